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
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..heads.errors import UserError, first_line
from .proposer import Proposer

GROUP = "draftsmith.proposers"
CLASS = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")
"""`package.module:Class`."""


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
    if not isinstance(getattr(proposer, "max_drafted", None), int):
        raise UserError(f"drafter {name} has no max_drafted, the most tokens that it drafts")
    return with_name(proposer)


def _said(error: Exception) -> str:
    """Return an error of somebody else's code, and how to see where it was raised."""
    return f"{type(error).__name__}: {first_line(error)} (--debug shows where)"


def with_name(proposer: Proposer) -> Proposer:
    """Return a proposer, with the name of its class if it has none."""
    if not getattr(proposer, "name", None):
        proposer.name = type(proposer).__name__
    return proposer


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
