"""Removed names are answered in one line, and are not current names."""

from __future__ import annotations

import pytest

from draftsmith.command_line.fields import Option, fields_of, former_names, item_of
from draftsmith.commands.cli import VERBS, options_of_verb
from draftsmith.train.methods.registry import METHODS, run_class_named


def classes() -> dict[str, set[str]]:
    """Return the option names of each dataclass of options, dotted and plain."""
    found: dict[str, set[str]] = {}
    for config_class in [*map(options_of_verb, VERBS), *map(run_class_named, METHODS)]:
        options = [*fields_of(config_class)]
        names = {option.name for option in options}
        for base in config_class.__mro__:
            found.setdefault(base.__name__, set()).update(names)
        for option in [*options, *rows_of(options)]:
            for base in option.owner.__mro__:
                plain = option.name.rpartition(".")[2]
                found.setdefault(base.__name__, set()).add(plain)
    return found


def rows_of(options: list[Option]) -> list[Option]:
    """Return the options of the tables in lists, such as data.sources."""
    items = [item for option in options if (item := item_of(option.kind)) is not None]
    return [one for item in items for one in fields_of(item)]


KNOWN = classes()


@pytest.mark.parametrize("name", former_names()["options"])
def test_former_options_name_an_options_class_and_no_current_option(name: str) -> None:
    assert name in KNOWN
    assert not KNOWN[name] & former_names()["options"][name].keys()
    assert all("\n" not in hint for hint in former_names()["options"][name].values())


@pytest.mark.parametrize("name", former_names()["still_read"])
def test_former_names_that_are_still_read_lead_to_current_options(name: str) -> None:
    assert {*former_names()["still_read"][name].values()} <= KNOWN[name]


def test_former_commands_are_not_current_commands() -> None:
    assert not former_names()["commands"].keys() & VERBS.keys()
