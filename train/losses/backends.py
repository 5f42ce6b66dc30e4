"""Which kernel computes attention in training, by device.

On a CPU it is torch's flash attention, for EAGLE chunk by chunk of queries. On CUDA it is
FlexAttention, whose block masks have (S / 128)^2 numbers; it is compiled or raises an error, and
never ends in the kernel that holds all scores. Elsewhere EAGLE holds all scores, and blocks have
dense masks.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Backend = Literal["auto", "sdpa", "flex", "plain"]

SMALLEST_HEAD = 16  # size of an attention head from which on FlexAttention's kernels take it
GRAPHS = 64  # shapes of FlexAttention of one process: `bucket` leaves two for each power of two


def backend_for(
    backend: Backend, device: torch.device, head: int, dtype: torch.dtype = torch.bfloat16
) -> Backend:
    """Return what `auto` stands for on a device, with attention heads of size `head` in `dtype`."""
    if backend != "auto":
        return backend
    if device.type == "cpu":
        return "sdpa"
    # torch 2.11 knows no tiles of FlexAttention for other large heads in float32, and those that it
    # falls back to do not fit into a GPU's shared memory.
    fits = dtype != torch.float32 or head <= 128 or head == 256
    on_cuda = device.type == "cuda" and has_triton()
    return "flex" if on_cuda and fits and head >= SMALLEST_HEAD else "plain"


@cache
def has_triton() -> bool:
    """Return whether functions can be compiled for a GPU; on Windows they cannot."""
    return find_spec("triton") is not None


def bucket(length: int) -> int:
    """Return the next of 128, 192, 256, 384, 512, .. that is at least `length`.

    A batch is as wide as its longest row, and a kernel is compiled for each width.
    """
    power = max(128, 1 << (length - 1).bit_length())
    return power * 3 // 4 if length <= power * 3 // 4 and power > 128 else power


def flex_for(device: torch.device) -> Any:
    """Return FlexAttention for a device: as it is on a CPU, else compiled once for the process.

    Uncompiled it holds all scores, which torch falls back to without an error after eight shapes,
    unless the limit is higher and the whole graph is asked for.
    """
    if device.type == "cpu":
        return flex_attention
    # Kernels are made for fixed shapes, of which `bucket` leaves few.
    return _compiled(flex_attention, dynamic=False, fullgraph=True)


def block_mask(visible: Any, rows: int, queries: int, keys: int, device: torch.device) -> Any:
    """Return FlexAttention's mask of `visible(b, h, query, key)`, for all heads alike."""
    # Uncompiled, it makes all queries x keys bools before it looks at them in blocks.
    make: Any = create_block_mask if device.type == "cpu" else _compiled(create_block_mask)
    return make(visible, rows, None, queries, keys, device=str(device))


@cache
def _compiled(function: Any, **options: Any) -> Any:
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, GRAPHS)
    return torch.compile(function, **options)
