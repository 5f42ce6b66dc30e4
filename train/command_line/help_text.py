"""Help pages: what a command does, examples, and its options, of which the first matter most.

jsonargparse's own pages name every option twice over and all at once, 266 lines for training.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser

from .spelling import SHORT_GROUPS

MOST_COLUMNS = 100
INDENT = 24  # column of the explanations
TIE = "\0"  # a space at which no line ends


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str
    """Dotted name, with underscores."""
    kind: Any
    """Type of its value."""
    default: Any
    """`MISSING` if it has to be given."""
    text: str
    """Explanation."""
    word: str | None = None
    """Form of its value, where neither type nor name says it."""

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def written(self) -> str:
        """The option as it is typed, such as `--optim.warmup-share`."""
        name = "target" if self.name == "target.path" else self.name
        return f"--{name.rstrip('_').replace('_', '-')}"

    @property
    def usage(self) -> str:
        """The option with the form of its value."""
        kinds = [kind for kind in (get_args(self.kind) or [self.kind]) if kind is not NoneType]
        if get_origin(self.kind) not in (Union, UnionType):
            kinds = [self.kind]
        if kinds == [bool]:
            # What can be said beside what holds anyway.
            return self.written if not self.default else self.written.replace("--", "--no-", 1)
        return f"{self.written} {self.word or form(kinds[0], self.name)}"

    @property
    def explanation(self) -> str:
        if self.default is MISSING:
            return f"{self.text} Required."
        if self.kind is bool and self.default:  # listed as --no-..., which its text does not say
            return f"Without this option: {self.text[:1].lower()}{self.text[1:]}"
        hidden = self.default is None or isinstance(self.default, bool | dict)
        if hidden or self.default == "" or self.default == []:
            return self.text
        value = self.default
        if isinstance(value, list | tuple):
            value = ",".join(map(str, value))
        if isinstance(value, float):
            value = f"{value:g}".replace("e+0", "e")
        return f"{self.text} ({value})"


NUMBERS = "N,N,..."
FORMS = {
    "acceptance": NUMBERS,
    "adapter": "FOLDER",
    "api_key": "KEY",
    "batch": NUMBERS,
    "batch_sizes": NUMBERS,
    "chat_template_kwargs": "JSON",
    "concurrency": NUMBERS,
    "config": "FILE",
    "context": NUMBERS,
    "contexts": NUMBERS,
    "data": "FILE",
    "device": "DEVICE",
    "drafter": "DRAFTER",
    "dtype": "TYPE",
    "fail_on_regression": "N%",
    "features": "FOLDER",
    "from": "FOLDER",
    "host": "ADDRESS",
    "init_from": "FOLDER",
    "json": "FILE",
    "like": "ENGINE",
    "out": "FOLDER",
    "path": "FOLDER",
    "profile": "FILE",
    "prompt": "TEXT",
    "prompts": "FILE",
    "report": "FILE",
    "reports": "FILE",
    "runs": "PATH",
    "server": "URL",
    "set": "KEY=VALUE",
    "share": "N/N",
    "since": "TIME",
    "spec_bench": "FOLDER",
    "stop": "TEXT",
    "store": "FOLDER",
    "taps": NUMBERS,
    "target": "FOLDER",
    "temperatures": NUMBERS,
    "time_field": "FIELD",
    "url": "URL",
    "vocab_data": "FILE",
}
"""Words for texts by the last part of the option's name; NAME for all others.

