"""Command lines, read by jsonargparse into dataclasses.

The fields of a dataclass become its options, with hyphens, and their docstrings become the help
text. Every mistake is answered in one clear line.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import jsonargparse

from ..heads.errors import UserError
from ..inference.console import warn
from ..inference.settings import TargetConfig
from .endings import fail
from .method import FORMER_SECTIONS

T = TypeVar("T")
# Lines of a help text about options that take a whole group, such as `--optim FILE`.
WHOLE_PART = re.compile(r"^  --[\w.]+ CONFIG\s+Path to a configuration file\.\n", re.MULTILINE)
# An option within a text: not the hyphens inside of a word, a path or an address.
OPTION = re.compile(r"(?<![\w/.-])--[A-Za-z][\w.]*")


class Parser(jsonargparse.ArgumentParser):
    """Parser that reports a mistake in one line, without jsonargparse's usage lines."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the mistake and exit with status 2."""
        fail(hyphenated(one_line(message)) + f" (see {self.prog} --help)")

    def format_help(self) -> str:
        """Return the help text, with hyphens in the options and without whole groups."""
        return hyphenated(WHOLE_PART.sub("", super().format_help()))


def one_line(message: str) -> str:
    """Return a message of jsonargparse, which nests its reasons over several lines, as one line."""
    lines = [line.strip(" -") for line in str(message).splitlines()]
    joined = re.sub(r"\s+", " ", " ".join(line for line in lines if line))
    # <class 'pkg.Name'> becomes Name, and typing.Literal becomes Literal.
    shortened = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.(?=Literal)", r"\1", joined)
    return shortened.removeprefix("Parser key ")


def hyphenated(text: str) -> str:
    """Return `text` with hyphens for underscores in every option that it names.

    `--optim.warmup_share` becomes `--optim.warmup-share`, and `--from_` becomes `--from`.
    """
    return OPTION.sub(lambda match: match.group().rstrip("_").replace("_", "-"), text)


def parse(config_class: type[T], argv: Sequence[str], prog: str) -> tuple[T, str]:
    """Return an instance of the dataclass, and all of its values as YAML.

    Values come from `--config FILE` (YAML) and from options; later ones win. Prints one line and
    exits with status 2 on a mistake.
    """
    parser = build_parser(config_class, prog)
    types = field_types(config_class)
    if "draft_model" in types:
        argv = present_names(argv)
    arguments = spelled(argv, types, next(iter(positional(config_class)), None))
    check_known(arguments, types, prog)
    namespace = parser.parse_args(arguments)
    try:
        values = parser.instantiate(namespace)
        # The option --config is the parser's own and no field.
        values.pop("config", None)
        return config_class(**dict(values)), parser.dump(namespace)
    except UserError as error:
        fail(str(error))


def present_names(argv: Sequence[str]) -> list[str]:
    """Return the command line of a run with its sections under their names of now.

    Options are renamed, with a notice for each section. The path of a config file that has a
    section under its former name becomes the file's text with the name of now, which jsonargparse
    takes in place of a path.
    """
    words, notices = [], {}
    for i, word in enumerate(argv):
        for old, new in FORMER_SECTIONS.items():
            # --student.layers 1, or the whole section: --student FILE
            if re.match(rf"--{old}(?![\w-])", word):
                option = f"--{new.replace('_', '-')}"
                notices[old] = f"the options --{old} are called {option} now; the old names work"
                word = option + word.removeprefix(f"--{old}")
        if i > 0 and argv[i - 1] == "--config":
            word = _with_present_sections(word)
        elif word.startswith("--config="):
            word = "--config=" + _with_present_sections(word.removeprefix("--config="))
        words.append(word)
    for notice in notices.values():
        warn(notice)
    return words


