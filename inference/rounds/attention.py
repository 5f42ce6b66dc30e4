"""Attention of tree nodes, or of a prompt, over a `TreeCache`.

Shapes: B rows of a batch, N positions of one forward pass, G attention heads, Gkv key-value heads,
E size of an attention head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...heads.layers import Attend
from ..kernels import operators
from .cache import Window

FEW = 256  # positions of one forward pass for which heads of the same keys are folded
KERNEL_FEW = 64  # nodes of a drafter that its kernel is tried with; it holds scratch for each


def attention_of_nodes(
    window: Window, visible: Tensor | None, undecided: int, kernel: bool
) -> Attend:
    """Return the attention of a drafter's layers for the nodes that a `window` is open for.

    They are the last of U `undecided` slots, and see every committed slot, and the undecided ones
    for which `visible` `[1 | B, N, U]` bool is true; None: all. With `kernel` few nodes are run by
    draftsmith's own kernel, which reads nothing but the slots in use. The function is that of
    `attention_over`.
    """
    kernel = kernel and window.count <= KERNEL_FEW
    if visible is None and (kernel or not window.cache.uniform):
        shape = 1, window.count, undecided
        visible = torch.ones(shape, dtype=torch.bool, device=window.cache.device)
    if kernel:
        assert visible is not None
        return _by_kernel(window, visible)
    # Equally long rows that see every slot need no mask. Of rows of different lengths the shorter
    # ones must not see the slots after their own.
    see = None if visible is None else visible_slots(visible, window)[:, None]
    return attention_over(window, see)


def _by_kernel(window: Window, visible: Tensor) -> Attend:
    cache = window.cache
    depths = torch.zeros(1, visible.shape[1], dtype=torch.long, device=visible.device)

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
        state = cache.states[layer]
        return operators.attend(
            queries.contiguous(), state.keys, state.values, cache.starts(), visible, depths, 0, 0
        )

    return attend


def visible_slots(visible: Tensor, window: Window) -> Tensor:
    """Return `[1 | B, N, width]` bool: the cache slots that each of N positions sees.

    All positions see all committed slots. `visible` `[1 | B, N, U]` bool says which of the U
    undecided slots, these N included, each position sees. `width` is that of the `window` of the
    pass. The first axis is 1 if the rows are equally long and `visible` has one row.
    """
    starts, width = window.cache.row_starts(), window.width
    # Index of each slot among the undecided ones; negative: the slot is committed. Example: 5
    # committed and 2 undecided slots of a width of 8 have the indices -5 .. -1, 0, 1 and 2, of
    # which the last is out of use.
    undecided_index = torch.arange(width, device=visible.device)[None] - starts[:, None]
    undecided = visible.shape[-1]
    batch = max(len(undecided_index), len(visible))
    # Slots outside of the undecided ones read a clamped entry, which the last line replaces: true
    # for committed slots, false for slots that nothing has written.
    clamped = undecided_index.clamp(0, undecided - 1)
    index = clamped[:, None].expand(batch, visible.shape[1], width)
    see = visible.expand(batch, -1, -1).gather(2, index)
    return (undecided_index < 0)[:, None] | (see & (undecided_index < undecided)[:, None])


def attention_over(window: Window, mask: Tensor | None, causal: bool = False) -> Attend:
    """Return the attention of decoder layers of a pass with this `window`.

    The function takes a layer's index, queries `[B, N, G, E]`, keys and values `[B, N, Gkv, E]`;
    it writes keys and values into the window, and returns `[B, N, G * E]`. `mask`
    `[1 | B, 1, N, slots]` is true where a query sees a slot, or is added to the scores; None: every
    query sees every slot, or with `causal` those up to its own, where the N positions are the last.
    """
    folded_masks: dict[int, Tensor | None] = {}

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, shared = queries.shape[1], queries.shape[2] // keys.shape[2]
        # Caches and torch's attention want the axis of the heads before that of the positions.
        keys, values = window.update(keys.transpose(1, 2), values.transpose(1, 2), layer)
        if count > FEW or (causal and count > 1):
            return _of_a_prompt(queries.transpose(1, 2), keys, values, mask, causal)
        # Attention head g reads key-value head g // shared. Heads of the same keys become rows of
        # one head, so that no kernel copies keys: queries [B, Gkv, shared * N, E]. The mask grows
        # with them, which is why prompts are not folded.
        folded = queries.unflatten(2, (-1, shared)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if shared not in folded_masks:
            repeated = None if mask is None else mask.repeat(1, 1, shared, 1)
            if repeated is not None and queries.device.type == "cuda":
                repeated = aligned(repeated, queries.dtype)
            folded_masks[shared] = repeated
        attended = scaled_dot_product_attention(
            folded, keys, values, attn_mask=folded_masks[shared]
        )
        return attended.unflatten(2, (shared, count)).permute(0, 3, 1, 2, 4).flatten(2)

    return attend


def aligned(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `mask` `[..., slots]` as an additive one whose rows begin at multiples of 16 bytes.

    CUDA kernels want that, and a type as the queries'. torch would convert and pad the mask
    otherwise, in each layer again.
    """
    slots = mask.shape[-1]
    padded = torch.zeros(*mask.shape[:-1], slots + -slots % 8, dtype=dtype, device=mask.device)
    inner = padded[..., :slots]
    if mask.dtype == torch.bool:
        return inner.masked_fill_(~mask, torch.finfo(dtype).min)
    return inner.copy_(mask)


def _of_a_prompt(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool
) -> Tensor:
    """Return attention `[B, N, G * E]` of queries `[B, G, N, E]` to keys `[B, Gkv, slots, E]`."""
    shared, count, slots = queries.shape[1] // keys.shape[1], queries.shape[2], keys.shape[2]
    if causal and slots > count:
        # torch's own causal mask aligns the first query with the first key. Here the last ones
        # belong together: of 5 slots the first of 2 queries sees 4.
        mask = torch.ones(count, slots, dtype=torch.bool, device=keys.device).tril(slots - count)
        causal = False
    if shared > 1 and mask is not None and keys.device.type == "cuda":
        # On CUDA, grouped heads with a mask would fall back to a kernel that holds all scores.
        # Two key-value heads for four attention heads become 0, 0, 1, 1.
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        shared = 1
    attended = scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=shared > 1
    )
    return attended.transpose(1, 2).flatten(2)
