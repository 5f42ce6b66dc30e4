"""Names of the training methods, their modules, and recognition of a config file's method."""

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
OWN_PARTS = ("heads", "student", "objective")  # sections of a config that differ between methods


def method_module(method: str) -> Any:
    """Return the module in `methods/` with the method's `Run`, drafter and objective."""
    return importlib.import_module(
        f".methods.{'draft_model' if method == 'distill' else method}", __package__
    )


def method_for(path: str, given: Method | None = None) -> Method:
    """Return the method that the config file at `path` is for.

    It is the one that was `given`; else the only one that knows all keys of the file; else, of
    several, the one that the file or its folder is named after (configs/eagle/mine.yaml). Raises
    `UserError` if that leaves a choice.
    """
    if given is not None:
        return given
    keys = own_keys(path)
    fitting: list[Method] = [
        method for method in METHODS if _knows(method_module(method).Run, keys)
    ]
    if len(fitting) == 1:
        return fitting[0]
    path_names = (Path(path).stem, Path(path).absolute().parent.name)
    named: list[Method] = [method for method in fitting or METHODS if method in path_names]
    if len(named) == 1:
        return named[0]
    which = f"{', '.join(fitting)} would read it" if fitting else "no method knows all its keys"
    raise UserError(f"which method is {path} for? {which}; name one with --method")


def own_keys(path: str) -> dict[str, list[str]]:
    """Return the keys of a config file in each of the sections `OWN_PARTS` that it has.

    Raises `UserError` for a file that is not YAML.
    """
    run = read_yaml(Path(path))
    return {
        section: list(run[section])
        for section in OWN_PARTS
        if isinstance(run.get(section), Mapping)
    }


def _knows(run_class: Any, keys: Mapping[str, list[str]]) -> bool:
    """Return whether a method's `Run` has all sections in `keys`, with all keys named there."""
    types = get_type_hints(run_class)
    for section, names in keys.items():
        if section not in types:
            return False
        if not {*names} <= {field.name for field in fields(types[section])}:
            return False
    return True
