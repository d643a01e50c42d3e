"""Several points, averaged."""
