"""The interface between the decode loop and a drafter in use, and what passes through it.

Shapes: B rows of a batch, S prompt positions (padded on the right), H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..rounds.cache import TreeCache
from ..rounds.outcome import Accepted as Accepted
from ..rounds.outcome import Hidden
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree
from ..targets.causal_model import CausalModel


@dataclass(kw_only=True)
class Prompts:
    """A batch after its prefill. Positions past a prompt's own length hold nothing of meaning."""

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


class Given(NamedTuple):
    """Words by which a user named a drafter, and from which `evaluation/names.py` names it."""

    spec: str
    suffix: str = ""
    """End of its name that tells it from other ways to decode with it: `:tuned`."""


class Proposer:
    """Drafter in use for one batch; it owns the drafter's state.

    The root is the token that the target chose last. It has not been run through the target yet, so
    features exist for every position before it and for none after (docs/notation.md#positions). A
    drafter without state needs only `propose`.
    """

    name: str
    taps: tuple[int, ...] = ()
    """Hidden states of the target that `prefill` and `commit` need."""
    max_drafted: int
    """Nodes at most, without the root, that `propose` returns, or puts into the target's cache."""
    traceable: bool = False
    """True if `commit` and `propose` use tensors alone where shapes are fixed. They are part of the
    compiled or recorded round then, and run before the host knows what was accepted."""
    left_for_commit: tuple[str, ...] = ()
    """Attributes with tensors that `propose` leaves for the next `commit`, of a traceable one. They
    have the same shapes in all rounds over trees of one form."""
    drafter: Any = None
    """The drafter's module, which says what it is; None for one without weights."""
    plan: Any = None
    """Plan by which it drafts, where it has one."""
    given: Given | None = None
    """Words by which a user named it, where it was loaded by them."""
    in_use: bool = False
    """True while it has a batch, to which its state belongs."""

    def owner_of_rounds(self, target: CausalModel) -> Any:
        """Return what a compiled or recorded round belongs to, and is forgotten with."""
        # A round that the proposer has no part in is the same for all proposers.
        return self if self.traceable else target

    @property
    def own_cache(self) -> TreeCache | None:
        """Cache of the drafter's own, where it has one."""
        return None

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's own weights, without those of the target that it runs too."""
        return 0

    def lay_out(self, reference: bool) -> None:
        """Prepare weights that nobody else has for decoding; they cannot be trained afterwards.

        With `reference` they stay as they are, and are run by torch's operators alone.
        """

    def prefill(self, prompts: Prompts) -> None:
        """Start on a batch; whatever was there before is forgotten."""

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return drafts of what follows `root` `[B]`."""
        raise NotImplementedError

    def commit(self, accepted: Accepted) -> None:
        """Take over what was accepted of the last proposal."""

    def keep(self, rows: list[int]) -> None:
        """Drop every batch row but `rows`: the others have finished."""

    def stop(self, rows: list[int]) -> None:
        """Take note that batch rows idle from now on: what is drafted for them counts for nothing.

        It is called in place of `keep` where the batch has a fixed size.
        """

    def finish(self) -> None:
        """Release the state of the batch, which has ended or was given up."""
