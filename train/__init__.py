"""Training of drafters, and the console commands.

`draftsmith.train` is this package, and a function that trains a drafter:

    train(method, target=None, data=None, out=None, *, config=None, callbacks=(), **options) -> Path

    best = draftsmith.train("eagle", target=TARGET, data="replies.jsonl", out="runs/mine")

`help(draftsmith.train.__call__)` explains the arguments.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


class _Callable(ModuleType):
    """This package as a function."""

    @property
    def __call__(self) -> Callable[..., Path]:  # a property, so that `help` finds the function
        from .commands.python import train

        return train


sys.modules[__name__].__class__ = _Callable
