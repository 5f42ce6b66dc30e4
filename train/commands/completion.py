"""Completion of commands, options and choices in a shell."""

from __future__ import annotations

import argparse
from typing import Any, Literal, get_args, get_origin

import shtab

from ..command_line.fields import alternatives, options_of_class, positional
from ..command_line.help_text import usage_of
from ..endings import fail
from ..method import METHODS, run_class_named
from .verbs import GROUPS, VERBS, options_of_verb, purpose_of

COMPLETED = {"FOLDER": shtab.DIRECTORY, "DRAFTER": shtab.DIRECTORY, "PATH": shtab.FILE}
COMPLETED |= dict.fromkeys(("FILE", "[FILE]", "FILE,FILE,..."), shtab.FILE)
"""Completions of an option, by the form of its value in the help text."""


def print_completion(argv: list[str]) -> None:
    """Print the completion script of the shell that is named; status 2 for another word."""
    shells = shtab.SUPPORTED_SHELLS
    if len(argv) != 1 or argv[0] not in shells:
        fail(
            f"name your shell: draftsmith completion {'|'.join(shells)}; bash reads it by "
            "`source <(draftsmith completion bash)`"
        )
    print(shtab.complete(whole_parser(), argv[0]))


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser of all commands, by which nothing is parsed."""
    parser = argparse.ArgumentParser("draftsmith", add_help=False)
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    groups = {
        name: commands.add_parser(name, help=what, add_help=False).add_subparsers()
        for name, what in GROUPS.items()
    }
    for verb in VERBS:
        group, _, last = verb.rpartition(" ")
        one = groups.get(group, commands).add_parser(last, help=purpose_of(verb), add_help=False)
        add_options(one, options_of_verb(verb))
    methods = commands.add_parser("train", help="train a drafter", add_help=False).add_subparsers()
    for method in METHODS:
        one = methods.add_parser(method, help=f"with {method}", add_help=False)
        add_options(one, run_class_named(method))
    shells = commands.add_parser("completion", help="completion in a shell", add_help=False)
    shells.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    return parser


def add_options(parser: argparse.ArgumentParser, config_class: Any) -> None:
    """Add the options of a dataclass, with choices, files and folders to complete."""
    for option in options_of_class(config_class):
        if option.name == positional(config_class):
            parser.add_argument(option.last, nargs="*").complete = shtab.FILE  # type: ignore[attr-defined]
            continue
        words = usage_of(option).split(" ")
        if len(words) == 1:
            parser.add_argument(words[0], action="store_true")
            continue
        literals = [one for one in alternatives(option.kind) if get_origin(one) is Literal]
        choices = [choice for one in literals for choice in get_args(one)]
        added = parser.add_argument(words[0], choices=choices or None)
        if words[1] in COMPLETED:
            added.complete = COMPLETED[words[1]]  # type: ignore[attr-defined]
    for name in ("--help", "--help-all", "--quiet", "--verbose"):
        parser.add_argument(name, action="store_true")
