"""Plans of draft trees: chains, trees that follow the drafter's confidence, trees of fixed shape.

Shapes: B rows of a batch, N tree nodes with the root, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..proposer import Accepted, Prompts, Proposer
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, TreeShape
from ..targets.causal_model import bytes_of
from ..tree_settings import MOST, TreeSettings, positive
from .chains import grow_chain
from .growth import Continue, Slots, grow_dynamic, grow_fixed
from .shapes import grow, ranks_of, shape_of_ranks

# How often the child drawn first, second, .. is the accepted one, where fixed shapes have to be
# chosen before anything is known: measured on the quickstart target at T = 0.7 and 1
# (EXPERIMENTS.md, "Which kind of draft"). Any values are lossless.
SAMPLED_ACCEPTANCE = (0.67, 0.115, 0.045, 0.035, 0.015, 0.012, 0.01, 0.01)

DEFAULT_TREE = TreeSettings()
DEFAULT_NODES = 16
"""Nodes of a tree of drafts that are made at once, where training has noted none."""


class Planner(Protocol):
    """Plan that a drafter follows when it drafts: `TreePlan`, or one that measures."""

    length: int
    """Levels at most."""
    width: int
    """Children of a node at most; 1 is a chain."""
    nodes: int
    """Drafted nodes at most, without the root."""
    expanded: int
    """Nodes that the drafter itself runs in a round at most, the root included."""
    threshold: float
    """Above 0: chains end early."""

    def draft(
        self, first: Tensor, root: Tensor, draws: Draws, go_on: Continue
    ) -> tuple[DraftTree, Tensor]:
        """Return a tree below `root` `[B]`, and which of its nodes the drafter has run.

        `first` `[B, V]` are the logits after the root, and `go_on` returns those after any node.
        The second result `[B, N]` has the index of each node among those that `go_on` has run (see
        `grow_dynamic`). It is empty for a chain, of which node d is the d-th, and where the logits
        do not depend on a node's path (`Slots`).
        """
        ...


class TreePlan:
    """Plan from `TreeSettings` with a length and a width: a chain, or a tree.

    A `width` above 1 makes trees of `nodes` nodes and `length` levels. They are expanded where the
    drafter is surest (EAGLE-2, arXiv 2406.16858), except under a rule that compares distributions,
    which needs a shape fixed beforehand: that is the shape of greatest expected acceptance. `shape`
    fixes the tree for every rule, whatever the drafter is sure of.
    """

    def __init__(self, settings: TreeSettings, give_all: bool = False) -> None:
        """Make a plan from `settings`. Raises `UserError` for settings that exclude each other.

        With `give_all` a tree over `Slots` has the best `nodes` of every level instead of those of
        all levels together, so that `tune` can cut smaller trees from it.
        """
        length, width, nodes = settings.length, settings.width, settings.nodes
        self.fixed = ranks_of(settings.shape) if settings.shape is not None else None
        self._ranks: tuple[int, ...] | None = None
        if self.fixed is not None:
            # The ranks fix all sizes. `nodes` is refused for chains, so a fixed one has None. Last
            # ranks are enough for the width (they count from 0): the ranks before the last are the
            # last ones of ancestors, which are nodes of the tree themselves. The root has none.
            self._ranks = (0, *(ranks[-1] for ranks in self.fixed))
            length, width = max(map(len, self.fixed)), max(self._ranks) + 1
            nodes = len(self.fixed) if width > 1 else None
        self.length, self.width = positive("length", length), positive("width", width)
        self.threshold = _checked_threshold(settings.threshold, self.width)
        self.score_temperature = float(settings.score_temperature)
        self.give_all = give_all
        self.nodes = self._node_count(nodes)
        # The root, and `width` nodes of each level but the last, which has no children.
        self.expanded = 1 + self.width * (self.length - 1)
        if self.width == 1:
            self.shape = TreeShape.chain(self.length)
        else:
            # A plan of dynamic trees has a shape too, because the rule of a batch is not known yet:
            # rules that compare distributions fill this shape.
            acceptance = [SAMPLED_ACCEPTANCE[: self.width]] * self.length
            self.shape = shape_of_ranks(self.fixed or grow(acceptance, self.nodes))

    def _node_count(self, nodes: int | None) -> int:
        """Return the number of drafted nodes; 4 per level if `nodes` is None."""
        length, width = self.length, self.width
        if self.fixed is not None:
            return len(self.fixed)
        if width == 1:
            if nodes is not None:
                raise UserError("nodes is about trees; give width above 1 too")
            return length
        if nodes is not None and positive("nodes", nodes) < length:
            raise UserError(
                f"a tree of {length} levels needs at least as many nodes, not {nodes}; give more "
                "nodes or a smaller length"
            )
        # A dynamic tree has `width` candidates below the root, and `width` below each of the
        # `width` nodes that it expands on every further level: 8 + 4 * 64 = 264 for width 8 and
        # length 5. More nodes than that cannot be drafted.
        candidates = width + (length - 1) * width * width
        return min(nodes if nodes is not None else 4 * length, candidates)

    def draft(
        self, first: Tensor, root: Tensor, draws: Draws, go_on: Continue
    ) -> tuple[DraftTree, Tensor]:
        """Return a tree and the nodes that were run, as `Planner.draft`."""
        draws.prepare(self.length, first)
        no_places = first.new_zeros(0)
        if self.width == 1:
            chain = grow_chain(first, root, draws, go_on, self.shape, self.threshold)
            return chain, no_places
        compares = draws.sampling.compares_distributions
        if isinstance(go_on, Slots) and not compares:
            if self._ranks is None:
                tree = go_on.tree(
                    root, draws, self.width, self.nodes, self.score_temperature, self.give_all
                )
                return tree, no_places
            if self.width <= first.shape[-1]:  # or nodes are missing
                return go_on.fill(root, draws, self.shape, self._ranks), no_places
        if self.fixed is not None or compares:
            return grow_fixed(first, root, draws, go_on, self.shape, self._ranks)
        return grow_dynamic(
            first, root, draws, go_on, self.length, self.width, self.nodes, self.score_temperature
        )


def _checked_threshold(threshold: Any, width: int) -> float:
    """Return a chain's threshold as a float. Raises `UserError`."""
    # Python counts True among the integers.
    known = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not known or not 0 <= threshold < 1:
        raise UserError(
            f"threshold must be a probability between 0 (never stop early) and 1, not {threshold!r}"
        )
    if threshold and width > 1:
        raise UserError("threshold is about chains; leave out width, or the threshold")
    return float(threshold)


