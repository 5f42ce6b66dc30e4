"""Entry point of `python -m draftsmith.train METHOD`."""

from ..commands.cli import train_main

if __name__ == "__main__":
    train_main()
