"""Names that commands and options had before, which `former_names.yaml` lists."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).with_name("former_names.yaml")


@cache
def former_names() -> dict[str, dict[str, Any]]:
    """Return the tables of the file: commands, options, still_read."""
    return yaml.safe_load(TABLES.read_text())


def entry_of(table: str, name: str, owner: Any, part: Any) -> str | None:
    """Return what a table of the file has for the option `name` of the dataclass `owner`, or None.

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
