"""Attention masks that are not left to transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def packed_mask(positions: Tensor, dtype: torch.dtype, window: int | None, mixed: bool) -> Any:
    """The mask `[B, 1, S, S]` of packed rows, additive (0 = visible): causal, and no document sees
    another.

    A document begins wherever `positions` `[B, S]` do not go on by one. `window`: of a model with
    sliding layers, which see only keys less than so many positions back; a `mixed` one has both
    kinds of layers and takes a mask for each, by transformers' names.
    """
    begins = functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
    document = begins.cumsum(-1)
    order = torch.arange(positions.shape[1], device=positions.device)
    see = (document[:, :, None] == document[:, None, :]) & (order[:, None] >= order)
    lowest = torch.finfo(dtype).min
    full = torch.zeros(see.shape, dtype=dtype, device=see.device).masked_fill_(~see, lowest)[
        :, None
    ]
    if window is None:
        return full
    sliding = full.masked_fill(order[:, None] - order >= window, lowest)
    return {"full_attention": full, "sliding_attention": sliding} if mixed else sliding
