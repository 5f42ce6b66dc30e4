"""The methods that training is launched with, and which of them a run's config file is for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from ..heads.errors import UserError
from ..heads.files import read_yaml

Method = Literal["medusa", "eagle", "dflash", "dspark", "distill"]
METHODS: tuple[Method, ...] = get_args(Method)
OWN_PARTS = ("heads", "student", "objective")  # of a run: what only its method has


def method_module(method: str) -> Any:
    """The module in `methods/` that has the method's `Run`, its drafter and its objective."""
    return importlib.import_module(
        f".methods.{'draft_model' if method == 'distill' else method}", __package__
    )


def method_for(path: str, given: Method | None = None) -> Method:
    """The method that the config file at `path` is for: the one that was named, else the one that
    knows all its keys, else, of several, the one that its folder or the file is named after
    (configs/eagle/mine.yaml). Raises `UserError` for a choice."""
    if given is not None:
        return given
    keys = own_keys(path)
    fitting: list[Method] = [
        method for method in METHODS if _knows(method_module(method).Run, keys)
    ]
    if len(fitting) == 1:
        return fitting[0]
    named: list[Method] = [
        method
        for method in fitting or METHODS
        if method in (Path(path).stem, Path(path).absolute().parent.name)
    ]
    if len(named) == 1:
        return named[0]
    which = f"{', '.join(fitting)} would read it" if fitting else "no method knows all its keys"
    raise UserError(f"which method is {path} for? {which}; name one with --method")


def own_keys(path: str) -> dict[str, list[str]]:
    """The keys of a config file under `OWN_PARTS`, by part. Raises `UserError` for a file that is
    no YAML."""
    run = read_yaml(Path(path))
    return {part: list(run[part]) for part in OWN_PARTS if isinstance(run.get(part), Mapping)}


def _knows(run_class: Any, keys: Mapping[str, list[str]]) -> bool:
    types = get_type_hints(run_class)
    return all(
        part in types and {*names} <= {field.name for field in fields(types[part])}
        for part, names in keys.items()
    )
