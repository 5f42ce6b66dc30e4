"""Where tables are printed."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """rich's, but that a reader who has gone (`| head`) is told to the caller; rich itself ends the process with status 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
