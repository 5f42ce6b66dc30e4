"""Packed rows and their order: a pure function of seed and step, so that a resumed run sees what it
would have seen.

Shapes: B packed rows, S positions.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .tables import TokenTable

PADDING = -1  # document number of padding
GOLDEN = (5**0.5 - 1) / 2
ANY = -(1 << 20)  # in `rounds`: an ordinary position, at which any draft may begin


@dataclass
class Batch:
    """Packed rows on the CPU: masks are data, and what is derived from them needs no device
    synchronisation."""

    ids: Tensor
    """[B, S]."""
    positions: Tensor
    """[B, S]; restart at 0 with every document, and with the padding."""
    documents: Tensor
    """[B, S]; number of the document within the row, PADDING at the end."""
    mask: Tensor
    """[B, S] bool; true where the target wrote."""
    numbers: tuple[int, ...] = ()
    """Place of each row in the endless stream of rows, whatever the rank: what is random about a
    row is drawn from it."""
    rounds: Tensor | None = None
    """[B, S]; in texts decoded with the drafter (train/data/rollouts.py), at the root of each
    round: how many of its drafts were looked at, m > 0 if the last of them was rejected, -m if all
    were accepted; 0 elsewhere. ANY, or no tensor: ordinary text."""

    def __post_init__(self) -> None:
        self.numbers = self.numbers or tuple(range(len(self.ids)))

    def draft_weights(self, steps: int, accepted: float) -> Tensor:
        """`[B, S, steps]`: weight of the draft of each depth from a root at each position: 1, but
        in decoded texts only for those that were looked at, `accepted` for those that were
        right."""
        if self.rounds is None:
            return torch.ones(*self.ids.shape, steps)
        rounds, depth = self.rounds[..., None], torch.arange(1, steps + 1)
        looked_at = torch.where((rounds > 0) & (depth == rounds), 1.0, accepted) * (
            depth <= rounds.abs()
        )
        return torch.where(rounds == ANY, 1.0, looked_at)

    def row_weights(self, accepted: float) -> Tensor:
        """`[B, S]`: the same for drafters whose row t drafts x[t+1] whatever the root: the weight
        of the draft that it made."""
        if self.rounds is None:
            return torch.ones(self.ids.shape)
        decoded = torch.where(self.rounds == ANY, 0, self.rounds)
        steps = int(decoded.abs().max())
        total = (self.rounds == ANY).float()
        table = self.draft_weights(max(steps, 1), accepted) * (decoded != 0)[..., None]
        for depth in range(steps):
            here, root = slice(depth, None), slice(None, table.shape[1] - depth)
            # a text may have been cut within its last round
            same = self.documents[:, here] == self.documents[:, root]
            total[:, here] += table[:, root, depth] * same
        return total

    def document_lengths(self) -> Tensor:
        """`[B, S]`: length of the document that each position belongs to."""
        places = self.documents + 1
        counts = torch.zeros(len(places), places.shape[1] + 1, dtype=torch.long).scatter_add_(
            1, places, torch.ones_like(places)
        )
        return counts.gather(1, places)

    def reply_run(self, first: int, last: int) -> Tensor:
        """`[B, S]` bool: position t is true iff t + first .. t + last are all reply tokens of t's
        own document.

        This is R(root .. label) of drafter-recipes 0.2: a draft is reachable only through tokens
        that the target wrote.
        """
        run = torch.ones_like(self.mask)
        for offset in range(first, last + 1):
            inside = torch.zeros_like(run)
            if offset < run.shape[1]:
                ahead = slice(offset, None)
                here = slice(None, run.shape[1] - offset)
                inside[:, here] = self.mask[:, ahead] & (
                    self.documents[:, ahead] == self.documents[:, here]
                )
            run &= inside
        return run


def pack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Groups of items whose lengths sum to at most `capacity`: best fit, longest first.
    Deterministic."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(open_rows, (lengths[item], -1))
        if place < len(open_rows):
            room, row = open_rows.pop(place)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        if room > lengths[item]:
            bisect.insort(open_rows, (room - lengths[item], row))
    return rows


class Turns:
    """Which rows of an endless stream each of several parts takes: a share of them from a first row
    on, evenly spread, no row twice; what is left goes to the part after the last."""

    BLOCK = 1 << 12

    def __init__(self, parts: Sequence[tuple[float, int]]) -> None:
        """`parts`: share and first row of each; the shares sum to 1 at most."""
        self._parts = parts
        self._before = [np.zeros(len(parts) + 1, np.int64)]  # rows of each part before every block

    def of(self, number: int) -> tuple[int, int]:
        """The part that takes row `number`, and how many rows it has taken before."""
        block, inside = divmod(number, self.BLOCK)
        while len(self._before) <= block:
            owners = self._owners(len(self._before) - 1)
            self._before.append(
                self._before[-1] + np.bincount(owners, minlength=len(self._parts) + 1)
            )
        owners = self._owners(block)
        owner = int(owners[inside])
        return owner, int(self._before[block][owner] + (owners[:inside] == owner).sum())

    def _owners(self, block: int) -> np.ndarray:
        numbers = np.arange(block * self.BLOCK, (block + 1) * self.BLOCK)
        points = (numbers + 0.5) * GOLDEN % 1.0  # any stretch of these is spread evenly over [0, 1)
        owners, low = np.full(self.BLOCK, len(self._parts)), 0.0
        for i, (share, first) in enumerate(self._parts):
            owners[(points >= low) & (points < low + share) & (numbers >= first)] = i
            low += share
        return owners


class Batches:
    """The endless stream of packed rows, dealt out by step, accumulation and rank.

    Rows are shuffled anew each epoch; W ranks with A accumulations take the same rows in a step as
    one rank with W * A.
    """

    def __init__(
        self,
        table: TokenTable,
        max_length: int,
        rows: int,
        accumulation: int,
        ranks: int,
        seed: int,
    ) -> None:
        self.table = table
        self._documents = [
            d for d, copies in enumerate(table.copies.tolist()) for _ in range(copies)
        ]
        self._packs = pack([table.length(d) for d in self._documents], max_length)
        self._rows, self._accumulation, self._ranks, self.seed = rows, accumulation, ranks, seed
        self.max_length = max_length
        self.rollouts: list[Any] = []
        """Parts of the stream that are written while training goes on, see `written.Written`."""
        self._turns: Turns | None = None
        self._epoch, self._order = -1, np.arange(0)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a rank in a step."""
        return self._accumulation

    @property
    def packs(self) -> int:
        """Packed rows in an epoch."""
        return len(self._packs)

    @property
    def rows_per_step(self) -> int:
        return self._rows * self._accumulation * self._ranks

    @property
    def fill(self) -> float:
        """Share of positions that are not padding when every row is as long as the longest."""
        lengths = [
            sum(self.table.length(self._documents[i]) for i in pack_) for pack_ in self._packs
        ]
        return sum(lengths) / (max(lengths) * len(lengths))

    def micro_batch(self, step: int, accumulation: int, rank: int) -> Batch:
        """What `rank` sees in the given accumulation of `step` (all 0-based)."""
        first = step * self.rows_per_step + (accumulation * self._ranks + rank) * self._rows
        numbers = range(first, first + self._rows)
        return collate([self._row(number) for number in numbers], tuple(numbers))

    def before_step(self, step: int) -> None:
        """Bring up to date what is written while training goes on; all ranks call this."""
        for part in self.rollouts:
            part.before_step(step)

    def sample(self, count: int) -> list[Tensor]:
        """Token ids `[S]` of `count` documents, or of all, evenly spread."""
        places = np.unique(np.linspace(0, len(self._documents) - 1, count).astype(int))
        return [
            torch.from_numpy(self.table.document(self._documents[i])[0].astype(np.int64))
            for i in places
        ]

    def sample_ids(self, longest: int, texts: int = 8, piece: int = 32) -> list[int]:
        """Pieces of texts from all over the data, from where their replies begin, in a row of at
        most `longest` tokens."""
        places = np.unique(np.linspace(0, len(self._documents) - 1, texts).astype(int))
        found: list[int] = []
        for place in places:
            ids, written, *_ = self.table.document(self._documents[place])
            start = max(int(written.argmax()) - piece // 2, 0)
            found += ids[start : start + piece].tolist()
        return found[:longest]

    def token_counts(self, vocab_size: int, prompts: bool = False) -> Tensor:
        """How often each token `[V]` is written by the target in an epoch; with `prompts`, how
        often it stands anywhere."""
        counts, waiting, size = np.zeros(vocab_size, np.int64), [], 0
        for place, document in enumerate(self._documents, 1):
            ids, written = self.table.document(document)
            waiting.append(ids if prompts else ids[written])
            size += len(waiting[-1])
            # a count is as long as the vocabulary, a document is short
            if size > 1 << 20 or place == len(self._documents):
                counts += np.bincount(np.concatenate(waiting), minlength=vocab_size)
                waiting, size = [], 0
        return torch.from_numpy(counts)

    def _row(self, number: int) -> list[tuple[np.ndarray, ...]]:
        if not self.rollouts:
            return self._pack_at(number)
        if self._turns is None:
            self._turns = Turns([(part.config.share, part.first_row) for part in self.rollouts])
        owner, place = self._turns.of(number)
        return (
            self.rollouts[owner].row(place) if owner < len(self.rollouts) else self._pack_at(place)
        )

    def pack_of(self, number: int) -> int:
        """Which pack is row `number` of the endless stream."""
        epoch, place = divmod(number, self.packs)
        if epoch != self._epoch:
            self._epoch, self._order = (
                epoch,
                np.random.default_rng([self.seed, epoch]).permutation(self.packs),
            )
        return int(self._order[place])

    def pack(self, index: int) -> list[tuple[np.ndarray, ...]]:
        """The documents of a pack."""
        return [self.table.document(self._documents[i]) for i in self._packs[index]]

    def _pack_at(self, number: int) -> list[tuple[np.ndarray, ...]]:
        return self.pack(self.pack_of(number))


def collate(
    rows: Sequence[Sequence[tuple[np.ndarray, ...]]], numbers: tuple[int, ...] = ()
) -> Batch:
    """Lay the documents (ids, mask, and rounds of decoded ones) of each row end to end and pad to
    the longest row."""
    width = max(sum(len(ids) for ids, *_ in row) for row in rows)
    shape = (len(rows), width)
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    documents, mask = np.full(shape, PADDING, np.int64), np.zeros(shape, np.bool_)
    rounds = (
        np.full(shape, ANY, np.int64)
        if any(len(parts) > 2 for row in rows for parts in row)
        else None
    )
    for r, row in enumerate(rows):
        at = 0
        for number, (document, written, *decoded) in enumerate(row):
            span = slice(at, at + len(document))
            ids[r, span], mask[r, span] = document, written
            positions[r, span], documents[r, span] = np.arange(len(document)), number
            if rounds is not None and decoded:
                rounds[r, span] = decoded[0]
            at += len(document)
        positions[r, at:] = np.arange(width - at)
    as_tensor = torch.from_numpy
    decoded_rounds = as_tensor(rounds) if rounds is not None else None
    return Batch(
        as_tensor(ids),
        as_tensor(positions),
        as_tensor(documents),
        as_tensor(mask),
        numbers,
        decoded_rounds,
    )
