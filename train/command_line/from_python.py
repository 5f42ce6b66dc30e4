"""Options of a command from Python values, checked as those of a command line are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from typing import Any, NoReturn, TypeVar

from ...heads.errors import UserError
from .mistakes import in_words
from .parse import Parser, build_parser, field_types, near
from .spelling import is_list_of_paths, present_keys

T = TypeVar("T")


class _Parser(Parser):
    """Parser whose mistakes are raised, not printed."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # of a part, for the whole one's
            super().error(message, ex)
        raise UserError(in_words(str(message), self.types, ()))


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
        words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    namespace = parser.parse_args(words)
    made = dict(parser.instantiate(namespace))
    if "config" not in types:  # the parser's own
        made.pop("config", None)
    return config_class(**made), parser.dump(namespace)


def _flat(values: Mapping[str, Any], types: dict[str, Any], prefix: str = "") -> Iterator[Any]:
    """Yield dotted names with their values. Raises `UserError` for a name that there is not."""
    groups = {name.rpartition(".")[0] for name in types}
    tables = [name for name, kind in types.items() if kind in (dict, dict[str, Any])]
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name == "target" and isinstance(value, str | PathLike):
            name = "target.path" if "target.path" in types else name
        if name == "data" and not isinstance(value, Mapping):
            name = "data.sources"
        if name in groups and isinstance(value, Mapping) and name not in tables:
            yield from _flat(value, types, f"{name}.")
            continue
        if name not in types:
            raise UserError(f"unknown option {name!r}{near(name, types).replace('--', '')}")
        if isinstance(value, PathLike):
            value = fspath(value)
        if is_list_of_paths(types[name]):
            several: Any = value if isinstance(value, list | tuple) else [value]
            value = [one if isinstance(one, Mapping) else {"path": fspath(one)} for one in several]
        elif types[name] == list[str]:
            several = value if isinstance(value, list | tuple) else [value]
            value = [fspath(one) for one in several]
        yield name, value
