"""Masks of forward passes, which are made here, and not in transformers.

Shapes: B rows, N positions of one forward pass, U undecided slots of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..rounds.cache import TreeCache, visible_slots
from ..rounds.tree import Pass


def with_replies(starts: Sequence[int], count: int) -> Pass:
    """Return the layout of whole texts `[B, count]`, whose replies begin at `starts`."""
    return Pass(written=torch.arange(count) >= torch.tensor(starts)[:, None])


def packed_mask(positions: Tensor, dtype: torch.dtype, window: int | None, mixed: bool) -> Any:
    """Return the mask `[B, 1, S, S]` of packed rows: causal, and no document sees another.

    The mask is additive (0 = visible) and has `dtype`. A document begins wherever `positions`
    `[B, S]` do not go on by one. `window` is that of a model with sliding layers, which see only
    keys less than so many positions back; None for a model without. A `mixed` model has both kinds
    of layers and takes a dict with a mask for each, under transformers' names.
    """
    begins = functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
    # Example: positions 0 1 2 0 1 begin a document at index 3 and have the documents 0 0 0 1 1.
    document = begins.cumsum(-1)
    order = torch.arange(positions.shape[1], device=positions.device)
    see = (document[:, :, None] == document[:, None, :]) & (order[:, None] >= order)
    full = _additive(see, dtype)
    if window is None:
        return full
    # `order` counts along the packed row. Within a document that is the distance of the positions,
    # and other documents are hidden already.
    return _by_kind(full, order[:, None] - order >= window, mixed)


def _additive(see: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask `[B, 1, N, slots]` that hides what `see` `[B, N, slots]` is false for."""
    full = torch.zeros(see.shape, dtype=dtype, device=see.device)
    # In place, since a packed row has S * S numbers; the least one, as in transformers' own masks.
    return full.masked_fill_(~see, torch.finfo(dtype).min)[:, None]


def _by_kind(full: Tensor, far: Tensor, mixed: bool) -> Any:
    """Return the masks for layers that see all, and for sliding ones, which do not see `far`."""
    sliding = full.masked_fill(far, torch.finfo(full.dtype).min)
    return {"full_attention": full, "sliding_attention": sliding} if mixed else sliding


def tree_mask(
    tree: Pass,
    positions: Tensor,
    cache: TreeCache,
    *,
    dtype: torch.dtype,
    window: int | None,
    mixed: bool,
) -> Any:
    """Return the mask `[1 | B, 1, N, slots]` of tree nodes at `positions` `[1 | B, N]`.

    `window` and `mixed` are as in `packed_mask`. The mask is additive, since every attention
    implementation that takes a 4D mask takes an additive one.
    """
    visible = tree.visible
    slot_depths = tree.undecided_depths
    count = positions.shape[1]
    width, undecided = cache.seen(count), slot_depths.shape[1]
    if visible is None:
        visible = torch.ones(1, count, undecided, dtype=torch.bool, device=positions.device)
    if cache.uniform and window is None:
        # Equally long rows have the tree in the same columns: `visible` has one for every undecided
        # slot, those of earlier passes too. All before it is committed, hence visible (0).
        return functional.pad(_additive(visible, dtype), (cache.longest, 0))
    full = _additive(visible_slots(visible, cache, width), dtype)
    if window is None:
        return full
    starts = cache.row_starts()
    slots = torch.arange(width, device=visible.device)[None]
    undecided_index = slots - starts[:, None]  # negative: the slot is committed
    # Slots outside of the undecided ones have no depth. What they read is replaced (committed
    # slots) or hidden in `full` already (slots after the tree).
    clamped = undecided_index.clamp(0, undecided - 1)
    batch = len(full)
    depths = slot_depths.expand(batch, -1).gather(1, clamped.expand(batch, -1))
    # A window counts positions: a committed slot's number is its position, while an undecided
    # one is at its depth, which siblings share.
    key_positions = torch.where(undecided_index < 0, slots, starts[:, None] + depths)
    # Example: with a window of 4 the node at position 9 sees the positions 6 to 9.
    near = positions[..., None] - key_positions[:, None] < window
    return _by_kind(full, ~near[:, None], mixed)
