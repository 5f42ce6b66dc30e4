"""Draft trees: shapes, the tables derived from them, and the greedy growth of a static tree.

A shape is `parents`: node 0 is the root (the last committed token, not a draft), and every node stands after its parent.
Shapes here: B batch, N nodes with the root, D levels (depth of the deepest node).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..heads.errors import UserError

NO_NODE = -1  # never a token id, so padding can never match (Medusa's tables pad with token 0)


@dataclass(frozen=True)
class TreeShape:
    """The static shape of a draft tree; a chain is a tree."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.parents and self.parents[0] == NO_NODE, "node 0 is the root"
        assert all(0 <= p < i for i, p in enumerate(self.parents[1:], 1)), "a node must stand after its parent"

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """The root with `length` drafted nodes in a row; 0 gives plain decoding."""
        return cls(tuple(range(-1, length)))

    @property
    def nodes(self) -> int:
        """Nodes with the root."""
        return len(self.parents)

    @property
    def drafted(self) -> int:
        """Nodes without the root."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def levels(self) -> int:
        return max(self.depths)

    def path_to(self, node: int) -> list[int]:
        """Node ids from the root to `node`, both included."""
        path = []
        while node != NO_NODE:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def tables(self, device: torch.device) -> TreeTables:
        return _tables(self, device)


@dataclass(frozen=True)
class TreeTables:
    """What verification needs of a shape, as tensors on one device."""

    parents: Tensor
    """[N]; the root's is 0, itself."""
    depths: Tensor
    """[N]."""
    ancestors: Tensor
    """[N, N] bool: row i is true at i and at i's ancestors. The tree part of the attention mask."""
    paths: Tensor
    """[N, D + 1]: node ids from the root to each node, padded with NO_NODE."""


@lru_cache(maxsize=256)
def _tables(shape: TreeShape, device: torch.device) -> TreeTables:
    paths = [shape.path_to(node) for node in range(shape.nodes)]
    ancestors = torch.zeros(shape.nodes, shape.nodes, dtype=torch.bool)
    for node, path in enumerate(paths):
        ancestors[node, path] = True
    width = shape.levels + 1
    return TreeTables(
        parents=torch.tensor([max(p, 0) for p in shape.parents], device=device),
        depths=torch.tensor(shape.depths, device=device),
        ancestors=ancestors.to(device),
        paths=torch.tensor([path + [NO_NODE] * (width - len(path)) for path in paths], device=device),
    )


@dataclass
class DraftTree:
    """A shape filled with guesses: `tokens` `[B, N]`, the root's own token first."""

    shape: TreeShape
    tokens: Tensor


Ranks = tuple[int, ...]


def shape_of_ranks(nodes: Sequence[Ranks]) -> TreeShape:
    """The shape of a set of rank tuples, one a node: `(2, 0)` is the best child of the third-best child of the root.

    Node ids follow the order (length, lexicographic). Raises `UserError` if a node's parent is missing.
    """
    order = sorted(set(nodes), key=lambda ranks: (len(ranks), ranks))
    index: dict[Ranks, int] = {(): 0} | {ranks: i for i, ranks in enumerate(order, 1)}
    for ranks in order:
        if not ranks or ranks[:-1] not in index:
            raise UserError(f"tree node {list(ranks)} has no parent in the tree; add {list(ranks[:-1])}")
    return TreeShape((NO_NODE, *(index[ranks[:-1]] for ranks in order)))


def grow(rank_accuracy: Sequence[Sequence[float]], nodes: int) -> list[Ranks]:
    """The `nodes` rank tuples of greatest expected acceptance, best first (Medusa, arXiv 2401.10774, section 2.3.3).

    `rank_accuracy[d][r]` estimates how often the candidate of rank r at depth d + 1 is right; a node's value is the product along
    its path. Siblings are offered in order of accuracy, so the set is closed under taking parents. A node that was never right
    is left out, so fewer than `nodes` may come back.
    """
    order = [sorted(range(len(row)), key=lambda r: (-row[r], r)) for row in rank_accuracy]
    chosen: list[Ranks] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = []  # (-value, depth, places in `order`): ties go to the shallower

    def offer(value: float, places: tuple[int, ...]) -> None:
        depth = len(places) - 1
        if depth < len(order) and places[-1] < len(order[depth]):
            accuracy = rank_accuracy[depth][order[depth][places[-1]]]
            if value * accuracy > 0:
                heapq.heappush(heap, (-value * accuracy, depth, places))

    def value_of(places: tuple[int, ...]) -> float:
        value = 1.0
        for depth, place in enumerate(places):
            value *= rank_accuracy[depth][order[depth][place]]
        return value

    offer(1.0, (0,))
    while heap and len(chosen) < nodes:
        *_, places = heapq.heappop(heap)
        chosen.append(tuple(order[depth][place] for depth, place in enumerate(places)))
        offer(value_of(places[:-1]), (*places[:-1], places[-1] + 1))
        offer(value_of(places), (*places, 0))
    return chosen
