"""Drafters that live in other packages: `module:Class`, or the name of an entry point.

A package names its own in the group `draftsmith.proposers` of its entry points. Importing runs the
code of that module, as the user asked by naming it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from ..heads.errors import UserError, first_line, out_of_memory
from .proposer import Proposer
from .rounds.tree import NO_NODE, DraftTree

GROUP = "draftsmith.proposers"
CLASS = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")
"""`package.module:Class`."""
METHODS = ("prefill", "commit", "keep", "stop", "finish")  # of a proposer, besides `propose`


def is_own(name: str) -> bool:
    """Return True if `name` has the form of a class in a module, or is an entry point's."""
    return CLASS.fullmatch(name) is not None or name in entry_point_names()


def entry_point_names() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by their names."""
    return {point.name: point for point in entry_points(group=GROUP)}


def own_name(name: str) -> str:
    """Return what tables call it: the class without its module, or the entry point."""
    return name.rpartition(":")[2]


def check_own(name: str, settings: dict[str, Any]) -> Any:
    """Return the class or function that `name` stands for, which takes `settings`.

    Raises `UserError` for a module that cannot be imported, and settings that it does not take.
    """
    make = _maker(name)
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"drafter {name} is nothing that can be called; name a Proposer's class"
        ) from error
    if "target" in settings:
        raise UserError(f"drafter {name}: target is given by draftsmith; leave it out")
    given = dict.fromkeys(settings)
    if "target" in signature.parameters:
        given["target"] = None
    try:
        signature.bind(**given)
    except TypeError as error:
        known = ", ".join(key for key in signature.parameters if key != "target")
        raise UserError(f"drafter {name}: {error}; it takes {known or 'no settings'}") from error
    return make


def make_own(name: str, settings: dict[str, Any], target: Any) -> Proposer:
    """Return the proposer `name`, made with `settings`, and with `target` if it takes one.

    Raises `UserError` as `check_own` does, for any error of its code, and for anything that is no
    `Proposer`.
    """
    make = check_own(name, settings)
    arguments = dict(settings)
    if "target" in inspect.signature(make).parameters:
        arguments["target"] = target
    try:
        proposer = make(**arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"drafter {name} cannot be made: {_said(error)}") from error
    if not isinstance(proposer, Proposer):
        raise UserError(
            f"drafter {name} makes a {type(proposer).__name__}; it has to be a subclass of "
            "draftsmith.Proposer"
        )
    return guarded(with_name(proposer), name, target.vocab_size)


def _said(error: Exception) -> str:
    """Return an error of somebody else's code, and how to see where it was raised."""
    return f"{type(error).__name__}: {first_line(error)} (--debug shows where)"


def with_name(proposer: Proposer) -> Proposer:
    """Return a proposer, with the name of its class if it has none."""
    if not getattr(proposer, "name", None):
        proposer.name = type(proposer).__name__
    return proposer


def files_of(name: str, settings: dict[str, Any]) -> list[Path]:
    """Return the files that decide what a drafter does, as far as they are known.

    These are the module of its class, and files that its settings name.
    """
    source = inspect.getsourcefile(_maker(name))
    named = (Path(value) for value in settings.values() if isinstance(value, str))
    return [*([Path(source)] if source else []), *(path for path in named if path.is_file())]


def guarded(proposer: Proposer, label: str, vocab_size: int) -> Proposer:
    """Return a proposer of a user's class, whose mistakes become one line that names `label`.

    An exception in one of its methods, and a tree that cannot be verified, raise `UserError`.
    Proposers of draftsmith's own stay as they are, and so do those whose methods are a part of a
    recorded round. Raises `UserError` for one without a sound `max_drafted`.
    """
    most = getattr(proposer, "max_drafted", None)
    if most is None:
        raise UserError(f"drafter {label} has no max_drafted, the most tokens that it drafts")
    if isinstance(most, bool) or not isinstance(most, int):
        raise UserError(f"max_drafted of drafter {label} is {most!r}, not a whole number")
    if type(proposer).propose is Proposer.propose:
        raise UserError(f"drafter {label} has no method propose, which drafts")
    own = type(proposer).__module__.split(".")[0] != __name__.split(".")[0]
    if own and not proposer.traceable and not isinstance(proposer.propose, _Guarded):
        for name in METHODS:
            setattr(proposer, name, _Guarded(getattr(proposer, name), label))
        proposer.propose = _CheckedTree(proposer, label, vocab_size)  # type: ignore[method-assign]
    return proposer


class _Guarded:
    """Method of a user's class, whose exceptions are told as the user's own."""

    def __init__(self, method: Callable[..., Any], label: str) -> None:
        self._method, self._label = method, label

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._method(*arguments)
        except UserError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            name = getattr(self._method, "__name__", "a method")
            raise UserError(f"drafter {self._label} failed in {name}: {_said(error)}") from error


class _CheckedTree(_Guarded):
    """Method `propose` of a user's class, whose trees are checked."""

    def __init__(self, proposer: Proposer, label: str, vocab_size: int) -> None:
        super().__init__(proposer.propose, label)
        self._proposer, self._vocab_size = proposer, vocab_size

    def __call__(self, *arguments: Any) -> DraftTree:
        root, tree = arguments[0], super().__call__(*arguments)
        if not isinstance(tree, DraftTree):
            wrong = f"propose returned {type(tree).__name__}; it has to return a DraftTree"
            raise UserError(f"drafter {self._label}: {wrong}")
        tokens, most = tree.tokens, self._proposer.max_drafted
        wrong = None
        if tokens.ndim != 2 or len(tokens) != len(root) or tokens.is_floating_point():
            kind = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            wrong = f"tokens of its tree are {kind}, not int64 [{len(root)}, nodes]"
        elif tokens.shape[1] - 1 > most:
            wrong = f"it drafted {tokens.shape[1] - 1} tokens; its max_drafted is {most}"
        elif (tokens[:, 0] != root).any():
            wrong = "node 0 of its tree is not the root, the token that propose was given"
        elif (outside := (tokens >= self._vocab_size) | (tokens < NO_NODE)).any():
            token = int(tokens[outside][0])
            wrong = f"it drafted token {token}; the target has {self._vocab_size}"
        if wrong is not None:
            raise UserError(f"drafter {self._label}: {wrong}")
        return tree


def _maker(name: str) -> Any:
    """Return the class or function that `name` stands for. Raises `UserError`."""
    try:
        if (point := entry_point_names().get(name)) is not None:
            return point.load()
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())  # a module next to which the command was started
        module, _, attribute = name.partition(":")
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise UserError(
            f"drafter {name} cannot be imported: {first_line(error)}; start the command in the "
            "folder of the module, or install its package"
        ) from error
    except Exception as error:
        raise UserError(f"drafter {name} cannot be imported: {_said(error)}") from error
