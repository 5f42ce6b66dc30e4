"""Blocks of drafts at many anchors of a text at once, each as decoding would run it from that root
(DFlash, arXiv 2602.06036).

The block of anchor a sees the context before a in its own document, and itself: not the anchor's
own feature, which does not exist when a is the root, and no other block. Anchors are drawn anew for
every row that training sees.

Shapes: B packed rows, S positions, A anchors a row, b slots of a block, D drafts of a block, G
heads, E head size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...heads.dflash import DFlashDrafter, Pair
from ..data.batches import Batch
from ..memory import Memory, recomputing
from .unroll import Backend, bucket, flex_for

GROUP_ROWS = 128  # rows of blocks that share one slice of the context, at most


@dataclass
class Anchors:
    """Where blocks stand, on the CPU: masks are data, so what is derived from them waits for no
    device."""

    places: Tensor
    """[B, A]: positions, ascending in each row; what is left over repeats the last one."""
    weights: Tensor
    """[B, A, D]: 1 where the draft about the d-th token after the anchor is reached through tokens
    that the target wrote."""

    @classmethod
    def drawn(cls, batch: Batch, count: int, drafts: int, seed: int) -> Anchors:
        """`count` roots in each row, uniformly among those with a reply token to draft, none twice;
        a pure function of seed and the row's place in the data, whatever the ranks."""
        valid = batch.reply_run(0, 1)
        keys = torch.full(valid.shape, 2.0)
        for row, number in enumerate(batch.numbers):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            keys[row] = torch.rand(valid.shape[1], generator=generator)
        keys = torch.where(valid, keys, 2.0)
        best, places = keys.topk(min(count, keys.shape[1]), largest=False)
        kept = functional.pad(best < 2, (0, count - best.shape[1]))
        beyond = torch.where(
            kept, functional.pad(places, (0, count - best.shape[1])), batch.ids.shape[1]
        )
        places = beyond.sort(dim=-1).values
        kept = places < batch.ids.shape[1]
        places = torch.where(kept, places, torch.where(kept, places, 0).amax(-1, keepdim=True))
        return cls(places, runs_at(batch, places, drafts) * kept[..., None])

    def ahead(self, row: Tensor, device: torch.device, places: int) -> Tensor:
        """`[B, A, D]`: what `row` `[B, S]` holds at a + places + 0 .. D - 1; the last one past the
        end."""
        steps = torch.arange(places, places + self.weights.shape[-1])
        index = (self.places[..., None] + steps).clamp(max=row.shape[1] - 1).to(row.device)
        return row.gather(1, index.flatten(1)).view(index.shape).to(device, non_blocking=True)


def runs_at(batch: Batch, places: Tensor, drafts: int) -> Tensor:
    """R(a .. a + d) of drafter-recipes 0.2 `[B, A, D]`, d = 1 .. D: also false where a turn or a
    document has ended before."""
    runs = [batch.reply_run(0, d).gather(1, places) for d in range(1, drafts + 1)]
    return torch.stack(runs, dim=-1).float()


