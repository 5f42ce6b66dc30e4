"""Options of a dataclass: names, types, defaults and explanations."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import docstring_parser
import yaml

from ...inference.settings import OTHER_NAMES

SHORT_GROUPS = ("sampling", "target")
"""Groups whose options may be written without the name of the group."""
SWITCHES = (bool, bool | None, bool | str)  # types of the options that need no value
FORMER_NAMES = Path(__file__).with_name("former_names.yaml")
MANY = "..."  # at the end of a form: values that are given without the option's name


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
    """Return what to use in place of an option that went, or None where there was none."""
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
