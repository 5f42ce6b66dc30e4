"""How much a command says, by --quiet and --verbose, which every command takes.

Quiet: warnings, errors and results; verbose: also our debug lines. TRANSFORMERS_VERBOSITY wins for
what transformers says.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal

from ..heads.errors import UserError

SWITCHES = {"--quiet": "quiet", "--verbose": "verbose"}
Verbosity = Literal["quiet", "usual", "verbose"]
_chosen: list[Verbosity] = ["usual"]


def take_verbosity(argv: list[str]) -> list[str]:
    """Return the words of a command without the switches, and note which one was given.

    Raises `UserError` for both.
    """
    given = {word for word in argv if word in SWITCHES}
    if len(given) > 1:
        raise UserError("--quiet and --verbose exclude each other; give one")
    _chosen[0] = SWITCHES[given.pop()] if given else "usual"  # type: ignore[assignment]
    return [word for word in argv if word not in SWITCHES]


def quiet() -> bool:
    """Return whether the command is to say warnings and results alone."""
    return _chosen[0] == "quiet"


def set_up_logging(main: bool) -> None:
    """Let logging, progress and transformers say as much as was asked for, on stderr.

    Other ranks than the `main` one say warnings alone. Imports transformers.
    """
    from transformers.utils import logging as transformers_logging

    from ..inference.base.console import ProgressReporter

    ProgressReporter.quiet = quiet()
    usual = logging.INFO if main else logging.WARNING
    level = logging.WARNING if quiet() else usual
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    for noisy in ("httpx", "httpx2", "datasets", "filelock", "fsspec", "accelerate"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # It reports at every save that tied weights are stored once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    if _chosen[0] == "verbose" and main:
        logging.getLogger("draftsmith").setLevel(logging.DEBUG)
    if quiet() and "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
    if quiet() or not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
