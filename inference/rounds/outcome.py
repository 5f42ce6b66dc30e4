"""Outcome of a round: records of it on the device and on the host, and the transfer in between.

An acceptance rule leaves its `Verdict` on the device. The decode loop needs it on the host too.
Each transfer makes the host wait, so everything travels in one tensor (`DeviceOutcome`).

Shapes: B rows of a batch, N tree nodes with the root, A accepted nodes with the root, S positions
of a text, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .accept import Verdict
from .cache import Counts
from .device import read_later, send
from .tree import DraftTree, TreeShape


@dataclass
class Hidden:
    """Hidden states of one forward pass: after the final norm, and of each tap.

    They are `[B, N, H]`, or `[S, H]` of one text, in the dtype of the model that made them.
    """

    last: Tensor
    taps: tuple[Tensor, ...] = ()

    def map(self, function: Callable[[Tensor], Tensor]) -> Hidden:
        """Return `function` of each of them."""
        return Hidden(function(self.last), tuple(function(tap) for tap in self.taps))

    @staticmethod
    def joined(parts: Sequence[Hidden]) -> Hidden:
        """Return the states of several passes side by side, as of one."""
        taps = zip(*(part.taps for part in parts), strict=True)
        return Hidden(
            torch.cat([part.last for part in parts], dim=1),
            tuple(torch.cat(list(tap), dim=1) for tap in taps),
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a round for each row, on the host."""

    nodes: list[list[int]]
    """Accepted node ids, the root's (0) first."""
    tokens: list[list[int]]
    """Accepted drafts, then the target's own token after them: the next root."""
    drafted: list[int]
    """Number of nodes drafted, without the root and without missing nodes."""
    refused: list[bool]
    """True where a draft followed the last accepted node."""
    rule: str
    """Rule that decided, see `Verdict.rule`."""
    overlap: list[list[float]] | None = None
    """`Verdict.overlap` at the accepted nodes that have children."""


