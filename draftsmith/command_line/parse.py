"""Options of a command from its words, from YAML files and from Python.

The fields of a dataclass are its options, with hyphens, and their docstrings the help text. Values
are gathered by their dotted names, where later ones replace earlier ones; then the dataclass is
made. Every mistake is answered in one line.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import yaml

from ..heads.errors import UserError
from ..heads.files import read_yaml
from .fields import (
    SWITCHES,
    TABLES,
    WrongValue,
    converted,
    fields_of,
    former_hint,
    from_python,
    from_word,
    item_of,
    joined,
    known_name,
    near,
    positional,
    shown,
    takes,
    written,
)  # fmt: skip
from .help_text import help_page
from .process import fail

T = TypeVar("T")
# What options take of which the type does not say it.
USUAL_FIRST = ("target.path", "target", "prompt", "drafter", "config", "prompts", "data", "out")
"""Options that a user expects not to have to name, the most usual first."""
VALUES = {"config": "a YAML file", "json": "a file to write, or - for standard output"}


class OptionValues(Generic[T]):
    """Values of a dataclass of options as they are gathered, its defaults to begin with."""

    def __init__(self, config_class: type[T]) -> None:
        self.config_class = config_class
        options = [*fields_of(config_class)]
        self.types = {option.name: option.kind for option in options}
        self.flat = {one.name: one.default for one in options if one.default is not MISSING}
        self.run_types: dict[str, Any] = {}
        """Options of a run, which a command that reads its file takes as changes."""
        if hasattr(config_class, "run_keys"):
            self.run_types = config_class.run_keys()  # type: ignore[attr-defined]

    def name_of(self, name: str) -> str:
        """Return the field that an option means, one of a run if the command takes those."""
        mine = known_name(name, self.types, self.config_class)
        return mine if mine in self.types else known_name(name, self.run_types)

    def check_known(self, name: str, file: str = "") -> None:
        """Raise `UserError` for an unknown option, with the options that may be meant."""
        if name in self.types:
            return
        plain, said = name.replace("-", "_"), repr(name) if file else written(name)
        if hint := former_hint(plain, self.types, self.config_class):
            raise UserError(f"there is no option {said} any more: {hint}")
        if name == "set" and not file:
            meant = "; write each key as an option, such as --optim.lr 1e-5"
        else:
            similar = near(plain, self.types | self.run_types)
            similar = similar if file else [*map(written, similar)]
            meant = f"; did you mean {' or '.join(similar)}?" if similar else ""
        unknown = f"{file} has an unknown key" if file else "unknown option"
        raise UserError(f"{unknown} {said}{meant}")

    def put(self, name: str, value: Any, append: bool = False, file: str = "") -> None:
        """Set an option, or each one that a table names; `append` to a list.

        Raises `UserError`, with the option as it is typed, or as the YAML file of that path has it.
        """
        if not isinstance(value, Mapping):
            name = known_name(name, self.types, self.config_class)
        table, _, key = name.rpartition(".")
        if self.types.get(table) in TABLES:
            name, value = table, {**self.flat[table], key: value}
        self.check_known(name, file)
        kind = self.types[name]
        if is_dataclass(kind) and isinstance(value, Mapping):
            for one, inner in value.items():
                self.put(f"{name}.{one}", inner, file=file)
            return
        said = f"{file}: {name}" if file else written(name)
        try:
            if is_dataclass(kind):
                raise WrongValue(f" takes {takes(kind, name)}, not {shown(value)}")
            value = converted(kind, value)
        except WrongValue as wrong:
            raise UserError(f"{said}{wrong}") from wrong
        if item_of(kind) is not None:
            value = [entry(kind, one, said) for one in value]
        self.flat[name] = self.flat[name] + value if append else value
        # The first of several temperatures of a command is also that of its sampling settings,
        # which do not take a `top_p` and the like without one.
        if value and name == "temperature" and isinstance(value, list):
            self.flat[f"sampling.{name}"] = value[0]

    def read(self, path: str) -> None:
        """Set the options of a YAML file. Raises `UserError`."""
        if Path(path).is_dir():
            raise UserError(f"--config takes {VALUES['config']}, not {path}")
        for name, value in read_yaml(Path(path)).items():
            self.put(str(name), value, file=path)

    def take(self, argv: Sequence[str]) -> set[str]:
        """Set the options of a command line, and return their names. Raises `UserError`."""
        given = set()
        for name, value in given_options(argv, self):
            if name == "config" and name not in self.types:
                self.read(value)
            elif name in self.run_types and name not in self.types:
                word = value if isinstance(value, str) else str(value).lower()
                self.put("set", [f"{name}={word}"], "set" in given)
                name = "set"
            elif name != "print_config":
                kind = self.types.get(name, Any)
                plain = from_word(kind, value) if isinstance(value, str) else value
                self.put(name, plain, name in given)
            given.add(name)
        return given

    def nested(self) -> dict[str, Any]:
        """Return the values as tables in tables; those that are missing are None."""
        tables: dict[str, Any] = {"": {}}
        for name, kind in self.types.items():
            table, _, last = name.rpartition(".")
            tables[name] = {} if is_dataclass(kind) else self.flat.get(name)
            tables[table][last] = tables[name]
        return tables[""]

    def check_complete(self) -> None:
        """Raise `UserError` where an option has no value that needs one."""
        options = [name for name, kind in self.types.items() if not is_dataclass(kind)]
        if names := [written(name) for name in options if name not in self.flat]:
            raise UserError(f"{joined(names)} {'is' if len(names) == 1 else 'are'} missing")

    def made(self) -> T:
        """Return the dataclass. Raises `UserError`."""
        try:
            return msgspec.convert(self.nested(), self.config_class)
        except msgspec.ValidationError as error:  # caused by the `UserError` of a `__post_init__`
            raise (error.__cause__ or error) from None


def entry(kind: Any, value: Any, said: str) -> dict[str, Any]:
    """Return an entry of a list of type `kind`, of dataclasses; a text is its first field.

    Raises `UserError`, in which the list is called `said`.
    """
    item = item_of(kind)
    value = {fields(item)[0].name: value} if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise UserError(f"{said} takes {takes(kind)}, not {shown(value)}")
    values = OptionValues(item)
    for key, one in value.items():
        values.put(str(key), one, file=said)
    if missing := [name for name in values.types if name not in values.flat]:
        label = " (name is a label, not the data set's name)" if "name" in value else ""
        raise UserError(f"{said}: {missing[0]} is missing{label}")
    return values.nested()


def as_given(values: OptionValues[Any]) -> str:
    """Return values as a config file, null where an option has none."""
    return yaml.safe_dump(values.nested(), sort_keys=False, allow_unicode=True)


def parse(
    config_class: type[T],
    argv: Sequence[str],
    prog: str,
    shown: Callable[[OptionValues[T]], str] = as_given,
) -> T:
    """Return an instance of the dataclass.

    Values come from `--config FILE` (YAML) and from options; later ones win. Prints one line and
    exits with status 2 on a mistake. `--print-config` prints what `shown` returns.
    """
    if wanted := {"-h", "--help", "--help-all"} & {*argv}:
        print(help_page(config_class, prog, "--help-all" in wanted))
        raise SystemExit(0)
    values = OptionValues(config_class)
    try:
        if "print_config" in values.take(argv):
            print(shown(values), end="")
            raise SystemExit(0)
        values.check_complete()
    except UserError as error:
        fail(f"{error} (see {prog} --help)")
    try:
        return values.made()
    except UserError as error:
        fail(str(error))


def config_with(config_class: type[T], path: str, changes: list[str]) -> T:
    """Return the config of the YAML file `path` with `changes`, each KEY=VALUE as in `--set`.

    Raises `UserError`.
    """
    values = OptionValues(config_class)
    values.read(path)
    values.take([f"--{change}" for change in changes])
    values.check_complete()
    return values.made()


def options_from(
    config_class: type[T], given: Mapping[str, Any], config: str | PathLike[str] | None = None
) -> T:
    """Return an instance of a dataclass of options from the values of its fields.

    They are `given` by their names, nested ones as tables or by dotted names, and replace those of
    the YAML file `config`. A path means a target or a source of data. Raises `UserError`.
    """
    values = OptionValues(config_class)
    if config is not None:
        values.read(fspath(config))
    for name, value in from_python(given).items():
        part = is_dataclass(values.types.get(name))
        name = "data.sources" if name == "data" and part and not isinstance(value, dict) else name
        values.put(name, value)
    values.check_complete()
    return values.made()


def bare_word_error(word: str, types: dict[str, Any], given: Collection[str]) -> str:
    """Return the error for a word that follows no option, of a command without positional words.

    It may have one hyphen, be a setting as Hydra has it, or be a value without its option's name.
    """
    key, equals, value = word.lstrip("-+").partition("=")
    name = known_name(key.replace("-", "_"), types)
    meant = [name] if name in types else near(name, types)
    if meant and (equals or word.startswith("-")):
        such = f"{written(meant[0])} {shlex.quote(value)}" if equals else written(meant[0])
        return f"{word!r} lacks two hyphens; did you mean {such}?"
    texts = {name for name, kind in types.items() if not is_dataclass(kind)}
    usual = [one for one in USUAL_FIRST if one in texts and one not in given]
    such = f", as in {written(usual[0])} {shlex.quote(word)}" if usual else ""
    return (
        f"{word!r} belongs to no option: a value follows the name of its option{such}; put quotes "
        "around a value with spaces"
    )


def given_options(argv: Sequence[str], values: OptionValues[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command line by their fields' names, with a text, true or false.

    `--lr 3e-4` is `--lr=3e-4`. Words that are not the value of an option belong to the positional
    list, if there is one. Raises `UserError` for an option that is unknown, lacks a value, or is
    given twice and takes one.
    """
    types = {"config": list[str], "print_config": bool, **values.run_types, **values.types}
    bare_goes_to = positional(values.config_class)
    words, given = [*argv], set()
    while words:
        word, equals, value = words[0].partition("=")
        if not word.startswith("--"):
            if bare_goes_to is None or word.startswith("-"):
                raise UserError(bare_word_error(words[0], types, given))
            yield bare_goes_to, words.pop(0)
            continue
        bare = len(words) > 1 and not words[1].startswith("--") and not equals
        value = words[1] if bare else value if equals else None
        del words[: 1 + bare]
        name = values.name_of(word[2:].replace("-", "_"))
        off = values.name_of(name.removeprefix("no_"))
        if value is None and name not in types and types.get(off) in SWITCHES:
            name, value = off, False
        if name not in types and types.get(name.rpartition(".")[0]) not in TABLES:
            values.check_known(name)
        kind = types.get(name)
        if value is None and kind not in SWITCHES:
            what = VALUES.get(name) or takes(kind, name)
            raise UserError(f"{written(name)} needs a value: {what}")
        if name in given and kind != list[str] and item_of(kind) is None:
            raise UserError(f"{written(name)} is given twice; it takes one value")
        given.add(name)
        yield name, True if value is None else value