class BlockAttention:
    """Attention of the blocks' rows over the context before their anchors and over their own block,
    for one batch.

    sdpa (auto on a CPU): groups of neighbouring blocks through torch's own attention with a dense
    mask, over the context up to the last anchor of the group, of which each keeps a copy. flex
    (auto on a GPU): FlexAttention with a block mask; no gradients on a CPU. plain: one block after
    another, which the others are tested against.
    """

    def __init__(
        self,
        batch: Batch,
        places: Tensor,
        size: int,
        device: torch.device,
        backend: Backend = "auto",
    ) -> None:
        """`places` `[B, A]` on the CPU, `size` slots a block."""
        self.backend = (
            ("flex" if device.type == "cuda" else "sdpa") if backend == "auto" else backend
        )
        self._places, self._size, self._device = places, size, device
        # where each anchor's document begins
        self._first = places - batch.positions.gather(1, places)
        self._groups: list[_Group] | None = None
        self._block_mask: Any = None

    def __call__(self, queries: Tensor, context: Pair, own: Pair) -> Tensor:
        """`queries` `[B, G, A * b, E]`; keys and values of the context `[B, Gkv, S, E]`, of the
        blocks `[B, Gkv, A * b, E]`."""
        run = {"sdpa": self._sdpa, "flex": self._flex, "plain": self._plain}[self.backend]
        return run(queries, context, own)

    def _plain(self, queries: Tensor, context: Pair, own: Pair) -> Tensor:
        found = torch.zeros_like(queries)
        heads = queries.shape[1] // own[0].shape[1]
        for row, places in enumerate(self._places.tolist()):
            for block, place in enumerate(places):
                mine = slice(block * self._size, (block + 1) * self._size)
                before = slice(int(self._first[row, block]), place)
                keys, values = (
                    torch.cat([c[row, :, before], o[row, :, mine]], dim=1).repeat_interleave(
                        heads, dim=0
                    )
                    for c, o in zip(context, own, strict=True)
                )
                scores = queries[row, :, mine] @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
                found[row, :, mine] = scores.softmax(-1) @ values
        return found

    def _sdpa(self, queries: Tensor, context: Pair, own: Pair) -> Tensor:
        shared = queries.shape[1] // own[0].shape[1]
        repeated = [[x.repeat_interleave(shared, dim=1) for x in pair] for pair in (context, own)]
        found = []
        for group in self._in_groups():
            rows = slice(group.start * self._size, group.end * self._size)
            keys, values = (
                torch.cat([c[:, :, group.first : group.last], o[:, :, rows]], dim=2)
                for c, o in zip(*repeated, strict=True)
            )
            found.append(
                functional.scaled_dot_product_attention(
                    queries[:, :, rows], keys, values, attn_mask=group.visible[:, None]
                )
            )
        return torch.cat(found, dim=2)

    def _in_groups(self) -> list[_Group]:
        """Anchors ascend, so a group of neighbours sees little of the context that it may not
        see."""
        if self._groups is None:
            count, self._groups = max(GROUP_ROWS // self._size, 1), []
            for start in range(0, self._places.shape[1], count):
                end = min(start + count, self._places.shape[1])
                places, firsts = self._places[:, start:end, None], self._first[:, start:end, None]
                first, last = int(firsts.min()), int(places.max())
                at = torch.arange(first, last)
                context = ((at >= firsts) & (at < places)).repeat_interleave(self._size, dim=1)
                own = (
                    torch.eye(end - start, dtype=torch.bool)
                    .repeat_interleave(self._size, 0)
                    .repeat_interleave(self._size, 1)
                )
                visible = torch.cat([context, own.expand(len(context), -1, -1)], dim=-1)
                self._groups.append(
                    _Group(start, end, first, last, visible.to(self._device, non_blocking=True))
                )
        return self._groups

    def _flex(self, queries: Tensor, context: Pair, own: Pair) -> Tensor:
        length = context[0].shape[2]
        # every width is compiled once
        width = bucket(length) if queries.device.type == "cuda" else length
        wide = (functional.pad(x, (0, 0, 0, width - length)) for x in context)
        keys, values = (torch.cat(parts, dim=2) for parts in zip(wide, own, strict=True))
        return flex_for(queries.device)(
            queries,
            keys,
            values,
            block_mask=self._flex_mask(width),
            enable_gqa=queries.shape[1] != keys.shape[1],
        )

    def _flex_mask(self, length: int) -> Any:
        if self._block_mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            places, firsts = self._places.to(self._device), self._first.to(self._device)
            size, rows = self._size, self._places.shape[1] * self._size

            def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
                block = row // size
                before = (key < places[b, block]) & (key >= firsts[b, block])
                return before | ((key >= length) & ((key - length) // size == block))

            make = (
                torch.compile(create_block_mask)
                if self._device.type == "cuda"
                else create_block_mask
            )
            self._block_mask = make(
                visible, len(places), None, rows, length + rows, device=str(self._device)
            )
        return self._block_mask


@dataclass
class _Group:
    """Blocks `start` .. `end`, which see the context from `first` to `last`; `visible` `[B, rows,
    keys]`."""

    start: int
    end: int
    first: int
    last: int
    visible: Tensor


def contexts(drafter: DFlashDrafter, batch: Batch, taps: tuple[Tensor, ...]) -> list[Pair]:
    """Each layer's keys and values `[B, Gkv, S, E]` of a whole text, from the target's features
    `[B, S, Ht]`."""
    fused = drafter.fuse(taps)
    found = drafter.context(
        fused, drafter.rotary(batch.positions.to(fused.device, non_blocking=True))
    )
    return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in found]


def run_blocks(
    drafter: DFlashDrafter,
    batch: Batch,
    places: Tensor,
    context: list[Pair],
    backend: Backend = "auto",
    memory: Memory | None = None,
) -> Tensor:
    """The layers' output `[B, A, D, H]` for the slots that draft, of blocks at `places` `[B, A]`
    (CPU).

    `context` as from `contexts`. `memory`: whether only the states between the layers are kept for
    the backward pass.
    """
    device, size = context[0][0].device, drafter.shape.block_size
    attention = BlockAttention(batch, places, size, device, backend)
    state = drafter.embed(batch.ids.gather(1, places).to(device, non_blocking=True))
    positions = batch.positions.gather(1, places)[..., None] + torch.arange(size)
    cosines, sines = drafter.rotary(positions.flatten(1).to(device, non_blocking=True))

    def step(index: int, state: Tensor, cosines: Tensor, sines: Tensor, *there: Tensor) -> Tensor:
        def attend(_: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
            return (
                attention(queries, (there[0], there[1]), (keys, values)).transpose(1, 2).flatten(2)
            )

        return drafter.layer(index, state, (cosines, sines), attend)

    run = recomputing(step, memory.offload) if memory and memory.recompute else step
    for index, pair in enumerate(context):
        state = run(index, state, cosines, sines, *pair)
    return state.unflatten(1, (-1, size))[:, :, drafter.first_slot :]
