"""`python -m embert` is the command `embert`."""

from embert.server.cli.main import main

if __name__ == "__main__":
    main()
