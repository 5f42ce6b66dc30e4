"""Draft trees: shapes, filled trees, and the tables that verification needs of them.

Node 0 is the root (the last token that the target chose, not a draft), and every node has a larger
number than its parent.

Shapes: B batch, N nodes with the root, D levels (depth of the deepest node), V vocabulary. A table
of one shape has 1 in place of B.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .device import send

# Token of a missing node, and padding of node ids. It is not a token id, and so never equals the
# target's choice; the tables of Medusa's own code pad with token 0, which can.
NO_NODE = -1


@dataclass(frozen=True)
class TreeShape:
    """Fixed shape of a draft tree: the parent of every node. A chain is a tree.

    The root's parent is NO_NODE. Siblings are offered in the order of their ids.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.parents and self.parents[0] == NO_NODE, "node 0 is the root"
        for node, parent in enumerate(self.parents[1:], 1):
            assert 0 <= parent < node, "a node must come after its parent"
        # Asked for now: in Python 3.11 the lock of a `cached_property` that has no value yet cannot
        # be traced by a compiler.
        _ = self.depths, self.children, self.is_chain

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        """Return the root with `length` drafted nodes in a row; 0 gives plain decoding."""
        # The root's NO_NODE is -1, which continues the row: -1, 0, 1 for two drafts.
        return cls(tuple(range(-1, length)))

    @property
    def nodes(self) -> int:
        """Number of nodes with the root."""
        return len(self.parents)

    @property
    def drafted(self) -> int:
        """Number of nodes without the root."""
        return len(self.parents) - 1

    @cached_property
    def depths(self) -> tuple[int, ...]:
        # One pass is enough, as every parent comes before its children.
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

    @cached_property
    def is_chain(self) -> bool:
        return all(len(below) <= 1 for below in self.children)

    def path_to(self, node: int) -> list[int]:
        """Return the node ids from the root to `node`, both included."""
        path = []
        while node != NO_NODE:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def tables(self, device: torch.device) -> TreeTables:
        return _tables(self, device)


@dataclass(frozen=True)
class TreeTables:
    """Tables of a batch of trees, on one device: the only source of masks and paths."""

    parents: Tensor
    """[B, N]: parent of each node; the root's is 0, itself."""
    depths: Tensor
    """[B, N]: depth of each node."""
    ancestors: Tensor
    """[B, N, N] bool: row i is true at i and at the ancestors of i. It is the tree's part of the
    attention mask."""
    paths: Tensor
    """[B, N, D + 1]: node ids from the root to each node, padded with NO_NODE."""


