"""Options of a command from Python values, checked as those of a command line are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from typing import Any, NoReturn, TypeVar

from ...heads.errors import UserError
from .parse import Parser, field_types, near, one_line
from .spelling import is_list_of_paths

T = TypeVar("T")


class _Parser(Parser):
    """Parser whose mistakes are raised, not printed."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(one_line(message))


def options_from(
    config_class: type[T], values: Mapping[str, Any], config: str | PathLike[str] | None = None
) -> tuple[T, str]:
    """Return an instance of a dataclass of options, and all of its values as YAML.

    `values` are its fields by their names, nested ones as mappings or by dotted names; they replace
    those of the YAML file `config`. A path stands for a target or for a source of data. Raises
    `UserError` for an unknown name or a value of another type.
    """
    types = field_types(config_class)
    flat = dict(_flat(values, types))
    parser = _Parser(prog=config_class.__name__, default_meta=False, add_help=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(config_class)
    base = (
        parser.parse_args(["--config", fspath(config)], _skip_validation=True) if config else None
    )
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        place = nested
        *groups, last = name.split(".")
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    namespace = parser.parse_object(nested, cfg_base=base)
    made = dict(parser.instantiate(namespace))
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
