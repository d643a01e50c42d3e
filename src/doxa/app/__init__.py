"""What people touch: the command line and its tables and figures."""