Where an option of that name takes something else, its field says so: `metadata={"form": "FILE"}`.
"""


def form(kind: Any, name: str) -> str:
    """Return the form of a value of type `kind`: `a|b` for a choice, N for a number, or a word."""
    name = name.rpartition(".")[2].rstrip("_")
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if kind in (int, float):
        return "N"
    items = get_args(kind) if get_origin(kind) in (list, tuple) else ()
    if {*items} & {int, float}:
        return NUMBERS
    if any(map(is_dataclass, items)):  # sources of data
        return "FILE,FILE,..."
    return FORMS.get(name, "NAME")


def help_page(config_class: Any, prog: str, everything: bool) -> str:
    """Return the help page of a dataclass of options, as wide as the terminal.

    It explains the options that `config_class.first` names, and lists the others; with `everything`
    it explains all of them, group by group.
    """
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS) - 1
    options = list(options_of_class(config_class))
    words = "".join(
        f" {option.metadata['positional']}..."
        for option in fields(config_class)
        if "positional" in option.metadata
    )
    lines = [f"usage: {prog}{words} [--option VALUE ...]", ""]
    paragraphs = (config_class.__doc__ or "").split("\n\n")
    for paragraph in paragraphs:
        lines += [*wrapped(paragraph, width), ""]
    lines.append("examples:")
    for example in config_class.examples:
        lines += wrapped(pairs_together(example), width, "  ", "      ", " \\")
    if everything:
        for group, title in groups_of(config_class):
            own = [option for option in options if option.group == group]
            lines += ["", *wrapped(title, width), *explained(own, width)]
        lines += ["", *wrapped(CONFIG_TEXT, width)] * ("config" not in {o.name for o in options})
        return "\n".join(lines)
    first = [option for name in config_class.first for option in options if option.name == name]
    lines += ["", "the options that matter most:", *explained(first, width)]
    rest = [option.written for option in options if option not in first]
    if rest:
        lines += [
            "",
            "more, which --help-all explains:",
            *wrapped(", ".join(rest), width, "  ", "  "),
        ]
    return "\n".join(lines)


CONFIG_TEXT = (
    "--config FILE reads options from a YAML file with the same names; options behind it win. "
    "--print-config prints all values as such a file, and does nothing else."
)


def wrapped(
    text: str, width: int, first: str = "", later: str = "", continued: str = ""
) -> list[str]:
    """Return the lines of a text; `continued` ends all lines but the last.

    What stands between backticks is not broken, nor is a text at a `TIE`.
    """
    spaced = re.sub(r"[ \n]+", " ", text).strip()
    lines = textwrap.wrap(
        re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", TIE), spaced),
        width - len(continued),
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=False,
    )
    lines = [line.replace(TIE, " ") for line in lines]
    return [line + continued for line in lines[:-1]] + lines[-1:]


def pairs_together(command: str) -> str:
    """Return a command in which no option is parted from its value, nor a word between quotes."""
    command = re.sub(r"'[^']+'", lambda quoted: quoted[0].replace(" ", TIE), command)
    return re.sub(r"(--?[\w.-]+) (?=[^- ]|- )", rf"\1{TIE}", command)


def explained(options: Sequence[Option], width: int) -> list[str]:
    """Return the lines of options with their explanations beside them."""
    lines = []
    for option in options:
        usage = f"  {option.usage}"
        text = wrapped(option.explanation, width, " " * INDENT, " " * INDENT)
        if len(usage) < INDENT - 1:
            text[0] = usage.ljust(INDENT) + text[0][INDENT:]
        else:
            text.insert(0, usage)
        lines += text
    return lines


def options_of_class(config_class: Any, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a dataclass, those of its parts at the end."""
    types, texts = get_type_hints(config_class), texts_of(config_class)
    parts = []
    for one in fields(config_class):
        kind = types[one.name]
        if is_dataclass(kind):
            parts.append((kind, f"{prefix}{one.name}."))
        else:
            word = one.metadata.get("form")
            yield Option(prefix + one.name, kind, default_of(one), texts.get(one.name, ""), word)
    for kind, name in parts:
        yield from options_of_class(kind, name)


def groups_of(config_class: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the title of every part of a dataclass, its own options first."""
    types, texts = get_type_hints(config_class), texts_of(config_class)
    if not prefix:
        yield "", "options:"
    for one in fields(config_class):
        kind = types[one.name]
        if is_dataclass(kind):
            title = texts.get(one.name) or (kind.__doc__ or "").split("\n\n")[0]
            short = prefix + one.name in SHORT_GROUPS
            how = f" (--{one.name}.X may be written --X)" if short else ""
            yield prefix + one.name, f"{prefix}{one.name}: {title}{how}"
            yield from groups_of(kind, f"{prefix}{one.name}.")


def texts_of(config_class: Any) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass, those that it inherits included."""
    texts = {}
    for base in reversed(config_class.__mro__):
        if is_dataclass(base):
            for field in docstring_parser.parse_from_object(base).params:
                texts[field.arg_name] = " ".join((field.description or "").split())
    return texts


def default_of(one: Field[Any]) -> Any:
    """Return the default of a field, or `MISSING`."""
    if one.default_factory is not MISSING:
        return one.default_factory()
    return one.default
