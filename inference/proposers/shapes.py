"""Fixed shapes of draft trees: as rank tuples, and those of greatest expected acceptance."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from ...heads.errors import UserError
from ..rounds.tree import NO_NODE, TreeShape
from ..tree_settings import Ranks


def ranks_of(shape: Any) -> list[Ranks]:
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
        # There is no such node below the last depth, and none after the last rank of a depth.
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
