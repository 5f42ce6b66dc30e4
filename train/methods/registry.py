"""The table of the training methods, and the method of a name or of a config file.

This module is imported before torch is needed, by the options of commands.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_type_hints

from ...command_line.fields import fields_of
from ...heads.errors import UserError
from ...heads.files import read_yaml
from ..method import AnyMethod, Method

if TYPE_CHECKING:
    from ..config import RunConfig

MethodName = Literal["medusa", "eagle", "mtp", "dflash", "dspark", "distill"]
METHODS: dict[MethodName, str] = {
    "medusa": "MedusaRun",
    "eagle": "EagleRun",
    "mtp": "MtpRun",
    "dflash": "DFlashRun",
    "dspark": "DSparkRun",
    "distill": "DistillRun",
}
"""The training commands, in the order of lists and tables, and the class of the run's config.

The class is in `config.py` of the method's folder, and the method is `METHOD` in `method.py`."""
OWN_PARTS = ("heads", "draft_model", "objective")  # sections that differ between methods


def method_named(name: str | type[AnyMethod]) -> AnyMethod:
    """Return the method of a training command, and import its module.

    A method of another package is given as its class, or named `module:Class`. Raises `UserError`
    for an unknown method, and for a class that cannot be one.
    """
    if isinstance(name, type) or ":" in name:
        return _own_method(name)
    _check_known(name)
    return importlib.import_module(f".{name}.method", __package__).METHOD


def _own_method(given: str | type[AnyMethod]) -> AnyMethod:
    """Return a method of another package, by its class or as `module:Class`."""
    from ...heads.artifact import own_method
    from ...inference.proposers.custom_drafters import class_named

    made: Any = class_named(given) if isinstance(given, str) else given
    name = given if isinstance(given, str) else f"{given.__module__}:{given.__name__}"
    if not (isinstance(made, type) and issubclass(made, Method)):
        raise UserError(f"method {name} is not a subclass of draftsmith.train.method.Method")
    if missing := sorted(made.__abstractmethods__) or [
        one for one in ("run_class", "drafter_class") if not hasattr(made, one)
    ]:
        raise UserError(f"method {name} lacks {', '.join(missing)}")
    if made.proposer_class is None or own_method(name) is not made:
        raise UserError(
            f"method {name} needs a proposer_class, and a drafter_class whose attribute method is "
            f"{name!r}"
        )
    return made()


def run_class_named(name: str) -> type[RunConfig]:
    """Return the class of a method's run config, for which torch is not imported.

    That of another package is imported with its module. Raises `UserError` for an unknown method.
    """
    if ":" in name:
        return method_named(name).run_class
    known = _check_known(name)
    return getattr(importlib.import_module(f".{name}.config", __package__), METHODS[known])


def _check_known(name: str) -> MethodName:
    """Return the name of a method. Raises `UserError` for an unknown one."""
    if name not in METHODS:
        close = difflib.get_close_matches(str(name).lower(), METHODS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"there are: {', '.join(METHODS)}"
        raise UserError(f"there is no method {name!r}; {meant}")
    return cast(MethodName, name)


def method_for(path: str, given: MethodName | None = None) -> MethodName:
    """Return the method that the config file at `path` is for.

    It is the one that was `given`; else the only one that knows all keys of the file; else, of
    several, the one that the file or its folder is named after (configs/eagle/mine.yaml). Raises
    `UserError` if that leaves a choice, and for a file that is not YAML.
    """
    if given is not None:
        return given
    run = read_yaml(Path(path))
    keys = {part: {*run[part]} for part in OWN_PARTS if isinstance(run.get(part), Mapping)}

    def knows_all(name: MethodName) -> bool:
        types = get_type_hints(run_class_named(name))
        return all(
            part in types and names <= {field.name for field in fields(types[part])}
            for part, names in keys.items()
        )

    fitting: list[MethodName] = [name for name in METHODS if knows_all(name)]
    if len(fitting) == 1:
        return fitting[0]
    path_names = (Path(path).stem, Path(path).absolute().parent.name)
    named: list[MethodName] = [name for name in fitting or METHODS if name in path_names]
    if len(named) == 1:
        return named[0]
    which = f"{', '.join(fitting)} would read it" if fitting else "no method knows all its keys"
    raise UserError(f"which method is {path} for? {which}; name one with --method")


@dataclass
class RunFile:
    """Options of a command that reads the config file of a run; it takes the run's options too."""

    config: str
    """Config file of the run."""
    method: MethodName | None = field(default=None, kw_only=True)
    """Method of the run; if not given, the keys of the config file or its path
    (configs/eagle/...) determine it."""
    set: list[str] = field(default_factory=list, kw_only=True)
    """Change of a key of the run, such as target.dtype=float32; may be given several times, or
    written as an option of the run: --target.dtype float32."""

    @staticmethod
    def run_keys() -> dict[str, Any]:
        """Return the keys of the runs of all methods, which `--set` takes, and their types."""
        runs = map(run_class_named, METHODS)
        options = (one for run in runs for one in fields_of(run))
        return {one.name: one.kind for one in options if not is_dataclass(one.kind)}
