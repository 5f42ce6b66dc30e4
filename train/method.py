"""The contract of a training method, the table of the methods, and whose config a file is.

This module is imported before torch is needed (by the options of commands), so it imports none of
the modules that its contract names.
"""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, get_type_hints

from ..heads.errors import UserError
from ..heads.files import JsonObject, read_yaml

if TYPE_CHECKING:
    from torch import Tensor

    from ..heads.artifact import Artifact
    from ..heads.layout import DrafterModule
    from ..inference.targets.causal_model import Hidden
    from ..inference.targets.target import Target, TargetSource
    from .config import RunConfig
    from .data.batches import Batches
    from .data.rollouts import Rollouts, Writer
    from .objectives import Objective
    from .outline import ConfigOnly, Outline

RunT = TypeVar("RunT", bound="RunConfig")
DrafterT = TypeVar("DrafterT", bound="DrafterModule")
MethodName = Literal["medusa", "eagle", "mtp", "dflash", "dspark", "distill"]
METHODS: dict[MethodName, tuple[str, str]] = {
    "medusa": ("medusa", "MedusaRun"),
    "eagle": ("eagle", "EagleRun"),
    "mtp": ("mtp", "MtpRun"),
    "dflash": ("dflash", "DFlashRun"),
    "dspark": ("dspark", "DSparkRun"),
    "distill": ("draft_model", "DistillRun"),
}
"""The training commands, in the order of lists and tables: the module in `methods/` whose `METHOD`
is the method, and the class of the run's config in `methods/runs.py`."""
OWN_PARTS = ("heads", "draft_model", "objective")  # sections that differ between methods


class Method(ABC, Generic[RunT, DrafterT]):
    """Contract of a method with the commands and the training loop; an instance has no state.

    Shapes: S positions of a text, D drafts of a round.
    """

    run_class: type[RunT]
    """Class of the run's config."""
    drafter_class: type[DrafterT]
    proposer_class: Any = None
    """Of a method of another package: class of its proposer, made of an `Artifact` and `settings`,
    a `TreeSettings`."""
    tree_settings: tuple[str, ...] = ("length", "width", "nodes", "shape")
    """Of such a method: the fields of `TreeSettings` that its proposer follows; these are those of
    a `Planned` one."""

    def features_of(self, run: RunT, target: TargetSource | ConfigOnly) -> FeaturesRead:
        """Return the taps that the run reads, and whether it reads every last state.

        They are those of the drafter and of the objective; this is asked before either exists. By
        default there are no taps, and the last states suffice where a reply token comes next.
        """
        return (), False

    def resolve(self, run: RunT, target: ConfigOnly) -> None:
        """Fill in the options of the run that the target determines where they are None.

        `make_drafter` and `make_objective` would come to the same. By default there are none.
        """
        return

    @abstractmethod
    def outline(self, run: RunT, target: ConfigOnly) -> Outline:
        """Return the run's `Outline`, from the target's config alone.

        It is called with the meta device as torch's default: a module made here has no weights.
        """

    @abstractmethod
    def make_drafter(
        self, run: RunT, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> DrafterT:
        """Return an untrained drafter, on the CPU in float32; of the shape of `before`, if given.

        The loop then fills it with the weights of `before`. Random weights come from torch's global
        generator, which the run has seeded. Raises `UserError` if the run asks for another shape
        than that of `before`, or for a drafter that does not fit the target.
        """

    @abstractmethod
    def make_objective(self, run: RunT, target: TargetSource, drafter: DrafterT) -> Objective:
        """Return the run's objective for a drafter, of which it may freeze parameters.

        Raises `UserError` where gradients or sizes do not fit.
        """

    def writer(
        self, run: RunT, target: Target, drafter: DrafterT
    ) -> tuple[Rollouts, Writer] | None:
        """Return what writes texts while the run goes on, if it does: settings and function.

        By default nothing: heads and blocks draft from the target's states, whatever earlier rounds
        drafted.
        """
        return None

    @abstractmethod
    def teacher_forced(self, drafter: DrafterT, hidden: Hidden, ids: Tensor) -> Tensor:
        """Return what the training pass drafts at each root of a text, as `[S, ..]`.

        `ids` `[S]` are the text, `hidden` its features. Each method defines the columns, which
        `calibrate` reads.
        """

    @abstractmethod
    def calibrate(self, outcomes: Sequence[tuple[Tensor, int]], tree_nodes: int) -> JsonObject:
        """Return the calibration that an artifact stores.

        `outcomes` has, for each held-out text, the table of `teacher_forced` and the start of the
        reply. `tree_nodes`, which is stored too, are the nodes of the tree that the drafter is
        evaluated with. The keys are those of `heads.documents.Calibration`.
        """


FeaturesRead = tuple[tuple[int, ...], bool]
"""Taps that a run reads, and true if it reads the last state of every position."""
AnyMethod = Method[Any, Any]


def method_named(name: str | type[AnyMethod]) -> AnyMethod:
    """Return the method of a training command, and import its module.

    A method of another package is given as its class, or named `module:Class`. Raises `UserError`
    for an unknown method, and for a class that cannot be one.
    """
    if isinstance(name, type) or ":" in name:
        return _own_method(name)
    module_name, _ = _entry(name)
    return importlib.import_module(f".methods.{module_name}", __package__).METHOD


def _own_method(given: str | type[AnyMethod]) -> AnyMethod:
    """Return a method of another package, by its class or as `module:Class`."""
    from ..heads.artifact import own_method
    from ..inference.own_drafters import class_named

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
    _, class_name = _entry(name)
    return getattr(importlib.import_module(".methods.runs", __package__), class_name)


def _entry(name: str) -> tuple[str, str]:
    """Return what `METHODS` has under a name. Raises `UserError` for an unknown method."""
    if name not in METHODS:
        close = difflib.get_close_matches(str(name).lower(), METHODS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"there are: {', '.join(METHODS)}"
        raise UserError(f"there is no method {name!r}; {meant}")
    return METHODS[cast(MethodName, name)]


def method_for(path: str, given: MethodName | None = None) -> MethodName:
    """Return the method that the config file at `path` is for.

    It is the one that was `given`; else the only one that knows all keys of the file; else, of
    several, the one that the file or its folder is named after (configs/eagle/mine.yaml). Raises
    `UserError` if that leaves a choice, and for a file that is not YAML.
    """
    if given is not None:
        return given
    run = read_yaml(Path(path))
    keys = {part: list(run[part]) for part in OWN_PARTS if isinstance(run.get(part), Mapping)}
    fitting: list[MethodName] = [name for name in METHODS if _knows(run_class_named(name), keys)]
    if len(fitting) == 1:
        return fitting[0]
    path_names = (Path(path).stem, Path(path).absolute().parent.name)
    named: list[MethodName] = [name for name in fitting or METHODS if name in path_names]
    if len(named) == 1:
        return named[0]
    which = f"{', '.join(fitting)} would read it" if fitting else "no method knows all its keys"
    raise UserError(f"which method is {path} for? {which}; name one with --method")


def _knows(run_class: type[RunConfig], keys: Mapping[str, list[str]]) -> bool:
    """Return whether a method's run has all sections in `keys`, with all keys named there."""
    types = get_type_hints(run_class)
    return all(
        section in types and {*names} <= {field.name for field in fields(types[section])}
        for section, names in keys.items()
    )
