"""Decision of one round, brought from the device to the host in one transfer.

An acceptance rule leaves its `Verdict` on the device. The decode loop needs it on the host, as
lists, to cut replies at end tokens and to write one record per round. Each transfer makes the host
wait for the device, so everything travels in one packed tensor: `pack` makes it and `unpack` reads
it.

Shapes: B rows of a batch, N tree nodes with the root, D levels.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .accept import Verdict
from .tree import DraftTree, TreeShape


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


@dataclass(kw_only=True)
class Packed:
    """Verdict of a round in one tensor, and what the device needs of it next."""

    rows: Tensor
    """[B, n] int64: all columns. Integers are as they are, floats are float32 bit patterns beside
    them, so that a single integer tensor holds both."""
    columns: list[tuple[str, int, bool]]
    """Name and number of columns of each value in `rows`, and True for floats."""
    rule: str
    """Rule that decided, see `Verdict.rule`."""
    shape: TreeShape | None
    """Shape of the tree, if it is a static one."""
    path: Tensor
    """[B, D + 1]: accepted nodes, from the root down, padded with NO_NODE."""
    counts: Tensor
    """[B]: number of accepted nodes, the root counted."""
    bonus: Tensor
    """[B]: bonus token of each row, which is the next root."""


def pack(tree: DraftTree, verdict: Verdict) -> Packed:
    """Return a verdict on `tree` as one tensor, without waiting for the device."""
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
    values = {
        "path": path,
        # NO_NODE cannot be an index. What the padding reads is cut off on the host by the count.
        "path_tokens": tree.tokens.gather(1, path.clamp(min=0)),
        "count": counts[:, None],
        "bonus": verdict.bonus[:, None],
        "drafted": exists.sum(-1, keepdim=True),
        # Integers, since all columns travel in one tensor.
        "refused": after_last.any(-1, keepdim=True).long(),
    }
    if verdict.choices is not None:
        values["choices"] = verdict.choices
    if verdict.expected is not None:
        values["expected"] = verdict.expected[:, None]
    if verdict.overlap is not None:
        values["overlap"] = verdict.overlap
    columns, integers = [], []
    for name, value in values.items():
        is_float = value.is_floating_point()
        # Reading the same bits as int32 needs numbers of 32 bits; int64 is the type of the other
        # columns, which hold token and node ids.
        integers.append(value.float().contiguous().view(torch.int32).long() if is_float else value)
        columns.append((name, value.shape[1], is_float))
    return Packed(
        rows=torch.cat(integers, dim=1),
        columns=columns,
        rule=verdict.rule,
        shape=tree.shape,
        path=path,
        counts=counts,
        bonus=verdict.bonus,
    )


def _floats_of(bits: list[int]) -> list[float]:
    """Return the float32 values of bit patterns."""
    # On the host, without torch: a few numbers for each row.
    return list(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits)))


def unpack(packed: Packed, rows: list[list[int]]) -> Decision:
    """Return what was packed as a `Decision`. `rows` are those of `packed` on the host."""
    host: dict[str, list[list]] = {}
    start = 0
    for name, width, is_float in packed.columns:
        values = [row[start : start + width] for row in rows]
        host[name] = [_floats_of(bits) for bits in values] if is_float else values
        start += width
    nodes, tokens = [], []
    for row in range(len(rows)):
        (count,) = host["count"][row]
        nodes.append(host["path"][row][:count])
        # The root's own token was emitted in the round before.
        tokens.append([*host["path_tokens"][row][1:count], *host["bonus"][row]])
    return Decision(
        nodes=nodes,
        tokens=tokens,
        drafted=[count for (count,) in host["drafted"]],
        refused=[bool(flag) for (flag,) in host["refused"]],
        rule=packed.rule,
        choices=host.get("choices"),
        expected=[value for (value,) in host["expected"]] if "expected" in host else None,
        overlap=_overlap_on_path(packed, nodes, host["overlap"]) if "overlap" in host else None,
        path=packed.path,
        counts=packed.counts,
        bonus=packed.bonus,
    )


def _overlap_on_path(
    packed: Packed, nodes: list[list[int]], overlap: list[list[float]]
) -> list[list[float]]:
    """Return the overlaps at each row's accepted nodes that have children.

    A leaf offers no draft, so that there is nothing to compare.
    """
    shape = packed.shape
    assert shape is not None, "rules that compare distributions need a fixed shape"
    on_path: list[list[float]] = []
    for row, accepted in enumerate(nodes):
        of_row = []
        for node in accepted:
            if shape.children[node]:
                of_row.append(overlap[row][node])
        on_path.append(of_row)
    return on_path
