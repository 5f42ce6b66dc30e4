"""Plans of draft trees: chains, trees that follow the drafter's confidence, trees of fixed shape.

Shapes: B rows of a batch, D drafts, N tree nodes with the root, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..base.tree_settings import MOST, Ranks, TreeSettings, positive
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree, TreeShape
from ..targets.causal_model import bytes_of
from .contract import Accepted, Prompts, StaticProposer
from .growth import Continue, Level, Slots, grow_dynamic, grow_fixed

# How often the child drawn first, second, .. is the accepted one, where fixed shapes have to be
# chosen before anything is known: measured on the quickstart target at T = 0.7 and 1
# (docs/log/2026-11-experiments.md, "Which kind of draft"). Any values are lossless.
SAMPLED_ACCEPTANCE = (0.67, 0.115, 0.045, 0.035, 0.015, 0.012, 0.01, 0.01)

DEFAULT_TREE = TreeSettings()
DEFAULT_NODES = 16
"""Nodes of a tree of drafts that are made at once, where training has noted none."""


class TreePlan:
    """Plan from `TreeSettings` with a length and a width: a chain, or a tree.

    A `width` above 1 makes trees of `nodes` nodes and `length` levels. They are expanded where the
    drafter is surest (EAGLE-2, arXiv 2406.16858), except under a rule that compares distributions,
    which needs a shape fixed beforehand: that is the shape of greatest expected acceptance. `shape`
    fixes the tree for every rule, whatever the drafter predicts.
    """

    def __init__(self, settings: TreeSettings) -> None:
        """Make a plan from `settings`. Raises `UserError` for settings that exclude each other."""
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
        self.nodes = self._node_count(nodes)
        # Nodes that the drafter itself runs in a round at most: the root, and `width` nodes of each
        # level but the last, which has no children.
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
        """Return a tree below `root` `[B]`, and which of its nodes the drafter has run.

        `first` `[B, V]` are the logits after the root, and `go_on` returns those after any node.
        The second result `[B, N]` has the index of each node among those that `go_on` has run (see
        `grow_dynamic`). It is empty for a chain, of which node d is the d-th, and where the logits
        do not depend on a node's path (`Slots`).
        """
        draws.prepare(self.length, first)
        no_places = first.new_zeros(0)
        if self.width == 1:
            return grow_chain(first, root, draws, go_on, self.shape), no_places
        compares = draws.sampling.compares_distributions
        if isinstance(go_on, Slots) and not compares:
            if self._ranks is None:
                return go_on.tree(root, draws, self.width, self.nodes), no_places
            if self.width <= first.shape[-1]:  # or nodes are missing
                return go_on.fill(root, draws, self.shape, self._ranks), no_places
        if self.fixed is not None or compares:
            return grow_fixed(first, root, draws, go_on, self.shape, self._ranks)
        return grow_dynamic(first, root, draws, go_on, self.length, self.width, self.nodes)


def grow_chain(
    first: Tensor, root: Tensor, draws: Draws, go_on: Continue, chain: TreeShape
) -> DraftTree:
    """Draft the tokens of `chain`, each chosen after the ones before it.

    Under a rule that compares distributions each is a draw, and the tree has the distributions.
    Other arguments as in `grow_dynamic`.
    """
    logits, tokens, probs = first[:, None], [root[:, None]], []
    above = torch.zeros_like(root)[:, None]
    for depth in range(chain.drafted):
        paths = None
        # Only a penalty reads paths. Without one the concatenation for each draft is saved.
        if draws.sampling.history_processor is not None:
            paths = torch.cat(tokens, dim=1)[:, None]
        if draws.sampling.compares_distributions:
            # Node d of a chain has depth d, so the depth serves as the node id that names the
            # noise.
            drawn, drawn_from = draws.sample(logits, depth, 1, paths)
            chosen = drawn[:, :, 0]
            probs.append(drawn_from)
        else:
            chosen = draws.guess(logits, depth, paths)
        tokens.append(chosen)
        # Running the last draft would give only what follows the whole chain.
        if depth + 1 == chain.drafted:
            break
        logits = go_on(Level(chosen, above, None, depth + 1))
    # the last node has no children, hence no distribution
    probs_of_nodes = torch.cat([*probs, torch.zeros_like(probs[0])], dim=1) if probs else None
    return DraftTree(torch.cat(tokens, dim=1), chain, probs=probs_of_nodes)


def tree_of(settings: TreeSettings, calibration: JsonObject, drafts: int) -> TreeSettings:
    """Return tree settings with values for those that are None, for drafts that are made at once.

    They are those that the drafter was evaluated with in training. `drafts` are its levels at most.
    Raises `UserError`.
    """
    width, nodes, length = settings.width, settings.nodes, settings.length
    if length is None:
        length = min(calibration.get("length", drafts), drafts)
    if width == 1:
        return replace(settings, length=length, width=1)
    if settings.length is None and nodes is not None:
        length = min(length, positive("nodes", nodes))  # each level needs a node
    if nodes is None:
        nodes = int(max(calibration.get("tree_nodes", DEFAULT_NODES), positive("length", length)))
    return replace(settings, length=length, width=nodes if width is None else width, nodes=nodes)


DrafterT = TypeVar("DrafterT", bound=nn.Module)


class Planned(StaticProposer, Generic[DrafterT]):
    """Proposer that drafts by a plan."""

    drafter: DrafterT
    plan: TreePlan
    traceable = True
    longest: int = MOST
    """Levels that the drafter has at most."""

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.drafter)

    @property
    def round_key(self) -> tuple[Hashable, ...]:
        return *super().round_key, self.plan

    def prepare_weights(self, reference: bool) -> None:
        """Prepare the weights for decoding; nothing else may use them, nor train them afterwards.

        With `reference` they stay as they are, and are run by torch's operators alone.
        """

    def replan(self, plan: TreePlan) -> None:
        """Draft by another plan from the next batch on."""
        self.plan, self.max_drafted = plan, plan.nodes


class NewestStateProposer(Planned[DrafterT]):
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


def ranks_of(shape: Sequence[Ranks]) -> list[Ranks]:
    """Return a tree given as rank tuples, such as [[0], [1], [0, 0]], in the order of its levels.

    Raises `UserError` for another type. `shape_of_ranks` asks for the parents.
    """
    try:
        nodes = {tuple(map(int, node)) for node in shape}
    except (TypeError, ValueError) as error:
        raise UserError(
            f"shape must be a list of lists of ranks, such as [[0], [1], [0, 0]], not {shape!r}"
        ) from error
    ranks = sorted(nodes, key=lambda node: (len(node), node))
    if not ranks or min(map(min, ranks), default=-1) < 0:
        raise UserError("shape must hold at least one node, of ranks from 0")
    return ranks


def shape_of_ranks(nodes: Sequence[Ranks]) -> TreeShape:
    """Return the shape of a set of rank tuples, one for each node.

    `(2, 0)` is the best child of the third-best child of the root. Node ids follow the order by
    length, then lexicographic, so that parents come before their children. Raises `UserError` if a
    node's parent is missing.
    """
    order = sorted(set(nodes), key=lambda ranks: (len(ranks), ranks))
    # Example: (0,), (1,), (0, 0) become the nodes 1, 2, 3, and the parents are (-1, 0, 0, 1).
    index: dict[Ranks, int] = {(): 0}
    parents = [NO_NODE]
    for node, ranks in enumerate(order, 1):
        # A parent is shorter, hence earlier in the order: it has its number already, or none.
        if not ranks or ranks[:-1] not in index:
            raise UserError(
                f"tree node {list(ranks)} has no parent in the tree; add {list(ranks[:-1])}"
            )
        parents.append(index[ranks[:-1]])
        index[ranks] = node
    return TreeShape(tuple(parents))


def grow(rank_accuracy: Sequence[Sequence[float]], nodes: int) -> list[Ranks]:
    """Return the rank tuples of greatest expected acceptance, at most `nodes`, best first.

    The method is Medusa's (arXiv 2401.10774, section 2.3.3). `rank_accuracy[d][r]` estimates how
    often the candidate of rank r at depth d + 1 is right, and a node's value is the product along
    its path. A node's value is at most its parent's, so every chosen node's parent is chosen before
    it. Nodes of value 0 are left out, so that fewer than `nodes` may be returned.
    """
    # Ranks of each depth by accuracy, which need not fall with the rank. A node is held as a tuple
    # of indices into these lists: then its best sibling not offered yet has the next index.
    # Example: accuracies (0.1, 0.6, 0.3) give the ranks 1, 2, 0.
    order: list[list[int]] = []
    for accuracies in rank_accuracy:
        order.append(sorted(range(len(accuracies)), key=lambda r: (-accuracies[r], r)))
    chosen: list[Ranks] = []
    # (-value, depth, indices into `order`, the parent's value): of equal values the shallower node
    # comes first
    heap: list[tuple[float, int, tuple[int, ...], float]] = []

    def offer(parent_value: float, indices: tuple[int, ...]) -> None:
        depth = len(indices) - 1
        # No node lies below the last depth, or after the last rank of a depth.
        if depth < len(order) and indices[-1] < len(order[depth]):
            accuracy = rank_accuracy[depth][order[depth][indices[-1]]]
            if parent_value * accuracy > 0:
                # `heapq` gives the smallest entry first, hence the minus sign.
                heapq.heappush(heap, (-parent_value * accuracy, depth, indices, parent_value))

    # Every tree begins with the best node of depth 1: no other can be chosen before it.
    offer(1.0, (0,))
    while heap and len(chosen) < nodes:
        minus_value, _, indices, parent_value = heapq.heappop(heap)
        chosen.append(tuple(order[depth][index] for depth, index in enumerate(indices)))
        # The next sibling and the first child are all that can follow the node: each other node
        # has a better sibling or a parent that is not chosen yet.
        offer(parent_value, (*indices[:-1], indices[-1] + 1))
        offer(-minus_value, (*indices, 0))
    return chosen
