"""Options of a dataclass: names, types, defaults and explanations; and their values.

Values come from words of a command line, YAML and Python, and become what the types say.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import msgspec
import yaml

from ..heads.files import YamlLoader
from ..inference.base.settings import OTHER_NAMES, choice_named, dtype_named

SHORT_GROUPS = ("sampling", "target")
"""Groups whose options may be written without the name of the group."""
SWITCHES = (bool, bool | None, bool | str)  # types of the options that need no value
FORMER_NAMES = Path(__file__).with_name("former_names.yaml")
MANY = "..."  # at the end of a form: values that are given without the option's name
THOUSANDS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
TABLES = (dict, dict[str, Any])
SCALARS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str
    """Dotted name, with underscores."""
    kind: Any
    """Type of its value."""
    default: Any
    """`MISSING` if it has to be given."""
    owner: Any
    """Dataclass that has it as a field."""
    form: str | None = None
    """Form of its value, where neither type nor name says it."""

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def text(self) -> str:
        """Its explanation, the docstring of the field."""
        return texts_of(self.owner).get(self.last, "")


def fields_of(config_class: Any, prefix: str = "", made: Any = MISSING) -> Iterator[Option]:
    """Yield the options of a dataclass, and its parts, each followed by those in it.

    Defaults are those of `made`, an instance, if one is given.
    """
    kinds = get_type_hints(config_class)
    for one in fields(config_class):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        default = default if made is MISSING else getattr(made, one.name)
        kind, name = kinds[one.name], prefix + one.name
        form = one.metadata.get("form")
        if "positional" in one.metadata:
            form = f"{one.metadata['positional']}{MANY}"
        yield Option(name, kind, default, config_class, form)
        if is_dataclass(kind):
            yield from fields_of(kind, f"{name}.", default)


def options_of_class(config_class: Any) -> list[Option]:
    """Return the options of a dataclass, those of its parts at the end."""
    options = [option for option in fields_of(config_class) if not is_dataclass(option.kind)]
    return sorted(options, key=lambda option: bool(option.group))


@cache
def texts_of(config_class: Any) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass, those that it inherits included."""
    texts = {}
    for base in filter(is_dataclass, config_class.__bases__):
        texts |= texts_of(base)
    for field in docstring_parser.parse_from_object(config_class).params:
        texts[field.arg_name] = " ".join((field.description or "").split())
    return texts


def alternatives(kind: Any) -> list[Any]:
    """Return the types that a value of type `kind` may have, without None."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return [one for one in kinds if one is not NoneType]


def item_of(kind: Any) -> Any:
    """Return the dataclass of which a list of type `kind` holds tables, or None."""
    items = get_args(kind) if get_origin(kind) is list else ()
    return items[0] if items and is_dataclass(items[0]) else None


def positional(config_class: Any) -> str | None:
    """Return the list that takes words without an option's name, if the dataclass has one."""
    return next((one.name for one in fields(config_class) if "positional" in one.metadata), None)


def known_name(name: str, types: dict[str, Any], owner: Any = None) -> str:
    """Return the name of the field that an option of the dataclass `owner` means."""
    if name == "target" and "target.path" in types:
        return "target.path"
    if name in types:
        return name
    group = name.rpartition(".")[0]
    if now := entry_of("still_read", name, owner, types.get(group)):
        same_part = f"{group}.{now}"
        return same_part if same_part in types else now
    # --from is the field from_, since a field cannot have the name of a Python keyword.
    fields_meant = (f"{name}_", *(f"{part}.{name}" for part in SHORT_GROUPS))
    return next((meant for meant in fields_meant if meant in types), name)


def former_hint(name: str, types: dict[str, Any], owner: Any) -> str | None:
    """Return what to use in place of a removed option, or None for any other."""
    plain = name.removeprefix("no_")
    for full in (plain, *(f"{part}.{plain}" for part in SHORT_GROUPS)):
        if hint := entry_of("options", full, owner, types.get(full.rpartition(".")[0])):
            return hint
    return None


def written(name: str) -> str:
    """Return the option of a field as it is typed: `--optim.warmup-share`, `--target`."""
    return "--" + name.removesuffix(".path" if name == "target.path" else "_").replace("_", "-")


def near(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of `known` that are spelled like `word`.

    An option that another tool calls `word` is the only one.
    """
    # A dotted name is found by its last part too: --learning-rate for optim.learning_rate.
    by_end: dict[str, list[str]] = {}
    for name in known:
        for form in (name, name.rpartition(".")[2]):
            by_end.setdefault(form, []).append(name)
    other = OTHER_NAMES.get(word.rpartition(".")[2], "").split()
    if similar := [name for one in other for name in by_end.get(one, ())]:
        return similar[:1]
    for form in difflib.get_close_matches(word, by_end, n=2, cutoff=0.7):
        similar += by_end[form]
    return [*dict.fromkeys(similar)][:3]


def joined(words: Iterable[str], conjunction: str = "and") -> str:
    """Return words as a list of a sentence: `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} {conjunction} {last}" if first else last


@cache
def former_names() -> dict[str, dict[str, Any]]:
    """Return the tables of `former_names.yaml`: commands, options, still_read."""
    return yaml.safe_load(FORMER_NAMES.read_text())


def entry_of(table: str, name: str, owner: Any, part: Any) -> str | None:
    """Return what a table of the former names has for an option of the dataclass `owner`, or None.

    `part` is the dataclass of the part that the dotted name begins with, or None. Of a group that
    went as a whole, such as `errors.share`, the group's own entry is returned.
    """
    group, _, last = name.rpartition(".")
    entries: Mapping[str, Mapping[str, str]] = former_names()[table]
    for config_class, key in ((owner, name), (part, last), (owner, group)):
        for one in getattr(config_class, "__mro__", ()):
            if found := entries.get(one.__name__, {}).get(key):
                return found
    return None


class WrongValue(Exception):
    """Value that an option does not take; the message continues after the option's name."""


def from_word(kind: Any, word: str) -> Any:
    """Return the value that a word of a command line means for an option of type `kind`.

    `2,4,7` is a list of numbers, `a.jsonl,b.jsonl` one of sources, also for a part that has
    `sources`; lists and tables may be YAML.
    """
    lists = [one for one in alternatives(kind) if get_origin(one) in (list, tuple)]
    if word == "null" and NoneType in get_args(kind):
        return None
    bracket = word.lstrip().startswith(("[", "{"))
    has_sources = is_dataclass(kind) and any(one.name == "sources" for one in fields(kind))
    if has_sources and not bracket:
        return {"sources": word.split(",")}  # --data FILE
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
    to_list = getattr(value, "tolist", None)  # of numpy and torch
    return value if to_list is None else to_list()


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
        return f"options of its own, such as {written(f'{name}.{fields(kind)[0].name}')}"
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
