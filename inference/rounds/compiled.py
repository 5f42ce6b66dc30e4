"""The compiled function of a round, for CPUs."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...heads.errors import UserError

log = logging.getLogger(__name__)

_FUNCTIONS: WeakKeyDictionary[Any, dict[Any, Callable[..., Any]]] = WeakKeyDictionary()
"""Compiled functions of each owner, by the function and its constants."""
_NUMBERS = itertools.count()


def prepare_to_compile(device: torch.device) -> None:
    """Say what compilation will take. Raises `UserError` on a CPU without a C++ compiler."""
    if device.type == "cuda":
        return  # rounds are recorded there, in about a second (`recorded.py`)
    wanted = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(wanted) is None:
        raise UserError(
            f"--compile needs a C++ compiler, and there is no {wanted}; install it, name "
            "another one in CXX, or leave out --compile"
        )
    log.info(
        "the first rounds with each kind of sampling are compiled, which takes one or two minutes, "
        "or seconds where the cache on disk has them; batches of several rows are not compiled"
    )


def compiled(function: Any, owner: Any, *constants: Any) -> Callable[..., Any]:
    """Return `function`, a function of tensors and of objects that hold them, compiled.

    `owner` is one of its arguments: the proposer, or the target. Its modules and those of the other
    arguments must not change any more. There is a function for each of the `constants`. A batch of
    another size than the first is compiled once more, and then for all sizes (one row is a class of
    its own); a tree of another shape or other sampling settings are compiled by themselves.
    """
    functions = _FUNCTIONS.setdefault(owner, {})
    key = (function, *constants)
    if key not in functions:
        # torch keeps compilations with the object of the code, at most eight, and looks through all
        # of them in every call. A number that differs between two calls of a name becomes a
        # variable. So each owner has code and a name of its own.
        name = f"{function.__name__}_{next(_NUMBERS)}"
        code = function.__code__.replace(co_name=name)
        own = FunctionType(
            code, function.__globals__, name, function.__defaults__, function.__closure__
        )
        functions[key] = compile_function(own)
    return functions[key]


def compile_function(function: Any) -> Callable[..., Any]:
    return torch.compile(function, options={"guard_filter_fn": may_change})


def may_change(guards: Sequence[Any]) -> list[bool]:
    """Return which of a compiler's conditions have to be checked in every call.

    Most of them are about modules and about what a file has imported, which stay as they are. On
    the quickstart target 120 of 883 are left, and checking them takes 0.1 instead of 0.3 ms.
    """
    return [
        not (guard.is_global or guard.orig_guard.source.is_unspecialized_nn_module())
        for guard in guards
    ]
