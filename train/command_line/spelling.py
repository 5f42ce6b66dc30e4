"""Spelling of command lines: what people type, in the form that jsonargparse reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ...inference.console import warn
from ...inference.settings import TargetConfig, dtype_named
from ..endings import fail
from ..method import FORMER_KEYS

FORMER_OPTIONS = {**FORMER_KEYS, "run": "config", "report": "reports"}
"""Options by their former names, which are still read where only the name of now is known."""
SHORT_GROUPS = ("sampling", "target")
"""Groups whose options may be written without the name of the group."""
SWITCHES = (bool, bool | None, bool | str)  # types of the options that need no value
SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMBT])", re.IGNORECASE)
THOUSANDS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def spelled(
    argv: Sequence[str], types: dict[str, Any], bare_goes_to: str | None = None
) -> list[str]:
    """Return the command line in the form that jsonargparse reads.

    Hyphens become underscores; `--target X` is `--target.path X` and `--temperature X` is
    `--sampling.temperature X`, `--dtype X` is `--target.dtype X`; `--flag` and `--no-flag` set a
    switch; an option that takes a list of texts or paths may be given several times; values are
    those of `in_form`. Words that are not the value of an option belong to the list `bare_goes_to`,
    if there is one. Exits with status 2 for an option that takes one value and is given twice.
    """
    result: list[str] = []
    given: dict[str, int] = {}  # place of each option in `result`
    notices: dict[str, str] = {}
    for typed, value in options_of(argv):
        word = present_option(typed, types, notices)
        if not word.startswith("--"):
            bare_item = bare_goes_to is not None and not word.startswith("-")
            # `--name+=value` appends to a list, so that several words without an option add up.
            result.append(f"--{bare_goes_to}+={word}" if bare_item else word)
            continue
        name = known_name(word[2:].replace("-", "_"), types)
        kind = types.get(name)
        if value is None and kind in SWITCHES:
            value = "true"
        elif value is None and types.get(name.removeprefix("no_")) in SWITCHES:
            name, value = name.removeprefix("no_"), "false"
        if value is None:
            result.append(f"--{name}")
            continue
        if kind == list[str]:
            # `--name+` appends to the list instead of replacing it.
            result.append(f"--{name}+={value}")
            continue
        if name == "config" and kind is None:  # the parser's own
            value = present_keys(value, types)
        value = in_form(kind, value)
        if name in given and is_list_of_paths(kind):
            before = result[given[name]].partition("=")[2]
            result[given[name]] = f"--{name}={json.dumps(json.loads(before) + json.loads(value))}"
            continue
        if name in given and name != "config":
            fail(f"--{name.replace('_', '-')} is given twice; it takes one value")
        given[name] = len(result)
        result.append(f"--{name}={value}")
    for notice in notices.values():
        warn(notice)
    return result


def options_of(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield every option of a command line with its value, and other words alone.

    `--lr 3e-4` and `--lr=3e-4` are `("--lr", "3e-4")`; an option without a value, and a word that
    belongs to none, have None.
    """
    words = iter(range(len(argv)))
    for i in words:
        name, equals, value = argv[i].partition("=")
        if not argv[i].startswith("--"):
            yield argv[i], None
        elif equals:
            yield name, value
        elif i + 1 == len(argv) or argv[i + 1].startswith("--"):
            yield name, None
        else:
            next(words)
            yield name, argv[i + 1]


def known_name(name: str, types: dict[str, Any]) -> str:
    """Return the name of the field that an option means; underscores stand for hyphens already."""
    # A field cannot have the name of a Python keyword: --from is the field from_.
    if name not in types and f"{name}_" in types:
        name += "_"
    for group in SHORT_GROUPS:
        if name not in types and f"{group}.{name}" in types:
            name = f"{group}.{name}"
    if name == "target" and types.get("target") is TargetConfig:
        name = "target.path"
    return name


def in_form(kind: Any, value: str) -> str:
    """Return a value as jsonargparse reads it for an option of type `kind`.

    `2,4,7` becomes `[2,4,7]` for a list of numbers, `300M` becomes `300000000` for a number,
    `bf16` becomes `bfloat16` for a type of weights, and `a.jsonl,b.jsonl` becomes
    `[{"path": "a.jsonl"}, {"path": "b.jsonl"}]` for a list of sources.
    """
    if get_origin(kind) is Literal:
        # The choice of the same type, which is bfloat16 in one option and bf16 in another.
        same = [one for one in get_args(kind) if dtype_named(one) == dtype_named(value)]
        return same[0] if same else value
    bare = not value.lstrip().startswith(("[", "{"))
    if is_list_of_paths(kind) and bare and value not in ("null", ""):
        return json.dumps([{"path": path} for path in value.split(",")])
    if bare and is_list_of_numbers(kind) and value not in ("null", ""):
        return f"[{value}]"
    size = SIZE.fullmatch(value)
    if size and {int, float} & {kind, *get_args(kind)} and get_origin(kind) not in (list, tuple):
        number = float(size[1]) * THOUSANDS[size[2].upper()]
        return str(int(number)) if number.is_integer() else str(number)
    return value


def is_list_of_numbers(kind: Any) -> bool:
    """Return whether an option takes a list or a tuple of numbers, or such a list or none."""
    for part in (kind, *get_args(kind)):
        if get_origin(part) in (list, tuple) and set(get_args(part)) <= {int, float, ...}:
            return True
    return False


def is_list_of_paths(kind: Any) -> bool:
    """Return whether an option takes a list of tables of which the first key is `path`."""
    if get_origin(kind) is not list:
        return False
    (item,) = get_args(kind)
    return is_dataclass(item) and fields(item)[0].name == "path"


def former_names(types: dict[str, Any], names: dict[str, str]) -> dict[str, str]:
    """Return those of the former `names` that stand for a name that is known now."""
    return {old: new for old, new in names.items() if new in types and old not in types}


def present_option(option: str, types: dict[str, Any], notices: dict[str, str]) -> str:
    """Return `option` under its name of now; a notice for a former name goes into `notices`."""
    for old, new in former_names(types, FORMER_OPTIONS).items():
        # --student.layers, or the whole section: --student FILE
        if re.match(rf"--{old}(?![\w-])", option):
            present = f"--{new.replace('_', '-')}"
            notices[old] = f"the option --{old} is called {present} now; the old name works"
            return present + option.removeprefix(f"--{old}")
    return option


def present_keys(path: str, types: dict[str, Any]) -> str:
    """Return the path of a config file, or its text if it has a key under its former name.

    The text has the name of now. jsonargparse takes a text in place of a path.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        # The parser says what is wrong with the file.
        return path
    renamed, names = text, []
    for old, new in former_names(types, FORMER_KEYS).items():
        # The text is changed and not the values: YAML written anew would lose the quotes of "1e5".
        renamed, count = re.subn(rf"(?m)^{old}(?=\s*:)", new, renamed)
        names += [f"{old} -> {new}"] * bool(count)
    if not names:
        return path
    warn(f"{path} has a key by its former name ({', '.join(names)}); it is still read")
    return renamed
