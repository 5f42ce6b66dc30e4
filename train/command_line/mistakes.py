"""Mistakes in command lines and config files, in words: the option, what it takes, what was given.

jsonargparse says them with the types of Python, over several lines.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .spelling import is_list_of_paths, options_of

KEY = re.compile(r'^(?:Parser key )?"([\w.]+)":')
GIVEN = re.compile(r"(?:Got value|Given value): (.*?)(?=\n|$| Subclass types)")
MISSING = re.compile(r"^the following arguments are required: (.*)$")
NO_VALUE = re.compile(r"^argument --([\w.]+)\+?: expected one argument$")
STRAY = re.compile(r"^unrecognized arguments: (.*)$")
UNKNOWN = re.compile(r"(?:Option|does not accept option) '([\w.+-]+)'(?: is not accepted)?")
GROUP = re.compile(r"^Group '([\w.]+)'")
NO_FILE = re.compile(r'^(?:Parser key )?"config":\s+File does not exist: \'(.*)\'', re.DOTALL)
NO_YAML = re.compile(r"^Problems parsing config:\s*(.*)$", re.DOTALL)
PLACE = re.compile(r'\s*in "<unicode string>", line (\d+), column (\d+):?')
# An option within a text: not the hyphens inside of a word, a path or an address.
OPTION = re.compile(r"(?<![\w/.-])--[A-Za-z][\w.]*")
CONFIG = "a YAML file"
OUTPUT = "a file to write, or - for standard output"


def in_words(message: str, types: dict[str, Any], arguments: Sequence[str]) -> str:
    """Return a message of jsonargparse as one line for people.

    `types` are those of the fields by their dotted names, `arguments` the words of the command line
    as `spelling.spelled` returns them.
    """
    if found := MISSING.match(message):
        names = [written(name.strip()) for name in found[1].split(",")]
        return f"{joined(names)} {'is' if len(names) == 1 else 'are'} missing"
    if found := NO_VALUE.match(message):
        name = found[1]
        what = {"json": OUTPUT, "config": CONFIG}.get(name) or takes(types.get(name))
        return f"{written(name)} needs a value: {what}"
    if found := STRAY.match(message):
        return (
            f"{found[1].split()[0]!r} belongs to no option; put quotes around a value with spaces"
        )
    if found := NO_FILE.match(message):
        return f"config file {found[1]} does not exist; check the path"
    if found := NO_YAML.match(message):
        return f"{config_of(arguments)} is not valid YAML: {without_place(found[1])}"
    key = found[1] if (found := KEY.match(message)) else None
    if unknown := UNKNOWN.search(message):
        return unknown_key(unknown[1], key, message, types, arguments)
    if key is not None:
        return wrong_value(key, message, types, arguments)
    return hyphenated(one_line(message))


def wrong_value(key: str, message: str, types: dict[str, Any], arguments: Sequence[str]) -> str:
    """Return what the option or the key of a config file takes, and what was given."""
    reason = message.rpartition("Problem with given class_path")[2].partition("\n")[2]
    inner = KEY.match(reason.strip())
    if key == "config":
        return f"--config takes {CONFIG}, not {config_of(arguments)}"
    subject = name_of(key, arguments)
    given = [value.strip() for value in GIVEN.findall(message)]
    shown = as_typed(given[-1]) if given else None
    if shown is None and (found := re.search(r"Unable to load config ['\"](.*?)['\"]", message)):
        shown = found[1]
    if inner is not None and is_list_of_paths(types.get(key)):
        (item,) = get_args(types[key])
        kinds = {field.name: field.type for field in fields(item)}
        what = takes(kinds.get(inner[1]))
        return f"{subject}: {inner[1]} takes {what}" + (f", not {shown}" if shown else "")
    kind = types.get(key)
    what = takes(kind)
    if is_dataclass(kind):
        what = f"options of its own, such as {written(f'{key}.{fields(kind)[0].name}')}, or a file"
    return f"{subject} takes {what}" + (f", not {shown}" if shown else "")


def unknown_key(
    name: str, key: str | None, message: str, types: dict[str, Any], arguments: Sequence[str]
) -> str:
    """Return that a config file has an unknown key, and those that are spelled like it."""
    if key is not None and is_list_of_paths(types.get(key)):
        (item,) = get_args(types[key])
        known = ", ".join(field.name for field in fields(item))
        return f"{name_of(key, arguments)} has an unknown key {name!r}; there are: {known}"
    prefix = f"{found[1]}." if (found := GROUP.match(message)) else f"{key}." if key else ""
    known = [one.removeprefix(prefix) for one in types if one.startswith(prefix)]
    close = difflib.get_close_matches(name, [one for one in known if "." not in one], n=2)
    hint = f"; did you mean {' or '.join(prefix + one for one in close)}?" if close else ""
    return f"{config_of(arguments)} has an unknown key {prefix + name!r}{hint}"


def takes(kind: Any) -> str:
    """Return what an option of type `kind` takes, in words."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        return " or ".join(map(takes, kinds))
    if get_origin(kind) is Literal:
        return joined(map(str, get_args(kind)), "or")
    if is_list_of_paths(kind):
        return "files with commas between them, or a list such as [{path: a.jsonl, weight: 2}]"
    if get_origin(kind) in (list, tuple):
        items, arguments = takes(get_args(kind)[0]), get_args(kind)
        many = "" if get_origin(kind) is list or ... in arguments else f"{number(len(arguments))} "
        plural = {"a number": "numbers", "a whole number": "whole numbers"}.get(items, "texts")
        return f"{many}{plural} with commas between them"
    if get_origin(kind) is dict:
        return 'a table, such as {"enable_thinking": false}'
    # the names of types, where a dataclass was read with its annotations as texts
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    return words.get(name.partition(" ")[0], "another value")


