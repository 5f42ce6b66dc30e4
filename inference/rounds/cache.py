"""Key-value cache of a running batch, preallocated, for rows of different lengths and draft trees.

A round writes a whole draft tree after the committed positions and keeps the accepted path only.

Shapes: B batch, N positions of one forward pass, A accepted nodes with the root, U undecided slots,
C capacity, Gkv key-value heads, E size of an attention head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import Cache

from .device import send, static_address
from .recurrent import RecurrentStates


@dataclass
class Counts:
    """Numbers of positions, one for each row: on the host, and `[B]` on the device.

    `here` is empty where the host does not know them. A static cache does not ask.
    """

    here: list[int]
    there: Tensor

    def keep(self, rows: Sequence[int], index: Tensor) -> Counts:
        """Return those of the batch rows `rows`, which `index` holds on the device."""
        return Counts([self.here[row] for row in rows] if self.here else [], self.there[index])


class KeysAndValues:
    """State of an attention layer: a slot for each position in buffers `[B, Gkv, C, E]`."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    def resize(self, capacity: int) -> None:
        """Make the buffers longer."""
        keys, values = self.keys, self.values
        self.keys, self.values = _buffer(keys, capacity), _buffer(values, capacity)
        self.keys[:, :, : keys.shape[2]] = keys
        self.values[:, :, : values.shape[2]] = values

    def commit(self, source: Tensor, goal: Tensor) -> None:
        """Copy slots `source` `[B, A]` to slots `goal` `[B, A]`, which may overlap them."""
        source, goal = source.to(self.keys.device), goal.to(self.keys.device)
        for buffer in (self.keys, self.values):
            _move(buffer, source, goal)

    def keep(self, index: Tensor) -> None:
        """Drop every batch row but those in `index`."""
        # `index_select` copies, so the memory of the rows that leave is freed.
        index = index.to(self.keys.device)
        self.keys = self.keys.index_select(0, index)
        self.values = self.values.index_select(0, index)

    def reset(self) -> None:
        """Forget everything, at the same addresses."""
        # Zeros, see `_buffer`: a batch with an overflow may have left NaN or infinity.
        self.keys.zero_()
        self.values.zero_()


