"""Drafters that live in other packages: `module:Class`, or the name of an entry point.

A package names its own in the group `draftsmith.proposers` of its entry points. Importing runs the
code of that module, as the user asked by naming it.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    make = class_named(name)
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
        if "artifact" in signature.parameters:
            raise UserError(
                f"drafter {name} drafts with a trained drafter's weights; name the class of its "
                "method, with folder=FOLDER"
            ) from error
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
    return guarded(with_name(proposer), name, target)


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

    These are the module of its class, and files that its settings name, or the weights in a folder
    that they name.
    """
    make = class_named(name)
    try:
        source = inspect.getsourcefile(make)
    except TypeError:  # of an object that can be called
        module = sys.modules.get(name.partition(":")[0])
        source = getattr(module, "__file__", None)
    named = [Path(value) for value in settings.values() if isinstance(value, str)]
    weights = [file for path in named for file in sorted(path.glob("*.safetensors"))]
    files = [path for path in named if path.is_file()]
    return [*([Path(source)] if source else []), *files, *weights]


def guarded(proposer: Proposer, label: str, target: Any) -> Proposer:
    """Return a proposer of a user's class, whose mistakes become one line that names `label`.

    An exception in one of its methods, and a tree that cannot be verified, raise `UserError`.
    Proposers of draftsmith's own stay as they are, and so do those whose methods are a part of a
    recorded round. Raises `UserError` for one without a sound `max_drafted`, and for taps that the
    `target` does not have.
    """
    most = getattr(proposer, "max_drafted", None)
    if most is None:
        raise UserError(f"drafter {label} has no max_drafted, the most tokens that it drafts")
    if isinstance(most, bool) or not isinstance(most, int):
        raise UserError(f"max_drafted of drafter {label} is {most!r}, not a whole number")
    if type(proposer).propose is Proposer.propose:
        raise UserError(f"drafter {label} has no method propose, which drafts")
    for tap in proposer.taps:
        if tap not in range(target.num_layers + 1):
            raise UserError(
                f"drafter {label} reads tap {tap!r}; the target has taps 0 to {target.num_layers}"
            )
    base: Any = getattr(type(proposer), "guarded_class", type(proposer))
    if proposer.traceable or base.__module__.split(".")[0] == __name__.split(".")[0]:
        return proposer
    # A class, and not methods of the object: a batch drafts with a copy of the object.
    members: dict[str, Any] = {name: _reported(getattr(base, name), label) for name in METHODS}
    members["propose"] = _checked(_reported(base.propose, label), label, target.vocab_size)
    members |= {"guarded_class": base, "__slots__": ()}
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    object.__setattr__(proposer, "__class__", type(base)(base.__name__, (base,), members))
    return proposer


def _reported(method: Callable[..., Any], label: str) -> Callable[..., Any]:
    """Return a method of a user's class whose exceptions become `UserError`s that name `label`."""

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return method(self, *arguments, **named)
        except UserError:
            raise
        except Exception as error:
            if out_of_memory(error):
                raise
            where = f"drafter {label} failed in {method.__name__}"
            raise UserError(f"{where}: {_said(error)}") from error

    return call


def _checked(propose: Callable[..., Any], label: str, vocab_size: int) -> Callable[..., DraftTree]:
    """Return the method `propose` of a user's class, whose trees are checked."""

    @functools.wraps(propose)
    def call(self: Any, root: Tensor, *arguments: Any, **named: Any) -> DraftTree:
        tree = propose(self, root, *arguments, **named)
        if not isinstance(tree, DraftTree):
            wrong = f"propose returned {type(tree).__name__}; it has to return a DraftTree"
            raise UserError(f"drafter {label}: {wrong}")
        if (wrong := wrong_tree(tree, root, self.max_drafted, vocab_size)) is not None:
            raise UserError(f"drafter {label}: {wrong}")
        return tree

    return call


def wrong_tree(tree: DraftTree, root: Tensor, most: int, vocab_size: int) -> str | None:
    """Return why a tree for `root` `[B]` cannot be verified, or None."""
    tokens, parents = tree.tokens, tree.parents
    for name, found in (("tokens", tokens), ("parents", parents)):
        if found is None:
            continue
        shape = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)} on {found.device}"
        fits = found.ndim == 2 and len(found) == len(root) and found.shape == tokens.shape
        if not fits or found.dtype != root.dtype or found.device != root.device:
            wanted = f"int64 [{len(root)}, nodes] on {root.device}"
            return f"{name} of its tree are {shape}, not {wanted}"
    if tokens.shape[1] - 1 > most:
        return f"it drafted {tokens.shape[1] - 1} tokens; its max_drafted is {most}"
    if (tokens[:, 0] != root).any():
        return "node 0 of its tree is not the root, the token that propose was given"
    if (outside := (tokens >= vocab_size) | (tokens < NO_NODE)).any():
        return f"it drafted token {int(tokens[outside][0])}; the target has {vocab_size}"
    if parents is not None:
        before = torch.arange(tokens.shape[1], device=root.device).clamp(min=1)
        if ((parents < 0) | (parents >= before)).any():
            return "a node of its tree does not come after its parent"
    return None


@contextmanager
def reported(cls: type) -> Iterator[None]:
    """Turn exceptions that pass through the module of a user's class into `UserError`s of one line.

    The line names the place in that module. Those of a class of draftsmith stay as they are.
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [frame for frame in frames if frame.filename == file]
        ours = cls.__module__.split(".")[0] == __name__.split(".")[0]
        if ours or not places or out_of_memory(error):
            raise
        where = f"{os.path.relpath(places[-1].filename)}, line {places[-1].lineno}"
        raise UserError(f"{cls.__name__} failed in {where}: {_said(error)}") from error


def class_named(name: str) -> Any:
    """Return the class or function that `name` stands for. Raises `UserError`."""
    try:
        if (point := entry_point_names().get(name)) is not None:
            return point.load()
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())  # a module next to which the command was started
        path, _, attribute = name.partition(":")
        module = importlib.import_module(path)
        if hasattr(module, attribute):
            return getattr(module, attribute)
    except ModuleNotFoundError as error:
        remedy = "start the command in the folder of the module, or install its package"
        if path.endswith(".py"):
            remedy = f"did you mean {path.removesuffix('.py')}:{attribute}?"
        raise UserError(f"{name} cannot be imported: {first_line(error)}; {remedy}") from error
    except Exception as error:
        raise UserError(f"{name} cannot be imported: {_said(error)}") from error
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == path]
    near = difflib.get_close_matches(attribute, own, 1) or own
    there = f"did you mean {path}:{near[0]}?" if near else "it defines none"
    raise UserError(f"{path} has no class {attribute}; {there}")