def _with_present_sections(path: str) -> str:
    """Return `path`, or the text of a config file that has a section under its former name."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        # The parser says what is wrong with the file.
        return path
    renamed = text
    for old, new in FORMER_SECTIONS.items():
        # The text is changed and not the values: YAML written anew would lose the quotes of "1e5".
        renamed = re.sub(rf"(?m)^{old}(?=\s*:)", new, renamed)
    if renamed == text:
        return path
    names = ", ".join(f"{old} -> {new}" for old, new in FORMER_SECTIONS.items())
    warn(f"{path} has a section by its former name ({names}); it is still read")
    return renamed


def build_parser(config_class: Any, prog: str) -> Parser:
    """Return the parser of a dataclass with a class variable `example`, for the program `prog`."""
    # Docstrings under the fields are the help of the options.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    usage_words = "".join(f"{word}... " for word in positional(config_class).values())
    parser = Parser(
        prog=prog,
        usage=f"%(prog)s {usage_words}[--config FILE] [--option VALUE ...]",
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
    """Formatter of help texts that keeps the line breaks of the description."""


def check_known(arguments: Sequence[str], types: dict[str, Any], prog: str) -> None:
    """Exit with status 2 for an unknown option, naming those that are spelled like it.

    Keys of tables are not looked at.
    """
    groups = {name.rpartition(".")[0] for name in types}
    known_names = {*types, *groups, "config", "help", "print_config"}
    # A table takes any key, such as data.chat_template_kwargs.enable_thinking.
    tables = tuple(f"{name}." for name, kind in types.items() if not is_dataclass(kind))
    for argument in arguments:
        name = argument[2:].partition("=")[0].removesuffix("+")
        if not argument.startswith("--") or name in known_names or name.startswith(tables):
            continue
        fail(f"unknown option {hyphenated(f'--{name}')}{near(name, types)} (see {prog} --help)")


def near(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` with up to three of `known` that are spelled like `word`.

    It is an empty text if there are none.
    """
    # A dotted name is found by its last part too: --learning-rate for optim.learning_rate.
    by_end: dict[str, list[str]] = {}
    for name in known:
        for form in (name, name.rpartition(".")[2]):
            by_end.setdefault(form, []).append(name)
    similar = []
    for form in difflib.get_close_matches(word, by_end, n=2, cutoff=0.7):
        similar += by_end[form]
    options = [f"--{name.rstrip('_').replace('_', '-')}" for name in dict.fromkeys(similar)]
    return f"; did you mean {' or '.join(options[:3])}?" if options else ""


def field_types(config_class: type, prefix: str = "") -> dict[str, Any]:
    """Return the type of every field of a dataclass, those of nested ones by their dotted names."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(config_class).items():
        types[prefix + name] = kind
        if is_dataclass(kind) and isinstance(kind, type):
            types |= field_types(kind, f"{prefix}{name}.")
    return types


def positional(config_class: Any) -> dict[str, str]:
    """Return the field that takes values without an option's name, and its word in the usage.

    The field is a list. The result is empty if the dataclass has no such field.
    """
    words = {}
    for option in fields(config_class):
        if "positional" in option.metadata:
            words[option.name] = option.metadata["positional"]
    return words


def spelled(
    argv: Sequence[str], types: dict[str, Any], bare_goes_to: str | None = None
) -> list[str]:
    """Return the command line in the form that jsonargparse reads.

    Hyphens become underscores; `--target X` is `--target.path X` and `--temperature X` is
    `--sampling.temperature X`, `--dtype X` is `--target.dtype X`; `--flag` and `--no-flag` set a
    switch; an option that takes a list may be given several times. Words that are not the value of
    an option belong to the list `bare_goes_to`, if there is one. Exits with status 2 for an option
    that takes one value and is given twice.
    """
    result: list[str] = []
    given: set[str] = set()
    for i, argument in enumerate(argv):
        if not argument.startswith("--"):
            # `3e-4` in `--lr 3e-4` is a value, and the word after `--lr=3e-4` is not.
            is_value = i > 0 and argv[i - 1].startswith("--") and "=" not in argv[i - 1]
            bare_item = bare_goes_to is not None and not is_value and not argument.startswith("-")
            # `--name+=value` appends to a list, so that several words without an option add up.
            result.append(f"--{bare_goes_to}+={argument}" if bare_item else argument)
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        # A field cannot have the name of a Python keyword: --from is the field from_.
        if name not in types and f"{name}_" in types:
            name += "_"
        # An option without a value: the last word, or one with another option behind it.
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
            # `--name+` appends to the list instead of replacing it.
            name += "+"
        elif name in given and name != "config":
            fail(f"--{name.replace('_', '-')} is given twice; it takes one value")
        given.add(name)
        result.append(f"--{name}{equals}{value}")
    return result


SWITCHES = (bool, bool | None)  # types of the options that need no value