class TreeCache:
    """Cache of `lengths[b]` committed positions of each row b, followed by `staged` undecided ones.

    A forward pass writes its N positions after both, into the window that `open` returns. `stage`
    leaves them undecided, so that the
    next forward pass comes after them (a drafter that runs its own tree); `commit` keeps the
    accepted path and drops the rest. Dropped slots are simply overwritten later, so nothing is ever
    shifted or padded: slot and position are the same number for all that is committed. What was
    committed is never taken back, since the state of a recurrent layer could not be.

    Attention gets the slots in use. Buffers grow by doubling, and not beyond `limit`, if given.
    """

    static = False
    """True if all rounds have to have the same shapes (`StaticTreeCache`)."""

    def __init__(
        self,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        limit: int | None = None,
    ):
        self.capacity, self.limit = capacity, limit
        self.device = torch.device(device)
        self.staged = 0
        self.states: dict[int, KeysAndValues] = {}
        """State of each attention layer by its number, made in the first forward pass."""
        self.recurrent = RecurrentStates()
        """States of the layers that keep one number of bytes however long a text is."""
        # None: known to the device only
        self._lengths: list[int] | None = [0] * batch
        # `lengths` on the device; if None, made when it is first needed
        self._lengths_there: Tensor | None = None

    @property
    def layers(self) -> int:
        """Number of layers that keep something here."""
        return len({*self.states, *self.recurrent.layers})

    @property
    def lengths(self) -> list[int]:
        """Number of committed positions of each row, as far as the host knows them."""
        assert self._lengths is not None, "the device has counted what was committed"
        return self._lengths

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def uniform(self) -> bool:
        """True if all rows are equally long, so that no slot in use has to be hidden from one."""
        return self.longest == min(self.lengths)

    def starts(self) -> Tensor:
        """Return `lengths` as a tensor `[B]` on the device."""
        if self._lengths_there is None:
            self._lengths_there = send(self.lengths, self.device)
        return self._lengths_there

    def row_starts(self) -> Tensor:
        """Return `starts`, or only the first of them `[1]` where all are equal."""
        return self.starts()[:1] if self.uniform else self.starts()

    def positions(self, depths: Tensor, slots: int, last: int) -> Tensor:
        """Return the positions of nodes at `depths` `[1 | B, N]` among `slots` undecided slots.

        Those past the position `last` are never emitted, and become `last`.
        """
        # Adding a number that the host knows needs no tensor.
        first = self.lengths[0] if len(self.lengths) == 1 else self.starts()[:, None]
        positions = depths + first
        return positions.clamp(max=last) if self.longest + slots > last + 1 else positions

    def width(self, counts: Counts, most: int) -> int:
        """Return the columns that a tensor of `counts` positions of each row needs, of `most`."""
        return max(counts.here)

    def open(self, count: int, text: bool = False) -> Window:
        """Make space for a forward pass of `count` positions, and return the slots that it writes.

        `text`: the positions are those of texts, and no mask hides slots out of use.
        """
        self.recurrent.truncate(self.staged)
        # Where the longest row goes on. Shorter ones go on earlier, as the slots say.
        end = self.longest + self.staged + count
        self._reserve(end)
        # Slices with Python numbers are cheapest, but they hold for equally long rows only.
        return Window(self, count, None if self.uniform else self._next_slots(count), end)

    def _next_slots(self, count: int) -> Tensor:
        return self.starts()[:, None] + self.staged + torch.arange(count, device=self.device)

    def _reserve(self, needed: int) -> None:
        """Grow to at least `needed` slots, by doubling up to `limit`."""
        if needed <= self.capacity:
            return
        assert self.limit is None or needed <= self.limit, "the loop bounds all positions"
        doubled = 2 * self.capacity
        self.capacity = max(needed, doubled if self.limit is None else min(doubled, self.limit))
        for state in self.states.values():
            state.resize(self.capacity)

    def state_of(self, layer: int, keys: Tensor, values: Tensor) -> KeysAndValues:
        """Return the state of a layer with keys and values such as these `[B, Gkv, N, E]`.

        Layers come in ascending order the first time.
        """
        state = self.states.get(layer)
        if state is None:
            state = self.states[layer] = self._new_state(keys, values)
        return state

    def _new_state(self, keys: Tensor, values: Tensor) -> KeysAndValues:
        return KeysAndValues(_buffer(keys, self.capacity), _buffer(values, self.capacity))

    def stage(self, count: int) -> None:
        """Leave the `count` positions just written undecided, in front of the next ones."""
        self.staged += count

    def drop(self) -> None:
        """Forget all undecided positions."""
        self.staged = 0
        self.recurrent.truncate(0)

    def commit(self, counts: Counts | Sequence[int], places: Tensor | None = None) -> None:
        """Commit `counts[b]` undecided positions of each row b, and drop the others.

        `places` `[B, A]` are the indices of the positions to commit among the undecided ones,
        ascending; entries beyond a row's own count are ignored. Without it the first ones are
        committed, which are in their slots already.
        """
        if places is not None and places.shape[1]:
            # The accepted positions close up after the committed ones. Example: of 10 committed
            # positions and the places 0, 2, 5 the slots 10, 12, 15 are copied to 10, 11, 12.
            starts = self.starts()[:, None]
            goal = torch.arange(places.shape[1], device=self.device)[None] + starts
            # Rows with fewer positions copy a few slots too many, after their new length.
            self._move(places.clamp(min=0) + starts, goal)
        if not isinstance(counts, Counts):  # outside of rounds
            self.recurrent.place()
        if self.recurrent.undecided:
            there = counts.there if isinstance(counts, Counts) else send(counts, self.device)
            path = places.clamp(min=0) if places is not None and places.shape[1] else None
            self.recurrent.commit(self.progress(there), path)
        self.staged = 0
        self._add(counts)

    def _move(self, source: Tensor, goal: Tensor) -> None:
        """Copy slots `source` `[B, A]` to slots `goal` `[B, A]` in every layer."""
        for state in self.states.values():
            state.commit(source, goal)

    def progress(self, counts: Tensor) -> Tensor:
        """Return `counts` `[B]`, or 0 for rows that idle."""
        return counts

    def _add(self, counts: Counts | Sequence[int]) -> None:
        """Add `counts` to the lengths."""
        here = counts.here if isinstance(counts, Counts) else counts
        self._lengths = [a + b for a, b in zip(self.lengths, here, strict=True)]
        self._lengths_there = None

    def commit_chunk(self, start: int, width: int, counts: Counts) -> None:
        """Commit what each row has in a chunk of `width` positions, the first of which is `start`.

        `counts` are the positions of each row in all chunks. Example: in chunks of 3, rows of 5 and
        2 positions commit 3 and 2, then 2 and 0.
        """
        # A compiled function would be compiled again for other numbers of the host.
        numbers = [] if self.static else counts.here
        here = [min(max(count - start, 0), width) for count in numbers]
        self.commit(Counts(here, (counts.there - start).clamp(0, width)))

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every batch row but `rows`."""
        index = send(rows, self.device)
        self._lengths, self._lengths_there = [self.lengths[row] for row in rows], None
        for state in self.states.values():
            state.keep(index)
        self.recurrent.keep(index)


class Window(Cache):
    """Slots of a `TreeCache` that one forward pass of `count` positions writes and attends to.

    It is the cache that a model of transformers is given.
    """

    def __init__(self, cache: TreeCache, count: int, slots: Tensor | None, end: int | None) -> None:
        """`slots` `[B, N]` are written, or the last `count` before `end` in every row if None.

        Attention gets the slots before `end`, or the whole buffer if that is None.
        """
        # transformers demands layers or a class for them. All storage is in `cache`.
        super().__init__(layers=[])
        self.cache, self.count = cache, count
        self._slots, self._end = slots, end

    @property
    def width(self) -> int:
        """Number of slots that attention gets."""
        if self._end is not None:
            return self._end
        # Of the buffers, whose size a compiler was asked to leave open; a number it would fix.
        first = next(iter(self.cache.states.values()), None)
        return self.cache.capacity if first is None else first.keys.shape[2]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[B, Gkv, N, E]` of a layer.

        Returns the keys and values of the slots that attention gets. transformers' attention layers
        call this.
        """
        state = self.cache.state_of(layer_idx, key_states, value_states)
        keys, values, end = state.keys, state.values, self._end
        if self._slots is None:
            assert end is not None
            keys[:, :, end - self.count : end] = key_states
            values[:, :, end - self.count : end] = value_states
        else:
            if self._slots.device != keys.device:  # of a layer of a spread target
                self._slots = self._slots.to(keys.device)  # the next ones mostly lie there too
            _write(keys, self._slots, key_states)
            _write(values, self._slots, value_states)
            if end is None:
                return keys, values
        # Shorter rows are given slots after their own ends too, which the mask hides.
        return keys[:, :, :end], values[:, :, :end]

    # A model of transformers calls the others wherever it is given no mask: in a prefill, and for a
    # single node, which sees everything before it.

    def __len__(self) -> int:
        return self.cache.layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.longest + self.cache.staged

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # Number of slots that attention gets, and the first of them.
        return self.width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.cache.capacity


