"""`python -m doxa`: the `doxa` command, where it is not on the path."""

from doxa.app.cli import main

if __name__ == "__main__":
    main()
