"""Options of a command from Python values, checked as those of a command line are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from os import PathLike, fspath
from typing import Any, NoReturn, TypeVar

from ...heads.errors import UserError
from ...heads.exchange.hub import Drafter
from .mistakes import OPTION, in_words
from .parse import Parser, build_parser, field_types, near
from .spelling import in_form, is_list_of_paths, known_name, present_keys

T = TypeVar("T")


class _Parser(Parser):
    """Parser whose mistakes are raised, not printed."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # of a part, for the whole one's
            super().error(message, ex)
        said = in_words(str(message), self.types, ())
        # Options have the names of fields here: --data.sources is data.sources.
        raise UserError(OPTION.sub(lambda word: word[0][2:].replace("-", "_"), said))


def options_from(
    config_class: type[T], values: Mapping[str, Any], config: str | PathLike[str] | None = None
) -> tuple[T, str]:
    """Return an instance of a dataclass of options, and all of its values as YAML.

    `values` are its fields by their names, nested ones as mappings or by dotted names; they replace
    those of the YAML file `config`. A path stands for a target or for a source of data. Raises
    `UserError` for an unknown name or a value of another type.
    """
    types = field_types(config_class)
    parser = build_parser(config_class, config_class.__name__, _Parser)
    parser.types = types  # type: ignore[misc]
    # As words of a command line, so that values and a config file meet as they do there.
    words = [] if config is None else [f"--config={present_keys(fspath(config), types)}"]
    for name, value in _flat(values, types):
        words.append(f"--{name}={_word(name, value, types[name])}")
    namespace = parser.parse_args(words)
    made = dict(parser.instantiate(namespace))
    if "config" not in types:  # the parser's own
        made.pop("config", None)
    return config_class(**made), parser.dump(namespace)


def _flat(values: Mapping[str, Any], types: dict[str, Any], prefix: str = "") -> Iterator[Any]:
    """Yield the fields that are named with their values.

    Raises `UserError` for a name that there is not.
    """
    groups = {name.rpartition(".")[0] for name in types}
    tables = [name for name, kind in types.items() if kind in (dict, dict[str, Any])]
    for key, value in values.items():
        if is_dataclass(value) and not isinstance(value, type) and f"{prefix}{key}" in groups:
            value = {part.name: getattr(value, part.name) for part in fields(value)}
        name = f"{prefix}{key}"
        if name == "data" and not isinstance(value, Mapping):
            name = "data.sources"
        if not (isinstance(value, Mapping) and name in groups):
            name = known_name(name, types)
        if name in groups and isinstance(value, Mapping) and name not in tables:
            yield from _flat(value, types, f"{name}.")
            continue
        if name not in types:
            similar = [python_name(one) for one in near(name.replace("-", "_"), types)]
            meant = f"; did you mean {' or '.join(similar)}?" if similar else ""
            raise UserError(f"unknown option {name!r}{meant}")
        yield name, value


def python_name(field_name: str) -> str:
    """Return the name of a field as it is given from Python."""
    return "target" if field_name == "target.path" else field_name


def _word(name: str, value: Any, kind: Any) -> str:
    """Return a value as a word of a command line. Raises `UserError` for one that is none."""
    if is_list_of_paths(kind):
        several = value if isinstance(value, list | tuple) else [value]
        value = [one if isinstance(one, Mapping) else {"path": _plain(one)} for one in several]
    elif kind == list[str]:
        several = value if isinstance(value, list | tuple) else [value]
        value = [_plain(one) for one in several]
    elif kind in (str, str | None) and isinstance(value, list | tuple):
        return ",".join(str(_plain(one)) for one in value)  # temperatures=[0, 1]
    if isinstance(value, str):
        return in_form(kind, value)
    if isinstance(value, PathLike):
        return fspath(value)
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} cannot be {value!r}; see the options of the command") from error


def _plain(value: Any) -> Any:
    """Return a value as JSON knows it: the text of a path, numbers of numpy. Raises `TypeError`."""
    if isinstance(value, Drafter):
        return str(value.folder)
    if isinstance(value, PathLike):
        return fspath(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, str | int | float) or value is None:
        return value
    raise TypeError(f"{value!r} is no value of an option")
