"""Attention masks that are made here instead of in transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def packed_mask(positions: Tensor, dtype: torch.dtype, window: int | None, mixed: bool) -> Any:
    """Return the mask `[B, 1, S, S]` of packed rows: causal, and no document sees another.

    The mask is additive (0 = visible) and has `dtype`. A document begins wherever `positions`
    `[B, S]` do not go on by one. `window` is that of a model with sliding layers, which see only
    keys less than so many positions back; None for a model without. A `mixed` model has both kinds
    of layers and takes a dict with a mask for each, under transformers' names.
    """
    begins = functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
    document = begins.cumsum(-1)
    order = torch.arange(positions.shape[1], device=positions.device)
    see = (document[:, :, None] == document[:, None, :]) & (order[:, None] >= order)
    # the number that transformers' own masks use too
    lowest = torch.finfo(dtype).min
    full = torch.zeros(see.shape, dtype=dtype, device=see.device)
    full = full.masked_fill_(~see, lowest)[:, None]
    if window is None:
        return full
    # `order` counts along the packed row. Within a document that is the distance of the positions,
    # and other documents are hidden already.
    sliding = full.masked_fill(order[:, None] - order >= window, lowest)
    return {"full_attention": full, "sliding_attention": sliding} if mixed else sliding
