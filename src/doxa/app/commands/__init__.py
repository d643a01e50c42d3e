"""One command of `doxa` a file; `app/cli.py` puts them together."""
