"""`python -m embert` is the command `embert`."""

from embert.server.commands.cli import main

if __name__ == "__main__":
    main()