class StaticTreeCache(TreeCache):
    """Cache whose shapes never change, for static rounds.

    Attention gets the whole buffer in every forward pass over a tree, and buffers do not grow. Once
    `commit` was given `Counts`, the host does not know `lengths`. Rows do not leave: `stop` lets
    them idle, which commits nothing for them any more.

    The buffers of so many `layers` are one where that pays, so that two operators move a path.
    """

    static = True

    def __init__(
        self, batch: int, capacity: int, device: torch.device | str = "cpu", layers: int = 1
    ):
        super().__init__(batch, capacity, device)
        self._layers = layers if joins_layers(self.device) else 1
        # [2, layers, B, Gkv, C, E]: keys and values; None: layers have buffers of their own
        self._joint: Tensor | None = None
        # Always there, so that a compiled function finds the same inputs, and in one place, where
        # a recorded round finds them.
        self._lengths_there = static_address(send([0] * batch, self.device))
        self.running = static_address(send([1] * batch, self.device))
        """[B]: 0 for rows that idle."""

    @property
    def uniform(self) -> bool:
        return False  # the same shapes whether rows are equally long or not

    def positions(self, depths: Tensor, slots: int, last: int) -> Tensor:
        return (depths + self.starts()[:, None]).clamp(max=last)

    def width(self, counts: Counts, most: int) -> int:
        return most

    def open(self, count: int, text: bool = False) -> Window:
        if text:  # a prefill, which gives attention the slots in use only
            return super().open(count, text)
        return Window(self, count, self._next_slots(count), None)

    def _reserve(self, needed: int) -> None:
        assert needed <= self.capacity, "buffers of one size were made for all that may come"

    def _new_state(self, keys: Tensor, values: Tensor) -> KeysAndValues:
        state = self._part(keys, values) or super()._new_state(keys, values)
        for buffer in (state.keys, state.values):
            # One function for all capacities. "maybe": a function that depends on it is compiled
            # for each of them.
            torch._dynamo.maybe_mark_dynamic(static_address(buffer), 2)
        return state

    def _part(self, keys: Tensor, values: Tensor) -> KeysAndValues | None:
        """Return the next layer's part of the joint buffer, or None without one."""
        index = len(self.states)
        if not index and self._layers > 1:
            like = _buffer(keys, 0)
            shape = 2, self._layers, *like.shape[:2], self.capacity, like.shape[3]
            self._joint = like.new_zeros(shape)
        if self._joint is None:
            return None
        part = self._joint[:, index]
        alike = all(
            (x.shape[1], x.shape[3], x.device, x.dtype)
            == (part.shape[2], part.shape[4], part.device, part.dtype)
            for x in (keys, values)
        )
        if alike:
            return KeysAndValues(part[0], part[1])
        # Layers of different sizes: what the first ones have in the joint buffer moves out of it.
        for state in self.states.values():
            state.keys, state.values = (
                static_address(state.keys.clone()),
                static_address(state.values.clone()),
            )
        self._joint = None
        return None

    def _move(self, source: Tensor, goal: Tensor) -> None:
        if self._joint is None:
            super()._move(source, goal)
        else:
            _move(self._joint[:, : len(self.states)], source, goal)

    def progress(self, counts: Tensor) -> Tensor:
        return counts * self.running

    def _add(self, counts: Counts | Sequence[int]) -> None:
        # In place: a recorded round reads the same memory in every round.
        if isinstance(counts, Counts):
            self.starts().add_(self.progress(counts.there))
            self._lengths = None
        else:
            self.starts().add_(send(counts, self.device))
            self._lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]

    def stop(self, rows: Sequence[int]) -> None:
        """Let batch rows idle: what they still compute is written over in every round."""
        self.running.index_fill_(0, send(rows, self.device), 0)

    def reset(self) -> None:
        """Forget everything, at the same addresses."""
        self.staged, self._lengths = 0, [0] * len(self.starts())
        self.starts().zero_()
        self.running.fill_(1)
        for state in self.states.values():
            state.reset()
        self.recurrent.reset()


