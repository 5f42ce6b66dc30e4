"""The contract of a training method.

This module is imported before torch is needed (by the options of commands), so it imports none of
the modules that its contract names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..heads.files import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

    from ..heads.artifact import Artifact
    from ..heads.layout import DrafterModule
    from ..inference.rounds.outcome import Hidden
    from ..inference.targets.target import Target, TargetSource
    from .config import RunConfig
    from .data.batches import Batches
    from .data.rollouts import Rollouts, Writer
    from .objectives import Objective
    from .outline import MetaTarget, Outline

RunT = TypeVar("RunT", bound="RunConfig")
DrafterT = TypeVar("DrafterT", bound="DrafterModule")


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

    def features_of(self, run: RunT, target: TargetSource | MetaTarget) -> FeaturesRead:
        """Return the taps that the run reads, and whether it reads every last state.

        They are those of the drafter and of the objective; this is asked before either exists. By
        default no taps are read, and the last states suffice where a reply token comes next.
        """
        return (), False

    def resolve(self, run: RunT, target: MetaTarget) -> None:
        """Fill in the options of the run that the target determines where they are None.

        `make_drafter` and `make_objective` would come to the same. By default nothing is open.
        """
        return

    @abstractmethod
    def outline(self, run: RunT, target: MetaTarget) -> Outline:
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
        """Return settings and function of what writes texts during the run, None if nothing does.

        By default nothing does: heads and blocks draft from the target's states, not from earlier
        drafts.
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
