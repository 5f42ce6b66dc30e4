"""Masks of forward passes, which are made here, and attention of packed rows without a mask.

transformers keeps the documents of a packed row apart by a mask, for which CUDA kernels repeat the
keys of grouped heads in each layer. In `in_documents` every document is a call with a causal order
alone, which every fast kernel takes, registered as an attention function of transformers.

Shapes: B rows, N positions of one forward pass, U undecided slots of the cache, G attention heads,
Gkv key-value heads, E size of an attention head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from ..rounds.attention import visible_slots
from ..rounds.cache import Window
from ..rounds.device import send
from ..rounds.tree import Pass

NAME = "draftsmith_documents"

SHARING = {"cuda"}
"""Kinds of devices on which short documents share calls. On a CPU a call costs little."""
SHORT, FEWEST = 512, 8
"""Most positions of a document that shares calls, and the least number of such documents."""


def with_replies(starts: Sequence[int], count: int) -> Pass:
    """Return the pass of whole texts `[B, count]`, whose replies begin at `starts`."""
    return Pass(written=torch.arange(count) >= torch.tensor(starts)[:, None])


@dataclass(frozen=True)
class Masks:
    """Masks of one forward pass, added to the scores of attention: 0 where a slot is visible.

    Every implementation of attention that takes a 4D mask takes an additive one.
    """

    full: Tensor
    """[1 | B, 1, N, slots]: of layers that see all positions."""
    sliding: Tensor | None = None
    """The same of layers with a sliding window; None for a model without."""

    def for_transformers(self, mixed: bool) -> Tensor | dict[str, Tensor]:
        """Return what a decoder of transformers takes, whose layers differ in kind if `mixed`."""
        if self.sliding is None:
            return self.full
        both = {"full_attention": self.full, "sliding_attention": self.sliding}
        return both if mixed else self.sliding


def packed_masks(positions: Tensor, dtype: torch.dtype, sliding: int | None) -> Masks:
    """Return the masks of packed rows: causal, and no document sees another.

    A document begins wherever `positions` `[B, S]` do not go on by one. `sliding` is the window of
    a model with sliding layers, which see only keys less than so many positions back; None for a
    model without.
    """
    begins = functional.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0))
    # Example: positions 0 1 2 0 1 begin a document at index 3 and have the documents 0 0 0 1 1.
    document = begins.cumsum(-1)
    order = torch.arange(positions.shape[1], device=positions.device)
    see = (document[:, :, None] == document[:, None, :]) & (order[:, None] >= order)
    # `order` counts along the packed row. Within a document that is the distance of the positions,
    # and other documents are hidden already.
    far = None if sliding is None else order[:, None] - order >= sliding
    return _masks(see, far, dtype)


def _masks(see: Tensor, far: Tensor | None, dtype: torch.dtype) -> Masks:
    """Return masks that hide what `see` `[B, N, slots]` is false for, sliding ones also `far`."""
    least = torch.finfo(dtype).min  # as in transformers' own masks
    full = torch.zeros(see.shape, dtype=dtype, device=see.device)
    # In place, since a packed row has S * S numbers.
    full = full.masked_fill_(~see, least)[:, None]
    return Masks(full, None if far is None else full.masked_fill(far, least))


def tree_masks(tree: Pass, window: Window, dtype: torch.dtype, sliding: int | None) -> Masks | None:
    """Return the masks of the N tree nodes of a pass with this `window`; None: they need none.

    `sliding` is as in `packed_masks`.
    """
    cache, slot_depths = window.cache, tree.undecided_depths
    undecided = slot_depths.shape[1]
    # A single node that sees all slots needs no mask: without one it sees what the cache gives.
    # That is all it may see only if rows are equally long and no slot given is out of use.
    if window.count == 1 and (tree.visible is None or undecided == 1) and cache.uniform:
        return None
    visible = tree.seen
    if cache.uniform and sliding is None:
        # Equally long rows have the tree in the same columns: `visible` has one for every undecided
        # slot, those of earlier passes too. All before it is committed, hence visible (0).
        undecided_part = _masks(visible, None, dtype).full
        return Masks(functional.pad(undecided_part, (cache.longest, 0)))
    see = visible_slots(visible, window)
    if sliding is None:
        return _masks(see, None, dtype)
    assert tree.depths is not None
    starts = cache.row_starts()[:, None]
    slots = torch.arange(window.width, device=visible.device)[None]
    undecided_index = slots - starts  # negative: the slot is committed
    # Slots outside of the undecided ones have no depth. What they read is replaced (committed
    # slots) or hidden by `see` already (slots after the tree).
    clamped = undecided_index.clamp(0, undecided - 1)
    depths = slot_depths.expand(len(see), -1).gather(1, clamped.expand(len(see), -1))
    # A window counts positions: a committed slot's number is its position, while an undecided
    # one is at its depth, which siblings share.
    key_positions = torch.where(undecided_index < 0, slots, starts + depths)
    # Example: with a window of 4 the node at position 9 sees the positions 6 to 9.
    near = (starts + tree.depths)[..., None] - key_positions[:, None] < sliding
    return _masks(see, ~near[:, None], dtype)


class Spans:
    """Documents of packed rows `[B, N]`, and the calls of attention that take them."""

    def __init__(self, rows: list[list[tuple[int, int]]]) -> None:
        """`rows` has begin and end of each document of each row."""
        self.rows = rows
        self._calls: dict[torch.device, AttentionCalls] = {}

    def calls(self, device: torch.device) -> AttentionCalls:
        """Return the calls of attention on `device`."""
        if device not in self._calls:
            self._calls[device] = self._made(device)
        return self._calls[device]

    def _made(self, device: torch.device) -> AttentionCalls:
        length = self.rows[0][-1][1]
        alone: list[tuple[int, int, int]] = []
        short: dict[int, list[tuple[int, int]]] = {}
        for row, spans in enumerate(self.rows):
            for start, end in spans:
                if end - start > SHORT or device.type not in SHARING:
                    alone.append((row, start, end))
                else:
                    # Those of one call differ in length by less than a factor of 2.
                    of_length = short.setdefault((end - start).bit_length(), [])
                    of_length.append((row * length + start, row * length + end))
        if sum(map(len, short.values())) < FEWEST:
            every = [(row, *span) for row, spans in enumerate(self.rows) for span in spans]
            return AttentionCalls(every, [], None)
        shared = [tables_of(spans) for spans in short.values()]
        places = [row * length + np.arange(start, end) for row, start, end in alone]
        places += [index.flatten()[real] for index, real in shared]
        order = _sent(np.concatenate(places).argsort(), device)
        there = [(_sent(index, device), _sent(real, device)) for index, real in shared]
        return AttentionCalls(alone, there, order)


class AttentionCalls(NamedTuple):
    """Calls of attention that take the documents of packed rows."""

    alone: list[tuple[int, int, int]]
    """Row, begin and end of each document with a call of its own."""
    shared: list[tuple[Tensor, Tensor]]
    """Result of `tables_of` for each call of several documents."""
    order: Tensor | None
    """[B * N]: where in the results, one after another, each position is; None: in order."""


def _sent(numbers: Any, device: torch.device) -> Tensor:
    return send(torch.tensor(numbers), device)


def tables_of(spans: list[tuple[int, int]]) -> tuple[Any, Any]:
    """Return positions `[n, L]` of documents, and the numbers of those that are not padding.

    Both are arrays of numpy. Positions count through all rows. Documents are filled up with their
    last position. Example: the documents 3 .. 5 and 7 .. 10 are the positions 3 4 4 and 7 8 9, of
    which the numbers 0, 1, 3, 4 and 5 are not padding.
    """
    starts, ends = np.array(spans).T[:, :, None]
    index = starts + np.arange((ends - starts).max())
    (real,) = (index < ends).flatten().nonzero()
    return np.minimum(index, ends - 1), real


def spans_of(documents: Tensor) -> Spans:
    """Return the spans of `documents` `[B, N]`, the number of each position's document, on the CPU.

    Example: 0 0 0 1 1 are the spans 0 .. 3 and 3 .. 5. Padding is a document like any other.
    """
    rows = []
    for row in documents:
        ends = [*((row[1:] != row[:-1]).nonzero()[:, 0] + 1).tolist(), len(row)]
        rows.append(list(zip([0, *ends[:-1]], ends, strict=True)))
    return Spans(rows)


def attend_in_documents(
    _module: Any,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    _mask: None,
    *,
    documents: Spans,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return what the queries `[B, G, N, E]` read, `[B, N, G, E]`, each in its own document.

    `keys` and `values` are `[B, Gkv, N, E]`.
    """
    shared = queries.shape[1] // keys.shape[1]
    if shared > 1 and queries.device.type == "cuda" and queries.dtype == torch.float32:
        # The kernels for float32 on CUDA share no heads, and torch would go to one that holds all
        # scores.
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        shared = 1
    attend = partial(
        scaled_dot_product_attention, dropout_p=dropout, scale=scaling, enable_gqa=shared > 1
    )
    states, calls = (queries, keys, values), documents.calls(queries.device)
    parts = []
    for row, start, end in calls.alone:
        own = (x[row : row + 1, :, start:end] for x in states)
        part = attend(*own, is_causal=end - start > 1)
        parts.append(part[0].transpose(0, 1))
    if calls.shared:
        flat = [x.transpose(1, 2).flatten(0, 1) for x in states]
    for index, real in calls.shared:
        # Filling comes after a document, whose own positions do not see it.
        part = attend(*(x[index].transpose(1, 2) for x in flat), is_causal=index.shape[1] > 1)
        parts.append(part.transpose(1, 2).flatten(0, 1)[real])
    found = torch.cat(parts)
    if calls.order is not None:
        found = found[calls.order]
    return found.unflatten(0, (len(queries), -1)), None


AttentionInterface.register(NAME, attend_in_documents)


@contextmanager
def in_documents(decoder: Any) -> Iterator[None]:
    """Let a transformers decoder, called with `documents=spans`, attend in documents meanwhile."""
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation(NAME)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)