@dataclass(frozen=True)
class DeviceOutcome:
    """Outcome of a round on the device."""

    verdict: Verdict
    shape: TreeShape | None
    """Shape of the tree, if all rows share one."""
    path: Tensor
    """[B, D + 1]: accepted nodes, from the root (0) down. Shorter rows repeat the root."""
    counts: Tensor
    """[B]: number of accepted nodes, the root counted."""
    numbers: Tensor
    """[B, n] int64: four numbers, the path, its tokens, and the overlap at all nodes. Floats are
    float32 bit patterns in it, so that a single integer tensor holds both."""

    @classmethod
    def of(cls, tree: DraftTree, verdict: Verdict) -> DeviceOutcome:
        """Return the outcome of a verdict on `tree`, without waiting for the device."""
        tables, batch = tree.tables, len(verdict.node)
        rows = torch.arange(batch, device=verdict.node.device)
        path = tables.paths.expand(batch, -1, -1)[rows, verdict.node]
        # Paths are padded with NO_NODE, so their entries of 0 and above are the accepted nodes.
        counts = (path >= 0).sum(-1)
        path = path.clamp(min=0)
        # A node that a row does not have holds NO_NODE, which is negative: it was not drafted.
        exists = tree.tokens[:, 1:] >= 0
        # Parents of a shape are `[1, N]`: they broadcast against the rows.
        after_last = exists & (tables.parents[:, 1:] == verdict.node[:, None])
        numbers = [counts, verdict.bonus, exists.sum(-1), after_last.any(-1).long()]
        parts = [torch.stack(numbers, dim=1), path, tree.tokens.gather(1, path)]
        if verdict.overlap is not None:
            parts.append(verdict.overlap.float().contiguous().view(torch.int32).long())
        return cls(verdict, tree.shape, path, counts, torch.cat(parts, dim=1))

    def read(self) -> Outcome:
        """Return the outcome on the host, which waits for the device: once in a round."""
        return self._unpacked(self.numbers.tolist())

    def fetch(self) -> Callable[[], Outcome]:
        """Begin a `read`; the function returned ends it, and waits for nothing launched later."""
        arriving = read_later(self.numbers)
        return lambda: self._unpacked(arriving())

    def _unpacked(self, rows: list[list[int]]) -> Outcome:
        """Return the outcome of `numbers` on the host."""
        width = self.path.shape[1]
        all_nodes, all_tokens, overlaps = [], [], []
        for count, bonus, _, _, *rest in rows:
            # What lies past the row's count repeats the root.
            nodes, tokens, bits = rest[:count], rest[width : width + count], rest[2 * width :]
            all_nodes.append(nodes)
            # The root's own token was emitted in the round before.
            all_tokens.append([*tokens[1:], bonus])
            if bits:
                assert self.shape is not None, "rules that compare distributions need a fixed shape"
                # Without torch: a few numbers for each row.
                overlap = np.array(bits, np.int32).view(np.float32).tolist()
                # A leaf offers no draft, so that there is nothing to compare.
                overlaps.append([overlap[node] for node in nodes if self.shape.children[node]])
        return Outcome(
            nodes=all_nodes,
            tokens=all_tokens,
            drafted=[row[2] for row in rows],
            refused=[bool(row[3]) for row in rows],
            rule=self.verdict.rule,
            overlap=overlaps or None,
        )


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """Accepted path of each row, for the caches of target and drafter.

    Row b has `counts[b]` positions; entries past that repeat the root and mean nothing.
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
    tokens: list[list[int]] = field(default_factory=list)
    """Each row's accepted drafts, then the target's own token after them: the next root. Empty for
    a `traceable` proposer in a static round, which the host has not read yet."""
    bonus: Tensor | None = None
    """[B]: bonus token of each row, which is the next root; None of a text that is known."""
    in_place: bool = False
    """True if the host knows that each path is 0, 1, 2, .., whose slots are in order."""

    @classmethod
    def of(
        cls, tree: DraftTree, packed: DeviceOutcome, hidden: Hidden, outcome: Outcome | None = None
    ) -> Accepted:
        """Return what was accepted of `tree`, whose nodes have the features `hidden` `[B, N, H]`.

        With the `outcome` on the host it is as wide as the longest path, and else as the tree is
        deep.
        """
        path, tokens = packed.path, []
        in_place = packed.shape is not None and packed.shape.is_chain
        if outcome is not None:
            path, tokens = path[:, : max(map(len, outcome.nodes))], outcome.tokens
            in_place |= all(nodes == list(range(len(nodes))) for nodes in outcome.nodes)
        return cls(
            path=path,
            counts=packed.counts,
            ids=tree.tokens.gather(1, path),
            hidden=hidden.map(lambda states: _rows(states, path)),
            tokens=tokens,
            bonus=packed.verdict.bonus,
            in_place=in_place,
        )

    @property
    def gained(self) -> Counts:
        """Positions that each row has gained."""
        return Counts([len(tokens) for tokens in self.tokens], self.counts)

    def keep(self, rows: list[int]) -> Accepted:
        """Return what was accepted in the batch rows `rows` alone, as wide as the longest."""
        tokens = [self.tokens[row] for row in rows]
        width, index = max(map(len, tokens)), send(rows, self.ids.device)
        return Accepted(
            path=self.path[index, :width],
            counts=self.counts[index],
            ids=self.ids[index, :width],
            hidden=self.hidden.map(lambda states: states[index, :width]),
            tokens=tokens,
        )

    @staticmethod
    def joined(rounds: Sequence[Accepted]) -> Accepted:
        """Return several rounds as one, in which the positions of all were accepted.

        Example, one row: two positions `a b` and then one `c`, each padded to a width of three, are
        `a b c`. Paths are those of a chain.
        """
        if len(rounds) == 1:
            return rounds[0]
        batch, device = range(len(rounds[0].tokens)), rounds[0].ids.device
        # For each row the columns of its positions, with the rounds side by side.
        columns: list[list[int]] = [[] for _ in batch]
        before = 0
        for accepted in rounds:
            for row, tokens in zip(columns, accepted.tokens, strict=True):
                row += range(before, before + len(tokens))
            before += accepted.ids.shape[1]
        width = max(map(len, columns))
        index = send([row + [0] * (width - len(row)) for row in columns], device)
        states = [accepted.hidden for accepted in rounds]
        return Accepted(
            path=torch.arange(width, device=device).expand(len(batch), -1),
            counts=torch.stack([accepted.counts for accepted in rounds]).sum(0),
            ids=torch.cat([accepted.ids for accepted in rounds], dim=1).gather(1, index),
            hidden=Hidden.joined(states).map(lambda joint: _rows(joint, index)),
            tokens=[[t for accepted in rounds for t in accepted.tokens[row]] for row in batch],
        )


def _rows(states: Tensor, path: Tensor) -> Tensor:
    """Return the features of the nodes `path` `[B, A]` among those of all nodes `[B, N, H]`."""
    # One row needs no index for each number of a state, as `gather` does.
    if len(states) == 1:
        return states[:, path[0]]
    return states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))
