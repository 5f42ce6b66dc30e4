"""The contract between the decode loop and a drafter in use; users implement `Proposer` alone.

Shapes: B rows of a batch, S prompt positions (padded on the right), H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from ..rounds.cache import TreeCache
from ..rounds.outcome import Accepted as Accepted
from ..rounds.outcome import Hidden
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree
from ..targets.causal_model import CausalModel


@dataclass(kw_only=True)
class Prompts:
    """A batch after its prefill. Positions past a prompt's own length hold arbitrary values."""

    tokens: list[list[int]]
    """Each prompt with the token that the target chose after it: the first root."""
    ids: Tensor
    """[B, S]: the prompts."""
    lengths: Tensor
    """[B]: their lengths."""
    hidden: Hidden
    """Features of all prompt positions `[B, S, H]`."""
    cache: TreeCache
    """The target's cache, for drafters that run the target's own layers."""


class DrafterSpec(NamedTuple):
    """Text by which a user named a drafter; `evaluation/drafter_names.py` makes its name of it."""

    text: str
    suffix: str = ""
    """End of the name that distinguishes it from other ways to decode with it: `:tuned`."""


class Proposer:
    """Drafter in use for one batch; it owns the drafter's state of that batch.

    A subclass has `max_drafted` and `propose`; one with a state has `prefill`, `commit` and `keep`
    too. The root is the token that the target chose last. It has not been run through the target
    yet, so features exist for every position before it and for none after
    (docs/notation.md#positions).
    """

    name: str = ""
    """Name in tables; that of the class if it is empty."""
    taps: tuple[int, ...] = ()
    """Hidden states of the target that `prefill` and `commit` need."""
    max_drafted: int
    """Nodes at most, without the root, that `propose` returns, or puts into the target's cache."""
    kind: str = ""
    """Kind of drafter as engines know it (`DrafterModule.kind`); empty if no engine has it."""
    spec: DrafterSpec | None = None
    """Text by which a user named it; None for one that was made from its class."""
    in_use: bool = False
    """True while it has a batch, to which its state belongs."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's own weights, without those of the target that it runs too."""
        return 0

    def prefill(self, prompts: Prompts) -> None:
        """Start on a batch; the state of an earlier one is forgotten."""

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return drafts of what follows `root` `[B]`."""
        raise NotImplementedError

    def commit(self, accepted: Accepted) -> None:
        """Take over what was accepted of the last proposal."""

    def keep(self, rows: list[int]) -> None:
        """Drop every batch row but `rows`: the others have finished."""

    def finish(self) -> None:
        """Release the state of the batch, which has ended or was given up."""

    def clone(self) -> Self:
        """Return a second proposer of the same drafter, for another batch at the same time."""
        # Both share the weights, and the state of a batch until `prefill` replaces it.
        clone = copy.copy(self)
        clone.in_use = False
        return clone


class StaticProposer(Proposer):
    """Proposer that knows of static rounds, which are compiled or recorded as CUDA graphs.

    All tensors of such rounds have fixed shapes, and a row that has ended stays in its batch. Any
    other `Proposer` drafts outside of them, when the host has read what was accepted.
    """

    traceable: bool = False
    """True if `commit` and `propose` use tensors alone where shapes are fixed. They are part of the
    compiled or recorded round then, and run before the host knows what was accepted."""
    left_for_commit: tuple[str, ...] = ()
    """Attributes with tensors that `propose` leaves for the next `commit`, of a traceable one. They
    have the same shapes in all rounds over trees of one form."""

    @property
    def own_cache(self) -> TreeCache | None:
        """Cache of the drafter's own, where it has one."""
        return None

    @property
    def round_key(self) -> tuple[Hashable, ...]:
        """All of a traceable proposer that a recorded round depends on, besides its `taps`."""
        return (self.own_cache,)

    def owner_of_rounds(self, target: CausalModel) -> StaticProposer | CausalModel:
        """Return what the rounds of a traceable proposer belong to, and are forgotten with."""
        return self

    def stop(self, rows: list[int]) -> None:
        """Take note that batch rows idle from now on: what is drafted for them counts for nothing.

        It is called in place of `keep`.
        """
