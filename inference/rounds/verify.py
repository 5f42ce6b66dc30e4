"""Verification of a round's drafts, as functions of tensors.

The decode loop calls the parts one by one, because the host then knows how much has to be moved.
`verify` is all of them in one function that never waits for the device: it can be compiled, and
recorded as a CUDA graph (`compiled`).

Shapes: B rows of a batch, N tree nodes with the root, A accepted nodes with the root, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..proposer import Accepted
from ..targets.causal_model import CausalModel, Hidden
from .accept import judge
from .cache import TreeCache
from .decision import Decision, Packed, pack
from .sampling import Draws
from .tree import DraftTree


@dataclass(kw_only=True)
class Kept:
    """Accepted path of a round on the device; see `Accepted`."""

    path: Tensor
    ids: Tensor
    counts: Tensor
    hidden: Hidden


def verify(
    target: CausalModel, tree: DraftTree, cache: TreeCache, draws: Draws, taps: tuple[int, ...]
) -> tuple[Packed, Kept]:
    """Verify `tree` and keep its accepted path in a static `cache`.

    Returns the verdict for the host, and what the proposer needs of the path, which is as wide as
    the tree is deep.
    """
    hidden, logits = run_tree(target, tree, cache, taps)
    packed = pack(tree, judge(tree, logits, draws))
    path = packed.path.clamp(min=0)  # shorter rows repeat the root
    cache.commit(packed.counts, path)
    return packed, keep_path(tree, path, packed.counts, hidden, draws)


def run_tree(
    target: CausalModel, tree: DraftTree, cache: TreeCache, taps: tuple[int, ...]
) -> tuple[Hidden, Tensor]:
    """Return the target's states and logits `[B, N, V]` after the nodes of `tree`."""
    tables = tree.tables
    hidden = target.forward_tree(
        tree.tokens, tables.ancestors, tables.depths, tables.depths, cache, taps
    )
    return hidden, target.head(hidden.last)


def keep_path(tree: DraftTree, path: Tensor, counts: Tensor, hidden: Hidden, draws: Draws) -> Kept:
    """Return tokens and states of the nodes `path` `[B, A]`, and move `draws` behind them.

    Row b has accepted `counts[b]` of them.
    """
    ids = tree.tokens.gather(1, path)
    draws.extend(ids, counts)
    taps = tuple(_rows(tap, path) for tap in hidden.taps)
    states = Hidden(_rows(hidden.last, path), taps)
    return Kept(path=path, ids=ids, counts=counts, hidden=states)


def accepted_of(decision: Decision | None, kept: Kept) -> Accepted:
    """Return what the proposer is given of a round; None: the host does not know it yet."""
    return Accepted(
        tokens=[] if decision is None else decision.tokens,
        nodes=[] if decision is None else decision.nodes,
        choices=None if decision is None else decision.choices,
        path=kept.path,
        ids=kept.ids,
        counts=kept.counts,
        hidden=kept.hidden,
    )


def _rows(states: Tensor, path: Tensor) -> Tensor:
    """Return the features of the nodes `path` `[B, A]` among those of all nodes `[B, N, H]`."""
    # One row needs no index for each number of a state, as `gather` does.
    if len(states) == 1:
        return states[:, path[0]]
    return states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))
