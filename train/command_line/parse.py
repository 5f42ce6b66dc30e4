"""Options of a command from its words, from YAML files and from Python.

The fields of a dataclass are its options, with hyphens, and their docstrings the help text. Values
are gathered by their dotted names, where later ones replace earlier ones; then the dataclass is
made. Every mistake is answered in one line.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Generic, TypeVar, get_origin

import msgspec
import yaml

from ...heads.errors import UserError
from ...heads.files import read_yaml
from ..endings import fail
from .fields import SWITCHES, fields_of, item_of, joined, known_name, near, positional, written
from .help_text import help_page
from .values import TABLES, WrongValue, converted, from_python, from_word, shown, takes

T = TypeVar("T")
# What options take of which the type does not say it.
USUAL_FIRST = ("target.path", "target", "prompt", "drafter", "config", "prompts", "data", "out")
"""Options that a user expects not to have to name, the most usual first."""
VALUES = {"config": "a YAML file", "json": "a file to write, or - for standard output"}


@dataclass(frozen=True)
class Place:
    """A place where options are given, and how it names a known field and an unknown one."""

    name: Callable[[str], str]
    quote: Callable[[str], str] = repr
    unknown: str = "unknown option "
    wrong: str = ""
    """Words before the name in a message about a value."""


COMMAND_LINE = Place(written, quote=written)
SETTING = Place(lambda name: f"--set {name}", quote=lambda name: f"--set {name}")
PYTHON = Place(lambda name: {"target.path": "target", "data.sources": "data"}.get(name, name))


class Values(Generic[T]):
    """Values of a dataclass of options as they are gathered, its defaults to begin with."""

    def __init__(self, config_class: type[T]) -> None:
        self.config_class = config_class
        options = [*fields_of(config_class)]
        self.types = {option.name: option.kind for option in options}
        self.flat = {one.name: one.default for one in options if one.default is not MISSING}

    def put(self, name: str, value: Any, place: Place, append: bool = False) -> None:
        """Set an option, or each one that a table names; `append` to a list. Raises `UserError`."""
        name = name if isinstance(value, Mapping) else known_name(name, self.types)
        table, _, key = name.rpartition(".")
        if self.types.get(table) in TABLES:
            name, value = table, {**self.flat[table], key: value}
        check_known(name, self.types, place)
        kind = self.types[name]
        if is_dataclass(kind) and isinstance(value, Mapping):
            for one, inner in value.items():
                self.put(f"{name}.{one}", inner, place)
            return
        try:
            if is_dataclass(kind):
                raise WrongValue(f" takes {takes(kind, name)}, not {shown(value)}")
            value = converted(kind, value)
        except WrongValue as wrong:
            raise UserError(f"{place.wrong}{place.name(name)}{wrong}") from wrong
        self.flat[name] = self.flat[name] + value if append else value

    def read(self, path: str) -> None:
        """Set the options of a YAML file. Raises `UserError`."""
        if Path(path).is_dir():
            raise UserError(f"--config takes {VALUES['config']}, not {path}")
        file = Place(str, repr, f"{path} has an unknown key ", f"{path}: ")
        for name, value in read_yaml(Path(path)).items():
            self.put(str(name), value, file)

    def nested(self) -> dict[str, Any]:
        """Return the values as tables in tables; those that are missing are None."""
        tables: dict[str, Any] = {"": {}}
        for name, kind in self.types.items():
            table, _, last = name.rpartition(".")
            tables[name] = {} if is_dataclass(kind) else self.flat.get(name)
            tables[table][last] = tables[name]
        return tables[""]

    def check_complete(self, place: Place) -> None:
        """Raise `UserError` where an option has no value that needs one."""
        options = [name for name, kind in self.types.items() if not is_dataclass(kind)]
        if names := [place.name(name) for name in options if name not in self.flat]:
            raise UserError(f"{joined(names)} {'is' if len(names) == 1 else 'are'} missing")

    def made(self) -> T:
        """Return the dataclass. Raises `UserError`."""
        try:
            return msgspec.convert(self.nested(), self.config_class)
        except msgspec.ValidationError as error:  # caused by the `UserError` of a `__post_init__`
            raise (error.__cause__ or error) from None


def as_given(values: Values[Any]) -> str:
    """Return values as a config file, None where there are none."""
    return yaml.safe_dump(values.nested(), sort_keys=False, allow_unicode=True)


def parse(
    config_class: type[T],
    argv: Sequence[str],
    prog: str,
    shown: Callable[[Values[T]], str] = as_given,
) -> T:
    """Return an instance of the dataclass.

    Values come from `--config FILE` (YAML) and from options; later ones win. Prints one line and
    exits with status 2 on a mistake. `--print-config` prints what `shown` returns.
    """
    if wanted := {"-h", "--help", "--help-all"} & {*argv}:
        print(help_page(config_class, prog, "--help-all" in wanted))
        raise SystemExit(0)
    values, given = Values(config_class), set()
    try:
        for name, value in given_options(argv, values.types, positional(config_class)):
            if name == "config" and name not in values.types:
                values.read(value)
            elif name != "print_config":
                kind = values.types.get(name, Any)
                plain = from_word(kind, value) if isinstance(value, str) else value
                values.put(name, plain, COMMAND_LINE, name in given)
            given.add(name)
        if "print_config" in given:
            print(shown(values), end="")
            raise SystemExit(0)
        values.check_complete(COMMAND_LINE)
    except UserError as error:
        fail(f"{error} (see {prog} --help)")
    try:
        return values.made()
    except UserError as error:
        fail(str(error))


def config_with(config_class: type[T], path: str, changes: list[str]) -> T:
    """Return the config of the YAML file `path` with `changes`, each KEY=VALUE as in `--set`.

    Raises `UserError`, also for a change without a value.
    """
    if wrong := [change for change in changes if "=" not in change]:
        raise UserError(f"--set {wrong[0]} sets nothing; write KEY=VALUE, such as batch_rows=4")
    values, given = Values(config_class), set()
    values.read(path)
    for change in changes:
        key, _, value = change.partition("=")
        name = known_name(key.replace("-", "_"), values.types)
        kind = values.types.get(name, Any)
        again = name in given
        if again and get_origin(kind) is not list:
            raise UserError(f"--set {name} is given twice; it takes one value")
        values.put(name, from_word(kind, value), SETTING, again)
        given.add(name)
    values.check_complete(SETTING)
    return values.made()


def by_settings(message: str, own: Any) -> str:
    """Return a message about a run for a command that takes the run's options by `--set`.

    `own` is the dataclass of that command. `--rows-per-step 8` becomes `--set rows_per_step=8`.
    """
    from ..config import RunConfig

    types = {option.name: option.kind for option in fields_of(RunConfig)}

    def setting(found: re.Match[str]) -> str:
        name = known_name(found[1].replace("-", "_"), types)
        kind = types.get(name)
        if kind is None or is_dataclass(kind) or name in {one.name for one in fields_of(own)}:
            return found[0]
        if kind is bool:
            return f"--set {name}=true{found[2]}"
        return f"--set {name}={found[2].strip() or '...'}"

    # A value is what follows a space, as far as it cannot be a word of the sentence.
    values = r"((?: (?:\d[\w.]*|bfloat16|float32|sdpa|row|skip)\b)?)"
    return re.sub(rf"--([a-z][a-z.-]*[a-z]){values}", setting, message)


def options_from(
    config_class: type[T], given: Mapping[str, Any], config: str | PathLike[str] | None = None
) -> T:
    """Return an instance of a dataclass of options from the values of its fields.

    They are `given` by their names, nested ones as tables or by dotted names, and replace those of
    the YAML file `config`. A path means a target or a source of data. Raises `UserError`.
    """
    values = Values(config_class)
    if config is not None:
        values.read(fspath(config))
    for name, value in from_python(given).items():
        part = is_dataclass(values.types.get(name))
        name = "data.sources" if name == "data" and part and not isinstance(value, dict) else name
        values.put(name, value, PYTHON)
    values.check_complete(PYTHON)
    return values.made()


def check_known(name: str, types: dict[str, Any], place: Place) -> None:
    """Raise `UserError` for an option that there is not, with those that are spelled like it."""
    if name not in types:
        plain = name.replace("-", "_")
        similar = [place.name(one) for one in near(plain, types)]
        if place is COMMAND_LINE and "set" in types:
            keys = run_keys()
            if (key := known_name(plain, keys)) in keys:
                raise UserError(
                    f"{place.unknown}{place.quote(name)}; a key of the run is written "
                    f"--set {key}=VALUE"
                )
            similar = similar or [f"{SETTING.name(one)}=VALUE" for one in near(plain, keys)]
        meant = f"; did you mean {' or '.join(similar)}?" if similar else ""
        if name == "set" and place is COMMAND_LINE:
            meant = "; write each key as an option, such as --optim.lr 1e-5"
        raise UserError(f"{place.unknown}{place.quote(name)}{meant}")


def run_keys() -> dict[str, Any]:
    """Return the keys of the runs of all methods, which `--set` takes, and their types."""
    from ..method import METHODS, run_class_named

    runs = map(run_class_named, METHODS)
    options = (one for run in runs for one in fields_of(run))
    return {one.name: one.kind for one in options if not is_dataclass(one.kind)}


def about_bare(word: str, types: dict[str, Any], given: Collection[str]) -> str:
    """Return what is said of a word that follows no option, of a command that takes none such.

    It may be a setting as Hydra has it, `optim.lr=1e-4`, or a value without its option's name.
    """
    if re.fullmatch(r"-\w+", word):
        meant = near(word[1:].replace("-", "_"), types)
        such = f"; did you mean {written(meant[0])}?" if meant else ""
        return f"there is no option {word}; options have two hyphens{such}"
    key, equals, value = word.lstrip("+").partition("=")
    if equals and (name := known_name(key.replace("-", "_"), types)):
        meant = [name] if name in types else near(name, types)
        if meant:
            return f"{word!r} has no hyphens; write {written(meant[0])} {shlex.quote(value)}"
    texts = {name for name, kind in types.items() if not is_dataclass(kind)}
    usual = [name for name in USUAL_FIRST if name in texts and name not in given]
    such = f", as in {written(usual[0])} {shlex.quote(word)}" if usual else ""
    return (
        f"{word!r} belongs to no option: a value follows the name of its option{such}; put quotes "
        "around a value with spaces"
    )


def given_options(
    argv: Sequence[str], types: dict[str, Any], bare_goes_to: str | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command line by their fields' names, with a text, true or false.

    `--lr 3e-4` is `--lr=3e-4`. Words that are not the value of an option belong to the list
    `bare_goes_to`, if there is one. Raises `UserError` for an option that is unknown, lacks a
    value, or is given twice and takes one.
    """
    types = {"config": list[str], "print_config": bool, **types}
    words, given = [*argv], set()
    while words:
        word, equals, value = words[0].partition("=")
        if not word.startswith("--"):
            if bare_goes_to is None or word.startswith("-"):
                raise UserError(about_bare(words[0], types, given))
            yield bare_goes_to, words.pop(0)
            continue
        bare = len(words) > 1 and not words[1].startswith("--") and not equals
        value = words[1] if bare else value if equals else None
        del words[: 1 + bare]
        name = known_name(word[2:].replace("-", "_"), types)
        off = known_name(name.removeprefix("no_"), types)
        if value is None and name not in types and types.get(off) in SWITCHES:
            name, value = off, False
        if types.get(name.rpartition(".")[0]) not in TABLES:
            check_known(name, types, COMMAND_LINE)
        kind = types.get(name)
        if value is None and kind not in SWITCHES:
            what = VALUES.get(name) or takes(kind, name)
            raise UserError(f"{written(name)} needs a value: {what}")
        if name in given and kind != list[str] and item_of(kind) is None:
            raise UserError(f"{written(name)} is given twice; it takes one value")
        given.add(name)
        yield name, True if value is None else value