def number(count: int) -> str:
    """Return a small number as a word."""
    return {2: "two", 3: "three"}.get(count, str(count))


def as_typed(value: str) -> str:
    """Return a value that jsonargparse shows as Python does, as a user types it: `2,x`."""
    try:
        read = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
    if isinstance(read, list | tuple) and all(isinstance(item, str | int | float) for item in read):
        return ",".join(map(str, read)) or "an empty list"
    return value


def name_of(key: str, arguments: Sequence[str]) -> str:
    """Return `--optim.lr` for an option that was typed, `optim.lr` for a key of a config file."""
    for typed, _ in options_of(arguments):
        if typed.removeprefix("--").removesuffix("+") == key:
            return written(key)
    return f"{config_of(arguments)}: {key}"


def config_of(arguments: Sequence[str]) -> str:
    """Return the name of the last config file of a command line, or other words for it."""
    files = [value for typed, value in options_of(arguments) if typed == "--config" and value]
    # the text of a config stands in its place if a former name in it was replaced
    return files[-1] if files and "\n" not in files[-1] else "the config"


def without_place(problem: str) -> str:
    """Return a message of the YAML parser as one line, with the last place that it names."""
    places = PLACE.findall(problem)
    text = re.sub(r"\s+", " ", PLACE.sub("", problem)).strip().splitlines()[0]
    return f"{text} (line {places[-1][0]}, column {places[-1][1]})" if places else text


def one_line(message: str) -> str:
    """Return a message over several lines as one line, without the names of types."""
    lines = [line.strip(" -") for line in str(message).splitlines()]
    text = re.sub(r"\s+", " ", " ".join(line for line in lines if line))
    # <class 'pkg.Name'> becomes Name, and typing.Literal becomes Literal.
    shortened = re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.(?=Literal)", r"\1", text)
    return shortened.removeprefix("Parser key ")


def hyphenated(text: str) -> str:
    """Return `text` with hyphens for underscores in every option that it names.

    `--optim.warmup_share` becomes `--optim.warmup-share`, and `--from_` becomes `--from`.
    """
    return OPTION.sub(lambda match: match.group().rstrip("_").replace("_", "-"), text)


def written(name: str) -> str:
    """Return the option of a field as it is typed: `--optim.warmup-share`, `--target`."""
    return hyphenated("--target" if name == "target.path" else f"--{name}")


def joined(words: Iterable[str], conjunction: str = "and") -> str:
    """Return words as a list of a sentence: `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} {conjunction} {last}" if first else last
