"""Command lines, read by jsonargparse into dataclasses.

The fields of a dataclass become its options, with hyphens, and their docstrings become the help
text. Every mistake is answered in one clear line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, NoReturn, TypeVar, get_type_hints

import jsonargparse

from ...heads.errors import UserError
from ..endings import fail
from .help_text import help_page
from .mistakes import hyphenated, in_words, written
from .spelling import spelled

T = TypeVar("T")


class Parser(jsonargparse.ArgumentParser):
    """Parser that reports a mistake in one line, without jsonargparse's usage lines."""

    types: ClassVar[dict[str, Any]] = {}
    """Types of the fields by their dotted names; `build_parser` sets those of each parser."""
    typed: Sequence[str] = ()
    """Words of the command line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print the mistake and exit with status 2.

        The parser of a part, such as an entry of data.sources, raises it for the whole one's.
        """
        if not self.exit_on_error:
            super().error(message, ex)
        fail(in_words(str(message), self.types, self.typed) + f" (see {self.prog} --help)")


def parse(config_class: type[T], argv: Sequence[str], prog: str) -> tuple[T, str]:
    """Return an instance of the dataclass, and all of its values as YAML.

    Values come from `--config FILE` (YAML) and from options; later ones win. Prints one line and
    exits with status 2 on a mistake.
    """
    if wanted := {"-h", "--help", "--help-all"} & {*argv}:
        print(help_page(config_class, prog, "--help-all" in wanted))
        raise SystemExit(0)
    parser = build_parser(config_class, prog)
    types = field_types(config_class)
    arguments = spelled(argv, types, next(iter(positional(config_class)), None))
    check_known(arguments, types, prog)
    parser.types, parser.typed = types, arguments  # type: ignore[misc]
    namespace = parser.parse_args(arguments)
    try:
        values = parser.instantiate(namespace)
        if "config" not in types:  # the parser's own
            values.pop("config", None)
        return config_class(**dict(values)), parser.dump(namespace)
    except UserError as error:
        fail(str(error))


def build_parser(config_class: Any, prog: str, kind: type[Parser] = Parser) -> Parser:
    """Return the parser of a dataclass for the program `prog`, of a `kind` of parsers."""
    # The parser has no help text of its own; see `help_text.py`.
    parser = kind(prog=prog, default_meta=False, add_help=False)
    if "config" not in field_types(config_class):
        parser.add_argument("--config", action="config")
    parser.add_class_arguments(config_class)
    return parser


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
        similar = " or ".join(map(written, near(name, types)))
        meant = f"; did you mean {similar}?" if similar else ""
        fail(f"unknown option {hyphenated(f'--{name}')}{meant} (see {prog} --help)")


ELSEWHERE = {
    "model": "target.path",
    "learning_rate": "optim.lr",
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_rows",
    "gradient_accumulation_steps": "accumulation",
    "output": "out",
    "output_dir": "out",
    "dataset": "data.sources",
    "draft_model": "drafter",
    "speculative_model": "drafter",
}
"""Options of other tools by the last part of their names, and ours for the same."""


def near(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three of `known` that are spelled like `word`.

    An option that another tool calls `word` comes first.
    """
    # A dotted name is found by its last part too: --learning-rate for optim.learning_rate.
    by_end: dict[str, list[str]] = {}
    for name in known:
        for form in (name, name.rpartition(".")[2]):
            by_end.setdefault(form, []).append(name)
    similar = []
    if (same := ELSEWHERE.get(word.rpartition(".")[2])) in by_end:
        similar += by_end[same or ""]
    for form in difflib.get_close_matches(word, by_end, n=2, cutoff=0.7):
        similar += by_end[form]
    return [*dict.fromkeys(similar)][:3]


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
