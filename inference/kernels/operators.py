"""The kernels as operators of torch, so that they can be recorded, counted and run without memory.

Shapes: B rows of a batch, N positions of one forward pass, U undecided slots, the last N of which
are these positions', C capacity of a cache, H hidden size, G attention heads, Gkv key-value heads,
E size of an attention head, n numbers of it that are rotated.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...heads.errors import first_line
from . import operators

DEVICES = {"cuda"}
"""Kinds of devices; tests add "cpu", where Triton can interpret its kernels."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FEWEST_SLOTS = 128  # of one part of the keys
MOST_PARTS = 64
INTERPRETED_PROCESSORS = 8


def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the kernels can run on tensors of this kind."""
    return device.type in DEVICES and dtype in FLOATS and _new_enough(device)


@lru_cache(maxsize=16)
def _new_enough(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device) >= (8, 0)  # before, registers are spilled


def _kernels() -> Any:
    """Return the module of kernels; how they are launched is not in its types."""
    from . import triton_kernels

    return triton_kernels


def power_of_two(number: int) -> int:
    """Return the least power of two that is `number` or more."""
    return 1 << (number - 1).bit_length()


def blocks_of(queries: int, size: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return how many of `queries` of the same keys, heads of `size`, one program takes.

    After it come the slots that it takes at a time, and its warps. With these numbers no registers
    are spilled on an sm_90, and shared memory is below the 99 KiB of the smallest GPUs
    (docs/log/2026-11-experiments.md, "Kernels").
    """
    most, slots = (64, 64) if size <= 128 else (32, 32)
    if dtype == torch.float32:  # no tensor cores
        most, slots = 16, 32
    rows = min(most, max(16, power_of_two(queries)))  # tensor cores take 16 at least
    return rows, slots, 4 if rows == 16 else 8