def tables_of(parents: Tensor, levels: int) -> TreeTables:
    """Return the tables of trees `parents` `[B, N]` (the root's own is 0) of at most D `levels`."""
    batch, count = parents.shape
    nodes = torch.arange(count, device=parents.device).expand(batch, count)
    ancestors = torch.eye(count, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    climbed = [nodes]
    # Nodes that arrive at the root earlier stay there, because it is its own parent.
    for _ in range(levels):
        climbed.append(parents.gather(1, climbed[-1]))
        ancestors.scatter_(2, climbed[-1][..., None], True)
    # A row is true at the node itself too, which is not a step.
    depths = ancestors.sum(-1) - 1
    upwards = torch.stack(climbed, dim=-1)  # [B, N, D + 1]: node, parent, grandparent, ..
    # The ancestor of depth k stands `depth - k` steps up. Negative: it lies below the node. Example
    # with 3 levels: a node of depth 2 has the steps 2, 1, 0, -1, hence the path root, parent, node,
    # NO_NODE.
    steps = depths[..., None] - torch.arange(levels + 1, device=parents.device)
    paths = torch.where(steps >= 0, upwards.gather(2, steps.clamp(min=0)), NO_NODE)
    return TreeTables(parents, depths, ancestors, paths)


def deepest(right: Tensor, tables: TreeTables) -> Tensor:
    """Return the deepest node `[B]` that is right together with all its ancestors.

    `right` `[B, N]` is a bool for each node. Of several such nodes of one depth the first is taken.
    """
    # Row i asks for i and its ancestors alone: all other nodes count as right.
    reached = (right[:, None, :] | ~tables.ancestors).all(-1)
    # `argmax` gives the first of equal values.
    return torch.where(reached, tables.depths, -1).argmax(-1)


@lru_cache(maxsize=256)
def _tables(shape: TreeShape, device: torch.device) -> TreeTables:
    # `tables_of` wants the root to be its own parent
    parents = [max(parent, 0) for parent in shape.parents]
    return tables_of(torch.tensor([parents], device=device), shape.levels)


@dataclass
class DraftTree:
    """Draft trees of a batch: all rows share one `shape`, or `parents` and `levels` are given."""

    tokens: Tensor
    """[B, N]: the root's own token first, NO_NODE where a row has no such node."""
    shape: TreeShape | None = None
    parents: Tensor | None = None
    """[B, N]: parent of each node; the root's is 0, and a missing node hangs on the root."""
    levels: int = 0
    """Upper bound of the depths."""
    probs: Tensor | None = None
    """[B, N, V]: distribution that the children of each node were drawn from, for the rules that
    compare distributions."""
    _tables: TreeTables | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.shape is not None:
            assert self.tokens.shape[1] == self.shape.nodes, "a token for every node"
            self.levels = self.shape.levels
        else:
            assert self.parents is not None, "a tree without a shape needs its parents"

    def clone(self) -> DraftTree:
        """Return the same trees in memory of their own."""
        return replace(self, **{name: part.clone() for name, part in self._tensors().items()})

    @property
    def form(self) -> tuple[object, ...]:
        """All that a recorded round of these trees is fixed to: shapes, and which fields there are.

        A drafter with a lookup drafts trees in one round and chains in another.
        """
        sizes = ((name, part.shape, part.dtype) for name, part in self._tensors().items())
        return self.shape, self.levels, *sizes

    def copy_(self, other: DraftTree) -> None:
        """Take over the values of trees of the same `form`."""
        given = other._tensors()
        for name, part in self._tensors().items():
            part.copy_(given[name])
        self._tables = None

    def _tensors(self) -> dict[str, Tensor]:
        parts = {name: getattr(self, name) for name in ("tokens", "parents", "probs")}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def nodes(self) -> int:
        """Number of nodes with the root."""
        return self.tokens.shape[1]

    @property
    def tables(self) -> TreeTables:
        # Not a `cached_property`, whose lock in Python 3.11 no compiler can trace.
        if self._tables is None:
            if self.shape is not None:
                self._tables = self.shape.tables(self.tokens.device)
            else:
                assert self.parents is not None
                self._tables = tables_of(self.parents, self.levels)
        return self._tables

    @property
    def path_tokens(self) -> Tensor:
        """Tokens from the root to each node `[B, N, D + 1]`, NO_NODE beyond it."""
        paths = self.tables.paths.expand(self.tokens.shape[0], -1, -1)
        # NO_NODE cannot be an index; what it reads as node 0 is replaced below.
        tokens = self.tokens.gather(1, paths.clamp(min=0).flatten(1)).view(paths.shape)
        return torch.where(paths < 0, NO_NODE, tokens)


@dataclass(kw_only=True)
class Pass:
    """Places of the positions of a forward pass, and what they see.

    Without `depths` they are texts, each position after the one before it, and with a cache the
    next piece of its texts. With `depths` they are tree nodes over a cache, whose committed
    positions are followed by U undecided slots, of which these N nodes are the last.
    """

    positions: Tensor | None = None
    """[B, N]; None: those that follow from the rest. Without a cache positions that restart mark
    the documents of a packed row, and no document sees another."""
    documents: Tensor | None = None
    """[B, N], on the CPU: numbers of the documents of packed rows. A model that
    `attends_in_documents` keeps documents apart by them, without a mask."""
    counts: Tensor | None = None
    """[B]: positions that each row has of this piece of its text, all of which are committed next.
    Recurrent layers take them over in the pass, and the others change nothing there."""
    written: Tensor | None = None
    """[B, N] bool, in texts: positions of replies, which the model wrote one by one. Some
    recurrent layers limit their steps in prompts alone."""
    depths: Tensor | None = None
    """[1 | B, N]: depths of the nodes; depth 0 is the position after the committed ones."""
    visible: Tensor | None = None
    """[1 | B, N, U] bool: the undecided slots that each node sees; None: all."""
    slot_depths: Tensor | None = None
    """[1 | B, U]: depths of all undecided slots; None: they are the nodes, with `depths`."""
    _windows: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def undecided_depths(self) -> Tensor:
        """Depths `[1 | B, U]` of all undecided slots, of tree nodes."""
        depths = self.depths if self.slot_depths is None else self.slot_depths
        assert depths is not None
        return depths

    @property
    def seen(self) -> Tensor:
        """`visible` of tree nodes, also where that is None."""
        if self.visible is not None:
            return self.visible
        assert self.depths is not None
        shape = 1, self.depths.shape[1], self.undecided_depths.shape[1]
        return torch.ones(shape, dtype=torch.bool, device=self.depths.device)

    def complete(self, ids: Tensor) -> Pass:
        """Return the pass of `ids` `[B, N]` with all that recurrent layers read, on their device.

        That are `counts` of texts, and `depths`, `visible` and `slot_depths` of tree nodes.
        """
        counts, device = self.counts, ids.device
        if counts is None and (self.documents is not None or self.written is not None):
            counts = torch.full((len(ids),), ids.shape[1], device=device)
        if counts is not None:
            documents, written = (
                None if part is None else send(part, device)
                for part in (self.documents, self.written)
            )
            return Pass(counts=counts, documents=documents, written=written)
        depths = self.depths
        if depths is None:
            depths = torch.arange(ids.shape[1], device=device)[None]
        slot_depths = depths if self.depths is None else self.undecided_depths
        visible = self.visible
        if visible is None:
            # All undecided slots, which are a chain: a text is one that sees no later position.
            visible = depths[:, :, None] >= slot_depths[:, None]
        return Pass(depths=depths, visible=visible, slot_depths=slot_depths)

    def windows(self, width: int) -> Tensor:
        """Return `[1 | B, N, W]`: the inputs of a convolution along each node's path.

        They are indices into the W - 1 committed inputs followed by the undecided ones, the node's
        own at the end. Example: with W = 3 the root, in slot 0, reads 0, 1 and 2, and a child of
        it, in slot 4, reads 1, 2 and 6.
        """
        if width not in self._windows:
            assert self.depths is not None and self.visible is not None
            assert self.slot_depths is not None
            back = torch.arange(width - 1, -1, -1, device=self.depths.device)
            depths = self.depths[..., None] - back
            # A path has one node of each depth. Negative depths are committed positions.
            at_depth = self.slot_depths[:, None, None] == depths[..., None]
            slots = (self.visible[:, :, None] & at_depth).to(torch.uint8).argmax(-1)
            self._windows[width] = torch.where(depths < 0, depths, slots) + width - 1
        return self._windows[width]


def named(tree: DraftTree, root: Tensor, ids: Tensor | None) -> DraftTree:
    """Return a tree whose drafts are columns of a draft vocabulary with target ids in their place.

    `ids` `[Vd]` are the columns' target ids; with None the tree stays as it is. `root` `[B]` are
    the roots' tokens, which are target ids.
    """
    if ids is not None:
        drafts = tree.tokens[:, 1:]
        drafts = torch.where(drafts < 0, NO_NODE, ids[drafts.clamp(min=0)])
        tree.tokens = torch.cat([root[:, None], drafts], dim=1)
    return tree
