"""Blocks of drafts at many anchors of a text at once, each run as decoding runs it from that root.

A block is what DFlash (arXiv 2602.06036) and DSpark draft in one pass. The block of anchor a sees
the context before a in its own document, and its own slots. It sees neither the feature of a, which
does not exist while a is the root, nor any other block. Anchors are drawn again for every row that
training sees.

Example: a document from position 0 on, anchors 2 and 3, two slots a block; x marks what the slots
of each block attend to. A block has no causal mask: each slot sees all slots of its block.

                        context       anchor 2   anchor 3
                        0  1  2  3    slots 0 1  slots 0 1
    anchor 2, slot 0    x  x                x x
              slot 1    x  x                x x
    anchor 3, slot 0    x  x  x                        x x
              slot 1    x  x  x                        x x

Shapes: B packed rows, S positions, Sa anchors of a packed row, b slots of a block, D drafts of a
block, G attention heads, Gkv key-value heads, E head size, H hidden size, N keys that a group of
blocks may see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...heads.dflash import DFlashDrafter, Pair
from ...inference.rounds.attention import aligned
from ...inference.rounds.device import send
from ..config import Memory
from ..data.batches import Batch
from .backends import Backend, backend_for, block_mask, bucket, flex_for
from .memory import recomputing

GROUP_ROWS = 128  # rows of blocks that share one slice of the context, at most


@dataclass
class Anchors:
    """Positions of blocks and weights of their drafts.

    Both are on the CPU: masks are data there, so nothing that follows from them waits for a device.
    """

    places: Tensor
    """[B, Sa]: positions, ascending in each row; anchors left over repeat the last one."""
    weights: Tensor
    """[B, Sa, D]: R(a .. a + d) (docs/notation.md#positions), 1 where draft d is reached through
    tokens that the target wrote; 0 for all drafts of an anchor that is left over."""

    @classmethod
    def drawn(cls, batch: Batch, count: int, drafts: int, seed: int) -> Anchors:
        """Draw `count` roots in each row, uniformly among those with a reply token to draft.

        None is drawn twice; a row with fewer roots leaves anchors over, which keep the shapes fixed
        and have no weight: with the roots 1, 3 and 4 and `count` 5 the anchors are 1 3 4 4 4. The
        draw is a pure function of seed and the row's place in the data, not of the ranks:
        `BlockObjective` draws twice for one batch and has to get the same.
        """
        # R(a .. a + 1): the target wrote the root and the token that the first draft is about.
        valid = batch.reply_run(0, 1)
        rows, length = valid.shape
        # The positions with the smallest of random keys in [0, 1) are a uniform draw without
        # repetition. The key 2 comes after all of them: no root. A row may have fewer positions
        # than anchors are asked for.
        keys = torch.full((rows, max(length, count)), 2.0)
        for row, number in enumerate(batch.numbers):
            # Runs whose seeds differ by one share a draw only at rows that are a million apart.
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            keys[row, :length] = torch.rand(length, generator=generator)
        keys[:, :length].masked_fill_(~valid, 2.0)
        best_keys, positions = keys.topk(count, largest=False)
        # Anchors without a root get position S, so that sorting moves them to the end, and then
        # the last root of their row, or 0 in a row that has none.
        positions = torch.where(best_keys < 2, positions, length).sort(dim=-1).values
        is_root = positions < length
        last_root = torch.where(is_root, positions, 0).amax(-1, keepdim=True)
        positions = torch.where(is_root, positions, last_root)
        runs = [batch.reply_run(0, d).gather(1, positions) for d in range(1, drafts + 1)]
        # An anchor left over repeats a root, whose drafts must not count twice.
        return cls(positions, torch.stack(runs, dim=-1).float() * is_root[..., None])

    def drafts(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the R blocks with weight and what they learn, of the rows `ids` `[B, S]`.

        They are the blocks `[R]`, as indices into those of all rows end to end; the positions of
        their teachers, a .. a + D - 1, `[R, D]`, as indices into all rows end to end; their text
        x[a] .. x[a+D] `[R, D + 1]`; their weights `[R, D]`. All are on the CPU, where the number R
        is known without waiting. A draft without weight has an arbitrary teacher and label.
        """
        # Weights only fall within a block, so a block whose first draft has none has none at all.
        blocks = self.weights[..., 0].flatten().nonzero()[:, 0]
        steps = torch.arange(self.weights.shape[-1] + 1)
        ahead = (self.places[..., None] + steps).clamp(max=ids.shape[1] - 1)
        row_starts = torch.arange(0, ids.numel(), ids.shape[1])[:, None, None]
        ahead = (row_starts + ahead).flatten(0, 1)[blocks]
        return blocks, ahead[:, :-1], ids.flatten()[ahead], self.weights.flatten(0, 1)[blocks]


class BlockAttention:
    """Attention of blocks' rows over the context before their anchors and over their own block.

    An object serves all layers of one batch, for which it makes its masks once. Backends (see
    `backends.py`): sdpa runs groups of neighbouring blocks through torch's own attention with a
    dense mask, over a copy of the context up to the last anchor of the group. flex is FlexAttention
    with a block mask.
    """

    def __init__(
        self,
        batch: Batch,
        places: Tensor,
        size: int,
        device: torch.device,
        backend: Backend = "auto",
    ) -> None:
        """`places` `[B, Sa]` are the anchors, on the CPU; `size` is the number of slots a block."""
        self._backend: Backend = backend
        self._places, self._size, self._device = places, size, device
        # Where each anchor's document begins: at 5 for an anchor at 7 of the row that has position
        # 2 in its document.
        self._first = places - batch.positions.gather(1, places)
        self._groups: list[_Group] | None = None
        self._block_mask: Any = None

    def __call__(self, queries: Tensor, context: Pair, own: Pair) -> Tensor:
        """Return what the blocks' rows read, `[B, G, Sa * b, E]`, of queries of that shape.

        `context` are keys and values of the text `[B, Gkv, S, E]`, `own` those of the blocks'
        rows `[B, Gkv, Sa * b, E]`. Slot j of the block at anchor number i is row i * b + j.
        """
        backend = backend_for(self._backend, self._device, queries.shape[-1], queries.dtype)
        run = self._flex if backend == "flex" else self._sdpa
        return run(queries, context, own)

    def _sdpa(self, queries: Tensor, context: Pair, own: Pair) -> Tensor:
        """Return the output by torch's own attention, group by group of blocks."""
        shared = queries.shape[1] // own[0].shape[1]
        context_keys, context_values = (x.repeat_interleave(shared, dim=1) for x in context)
        own_keys, own_values = (x.repeat_interleave(shared, dim=1) for x in own)
        outputs = []
        for group in self._in_groups(queries.dtype):
            rows = slice(group.start * self._size, group.end * self._size)
            before = slice(group.first, group.last)
            keys = torch.cat([context_keys[:, :, before], own_keys[:, :, rows]], dim=2)
            values = torch.cat([context_values[:, :, before], own_values[:, :, rows]], dim=2)
            group_output = functional.scaled_dot_product_attention(
                queries[:, :, rows], keys, values, attn_mask=group.mask
            )
            outputs.append(group_output)
        return torch.cat(outputs, dim=2)

    def _in_groups(self, dtype: torch.dtype) -> list[_Group]:
        """Return groups of neighbouring blocks with their masks, made at the first call.

        Anchors ascend, so neighbours see nearly the same context, and little of a group's slice of
        the context is masked.
        """
        if self._groups is None:
            # Blocks of a group, one at least where blocks are longer than `GROUP_ROWS`.
            count, self._groups = max(GROUP_ROWS // self._size, 1), []
            all_anchors, all_firsts = (send(x, self._device) for x in (self._places, self._first))
            for start in range(0, self._places.shape[1], count):
                end = min(start + count, self._places.shape[1])
                # `last` is excluded: no block sees the feature of its own anchor.
                first = int(self._first[:, start:end].min())
                last = int(self._places[:, start:end].max())
                anchors, firsts = all_anchors[:, start:end, None], all_firsts[:, start:end, None]
                # The slice is one for all packed rows; the mask cuts it for each row.
                positions = torch.arange(first, last, device=self._device)
                before = (positions >= firsts) & (positions < anchors)
                before = before.repeat_interleave(self._size, dim=1)
                # With two blocks of two slots 1 1 0 0 / 1 1 0 0 / 0 0 1 1 / 0 0 1 1.
                block = torch.arange(before.shape[1], device=self._device) // self._size
                same_block = (block[:, None] == block).expand(len(before), -1, -1)
                visible = torch.cat([before, same_block], dim=-1)
                mask = aligned(visible, dtype)[:, None]
                self._groups.append(_Group(start, end, first, last, mask))
        return self._groups

    def _flex(self, queries: Tensor, context: Pair, own: Pair) -> Tensor:
        """Return the output by FlexAttention over the context, padded, and all blocks."""
        length = context[0].shape[2]
        # Every width is compiled once. The padding lies between context and blocks, where the mask
        # lets no row see it: a row sees keys before its anchor, which is before `length`.
        width = bucket(length) if queries.device.type == "cuda" else length
        padded_context = (functional.pad(x, (0, 0, 0, width - length)) for x in context)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(padded_context, own, strict=True))
        return flex_for(queries.device)(
            queries,
            keys,
            values,
            block_mask=self._flex_mask(width),
            # it shares key-value heads itself, without copies
            enable_gqa=queries.shape[1] != keys.shape[1],
        )

    def _flex_mask(self, length: int) -> Any:
        """Return the block mask for a context padded to `length`, made at the first call."""
        if self._block_mask is None:
            anchors, firsts = (send(x, self._device) for x in (self._places, self._first))
            size, rows = self._size, self._places.shape[1] * self._size

            def visible(b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
                # Keys are the context, 0 .. length - 1, and then the blocks' own rows: with a
                # context of 128 and blocks of 4, key 133 is row 5, in block 1.
                block = row // size
                before = (key < anchors[b, block]) & (key >= firsts[b, block])
                return before | ((key >= length) & ((key - length) // size == block))

            keys = length + rows
            self._block_mask = block_mask(visible, len(anchors), rows, keys, self._device)
        return self._block_mask


@dataclass
class _Group:
    """Blocks `start` .. `end - 1`, which see nothing of the context outside `first` .. `last - 1`.

    `mask` `[B, 1, (end - start) * b, N]` is added to the scores; the N keys are the context's slice
    and then the rows of these blocks.
    """

    start: int
    end: int
    first: int
    last: int
    mask: Tensor


def contexts(drafter: DFlashDrafter, batch: Batch, taps: tuple[Tensor, ...]) -> list[Pair]:
    """Return each layer's keys and values `[B, Gkv, S, E]` of whole texts, for all their blocks.

    `taps` are the target's features `[B, S, H]`.
    """
    fused = drafter.fuse(taps)
    pairs = drafter.context(fused, drafter.rotary(send(batch.positions, fused.device)))
    return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in pairs]


def run_blocks(
    drafter: DFlashDrafter,
    batch: Batch,
    places: Tensor,
    context: list[Pair],
    backend: Backend = "auto",
    memory: Memory | None = None,
) -> Tensor:
    """Return the layers' output `[B, Sa, D, H]` for the slots that draft, of blocks at `places`.

    `places` `[B, Sa]` are anchors, on the CPU; `context` is what `contexts` returns. With
    `memory.recompute` only the states between the layers are kept for the backward pass.
    """
    device, size = context[0][0].device, drafter.shape.block_size
    attention = BlockAttention(batch, places, size, device, backend)
    state = drafter.embed(send(batch.ids.gather(1, places), device))
    # Slot j is at a + j, counted within the anchor's document.
    positions = batch.positions.gather(1, places)[..., None] + torch.arange(size)
    cosines, sines = drafter.rotary(send(positions.flatten(1), device))

    def step(index: int, state: Tensor, cosines: Tensor, sines: Tensor, *pair: Tensor) -> Tensor:
        """Return the output of layer `index`, whose context has the keys and values `pair`."""

        def attend(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
            read = attention(queries, (pair[0], pair[1]), (keys, values))
            return read.transpose(1, 2).flatten(2)

        return drafter.layer(index, state, (cosines, sines), attend)

    # The context's states are arguments because arguments are what `recomputing` keeps of a layer.
    run = recomputing(step) if memory and memory.recompute else step
    for index, pair in enumerate(context):
        state = run(index, state, cosines, sines, *pair)
    # DFlash's slot 0 holds the anchor's own token and drafts nothing; DSpark's drafts (first_slot).
    return state.unflatten(1, (-1, size))[:, :, drafter.first_slot :]
