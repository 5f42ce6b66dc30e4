"""The interface between the decode loop and a drafter at work, and what passes through it.

Shapes: B rows of a batch, S prompt positions (padded on the right), N tree nodes with the root, A
accepted nodes with the root, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from .rounds.cache import TreeCache
from .rounds.sampling import Draws
from .rounds.tree import DraftTree
from .targets.causal_model import Hidden


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


@dataclass(kw_only=True)
class Accepted:
    """Result of a round as the proposer gets it.

    Row b has `counts[b]` nodes; entries past that repeat the root and mean nothing. Where the next
    drafts are made before the host knows the decision, which a `static` proposer allows, `tokens`
    and `nodes` are empty.
    """

    tokens: list[list[int]]
    """Each row's accepted drafts, then the target's own token after them: the next root."""
    nodes: list[list[int]]
    """Each row's accepted node ids, the root's (0) first."""
    path: Tensor
    """[B, A], device: `nodes`, padded with the root's id."""
    ids: Tensor
    """[B, A]: the last root and the drafts accepted after it: the positions that the target's cache
    has gained."""
    counts: Tensor
    """[B], device; equal to the lengths of `nodes`."""
    hidden: Hidden
    """Features of just these positions `[B, A, H]`."""
    choices: list[list[int]] | None = None
    """The target's token after every node of the tree `[B][N]`, from the rules that know it."""


class Proposer(Protocol):
    """Drafter at work on one batch; it owns the drafter's state.

    The root is the token that the target chose last. It has not been run through the target yet, so
    features exist for every position before it and for none after (docs/notation.md#positions).
    """

    name: str
    taps: tuple[int, ...]
    """Hidden states of the target that `prefill` and `commit` need."""
    max_drafted: int
    """Nodes at most, without the root, that `propose` returns, or puts into the target's cache
    while it drafts."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's own weights, without those of the target that it runs too."""
        ...

    @property
    def static(self) -> bool:
        """True if `propose` and `commit` use tensors alone where the target's cache is static, so
        that `propose` can be compiled, and called before the host knows what was accepted."""
        ...

    def prefill(self, prompts: Prompts) -> None:
        """Start on a batch; whatever was there before is forgotten."""
        ...

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return drafts of what follows `root` `[B]`."""
        ...

    def commit(self, accepted: Accepted) -> None:
        """Take over what was accepted of the last proposal."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Drop every batch row but `rows`: the others have finished."""
        ...

    def finish(self) -> None:
        """Release the state of the batch, which has ended or was given up."""
        ...


@runtime_checkable
class LaidOut(Proposer, Protocol):
    """Drafter whose weights can be stored in the order that decoding reads fastest."""

    def lay_out(self) -> None:
        """Reorder the weights; they cannot be trained or written to files any more."""
        ...
