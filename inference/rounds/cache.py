"""Key-value cache of a running batch, preallocated, for rows of different lengths and draft trees.

A round writes a whole draft tree behind the committed positions and keeps the accepted path only.

Shapes: B batch, N positions of one forward pass, A accepted nodes with the root, U undecided slots,
C capacity, Gkv key-value heads, E size of an attention head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache

from ...heads.errors import UserError
from .device import send


class TreeCache(Cache):
    """Cache of `lengths[b]` committed positions of each row b, followed by `staged` undecided ones.

    A forward pass writes its N positions behind both. `stage` leaves them undecided, so that the
    next forward pass stands behind them (a drafter that runs its own tree); `commit` keeps the
    accepted path and drops the rest. Dropped slots are simply overwritten later, so nothing is ever
    shifted or padded: slot and position are the same number for all that is committed.

    `static` gives attention the whole buffer in every forward pass over a tree, so that shapes
    never change (compilation, CUDA graphs). Otherwise attention gets only the slots in use, which
    is less work. Such a cache neither grows nor asks the host for anything once `commit` was given
    counts on the device: `lengths` are not known then, and only `starts` are. `limit` is the
    largest capacity that another cache may grow to; None sets no bound.
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        limit: int | None = None,
        static: bool = False,
    ):
        # transformers demands layers or a class for them. All storage is here, so there are none.
        super().__init__(layers=[])
        self.capacity = capacity
        self.limit = limit
        self.static = static
        self.device = torch.device(device)
        # None: known to the device only
        self._lengths: list[int] | None
        # `lengths` on the device; if None, made when it is first needed
        self._lengths_there: Tensor | None = None
        self.lengths = [0] * batch
        self.staged = 0
        # one buffer [B, Gkv, C, E] for each layer
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        # [B, N]: the slots that the next forward pass writes; None: the same slots in every row,
        # which begin at `_start`
        self._slots: Tensor | None = None
        self._start = 0
        # True if the next forward pass gives attention the whole buffer
        self._whole = False

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def lengths(self) -> list[int]:
        """Number of committed positions of each row, as far as the host knows them."""
        assert self._lengths is not None, "the device has counted what was committed"
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: list[int]) -> None:
        self._lengths = lengths
        if not self.static:
            self._lengths_there = None
            return
        # A static cache always has them there, so that a compiled function finds the same inputs,
        # and in one place, where a captured graph finds them.
        there = send(lengths, self.device)
        if self._lengths_there is not None and len(self._lengths_there) == len(lengths):
            self._lengths_there.copy_(there)
        else:
            self._lengths_there = there
            torch._dynamo.mark_static_address(there)

    @property
    def sizes(self) -> tuple[int, int | None, bool]:
        return self.capacity, self.limit, self.static

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def uniform(self) -> bool:
        """True if all rows are known to be equally long."""
        return self._lengths is not None and self.longest == min(self._lengths)

    def starts(self) -> Tensor:
        """Return `lengths` as a tensor `[B]` on the device."""
        if self._lengths_there is None:
            self._lengths_there = send(self.lengths, self.device)
        return self._lengths_there

    def row_starts(self) -> Tensor:
        """Return `starts`, or only the first of them `[1]` where all are equal."""
        # A static cache has the same shapes whether its rows are equally long or not.
        return self.starts()[:1] if not self.static and self.uniform else self.starts()

    def seen(self, count: int) -> int:
        """Return how many slots attention gets in a masked forward pass of `count` positions."""
        if not self.static:
            return self.longest + self.staged + count
        # Of the buffers, whose size a compiler was told to leave open; a number it would fix.
        return self.keys[0].shape[2] if self.keys else self.capacity

    def open(self, count: int, masked: bool) -> None:
        """Make space for a forward pass of `count` positions, and determine the slots it writes.

        `masked`: the caller passes an attention mask, which hides slots out of use. Without a mask
        (a prefill) attention gets the slots in use only, `static` or not.

        Raises `UserError` beyond `limit`.
        """
        self._whole = self.static and masked
        self._slots = None
        # Slices with Python numbers are cheapest, but they hold for equally long rows only, and a
        # compiled graph would be compiled again for every length. A tensor of slots is an input.
        if self._whole or not self.uniform:
            self._slots = (
                self.starts()[:, None] + self.staged + torch.arange(count, device=self.device)
            )
        if not self._whole:
            self.reserve(self.longest + self.staged + count)
            # Where the longest row goes on. Shorter ones go on earlier, each behind its own
            # positions, which `_slots` says.
            self._start = self.longest + self.staged

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
        """Return a zero buffer `[B, Gkv, C, E]` with batch, heads, size and dtype of `like`.

        Zeros matter: a slot that was never written is masked, and attention multiplies its value by
        a weight of 0, which would give NaN if the memory happened to hold NaN or infinity.
        """
        batch, heads, _, size = like.shape
        buffer = like.new_zeros(batch, heads, self.capacity, size)
        return self._marked(buffer)

    def _marked(self, buffer: Tensor) -> Tensor:
        """Tell a compiler about a buffer, and return it; copies of it have no marks."""
        if self.static:
            torch._dynamo.mark_static_address(buffer)  # a captured graph may write it in place
            # One function for all capacities. "maybe": a function that depends on it is compiled
            # for each of them.
            torch._dynamo.maybe_mark_dynamic(buffer, 2)
        return buffer

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[B, Gkv, N, E]` of a layer into the slots that `open` determined.

        Returns the keys and values of the slots that attention gets. transformers' attention layers
        call this; layers come in ascending order the first time.
        """
        # Only now are heads, size and dtype known; with a target over several devices also where
        # the layer lies, since the buffer is made like the keys.
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
        slots = self._slots_on(keys.device)
        for buffer, states in ((keys, key_states), (values, value_states)):
            _write(buffer, slots, states)
        # A captured graph wants the same shape at any length; the mask hides the slots out of use.
        if self._whole:
            return keys, values
        # Shorter rows are given slots behind their own ends too, which the mask hides.
        end = self._start + count
        return keys[:, :, :end], values[:, :, :end]

    def _slots_on(self, device: torch.device) -> Tensor:
        """Return the slots of this pass on `device`, where a layer of a spread target lies."""
        assert self._slots is not None
        if self._slots.device != device:
            self._slots = self._slots.to(device)  # the next layers mostly lie there too
        return self._slots

    def stage(self, count: int) -> None:
        """Leave the `count` positions just written undecided, in front of the next ones."""
        self.staged += count

    def commit(self, counts: Sequence[int] | Tensor, places: Tensor | None = None) -> None:
        """Commit `counts[b]` undecided positions of each row b, and drop the others.

        A static cache takes counts as a tensor `[B]` too, which are not brought to the host.

        `places` `[B, A]` are the indices of the positions to commit among the undecided ones,
        ascending; entries beyond a row's own count are ignored. Without it the first ones are
        committed. They are in their slots already, so that a chain costs no copy.
        """
        if places is not None and places.shape[1]:
            # The accepted positions close up behind the committed ones. Example: of 10 committed
            # positions and the places 0, 2, 5 the slots 10, 12, 15 are copied to 10, 11, 12.
            goal = torch.arange(places.shape[1], device=self.device)[None] + self.starts()[:, None]
            # Rows with fewer positions copy a few slots too many. Those lie behind the row's new
            # length, where the next forward pass writes.
            self._move(places.clamp(min=0) + self.starts()[:, None], goal)
        self.staged = 0
        if isinstance(counts, Tensor):
            # In place: a captured graph reads the same memory in every round.
            self.starts().add_(counts)
            self._lengths = None
            return
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def commit_chunk(
        self, start: int, width: int, counts: Sequence[int], counts_there: Tensor
    ) -> None:
        """Commit what each row has in a chunk of `width` positions, the first of which is `start`.

        `counts` are the positions of each row in all chunks, `counts_there` `[B]` the same on the
        device. Example: in chunks of 3, rows of 5 and 2 positions commit 3 and 2, then 2 and 0.
        What was written past that is overwritten later.
        """
        if self.static:
            self.commit((counts_there - start).clamp(0, width))
        else:
            self.commit([min(max(count - start, 0), width) for count in counts])

    def _move(self, source: Tensor, goal: Tensor) -> None:
        """Copy slots `source` `[B, A]` to slots `goal` `[B, A]`, in every layer.

        The two may overlap: `index_select` and `gather` copy everything before anything is written.
        """
        for buffer in (*self.keys, *self.values):
            source, goal = source.to(buffer.device), goal.to(buffer.device)
            if len(source) == 1:
                moved = buffer.index_select(2, source[0])
            else:
                shape = (-1, buffer.shape[1], -1, buffer.shape[3])
                moved = buffer.gather(2, source[:, None, :, None].expand(shape))
            _write(buffer, goal, moved)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every batch row but `rows`."""
        # `index_select` copies, so the memory of the rows that leave is freed.
        index = send(rows, self.device)
        if self._lengths is None:
            self._lengths_there = self.starts().index_select(0, index)
            torch._dynamo.mark_static_address(self._lengths_there)
        else:
            self.lengths = [self._lengths[row] for row in rows]
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):
                kept = buffer.index_select(0, index.to(buffer.device))
                buffers[layer] = self._marked(kept)

    # The interface of transformers' caches. A model calls these methods wherever it is given no
    # mask: in a prefill, and for a single node, which sees everything before it.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest + self.staged

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # Number of slots that attention gets, and the first of them.
        return self._start + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity


class KeptCache:
    """Static cache that the next batch of the same size uses again, at the same address.

    A captured graph reads and writes the addresses that it was captured with.
    """

    def __init__(self) -> None:
        self._cache: TreeCache | None = None

    def take(
        self,
        batch: int,
        capacity: int,
        device: torch.device,
        limit: int | None = None,
        static: bool = False,
    ) -> TreeCache:
        """Return an empty cache; arguments are those of `TreeCache`."""
        cache, self._cache = self._cache, None
        wanted = (batch, capacity, limit, static)
        if cache is not None and wanted == (len(cache.starts()), *cache.sizes):
            # Slots are hidden by a weight of 0, which would not hide NaN or infinity that a batch
            # with an overflow has left.
            for buffer in (*cache.keys, *cache.values):
                buffer.zero_()
            cache.lengths, cache.staged = [0] * batch, 0
            return cache
        return TreeCache(batch, capacity, device, limit, static)

    def put(self, cache: TreeCache) -> None:
        """Keep the cache of a batch that has ended, if it is static."""
        self._cache = cache if cache.static else None


def _write(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write `states` `[B, Gkv, N, E]` into the slots `[B, N]` of a buffer `[B, Gkv, C, E]`."""
    # Each row writes its own slots, the same for all heads and all numbers of a head. One row needs
    # no index for each number.
    if len(slots) == 1:
        buffer.index_copy_(2, slots[0], states)
    else:
        buffer.scatter_(2, slots[:, None, :, None].expand_as(states), states)


def visible_slots(visible: Tensor, cache: TreeCache, width: int) -> Tensor:
    """Return `[1 | B, N, width]` bool: the cache slots that each of N positions sees.

    All positions see all committed slots. `visible` `[1 | B, N, U]` bool says which of the U
    undecided slots, these N included, each position sees. `width` is the number of slots that
    attention gets. The first axis is 1 if the rows are equally long and `visible` has one row.
    """
    starts = cache.row_starts()
    # Index of each slot among the undecided ones; negative: the slot is committed. Example: 5
    # committed and 2 undecided slots of a width of 8 have the indices -5 .. -1, 0, 1 and 2, of
    # which the last is out of use.
    undecided_index = torch.arange(width, device=visible.device)[None] - starts[:, None]
    undecided = visible.shape[-1]
    batch = max(len(undecided_index), len(visible))
    # Slots outside of the undecided ones have no entry in `visible`. They read a clamped one, which
    # the last line replaces: true for committed slots, false for slots that nothing has written.
    clamped = undecided_index.clamp(0, undecided - 1)
    index = clamped[:, None].expand(batch, visible.shape[1], width)
    see = visible.expand(batch, -1, -1).gather(2, index)
    return (undecided_index < 0)[:, None] | (see & (undecided_index < undecided)[:, None])
