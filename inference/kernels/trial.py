"""Trial of the kernel of attention on random numbers, before a model takes it.

A model's own trial is a short text in one row: it has one part of the keys, and a few nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...heads.errors import first_line
from . import operators

log = logging.getLogger(__name__)

LENGTHS = (300, 130)  # committed slots of the rows
NODES = (1, 8, 60)
"""Nodes with which programs have the fewest queries, more, and the most (`blocks_of`)."""
STAGED = 3  # undecided slots before the nodes
CAPACITY = 400
WINDOW = 100
WRONG = {torch.float32: 1e-4}
"""Least error that is no rounding, as a share of a query's attention."""
WRONG_IN_HALF = 2e-2
PASSED: set[tuple[tuple[int, int, int], torch.dtype, torch.device]] = set()
"""Sizes, types and devices with which `attention_fits` has found no fault. A fault may pass, as a
lack of memory does, and is looked for again."""


def attention_fits(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return True if `attend` can run a drafter's layers, and agrees with torch's attention."""
    if not operators.usable(device, dtype):
        return False
    sizes = heads, kv_heads, size
    if (tried := (sizes, dtype, device)) not in PASSED:
        if fault := attention_fault([sizes], [False], dtype, device):
            log.warning("the drafter's attention is torch's own: %s", fault)
            return False
        PASSED.add(tried)
    return True


@torch.no_grad()
def attention_fault(
    sizes: Iterable[tuple[int, int, int]],
    windows: Iterable[bool],
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Return why `attend` does not give what torch's attention gives; empty: it does.

    `sizes` are attention heads, key-value heads and the size of a head; `windows` say whether there
    is one.
    """
    with torch.device(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        for heads, kv_heads, size in sizes:
            for window in windows:
                for nodes in NODES[:2] if dtype == torch.float32 else NODES:
                    try:
                        error = _error(heads, kv_heads, size, WINDOW * window, nodes, dtype)
                    except Exception as failed:  # noqa: BLE001  # as a compiler does
                        return first_line(failed)
                    if not error <= WRONG.get(dtype, WRONG_IN_HALF):
                        return f"attention of {nodes} nodes differs from torch's by {error:.1e}"
    return ""


def _error(
    heads: int, kv_heads: int, size: int, window: int, nodes: int, dtype: torch.dtype
) -> float:
    """Return the largest error of a query's attention, as a share of it."""
    batch = len(LENGTHS)
    queries = torch.randn(batch, nodes, heads, size).to(dtype)
    keys, values = torch.randn(2, batch, kv_heads, CAPACITY, size).to(dtype)
    starts, depths = torch.tensor(LENGTHS), torch.randint(0, 4, (batch, nodes))
    depths[:, 0] = 0  # the root's is the least
    visible = torch.rand(batch, nodes, STAGED + nodes) < 0.5
    visible[:, :, STAGED:] |= torch.eye(nodes, dtype=torch.bool)
    expected = scaled_dot_product_attention(
        *(part.float() for part in (queries.transpose(1, 2), keys, values)),
        attn_mask=slots_seen(starts, visible, depths, window, CAPACITY)[:, None],
        enable_gqa=True,
    ).transpose(1, 2)
    parts = operators.most_parts(batch * kv_heads, queries.device)
    found = operators.attend(queries, keys, values, starts, visible, depths, window, parts)
    difference = found.view_as(expected).float() - expected
    return (difference.norm(dim=-1) / expected.norm(dim=-1)).max().item()


def slots_seen(
    starts: Tensor, visible: Tensor, depths: Tensor, window: int, capacity: int
) -> Tensor:
    """Return which slots of a buffer each query sees, `[B, N, capacity]`; as in `attend`."""
    slots = torch.arange(capacity)
    near = slots < starts[:, None, None]
    if window:
        near = near & ((starts[:, None] + depths)[:, :, None] - slots < window)
    index = slots - starts[:, None]
    in_tree = (index >= 0) & (index < visible.shape[2])
    index = index.clamp(0, visible.shape[2] - 1)[:, None].expand(-1, visible.shape[1], -1)
    shown = visible.expand(len(starts), -1, -1).gather(2, index) & in_tree[:, None]
    return near.expand_as(shown) | shown
