"""Values of options, from words of a command line, YAML and Python, as their types have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from ...heads.files import YamlLoader, read_yaml
from ...inference.settings import choice_named, dtype_named
from .fields import alternatives, item_of, joined, written

THOUSANDS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
TABLES = (dict, dict[str, Any])
SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


class WrongValue(Exception):
    """Value that an option does not take; the message goes on after the option's name."""


YAML = (".yaml", ".yml")


def from_word(kind: Any, word: str) -> Any:
    """Return the value that a word of a command line means for an option of type `kind`.

    `2,4,7` is a list of numbers, `a.jsonl,b.jsonl` one of sources, also for a part that has
    `sources`; lists and tables may be YAML, and the options of a part a YAML file. Raises
    `UserError` for a file that is none.
    """
    lists = [one for one in alternatives(kind) if get_origin(one) in (list, tuple)]
    if word == "null" and NoneType in get_args(kind):
        return None
    sources = is_dataclass(kind) and any(one.name == "sources" for one in fields(kind))
    if sources and not word.lstrip().startswith("{") and Path(word).suffix not in YAML:
        return {"sources": word.split(",")}  # --data FILE
    if is_dataclass(kind) and Path(word).is_file():
        return read_yaml(Path(word))
    bracket = word.lstrip().startswith(("[", "{"))
    if is_dataclass(kind) or kind in (*TABLES, Any) or (lists and bracket):
        try:
            return yaml.load(word, YamlLoader)
        except yaml.YAMLError:
            return word
    several = kind != list[str] and lists and (lists == alternatives(kind) or "," in word)
    return word.split(",") if several else word


def from_python(value: Any) -> Any:
    """Return a value as YAML has it: paths as texts, numbers of numpy, dataclasses as tables."""
    if isinstance(value, PathLike):
        return fspath(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, Mapping):
        return {key: from_python(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [from_python(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def converted(kind: Any, given: Any) -> Any:
    """Return a value, as YAML has it, for an option of type `kind`. Raises `WrongValue`.

    `300M` is a number, `bf16` the choice bfloat16, a text a list of one.
    """
    value, item = given, item_of(kind)
    if isinstance(value, str):
        if item is not None or kind == list[str]:
            value = [value]
        elif get_origin(kind) is Literal:
            # The choice of the same type, which is bfloat16 in one option and bf16 in another.
            same = [one for one in get_args(kind) if dtype_named(str(one)) == dtype_named(value)]
            value = same[0] if same else choice_named(value, get_args(kind))
        elif {int, float} & {*alternatives(kind)}:
            value = sized(value)
    elif get_origin(kind) is list and isinstance(value, int | float):  # temperature=0.7
        value = [value]
    if item is not None and isinstance(value, list):  # whose entries are options of their own
        return value
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise WrongValue(f" takes {takes(kind)}, not {shown(given)}") from error


def sized(text: str) -> Any:
    """Return the number of `300M`; another text as it is."""
    try:
        number = float(text[:-1]) * THOUSANDS[text[-1:].upper()]
    except (ValueError, KeyError):
        return text
    return int(number) if number.is_integer() else number


def takes(kind: Any, name: str = "") -> str:
    """Return what the option `name` of type `kind` takes, in words."""
    kinds, items = alternatives(kind), get_args(kind)
    if is_dataclass(kind):
        return f"options of its own, such as {written(f'{name}.{fields(kind)[0].name}')}, or a file"
    if kinds != [kind]:
        return " or ".join(map(takes, kinds))
    if get_origin(kind) is Literal:
        return joined(map(str, items), "or")
    if item_of(kind) is not None:
        return "files with commas between them, or a list such as [{path: a.jsonl, weight: 2}]"
    if get_origin(kind) in (list, tuple):
        many = "two " if get_origin(kind) is tuple and len(items) == 2 else ""
        plural = {int: "whole numbers", float: "numbers"}.get(items[0], "texts")
        return f"{many}{plural} with commas between them"
    return SCALARS.get(kind, 'a table, such as {"enable_thinking": false}')


def shown(value: Any) -> str:
    """Return a value as a user types it, `2,x` for a list; of another object only its type."""
    if isinstance(value, list):
        return ",".join(map(shown, value))
    if isinstance(value, str | int | float | dict | NoneType):
        return str(value)
    return type(value).__name__
