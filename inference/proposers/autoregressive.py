"""What drafters that write one token after another have in common: a runner with its own cache
drafts a chain or a tree.

Shapes: B batch, N tree nodes with the root, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...heads.errors import UserError
from ..cache import TreeCache
from ..proposer import MOST, Accepted, positive
from ..sampling import Draws
from ..target import Target
from ..tree import DraftTree, TreeShape
from .growth import (
    Continue,
    Level,
    Ranks,
    Slots,
    grow,
    grow_chain,
    grow_dynamic,
    grow_fixed,
    shape_of_ranks,
)

# How often the child drawn first, second, .. is the accepted one, where fixed shapes have to be
# chosen before anything is known: measured on the quickstart target at T = 0.7 and 1
# (EXPERIMENTS.md, "Which kind of draft"). Any values are lossless.
SAMPLED_ACCEPTANCE = (0.67, 0.115, 0.045, 0.035, 0.015, 0.012, 0.01, 0.01)


class TreePlan:
    """How far and how wide to draft: a chain of `length`, or a tree.

    `width` > 1 makes trees: of `nodes` nodes and `length` levels, expanded where the drafter is
    surest (EAGLE-2), except under a rule that compares distributions, which needs its shape fixed
    beforehand: there it is the shape of greatest expected acceptance. `threshold` > 0 makes a chain
    adaptive, see `grow_chain`. `score_temperature` is the score temperature of the first kind of
    tree (`Draws.rank`). `shape`, rank tuples as in `shape_of_ranks`, fixes the tree for every rule,
    whatever the drafter is sure of.
    """

    def __init__(
        self,
        length: int,
        width: int,
        nodes: int | None,
        threshold: float = 0.0,
        score_temperature: float = 1.0,
        shape: Sequence[Ranks] | None = None,
    ) -> None:
        self.whole = False
        """Give all candidates, of which trees can be cut: for those who compare trees."""
        self.fixed = ranks_of(shape) if shape is not None else None
        if self.fixed is not None:
            length, width = max(map(len, self.fixed)), max(ranks[-1] for ranks in self.fixed) + 1
            nodes = len(self.fixed) if width > 1 else None
        self.length, self.width = positive("length", length), positive("width", width)
        if (
            isinstance(threshold, bool)
            or not isinstance(threshold, int | float)
            or not 0 <= threshold < 1
        ):
            raise UserError(
                "threshold must be a probability between 0 (never stop early) and 1, not "
                f"{threshold!r}"
            )
        if threshold and width > 1:
            raise UserError("threshold is about chains; leave out width, or the threshold")
        self.threshold = float(threshold)
        if nodes is not None and width == 1:
            raise UserError("nodes is about trees; give width above 1 too")
        if nodes is not None and positive("nodes", nodes) < length:
            raise UserError(
                f"a tree of {length} levels needs at least as many nodes, not {nodes}; give more "
                "nodes or a smaller length"
            )
        pool = width + (length - 1) * width * width
        if (
            isinstance(score_temperature, bool)
            or not isinstance(score_temperature, int | float)
            or not 0 < score_temperature < float("inf")
        ):
            raise UserError(f"score_temperature must be above 0, not {score_temperature!r}")
        self.score_temperature = float(score_temperature)
        self.nodes = length if width == 1 else min(nodes if nodes is not None else 4 * length, pool)
        if self.fixed is not None:
            self.nodes = len(self.fixed)
        self.expanded = 1 + width * (length - 1)
        """Most nodes that the drafter itself runs in a round, the root included."""
        ranks = self.fixed or grow([SAMPLED_ACCEPTANCE[:width]] * length, self.nodes)
        self.shape = TreeShape.chain(length) if width == 1 else shape_of_ranks(ranks)

    def draft(
        self, first: Tensor, root: Tensor, draws: Draws, go_on: Continue
    ) -> tuple[DraftTree, Tensor]:
        """As `grow_dynamic`; the places of a chain's nodes, which go without saying, are left
        empty."""
        if self.width == 1:
            return grow_chain(
                first, root, draws, go_on, self.length, self.threshold
            ), first.new_zeros(0)
        if self.fixed is not None or draws.sampling.compares_distributions:
            return grow_fixed(first, root, draws, go_on, self.shape)
        if isinstance(go_on, Slots):
            return go_on.tree(
                root, draws, self.width, self.nodes, self.score_temperature, self.whole
            ), first.new_zeros(0)
        return grow_dynamic(
            first, root, draws, go_on, self.length, self.width, self.nodes, self.score_temperature
        )


def ranks_of(shape: Any) -> list[Ranks]:
    """A tree given as rank tuples, such as [[0], [1], [0, 0]]. Raises `UserError` where siblings
    have gaps."""
    try:
        ranks = sorted(
            {tuple(map(int, node)) for node in shape}, key=lambda node: (len(node), node)
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"shape must be a list of lists of ranks, such as [[0], [1], [0, 0]], not {shape!r}"
        ) from error
    for node in ranks:
        if not node or min(node) < 0 or (node[-1] and (*node[:-1], node[-1] - 1) not in ranks):
            raise UserError(f"shape: node {list(node)} needs all its better siblings in the tree")
    if not ranks:
        raise UserError("shape must hold at least one node")
    return ranks


@lru_cache(maxsize=256)
def depth_row(depths: tuple[int, ...], device: torch.device) -> Tensor:
    """`depths` as a tensor `[1, N]`; the same few rows are needed every round."""
    return torch.tensor([depths], device=device)


class Planned:
    """A proposer whose drafting follows a `TreePlan`."""

    plan: TreePlan
    max_drafted: int
    longest: int = MOST
    """Most levels that the drafter has."""

    def replan(self, plan: TreePlan) -> None:
        """Draft by another plan from the next batch on."""
        self.plan, self.max_drafted = plan, plan.nodes


class TreeRunner:
    """A causal model that continues the nodes of a level; its cache has committed the root already,
    so depth 1 stands first."""

    def __init__(self, model: Target, cache: TreeCache, vocab_size: int) -> None:
        self._model, self._cache, self._vocab_size = model, cache, vocab_size
        self._depths: tuple[int, ...] = ()

    def __call__(self, level: Level) -> Tensor:
        count = level.tokens.shape[1]
        here = (level.depth - 1,) * count
        self._depths += here
        device = level.tokens.device
        hidden = self._model.forward_tree(
            level.tokens,
            level.visible,
            depth_row(here, device),
            depth_row(self._depths, device),
            self._cache,
        )
        self._cache.stage(count)
        return fit_vocabulary(self._model.head(hidden.last), self._vocab_size)


def fit_vocabulary(logits: Tensor, size: int) -> Tensor:
    """Logits over the target's vocabulary: padding rows of the drafter's head are cut, missing ones
    are never drafted."""
    if logits.shape[-1] < size:
        missing = logits.new_full((*logits.shape[:-1], size - logits.shape[-1]), -torch.inf)
        logits = torch.cat([logits, missing], dim=-1)
    return logits[..., :size]


def commit_accepted(cache: TreeCache, plan: TreePlan, slots: Tensor, accepted: Accepted) -> None:
    """Keep in a drafter's cache what it has seen of the accepted drafts; `slots` `[B, N]` as from
    `TreePlan.draft`.

    A chain has seen all its drafts but the last. Of a tree the accepted leaf may or may not have
    been expanded, which only the device knows: it counts as not seen, and the row is one token
    behind.
    """
    drafts = [len(nodes) - 1 for nodes in accepted.nodes]
    if plan.width == 1:
        cache.commit([min(count, cache.staged) for count in drafts])
    else:
        cache.commit(
            [max(count - 1, 0) for count in drafts], slots.gather(1, accepted.path[:, 1:-1])
        )
