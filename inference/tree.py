"""Draft trees: shapes, filled trees, and the tables that verification needs of them.

Node 0 is the root (the last token that the target chose, not a draft), and every node stands after
its parent. Shapes here: B batch, N nodes with the root, D levels (depth of the deepest node). A
table of a static shape has 1 in place of B.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

NO_NODE = -1  # never a token id, so padding can never match (Medusa's tables pad with token 0)


@dataclass(frozen=True)
class TreeShape:
    """The static shape of a draft tree; a chain is a tree. Siblings are offered in the order of
    their ids."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.parents and self.parents[0] == NO_NODE, "node 0 is the root"
        assert all(0 <= p < i for i, p in enumerate(self.parents[1:], 1)), (
            "a node must stand after its parent"
        )

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """The root with `length` drafted nodes in a row; 0 gives plain decoding."""
        return cls(tuple(range(-1, length)))

    @classmethod
    def wide(cls, widths: tuple[int, ...]) -> TreeShape:
        """Every node of depth d has `widths[d]` children."""
        parents, level = [NO_NODE], [0]
        for width in widths:
            below = []
            for node in level:
                below += range(len(parents), len(parents) + width)
                parents += [node] * width
            level = below
        return cls(tuple(parents))

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

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        below: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            below[parent].append(node)
        return tuple(map(tuple, below))

    @property
    def is_chain(self) -> bool:
        return all(len(below) <= 1 for below in self.children)

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
    """What verification needs of trees, as tensors on one device. The one place where a mask or a
    path comes from."""

    parents: Tensor
    """[B, N]; the root's is 0, itself."""
    depths: Tensor
    """[B, N]."""
    ancestors: Tensor
    """[B, N, N] bool: row i is true at i and at i's ancestors. The tree part of the attention
    mask."""
    paths: Tensor
    """[B, N, D + 1]: node ids from the root to each node, padded with NO_NODE."""


def tables_of(parents: Tensor, levels: int) -> TreeTables:
    """Tables of any trees `parents` `[B, N]` (the root's own is 0) of at most `levels` levels."""
    batch, count = parents.shape
    nodes = torch.arange(count, device=parents.device).expand(batch, count)
    ancestors = torch.eye(count, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    climbed = [nodes]
    for _ in range(levels):
        climbed.append(parents.gather(1, climbed[-1]))
        ancestors.scatter_(2, climbed[-1][..., None], True)
    depths = ancestors.sum(-1) - 1
    up = torch.stack(climbed, dim=-1)  # [B, N, levels + 1]: node, parent, grandparent, ..
    steps = depths[..., None] - torch.arange(levels + 1, device=parents.device)
    paths = torch.where(steps >= 0, up.gather(2, steps.clamp(min=0)), NO_NODE)
    return TreeTables(parents, depths, ancestors, paths)


def deepest(right: Tensor, tables: TreeTables) -> Tensor:
    """The deepest node `[B]` that is right `[B, N]` together with all its ancestors; of equals the
    first."""
    reached = (right[:, None, :] | ~tables.ancestors).all(-1)
    return torch.where(reached, tables.depths, -1).argmax(-1)


@lru_cache(maxsize=256)
def _tables(shape: TreeShape, device: torch.device) -> TreeTables:
    return tables_of(
        torch.tensor([[max(p, 0) for p in shape.parents]], device=device), shape.levels
    )


@dataclass
class DraftTree:
    """Trees filled with guesses, one a row: `tokens` `[B, N]`, the root's own token first, NO_NODE
    where a row has no such node.

    `shape` if all rows share one static shape; `parents` `[B, N]` and `levels` otherwise (the
    root's parent is 0; a missing node hangs on the root). `probs` `[B, N, V]`: what the children of
    each node were drawn from, for the rules that compare distributions.
    """

    tokens: Tensor
    shape: TreeShape | None = None
    parents: Tensor | None = None
    levels: int = 0
    probs: Tensor | None = None
    scores: Tensor | None = None
    """[B, N] float64: what the nodes of a tree that follows the drafter's confidence were chosen
    by, a sum along each path; the root's is inf."""
    informed: bool | None = None
    """Whether the drafts knew anything of the target's noise at their positions; then probabilities
    say nothing of acceptance. None: as the rule says, coupled drafts do."""

    def __post_init__(self) -> None:
        if self.shape is not None:
            assert self.tokens.shape[1] == self.shape.nodes, "a token for every node"
            self.levels = self.shape.levels
        else:
            assert self.parents is not None, "a tree without a shape needs its parents"

    @property
    def nodes(self) -> int:
        """Nodes with the root."""
        return self.tokens.shape[1]

    @cached_property
    def tables(self) -> TreeTables:
        if self.shape is not None:
            return self.shape.tables(self.tokens.device)
        assert self.parents is not None
        return tables_of(self.parents, self.levels)

    @cached_property
    def path_tokens(self) -> Tensor:
        """`[B, N, D + 1]`: the tokens from the root to each node, NO_NODE beyond it."""
        paths = self.tables.paths.expand(self.tokens.shape[0], -1, -1)
        found = self.tokens.gather(1, paths.clamp(min=0).flatten(1)).view(paths.shape)
        return torch.where(paths < 0, NO_NODE, found)
