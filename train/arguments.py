"""Command lines: jsonargparse over dataclasses, with hyphens in every option and one clear line for
every mistake."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn, TypeVar, get_type_hints

import jsonargparse

from ..heads.errors import UserError
from ..inference.settings import TargetConfig
from .endings import fail

T = TypeVar("T")
WHOLE_PART = re.compile(r"^  --[\w.]+ CONFIG\s+Path to a configuration file\.\n", re.MULTILINE)
OPTION = re.compile(r"(?<![\w/.-])--[A-Za-z][\w.]*")


class Parser(jsonargparse.ArgumentParser):
    """Says a mistake in one line and exits with 2, without jsonargparse's usage lines."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(hyphenated(one_line(message)) + f" (see {self.prog} --help)")

    def format_help(self) -> str:
        return hyphenated(WHOLE_PART.sub("", super().format_help()))


def one_line(message: str) -> str:
    """jsonargparse nests its reasons over several lines; join them."""
    lines = [line.strip(" -") for line in str(message).splitlines()]
    joined = re.sub(r"\s+", " ", " ".join(line for line in lines if line))
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.(?=Literal)", r"\1", joined).removeprefix(
        "Parser key "
    )


def hyphenated(text: str) -> str:
    """`--optim.warmup_share` -> `--optim.warmup-share`, in every option that `text` names."""
    return OPTION.sub(lambda match: match.group().rstrip("_").replace("_", "-"), text)


def parse(config_class: type[T], argv: Sequence[str], prog: str) -> tuple[T, str]:
    """An instance of the dataclass from `--config FILE` (YAML) and options, later ones winning, and
    the same resolved as YAML.

    Exits with 2 on a mistake.
    """
    parser = build_parser(config_class, prog)
    types = field_types(config_class)
    arguments = spelled(argv, types, next(iter(positional(config_class)), None))
    check_known(arguments, types, prog)
    namespace = parser.parse_args(arguments)
    try:
        values = parser.instantiate(namespace)
        values.pop("config", None)
        return config_class(**dict(values)), parser.dump(namespace)
    except UserError as error:
        fail(str(error))


def build_parser(config_class: Any, prog: str) -> Parser:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    words = "".join(f"{word}... " for word in positional(config_class).values())
    parser = Parser(
        prog=prog,
        usage=f"%(prog)s {words}[--config FILE] [--option VALUE ...]",
        description=f"{inspect.getdoc(config_class)}\n\nexample:\n  {config_class.example}",
        formatter_class=RawDescription,
        default_meta=False,
    )
    parser.add_argument(
        "--config", action="config", help="YAML file with the same keys; options after it win"
    )
    parser.add_class_arguments(config_class)
    return parser


class RawDescription(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description."""


def check_known(arguments: Sequence[str], types: dict[str, Any], prog: str) -> None:
    """Exit with 2 for an option that there is not, naming the ones that are spelled like it."""
    groups = {name.rpartition(".")[0] for name in types}
    for argument in arguments:
        name = argument[2:].partition("=")[0].removesuffix("+")
        if not argument.startswith("--") or name in {
            *types,
            *groups,
            "config",
            "help",
            "print_config",
        }:
            continue
        if any(
            name.startswith(f"{known}.") and not is_dataclass(kind) for known, kind in types.items()
        ):
            continue  # a key of a table, such as data.chat_template_kwargs.enable_thinking
        fail(f"unknown option {hyphenated(f'--{name}')}{near(name, types)} (see {prog} --help)")


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with those of `known` that are spelled like `word`; empty if there are
    none."""
    by_end: dict[str, list[str]] = {}
    for name in known:
        for form in (name, name.rpartition(".")[2]):
            by_end.setdefault(form, []).append(name)
    found = [
        name
        for form in difflib.get_close_matches(word, by_end, n=2, cutoff=0.7)
        for name in by_end[form]
    ]
    options = [f"--{name.rstrip('_').replace('_', '-')}" for name in dict.fromkeys(found)]
    return f"; did you mean {' or '.join(options[:3])}?" if options else ""


def field_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Type of every option of a dataclass, nested ones by their dotted name."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(config_class).items():
        types[prefix + name] = kind
        if is_dataclass(kind) and isinstance(kind, type):
            types |= field_types(kind, f"{prefix}{name}.")
    return types


def positional(config_class: Any) -> dict[str, str]:
    """The list that takes what is given without an option's name, and its word in the usage line,
    if the dataclass has one."""
    return {
        part.name: part.metadata["positional"]
        for part in fields(config_class)
        if "positional" in part.metadata
    }


def spelled(
    argv: Sequence[str], types: dict[str, Any], bare_goes_to: str | None = None
) -> list[str]:
    """The command line as jsonargparse wants it.

    Hyphens become underscores; `--target X` is `--target.path X` and `--temperature X` is
    `--sampling.temperature X`, `--dtype X` is `--target.dtype X`; `--flag` and `--no-flag` set a
    switch; an option that takes a list may be given several times. What is no option's value
    belongs to the list `bare_goes_to`, if there is one.
    """
    result: list[str] = []
    given: set[str] = set()
    for i, argument in enumerate(argv):
        if not argument.startswith("--"):
            is_value = i > 0 and argv[i - 1].startswith("--") and "=" not in argv[i - 1]
            bare_item = bare_goes_to is not None and not is_value and not argument.startswith("-")
            result.append(f"--{bare_goes_to}+={argument}" if bare_item else argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        # such as --from, which Python keeps for itself
        name += "_" * (name not in types and f"{name}_" in types)
        bare = not equals and (i + 1 == len(argv) or argv[i + 1].startswith("--"))
        for group in ("sampling", "target"):
            if name not in types and f"{group}.{name}" in types:
                name = f"{group}.{name}"
        if name == "target" and types.get("target") is TargetConfig:
            name = "target.path"
        if bare and types.get(name) in SWITCHES:
            equals, value = "=", "true"
        elif bare and types.get(name.removeprefix("no_")) in SWITCHES:
            name, equals, value = name.removeprefix("no_"), "=", "false"
        elif types.get(name) == list[str]:
            name += "+"
        elif name in given and name != "config":
            fail(f"--{name.replace('_', '-')} is given twice; it takes one value")
        given.add(name)
        result.append(f"--{name}{equals}{value}")
    return result


SWITCHES = (bool, bool | None)
