"""Help pages: what a command does, examples, and its options, of which the first matter most."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from .fields import (
    MANY,
    SHORT_GROUPS,
    Option,
    alternatives,
    fields_of,
    item_of,
    options_of_class,
    written,
)

MOST_COLUMNS = 100
MOST_CHOICES = 60  # characters of choices next to an option's name
INDENT = 24  # column of the explanations
TIE = "\0"  # a space at which no line ends
NUMBERS = "N,N,..."
FORMS = {
    NUMBERS: "acceptance",
    "FILE": "config data json profile prompts report reports",
    "FOLDER": "adapter features from init_from out path store target",
    "ADDRESS": "host", "DEVICE": "device", "DRAFTER": "drafter", "ENGINE": "like",
    "JSON": "chat_template_kwargs", "KEY": "api_key", "KEY=VALUE": "set",
    "N%": "fail_on_regression", "N/N": "share", "PATH": "runs", "TEXT": "prompt stop",
    "TIME": "since", "TYPE": "dtype", "URL": "server url",
}  # fmt: skip
"""Words for texts, with the last parts of the options' names; NAME for all others.

Where an option of that name takes something else, its field says so: `metadata={"form": "FILE"}`.
"""
SAID_TEXT = (
    "--quiet prints only warnings and results; --verbose adds details of each step; --debug prints "
    "the traceback of an unexpected error."
)
CONFIG_TEXT = (
    "--config FILE reads options from a YAML file with the same names; options given after it "
    "override the file. "
    "--print-config prints all values as such a file, and does nothing else."
)


def usage_of(option: Option) -> str:
    """Return an option with the form of its value: `a|b` for a choice, N, or a word."""
    kinds, name = alternatives(option.kind), written(option.name)
    if kinds == [bool]:
        # What can be said in place of the default.
        return name.replace("--", "--no-", 1) if option.default else name
    if option.form is not None and option.form.endswith(MANY):  # given without a name
        return option.form
    words = (word for word, names in FORMS.items() if option.last.rstrip("_") in names.split())
    form = option.form or next(words, "NAME")
    if get_origin(kinds[0]) is Literal and not many_choices(option):
        form = "|".join(map(str, get_args(kinds[0])))
    elif kinds[0] in (int, float):
        form = "N"
    elif {*get_args(kinds[0])} & {int, float}:
        form = NUMBERS
    elif item_of(kinds[0]) is not None:  # sources of data
        form = "FILE,FILE,..."
    return f"{name} {form}"


def many_choices(option: Option) -> list[str]:
    """Return the choices of an option if a line does not hold them, else none."""
    choices = [*map(str, get_args(alternatives(option.kind)[0]))]
    literal = get_origin(alternatives(option.kind)[0]) is Literal
    return choices if literal and len("|".join(choices)) > MOST_CHOICES else []


def explanation_of(option: Option) -> str:
    """Return the text of an option with its default."""
    value, text = option.default, option.text
    if choices := many_choices(option):
        text += f" One of {', '.join(choices)}."
    if value is MISSING:
        return f"{text} Required."
    if option.kind is bool and value:  # listed as --no-..., which its text does not say
        return f"Do not {text[:1].lower()}{text[1:]}"
    if value is None or isinstance(value, bool | dict) or value in ("", []):
        return text
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return f"{text} ({f'{value:g}'.replace('e+0', 'e') if isinstance(value, float) else value})"


def help_page(config_class: Any, prog: str, everything: bool) -> str:
    """Return the help page of a dataclass of options, as wide as the terminal.

    It explains the command's own options and those that have to be given, and lists the others;
    with `everything` it explains all of them, group by group.
    """
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS) - 1
    options = {option.name: option for option in options_of_class(config_class)}
    bare = [
        one.metadata["positional"] for one in fields(config_class) if "positional" in one.metadata
    ]
    lines = [f"usage: {prog}{''.join(f' {word}...' for word in bare)} [--option VALUE ...]", ""]
    for paragraph in (config_class.__doc__ or "").split("\n\n"):
        lines += [*wrapped(paragraph, width), ""]
    given = getattr(config_class, "examples", ())  # a method of another package may have none
    lines += ["examples:"] if given else []
    for example in given:
        lines += wrapped(unbroken_pairs(example), width, "  ", "      ", " \\")
    if everything:
        own = [option for option in options.values() if not option.group]
        lines += ["", "options:", *explained(own, width)]
        for part in fields_of(config_class):
            if is_dataclass(part.kind):
                title = part.text or (part.kind.__doc__ or "").split("\n\n")[0]
                how = f" (--{part.name}.X may be written --X)" * (part.name in SHORT_GROUPS)
                own = [option for option in options.values() if option.group == part.name]
                lines += ["", *wrapped(f"{part.name}: {title}{how}", width), *explained(own, width)]
        lines += ["", *wrapped(CONFIG_TEXT, width)] * ("config" not in options)
        lines += ["", *wrapped(SAID_TEXT, width)]
        return "\n".join(lines)
    required = [one for one in options.values() if one.default is MISSING]
    target = [one for one in options.values() if one.name == "target.path"]
    # Those that several commands share, such as the split of a data set, are keywords alone.
    shared = {one.name for one in fields(config_class) if one.kw_only}
    own = [one for one in options.values() if not one.group and one.name not in shared]
    shown = {one.name: one for one in (*required, *target, *own)}
    lines += ["", "options:", *explained(shown.values(), width)]
    rest = ", ".join(written(name) for name in options if name not in shown)
    more = ["", "more, which --help-all explains:", *wrapped(rest, width, "  ", "  ")]
    return "\n".join(lines + more * bool(rest))


def wrapped(
    text: str, width: int, first: str = "", later: str = "", continued: str = ""
) -> list[str]:
    """Return the lines of a text; `continued` ends all lines but the last.

    A piece of code between backticks is not broken, nor is a text at a `TIE`.
    """
    spaced = re.sub(r"[ \n]+", " ", text).strip()
    lines = textwrap.wrap(
        re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", TIE), spaced),
        width - len(continued), initial_indent=first, subsequent_indent=later,
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
    lines = [line.replace(TIE, " ") for line in lines]
    return [line + continued for line in lines[:-1]] + lines[-1:]


def unbroken_pairs(command: str) -> str:
    """Return a command in which no option is parted from its value, nor a word between quotes."""
    command = re.sub(r"'[^']+'", lambda quoted: quoted[0].replace(" ", TIE), command)
    return re.sub(r"(--?[\w.-]+) (?=[^- ]|- )", rf"\1{TIE}", command)


def explained(options: Iterable[Option], width: int) -> list[str]:
    """Return the lines of options, each with its explanation to the right."""
    lines = []
    for option in options:
        usage = f"  {usage_of(option)}"
        text = wrapped(explanation_of(option), width, " " * INDENT, " " * INDENT)
        if len(usage) < INDENT - 1:
            text[0] = usage.ljust(INDENT) + text[0][INDENT:]
        else:
            text.insert(0, usage)
        lines += text
    return lines
