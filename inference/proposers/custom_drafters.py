"""Drafters that live in other packages: `module:Class`.

Importing runs the code of that module, as the user asked by naming it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ...heads.errors import UserError, first_line, out_of_memory
from ..rounds.tree import NO_NODE, DraftTree
from ..targets.causal_model import CausalModel
from ..targets.target import TargetSource
from .contract import Proposer
from .kind import Settings

CLASS = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")
"""`package.module:Class`."""


def is_class_path(name: str) -> bool:
    """Return True if `name` has the form of a class in a module."""
    return CLASS.fullmatch(name) is not None


def check_own(name: str, settings: Settings) -> Callable[..., object]:
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
    arguments: dict[str, object] = dict(settings)
    if "target" in signature.parameters:
        arguments["target"] = None
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = ", ".join(key for key in signature.parameters if key != "target")
        raise UserError(f"drafter {name}: {error}; it takes {known or 'no settings'}") from error
    return make


def make_own(name: str, settings: Settings, target: TargetSource) -> Proposer:
    """Return the proposer `name`, made with `settings`, and with `target` if it takes one.

    Raises `UserError` as `check_own` does, for any error of its code, and for anything that is not
    a `Proposer`.
    """
    make = check_own(name, settings)
    arguments: dict[str, object] = dict(settings)
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
    return checked_proposer(proposer, target, name)


def _said(error: Exception) -> str:
    """Return an error of a user's code, and how to see where it was raised."""
    return f"{type(error).__name__}: {first_line(error)} (--debug shows where)"


def files_of(name: str, settings: Settings) -> list[Path]:
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


def checked_proposer(proposer: Proposer, target: TargetSource, label: str = "") -> Proposer:
    """Return a proposer if what it declares is sound; one without a name gets that of its class.

    What its methods do is checked in decoding: see `reported` and `wrong_tree`. Raises `UserError`
    that names `label`, or else the class.
    """
    label = label or type(proposer).__name__
    proposer.name = proposer.name or type(proposer).__name__
    # A user's class may lack it.
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
    return proposer


def is_users(cls: type) -> bool:
    """Return True for a class that is not draftsmith's own."""
    return cls.__module__.split(".")[0] != __name__.split(".")[0]


def wrong_tree(tree: object, root: Tensor, proposer: Proposer, target: CausalModel) -> str | None:
    """Return why `target` cannot verify what `proposer` drafted for `root` `[B]`, or None."""
    if not isinstance(tree, DraftTree):
        return f"propose returned {type(tree).__name__}; it has to return a DraftTree"
    tokens, parents = tree.tokens, tree.parents
    most, vocab_size = proposer.max_drafted, target.vocab_size
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
    """Turn exceptions that pass through the modules of a user's class into `UserError`s.

    Their line names the place there. Those of a class of draftsmith stay as they are.
    """
    modules = {base.__module__ for base in cls.__mro__ if is_users(base)} - {"builtins"}
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        places = [place for place in frames if place[0].f_globals.get("__name__") in modules]
        if not is_users(cls) or not places or out_of_memory(error):
            raise
        frame, line = places[-1]
        where = f"{os.path.relpath(frame.f_code.co_filename)}, line {line}"
        raise UserError(f"{cls.__name__} failed in {where}: {_said(error)}") from error


def class_named(name: str) -> Callable[..., object]:
    """Return the class or function that `name` stands for. Raises `UserError`."""
    path, _, attribute = name.partition(":")
    try:
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())  # a module next to which the command was started
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
