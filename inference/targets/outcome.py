"""Outcome of a round: its drafts are verified, and the accepted path is kept.

An acceptance rule leaves its `Verdict` on the device. The decode loop needs it on the host too.
Each transfer makes the host wait, so everything travels in one packed tensor (`Accepted.read`).

Shapes: B rows of a batch, N tree nodes with the root, A accepted nodes with the root, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..rounds.accept import Verdict, judge
from ..rounds.cache import Counts, TreeCache
from ..rounds.device import Clock, read_later, send
from ..rounds.sampling import Draws
from ..rounds.tree import DraftTree, TreeShape
from .causal_model import CausalModel, Hidden
from .masks import Pass


@dataclass(kw_only=True)
class Accepted:
    """Accepted path of each row: tensors for the device, and lists for the host.

    Row b has `counts[b]` nodes; entries past that repeat the root and mean nothing. The lists of a
    round are empty until they were `read`. A `traceable` proposer may be given it before that.
    """

    path: Tensor
    """[B, A]: accepted nodes, from the root (0) down."""
    counts: Tensor
    """[B]: number of accepted nodes, the root counted."""
    ids: Tensor
    """[B, A]: the last root and the drafts accepted after it: the positions that the target's cache
    has gained."""
    hidden: Hidden
    """Features of just these positions `[B, A, H]`."""
    bonus: Tensor | None = None
    """[B]: bonus token of each row, which is the next root; None of a text that is known."""
    rule: str = ""
    """Rule that decided, see `Verdict.rule`."""
    nodes: list[list[int]] = field(default_factory=list)
    """Each row's accepted node ids, the root's (0) first."""
    tokens: list[list[int]] = field(default_factory=list)
    """Each row's accepted drafts, then the target's own token after them: the next root."""
    drafted: list[int] = field(default_factory=list)
    """Nodes drafted for each row, without the root and without missing nodes."""
    refused: list[bool] = field(default_factory=list)
    """True for rows in which a draft followed the last accepted node."""
    overlap: list[list[float]] | None = None
    """`Verdict.overlap` at the accepted nodes that have children."""
    packed: Tensor | None = None
    """[B, n] int64: all that `read` takes apart, see `_pack`."""
    shape: TreeShape | None = None
    """Shape of the tree, if all rows share one."""
    _arriving: Callable[[], Any] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, tree: DraftTree, verdict: Verdict, hidden: Hidden) -> Accepted:
        """Return what a verdict on `tree` accepts, without waiting for the device.

        `ids` and `hidden` are those of all nodes until `select` is called.
        """
        batch = len(verdict.node)
        tables = tree.tables
        rows = torch.arange(batch, device=verdict.node.device)
        path = tables.paths.expand(batch, -1, -1)[rows, verdict.node]
        # Paths are padded with NO_NODE, so their entries of 0 and above are the accepted nodes.
        counts = (path >= 0).sum(-1)
        path = path.clamp(min=0)  # shorter rows repeat the root
        return cls(
            path=path,
            counts=counts,
            ids=tree.tokens,
            hidden=hidden,
            bonus=verdict.bonus,
            rule=verdict.rule,
            packed=_pack(tree, verdict, path, counts),
            shape=tree.shape,
        )

    def fetch(self) -> None:
        """Begin to bring the lists to the host; `read` then waits for nothing launched later."""
        assert self.packed is not None
        self._arriving = read_later(self.packed)

    def read(self) -> None:
        """Fill in the lists: the only time that the host waits for the device."""
        assert self.packed is not None
        self._unpack((self._arriving or self.packed.tolist)())

    def _unpack(self, rows: list[list[int]]) -> None:
        """Fill in the lists from `packed` on the host."""
        width, overlaps = self.path.shape[1], []
        for count, bonus, drafted, refused, *rest in rows:
            nodes, tokens, bits = rest[:count], rest[width : width + count], rest[2 * width :]
            self.nodes.append(nodes)
            # The root's own token was emitted in the round before.
            self.tokens.append([*tokens[1:], bonus])
            self.drafted.append(drafted)
            self.refused.append(bool(refused))
            if bits:
                assert self.shape is not None, "rules that compare distributions need a fixed shape"
                # Without torch: a few numbers for each row.
                overlap = np.array(bits, np.int32).view(np.float32).tolist()
                # A leaf offers no draft, so that there is nothing to compare.
                overlaps.append([overlap[node] for node in nodes if self.shape.children[node]])
        self.overlap = overlaps or None

    def select(self) -> None:
        """Reduce tokens and states to those of the path; if it was read, to its longest row."""
        if self.nodes:
            self.path = self.path[:, : max(map(len, self.nodes))]
        self.ids = self.ids.gather(1, self.path)
        self.hidden = self.hidden.map(lambda states: _rows(states, self.path))

    @property
    def gained(self) -> Counts:
        """Positions that each row has gained."""
        return Counts([len(nodes) for nodes in self.nodes], self.counts)

    @property
    def in_place(self) -> bool:
        """True if the host knows that each path is 0, 1, 2, .., whose slots are in order."""
        if self.shape is not None and self.shape.is_chain:
            return True
        in_order = (nodes == list(range(len(nodes))) for nodes in self.nodes)
        return bool(self.nodes) and all(in_order)

    def keep(self, rows: list[int]) -> Accepted:
        """Return what was accepted in the batch rows `rows` alone, as wide as the longest."""
        nodes = [self.nodes[row] for row in rows]
        width, index = max(map(len, nodes)), send(rows, self.ids.device)
        return Accepted(
            tokens=[self.tokens[row] for row in rows],
            nodes=nodes,
            path=self.path[index, :width],
            ids=self.ids[index, :width],
            counts=self.counts[index],
            hidden=self.hidden.map(lambda states: states[index, :width]),
        )

    @staticmethod
    def joined(rounds: Sequence[Accepted]) -> Accepted:
        """Return several rounds as one, in which the positions of all were accepted.

        Example, one row: two positions `a b` and then one `c`, each padded to a width of three, are
        `a b c`. Nodes and paths are those of a chain.
        """
        if len(rounds) == 1:
            return rounds[0]
        batch, device = range(len(rounds[0].nodes)), rounds[0].ids.device
        # For each row the columns of its positions, with the rounds side by side.
        columns: list[list[int]] = [[] for _ in batch]
        before = 0
        for accepted in rounds:
            for row, nodes in zip(columns, accepted.nodes, strict=True):
                row += range(before, before + len(nodes))
            before += accepted.ids.shape[1]
        width = max(map(len, columns))
        index = send([row + [0] * (width - len(row)) for row in columns], device)
        states = [accepted.hidden for accepted in rounds]
        return Accepted(
            tokens=[[t for accepted in rounds for t in accepted.tokens[row]] for row in batch],
            nodes=[list(range(len(row))) for row in columns],
            path=torch.arange(width, device=device).expand(len(batch), -1),
            ids=torch.cat([accepted.ids for accepted in rounds], dim=1).gather(1, index),
            counts=torch.stack([accepted.counts for accepted in rounds]).sum(0),
            hidden=Hidden.joined(states).map(lambda joint: _rows(joint, index)),
        )


def _pack(tree: DraftTree, verdict: Verdict, path: Tensor, counts: Tensor) -> Tensor:
    """Return `Accepted.packed`: four numbers, the path, its tokens, and the overlap at all nodes.

    Floats are float32 bit patterns in it, so that a single integer tensor holds both.
    """
    # A node that a row does not have holds NO_NODE, which is negative: it was not drafted.
    exists = tree.tokens[:, 1:] >= 0
    # Parents of a shape are `[1, N]`: they broadcast against the rows.
    after_last = exists & (tree.tables.parents[:, 1:] == verdict.node[:, None])
    numbers = [counts, verdict.bonus, exists.sum(-1), after_last.any(-1).long()]
    # What lies past a row's count is cut off on the host.
    parts = [torch.stack(numbers, dim=1), path, tree.tokens.gather(1, path)]
    if verdict.overlap is not None:
        parts.append(verdict.overlap.float().contiguous().view(torch.int32).long())
    return torch.cat(parts, dim=1)


def _rows(states: Tensor, path: Tensor) -> Tensor:
    """Return the features of the nodes `path` `[B, A]` among those of all nodes `[B, N, H]`."""
    # One row needs no index for each number of a state, as `gather` does.
    if len(states) == 1:
        return states[:, path[0]]
    return states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))


def verify(
    target: CausalModel,
    tree: DraftTree,
    cache: TreeCache,
    draws: Draws,
    taps: tuple[int, ...],
    clock: Clock | None = None,
) -> Accepted:
    """Verify `tree`, and keep its accepted path in `cache`.

    With a `clock`, which is given the ends of its parts, the result is read on the way, so that no
    more is moved than was accepted. Without one the function waits for nothing, so that it can be
    compiled, and recorded as a CUDA graph. The path is as wide as the tree is deep then, and the
    texts of `draws` need space for as many tokens.
    """
    tables = tree.tables
    nodes = Pass(depths=tables.depths, visible=tables.ancestors)
    hidden = target.forward(tree.tokens, nodes, cache, taps)
    logits = target.head(hidden.last)
    if clock is not None:
        clock.mark("verify")
    accepted = Accepted.of(tree, judge(tree, logits, draws), hidden)
    if clock is not None:
        accepted.read()
        clock.mark("accept")
    accepted.select()
    cache.commit(accepted.gained, None if accepted.in_place else accepted.path)
    draws.extend(accepted.ids, cache.progress(accepted.counts))
    return accepted
