"""Entry point of `python -m draftsmith COMMAND`."""

from .commands.cli import main

if __name__ == "__main__":
    main()