def parts_of(capacity: int, programs: int, processors: int) -> int:
    """Return into how many parts the keys of a buffer of `capacity` slots are split.

    `programs` run for each part. Two for each processor hide the latency of memory.
    """
    wanted = -(-2 * processors // programs)
    most = max(1, min(wanted, capacity // FEWEST_SLOTS, MOST_PARTS))
    return 1 << (most.bit_length() - 1)  # few numbers: kernels are compiled for each


def most_parts(programs: int, device: torch.device) -> int:
    """Return the parts of the keys of the longest buffer, see `parts_of`."""
    return parts_of(MOST_PARTS * FEWEST_SLOTS, programs, _processors(device))


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = torch.empty_like(x)
    _launch_norm(x, None, weight, eps, None, normed)
    return normed


def _add_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, added, weight, eps, total, normed)
    return total, normed


def _launch_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    eps: float,
    total: Tensor | None,
    normed: Tensor,
) -> None:

    size = x.shape[-1]
    block = power_of_two(size)
    with torch.cuda.device_of(x):
        _kernels().norm[(x.numel() // size,)](
            x,
            added,
            weight,
            total,
            normed,
            size,
            eps,
            ADD=added is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )


def _gate(gate_up: Tensor) -> Tensor:

    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    gated = gate_up.new_empty(*gate_up.shape[:-1], size)
    block = min(1024, power_of_two(size))
    with torch.cuda.device_of(gate_up):
        _kernels().gate[(gated.numel() // size, -(-size // block))](
            gate_up, gated, size, BLOCK=block
        )
    return gated


def _rotate(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    staged: int,
    cosines: Tensor,
    sines: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
) -> Tensor:

    batch, count, width = qkv.shape
    kv_heads, size = keys.shape[1], keys.shape[3]
    heads = width // size - 2 * kv_heads
    qkv, cosines, sines = qkv.contiguous(), cosines.contiguous(), sines.contiguous()
    queries = qkv.new_empty(batch, count, heads, size)
    rotated = cosines.shape[-1]
    with torch.cuda.device_of(qkv):
        _kernels().rotate[(batch * count, heads + 2 * kv_heads)](
            qkv,
            cosines,
            sines,
            query_weight,
            key_weight,
            starts,
            queries,
            keys,
            values,
            count,
            staged,
            heads,
            kv_heads,
            eps,
            0 if len(cosines) == 1 else count * rotated,
            *keys.stride()[:3],
            *values.stride()[:3],
            SIZE=size,
            ROTATED=rotated,
            NORMED=query_weight is not None,
            BLOCK=power_of_two(size),
            num_warps=1,
        )
    return queries


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    visible: Tensor,
    depths: Tensor,
    window: int,
    parts: int,
) -> Tensor:

    batch, count, heads, size = queries.shape
    kv_heads = keys.shape[1]
    assert keys.stride()[2:] == values.stride()[2:] == (size, 1), "slots are next to one another"
    assert keys.shape[2] * size < 1 << 31, "numbers of one head are counted in 32 bits"
    of_keys = count * (heads // kv_heads)
    block = max(16, power_of_two(size))
    rows, slots, warps = blocks_of(of_keys, block, queries.dtype)
    blocks = -(-of_keys // rows)
    programs = batch * kv_heads * blocks
    if not parts:
        parts = parts_of(keys.shape[2], programs, _processors(queries.device))
    visible, depths = visible.contiguous(), depths.contiguous()
    found = queries.new_empty(parts, batch, count, heads, size, dtype=torch.float32)
    logs = found.new_empty(found.shape[:-1])
    attended = queries.new_empty(batch, count, heads * size)
    with torch.cuda.device_of(queries):
        _kernels().attend[(parts, batch * kv_heads, blocks)](
            queries,
            keys,
            values,
            starts,
            visible.view(torch.uint8),
            depths,
            found,
            logs,
            count,
            visible.shape[2],
            heads,
            kv_heads,
            window,
            0 if len(visible) == 1 else count * visible.shape[2],
            0 if len(depths) == 1 else count,
            *keys.stride()[:2],
            *values.stride()[:2],
            size**-0.5,
            SIZE=size,
            WINDOW=window > 0,
            SPLITS=parts,
            ROWS=rows,
            SLOTS=slots,
            BLOCK=block,
            num_warps=warps,
            num_stages=2,
        )
        _kernels().merge[(batch * count * heads,)](
            found,
            logs,
            attended,
            batch * count * heads,
            SIZE=size,
            SPLITS=parts,
            MANY=power_of_two(parts),
            BLOCK=block,
            num_warps=max(1, power_of_two(parts) * block // 2048),
        )
    return attended


def _two_like(x: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _like(x: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(x)


def _half_of(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _queries_of(qkv: Tensor, keys: Tensor, *_others: Any) -> Tensor:
    batch, count, width = qkv.shape
    return qkv.new_empty(batch, count, width // keys.shape[3] - 2 * keys.shape[1], keys.shape[3])


def _joined_heads(queries: Tensor, *_others: Any) -> Tensor:
    return queries.new_empty(*queries.shape[:2], queries.shape[2] * queries.shape[3])


def _operator(schema: str, run: Any, shapes: Any) -> Any:
    """Define an operator; `shapes` returns tensors as its results, without their numbers."""
    name = f"draftsmith::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, ("cpu", "cuda"))(run)
    torch.library.register_fake(name)(shapes)
    return getattr(torch.ops.draftsmith, schema.partition("(")[0]).default


norm = _operator("norm(Tensor x, Tensor weight, float eps) -> Tensor", _norm, _like)
"""Return the root mean square norm of `x` `[.., H]`."""
add_norm = _operator(
    "add_norm(Tensor x, Tensor added, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_norm,
    _two_like,
)
"""Return `x + added` `[.., H]`, and the norm of it."""
gate = _operator("gate(Tensor gate_up) -> Tensor", _gate, _half_of)
"""Return SiLU of the first half of the last axis, times the second half."""
rotate = _operator(
    "rotate(Tensor qkv, Tensor(a!) keys, Tensor(b!) values, Tensor starts, int staged, "
    "Tensor cosines, Tensor sines, Tensor? query_weight, Tensor? key_weight, float eps) -> Tensor",
    _rotate,
    _queries_of,
)
"""Return rotated queries `[B, N, G, E]`, and write rotated keys, and values, into their slots.

`qkv` `[B, N, (G + 2 Gkv) * E]` are projections, as in `DecoderLayer`; `keys` and `values`
`[B, Gkv, C, E]` the buffers, whose slots begin at `starts` `[B]` plus `staged`. Angles are
`[1 | B, N, 1, n]`. With weights `[E]` queries and keys are normed first.
"""
attend = _operator(
    "attend(Tensor queries, Tensor keys, Tensor values, Tensor starts, Tensor visible, "
    "Tensor depths, int window, int parts) -> Tensor",
    _attend,
    _joined_heads,
)
"""Return attention `[B, N, G * E]` of queries `[B, N, G, E]` to the slots that they see.

Those are the `starts` `[B]` committed ones, within a `window` of positions if it is not 0, and the
undecided ones after them for which `visible` `[1 | B, N, U]` bool is true. `depths` `[1 | B, N]`
are the positions of queries after the committed ones. Keys are split into so many `parts`; 0: as
many as keep the processors of the device busy.
"""


log = logging.getLogger(__name__)

LENGTHS = (300, 130)  # committed slots of the rows
NODES = (1, 8, 60)
"""Nodes with which programs have the fewest queries, more, and the most (`blocks_of`)."""
STAGED = 3  # undecided slots before the nodes
CAPACITY = 400
WINDOW = 100
WRONG = {torch.float32: 1e-4}
"""Least error that is not rounding, as a share of a query's attention."""
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
