"""The cache of a running batch: preallocated, rows of different lengths, takes whole draft trees,
keeps the accepted paths.

Shapes: B batch, G key-value heads, C capacity, D head size, N positions of one forward, A accepted
positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from ..heads.errors import UserError
from .device import send


class TreeCache(Cache):
    """Keys and values of `lengths[b]` committed positions of each row b, followed by `staged` ones
    that are not decided yet.

    A forward writes its N positions after those. `stage` keeps them for the next forward without
    committing (a drafter that runs its own tree); `commit` keeps the accepted path and drops the
    rest. What is dropped is simply overwritten, so nothing is ever shifted or padded: slot =
    position for all that is committed.

    `static` gives attention the whole buffer in every forward over a tree, so that shapes never
    change (compilation, CUDA graphs); otherwise it sees only the slots in use, which is less work.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        limit: int | None = None,
        static: bool = False,
    ):
        super().__init__(layers=[])
        self.capacity = capacity
        self.limit = limit
        self.static = static
        self.device = torch.device(device)
        self._lengths = [0] * batch
        self._lengths_there: Tensor | None = None
        self.staged = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        # [B, N], what the next forward writes; None: the same slots in every row
        self._slots: Tensor | None = None
        self._start = 0
        self._whole = False

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> list[int]:
        """Committed positions of each row."""
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._lengths, self._lengths_there = lengths, None

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def uniform(self) -> bool:
        return self.longest == min(self.lengths)

    def starts(self) -> Tensor:
        """Lengths as a tensor `[B]`."""
        if self._lengths_there is None:
            self._lengths_there = send(self._lengths, self.device)
        return self._lengths_there

    def seen(self, count: int) -> int:
        """How many slots attention is given in a forward of `count` positions."""
        return self.capacity if self.static else self.longest + self.staged + count

    def open(self, count: int, masked: bool) -> None:
        """Make room for a forward of `count` positions, and settle where it writes. Slots out of
        use are hidden only if `masked`."""
        self.reserve(self.longest + self.staged + count)
        self._start = self.longest + self.staged
        self._whole = self.static and masked
        if self.uniform and not self._whole:
            self._slots = None
        else:
            self._slots = (
                self.starts()[:, None] + self.staged + torch.arange(count, device=self.device)
            )

    def reserve(self, needed: int) -> None:
        """Grow to at least `needed` slots, by doubling. Raises `UserError` beyond `limit`."""
        if needed <= self.capacity:
            return
        if self.limit is not None and needed > self.limit:
            raise UserError(
                f"a cache for {self.limit} positions was asked to hold {needed}; shorten the "
                "prompt or the reply"
            )
        grown = max(needed, 2 * self.capacity)
        self.capacity = grown if self.limit is None else min(grown, self.limit)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                buffers[layer] = self._allocate(old)
                buffers[layer][:, :, : old.shape[2]] = old

    def _allocate(self, like: Tensor) -> Tensor:
        batch, heads, _, size = like.shape
        buffer = like.new_zeros(batch, heads, self.capacity, size)
        if self.static:
            torch._dynamo.mark_static_address(buffer)  # a captured graph may write it in place
        return buffer

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, G, N, D]` where `open` said; return the slots that attention sees."""
        if layer_idx == len(self.keys):
            self.keys.append(self._allocate(key_states))
            self.values.append(self._allocate(value_states))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        count = key_states.shape[-2]
        if self._slots is None:
            end = self._start + count
            keys[:, :, self._start : end] = key_states
            values[:, :, self._start : end] = value_states
            return keys[:, :, :end], values[:, :, :end]
        for buffer, states in ((keys, key_states), (values, value_states)):
            buffer.scatter_(2, self._slots[:, None, :, None].expand_as(states), states)
        if self._whole:
            return keys, values
        end = self._start + count
        return keys[:, :, :end], values[:, :, :end]

    def stage(self, count: int) -> None:
        """Keep the `count` positions just written, undecided."""
        self.staged += count

    def commit(self, counts: Sequence[int], places: Tensor | None = None) -> None:
        """Keep `counts[b]` undecided positions of each row, drop the others.

        `places` `[B, A]`: which ones, ascending (what stands past a row's own count does not
        matter); without it the first ones, which are in place already: a chain costs nothing.
        """
        if places is not None and places.shape[1]:
            goal = torch.arange(places.shape[1], device=self.device)[None] + self.starts()[:, None]
            self._move(places.clamp(min=0) + self.starts()[:, None], goal)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.staged = 0

    def _move(self, source: Tensor, goal: Tensor) -> None:
        """Copy slots `[B, A]` to slots `[B, A]`, in every layer."""
        if len(source) == 1:
            first, last = self.lengths[0], self.lengths[0] + source.shape[1]
            for buffer in (*self.keys, *self.values):
                buffer[:, :, first:last] = buffer.index_select(2, source[0])
            return
        for buffer in (*self.keys, *self.values):
            shape = (-1, buffer.shape[1], -1, buffer.shape[3])
            moved = buffer.gather(2, source[:, None, :, None].expand(shape))
            buffer.scatter_(2, goal[:, None, :, None].expand(shape), moved)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every batch row but `rows`."""
        index = send(rows, self.device)
        self.lengths = [self.lengths[row] for row in rows]
        for buffers in (self.keys, self.values):
            buffers[:] = [buffer.index_select(0, index) for buffer in buffers]
            if self.static:
                for buffer in buffers:
                    torch._dynamo.mark_static_address(buffer)

    # What transformers asks of a cache. It asks only where nobody gave positions and a mask, which
    # is a prompt's prefill.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest + self.staged

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._start + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity


def visible_slots(visible: Tensor, cache: TreeCache, width: int) -> Tensor:
    """`[1 | B, N, width]` bool: which slots N positions see: all committed ones, and of the T
    undecided ones what `visible` `[1 | B, N, T]` says."""
    starts = cache.starts()[:1] if cache.uniform else cache.starts()
    # place among the undecided; negative: committed
    beyond = torch.arange(width, device=visible.device)[None] - starts[:, None]
    undecided = visible.shape[-1]
    batch = max(len(beyond), len(visible))
    index = beyond.clamp(0, undecided - 1)[:, None].expand(batch, visible.shape[1], width)
    see = visible.expand(batch, -1, -1).gather(2, index)
    return (beyond < 0)[:, None] | (see & (beyond < undecided)[:, None])
