"""Training of drafters, and the console commands.

`draftsmith.train` is this package, and a function that trains a drafter:

    best = draftsmith.train("eagle", target=TARGET, data="replies.jsonl", out="runs/mine")

`help(draftsmith.train.__call__)` explains the arguments; notebooks and editors find the signature
and the docstring at `draftsmith.train`.
"""

import sys
from collections.abc import Callable
from inspect import Signature, signature
from pathlib import Path
from types import ModuleType


class _Callable(ModuleType):
    """This package as a function: one name cannot be both otherwise."""

    @property
    def __call__(self) -> Callable[..., Path]:  # a property, so that `help` finds the function
        from ..commands.python import train

        return train

    @property
    def __signature__(self) -> Signature:
        return signature(self.__call__)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.__call__.__doc__


sys.modules[__name__].__class__ = _Callable