def tree_of(settings: TreeSettings, calibration: JsonObject, drafts: int) -> TreeSettings:
    """Return tree settings with values for those that are None, for drafts that are made at once.

    They are those that the drafter was evaluated with in training. `drafts` are its levels at most.
    Raises `UserError`.
    """
    width, nodes = settings.width, settings.nodes
    if settings.threshold and (nodes is not None or width not in (None, 1)):
        raise UserError("threshold is about chains; leave out nodes and width, or the threshold")
    length = settings.length
    if length is None:
        length = min(calibration.get("length", drafts), drafts)
    if width == 1 or (width is None and settings.threshold):
        return replace(settings, length=length, width=1)
    if settings.length is None and nodes is not None:
        length = min(length, positive("nodes", nodes))  # each level needs a node
    if nodes is None:
        nodes = int(max(calibration.get("tree_nodes", DEFAULT_NODES), positive("length", length)))
    return replace(settings, length=length, width=nodes if width is None else width, nodes=nodes)


class Planned(Proposer):
    """Proposer that drafts by a plan."""

    plan: Planner
    longest: int = MOST
    """Levels that the drafter has at most."""

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.drafter)

    def replan(self, plan: Planner) -> None:
        """Draft by another plan from the next batch on."""
        self.plan, self.max_drafted = plan, plan.nodes
        # A chain that ends where the drafter is unsure asks the device.
        self.traceable = not plan.threshold


class NewestStateProposer(Planned):
    """Base of proposers that read nothing of the target but its newest last state."""

    newest: Tensor
    """[B, H]: last hidden state one position before the root, the newest that there is."""

    def prefill(self, prompts: Prompts) -> None:
        rows = torch.arange(len(prompts.lengths), device=prompts.lengths.device)
        # The last position of each prompt, after which padding may follow. The root comes after it,
        # and the target has not run it.
        self.newest = prompts.hidden.last[rows, prompts.lengths - 1]

    def commit(self, accepted: Accepted) -> None:
        rows = torch.arange(len(accepted.counts), device=accepted.counts.device)
        # `hidden` begins with the old root and ends with the last accepted draft: the position
        # before the new root.
        self.newest = accepted.hidden.last[rows, accepted.counts - 1]

    def keep(self, rows: list[int]) -> None:
        self.newest = self.newest[send(rows, self.newest.device)]
