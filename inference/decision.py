"""Decision of one round, brought from the device to the host in one transfer.

An acceptance rule leaves its `Verdict` on the device. The decode loop needs it on the host, as
lists, to cut replies at end tokens and to write one record per round. Each transfer makes the host
wait for the device, so everything travels in one packed tensor: `HostTransfer` is that packer.

Shapes: B rows of a batch, N tree nodes with the root, D levels.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .accept import Verdict
from .tree import DraftTree


@dataclass(kw_only=True)
class Decision:
    """Verdict of one round: lists for the host, tensors for what the device does next."""

    nodes: list[list[int]]
    """Accepted nodes of each row, from the root (0) down."""
    tokens: list[list[int]]
    """Tokens that each row emits: its accepted drafts, then the bonus token."""
    drafted: list[int]
    """Nodes drafted for each row, without the root and without missing nodes."""
    refused: list[bool]
    """True for rows in which a draft stood after the last accepted node."""
    rule: str
    """Rule that decided, see `Verdict.rule`."""
    choices: list[list[int]] | None
    """Target's token after every node `[B][N]`, from the rules that know it."""
    expected: list[float] | None
    """Expected tokens of each row, see `Verdict.expected`."""
    overlap: list[list[float]] | None
    """`Verdict.overlap` at the accepted nodes that have children."""
    path: Tensor
    """[B, D + 1], device: `nodes`, padded with NO_NODE."""
    counts: Tensor
    """[B], device: lengths of `nodes`."""
    bonus: Tensor
    """[B], device: bonus token of each row, which is the next root."""


class HostTransfer:
    """Packer of named tensors `[B, n]` that travel to the host in one copy.

    Integers travel as they are, floats as float32 bit patterns beside them, so that a single
    integer tensor holds both.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._columns: list[Tensor] = []
        self._floats: set[str] = set()

    def add(self, name: str, values: Tensor) -> None:
        """Add `values` `[B]` or `[B, n]` under a name."""
        if values.dim() == 1:
            values = values[:, None]
        if values.is_floating_point():
            self._floats.add(name)
            # Reading the same bits as int32 needs numbers of 32 bits; int64 is the type of the
            # other columns, which hold token and node ids.
            values = values.float().contiguous().view(torch.int32).long()
        self._names.append(name)
        self._columns.append(values)

    def fetch(self) -> dict[str, list[list]]:
        """Return the rows of every tensor by name. The only synchronisation with the device."""
        rows = torch.cat(self._columns, dim=1).tolist()
        fetched: dict[str, list[list]] = {}
        start = 0
        for name, column in zip(self._names, self._columns, strict=True):
            end = start + column.shape[1]
            values = [row[start:end] for row in rows]
            if name in self._floats:
                values = [_floats_of(bits) for bits in values]
            fetched[name] = values
            start = end
        return fetched


def _floats_of(bits: list[int]) -> list[float]:
    """Return the float32 values of bit patterns."""
    # On the host, without torch: a few numbers for each row.
    return list(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits)))


def decide(tree: DraftTree, verdict: Verdict) -> Decision:
    """Return a verdict as a `Decision`. The single device-to-host synchronisation of a round."""
    batch = len(verdict.node)
    tables = tree.tables
    rows = torch.arange(batch, device=verdict.node.device)
    # Tables of a static shape have one row for the whole batch.
    path = tables.paths.expand(batch, -1, -1)[rows, verdict.node]
    # Paths are padded with NO_NODE, so their entries of 0 and above are the accepted nodes.
    counts = (path >= 0).sum(-1)
    # A node that a row does not have holds NO_NODE, which is negative: it was not drafted.
    exists = tree.tokens[:, 1:] >= 0
    # Parents of static shapes are `[1, N]`: they broadcast against the rows.
    after_last = exists & (tables.parents[:, 1:] == verdict.node[:, None])

    transfer = HostTransfer()
    transfer.add("path", path)
    # NO_NODE cannot be an index. What the padding reads is cut off on the host by the count.
    transfer.add("path_tokens", tree.tokens.gather(1, path.clamp(min=0)))
    transfer.add("count", counts)
    transfer.add("bonus", verdict.bonus)
    transfer.add("drafted", exists.sum(-1))
    # Integers, since all columns travel in one tensor.
    transfer.add("refused", after_last.any(-1).long())
    if verdict.choices is not None:
        transfer.add("choices", verdict.choices)
    if verdict.expected is not None:
        transfer.add("expected", verdict.expected)
    if verdict.overlap is not None:
        transfer.add("overlap", verdict.overlap)
    host = transfer.fetch()

    nodes, tokens = [], []
    for row in range(batch):
        (count,) = host["count"][row]
        nodes.append(host["path"][row][:count])
        # The root's own token was emitted in the round before.
        tokens.append([*host["path_tokens"][row][1:count], *host["bonus"][row]])
    expected = [value for (value,) in host["expected"]] if "expected" in host else None
    return Decision(
        nodes=nodes,
        tokens=tokens,
        drafted=[count for (count,) in host["drafted"]],
        refused=[bool(flag) for (flag,) in host["refused"]],
        rule=verdict.rule,
        choices=host.get("choices"),
        expected=expected,
        overlap=_overlap_on_path(tree, nodes, host["overlap"]) if "overlap" in host else None,
        path=path,
        counts=counts,
        bonus=verdict.bonus,
    )


def _overlap_on_path(
    tree: DraftTree, nodes: list[list[int]], overlap: list[list[float]]
) -> list[list[float]]:
    """Return the overlaps at each row's accepted nodes that have children.

    A leaf offers no draft, so that there is nothing to compare.
    """
    shape = tree.shape
    assert shape is not None, "rules that compare distributions need a fixed shape"
    on_path: list[list[float]] = []
    for row, accepted in enumerate(nodes):
        of_row = []
        for node in accepted:
            if shape.children[node]:
                of_row.append(overlap[row][node])
        on_path.append(of_row)
    return on_path