Kept = TypeVar("Kept")


class Pool(dict[tuple[int, int], Kept]):
    """Static caches that no batch uses now, or rounds over them, by batch and capacity."""

    MOST = 3  # capacities are powers of two: those of short, usual and long requests

    def put(self, cache: StaticTreeCache, used: Kept) -> None:
        """Keep what has `cache` for later batches, and of too many those that were used last."""
        self[len(cache.starts()), cache.capacity] = used
        while len(self) > self.MOST:
            del self[next(iter(self))]


def joins_layers(device: torch.device) -> bool:
    """Return True where a static cache has one buffer for all layers."""
    # A compiler, on CPUs, would have to find out which of the inputs of a function overlap.
    return device.type == "cuda"


def _buffer(like: Tensor, capacity: int) -> Tensor:
    """Return a zero buffer `[B, Gkv, C, E]` with batch, heads, size and dtype of `like`.

    Zeros matter: a slot that was never written is masked, and attention multiplies its value by a
    weight of 0, which would give NaN if the memory happened to hold NaN or infinity.
    """
    batch, heads, _, size = like.shape
    return like.new_zeros(batch, heads, capacity, size)


def _write(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write `states` `[.., B, Gkv, N, E]` into slots `[B, N]` of a buffer `[.., B, Gkv, C, E]`."""
    # Each row writes its own slots. One row needs no index for each number.
    if len(slots) == 1:
        buffer.index_copy_(-2, slots[0], states)
    else:
        buffer.scatter_(-2, slots[:, None, :, None].expand_as(states), states)


def _move(buffer: Tensor, source: Tensor, goal: Tensor) -> None:
    """Copy slots `source` `[B, A]` of a buffer `[.., B, Gkv, C, E]` to slots `goal` `[B, A]`."""
    # `index_select` and `gather` copy everything before anything is written.
    if len(source) == 1:
        moved = buffer.index_select(-2, source[0])
    else:
        shape = *buffer.shape[:-2], source.shape[1], buffer.shape[-1]
        moved = buffer.gather(-2, source[:, None, :, None].expand(shape))
    _write(buffer, goal, moved)
