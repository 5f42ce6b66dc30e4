"""Packed rows and their order.

The rows of a step are a pure function of seed and step, so a resumed run has the same ones.

Shapes: B packed rows, S positions, D draft depths, V vocabulary.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...inference.rounds.device import send
from .tables import TokenTable

Document = tuple[np.ndarray, np.ndarray]
"""Token ids and loss mask of a text, `[S]` each."""
PADDING = -1  # number of a document that is padding


class Roots(NamedTuple):
    """R rows before roots, as indices into all packed rows end to end, with teachers and labels."""

    rows: Tensor
    """The rows `[R]`."""
    teachers: Tensor
    """Positions `[R, D]` whose distributions the drafts learn: t + 1, t + 2, .. for row t."""
    text: Tensor
    """Token ids `[R, D + 1]`: the root and the labels."""
    valid: Tensor
    """True at labels that exist `[R, D]`; the others, and their teachers, are arbitrary."""

    def on(self, device: torch.device) -> Roots:
        return Roots(*(send(tensor, device) for tensor in self))


@dataclass
class Batch:
    """Packed rows, on the CPU.

    Masks are data here, so that what is derived from them needs no device synchronisation.
    """

    ids: Tensor
    """Token ids `[B, S]`."""
    positions: Tensor
    """Positions `[B, S]`; they restart at 0 with every document, and with the padding."""
    documents: Tensor
    """Number of each token's document within its row `[B, S]`; PADDING at the end of the row."""
    mask: Tensor
    """Loss mask `[B, S]`, bool: true where the target wrote the token."""
    numbers: tuple[int, ...] = ()
    """Number of each row in the endless stream of rows, the same on any number of ranks: the seed
    of random numbers for the row."""

    def __post_init__(self) -> None:
        self.numbers = self.numbers or tuple(range(len(self.ids)))

    def document_lengths(self) -> Tensor:
        """Return the length of each position's document `[B, S]`."""
        columns = self.documents + 1  # PADDING, which is -1, becomes column 0
        # A row of S positions has at most S documents, hence S + 1 columns.
        counts = torch.zeros(len(columns), columns.shape[1] + 1, dtype=torch.long).scatter_add_(
            1, columns, torch.ones_like(columns)
        )
        return counts.gather(1, columns)

    def reply_run(self, first: int, last: int) -> Tensor:
        """Return R(t + first .. t + last) for every position t `[B, S]`, bool.

        It is true where all of these are reply tokens of t's document: a draft can be reached only
        through tokens that the target wrote (docs/objectives.md#reachable-roots).
        """
        run = torch.ones_like(self.mask)
        for offset in range(first, last + 1):
            # Positions whose token at t + offset lies beyond the row stay false.
            in_reply = torch.zeros_like(run)
            if offset < run.shape[1]:
                ahead = slice(offset, None)
                base = slice(None, run.shape[1] - offset)
                in_reply[:, base] = self.mask[:, ahead] & (
                    self.documents[:, ahead] == self.documents[:, base]
                )
            run &= in_reply
        return run

    def learned(self, depths: int) -> Tensor:
        """Return whether each row has a root and a label at each depth `[B, S, D]`, bool.

        The root of row t is t + 1; the label at depth d = 1, 2, .. is the token at t + 1 + d.
        """
        return torch.stack([self.reply_run(1, 2 + k) for k in range(depths)], dim=-1)

    def roots(self, depths: int) -> Roots:
        """Return the rows with a label at the first depth, on the CPU."""
        valid, ids = self.learned(depths).flatten(0, 1), self.ids.flatten()
        # They include the rows of deeper drafts. The index is made on the CPU, where its length is
        # known without waiting.
        rows = valid[:, 0].nonzero()[:, 0]
        # Without a label an index may be in the next packed row or after the last one.
        ahead = (rows[:, None] + torch.arange(1, depths + 2)).clamp(max=len(ids) - 1)
        return Roots(rows, ahead[:, :-1], ids[ahead], valid[rows])


def pack_rows(lengths: list[int], capacity: int) -> list[list[int]]:
    """Group items into rows whose lengths sum to at most `capacity`; return the items of each row.

    Best fit, longest item first. Deterministic: equal lengths are taken in order.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free positions, row), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # Rows are numbered from 0, so -1 finds the first row with at least this many positions.
        fit = bisect.bisect_left(open_rows, (lengths[item], -1))
        if fit < len(open_rows):
            free, row = open_rows.pop(fit)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        # A full row is not put back.
        if free > lengths[item]:
            bisect.insort(open_rows, (free - lengths[item], row))
    return rows


class Batches:
    """Endless stream of packed rows, divided by step, accumulation and rank.

    Rows are shuffled in each epoch. n ranks with m accumulations have the same rows in a step as
    one rank with n * m.
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
        """Pack the documents of `table` into rows of at most `max_length` tokens.

        `rows` are the packed rows of one forward pass of a rank, `accumulation` its micro-batches
        in a step.
        """
        self.table = table
        self._documents: list[int] = []  # of an epoch: a document may be in it several times
        for document, copies in enumerate(table.copies.tolist()):
            self._documents += [document] * copies
        self._packs = pack_rows([table.length(d) for d in self._documents], max_length)
        self.packs = len(self._packs)
        """Number of packed rows in an epoch, without those of rollouts."""
        self.rows, self.accumulation, self._ranks = rows, accumulation, ranks
        self.rows_per_step = rows * accumulation * ranks
        self.max_length, self.seed = max_length, seed
        self.rollouts: Any = None
        """Part of the stream that is written during training, a `rollouts.RolloutRows`, or None."""
        self._epoch, self._order = -1, np.arange(0)

    @property
    def fill(self) -> float:
        """Share of positions that are not padding if every row is as long as the longest."""
        documents = self._documents
        lengths = [sum(self.table.length(documents[i]) for i in items) for items in self._packs]
        return sum(lengths) / (max(lengths) * len(lengths))

    def micro_batch(self, step: int, accumulation: int, rank: int) -> Batch:
        """Return the batch of `rank` in the given accumulation of `step` (all from 0)."""
        # The rows of a step are numbered by accumulation, then by rank. With 3 rows, 2 ranks and 2
        # accumulations: accumulation 0 has the rows 0 1 2 and 3 4 5, accumulation 1 has 6 7 8 and
        # 9 10 11, and the next step begins at 12.
        first = step * self.rows_per_step + (accumulation * self._ranks + rank) * self.rows
        numbers = range(first, first + self.rows)
        return collate([self._row(number) for number in numbers], tuple(numbers))

    def sample(self, count: int) -> list[Tensor]:
        """Return token ids `[S]` of `count` documents evenly spread over the data, or of all."""
        return [torch.from_numpy(ids.astype(np.int64)) for ids, _ in self._spread(count)]

    def sample_ids(self, longest: int) -> list[int]:
        """Return at most `longest` token ids: pieces of 8 documents evenly spread over the data.

        A piece has 32 tokens around the beginning of the first reply.
        """
        pieces: list[int] = []
        for ids, written in self._spread(8):
            start = max(int(written.argmax()) - 16, 0)
            pieces += ids[start : start + 32].tolist()
        return pieces[:longest]

    def _spread(self, count: int) -> list[Document]:
        """Return `count` documents evenly spread over the data, or all of fewer."""
        chosen = np.unique(np.linspace(0, len(self._documents) - 1, count).astype(int))
        return [self.table.document(self._documents[i]) for i in chosen]

    def token_counts(self, vocab_size: int) -> Tensor:
        """Return how often the target writes each token in an epoch `[V]`, V = `vocab_size`."""
        counts, waiting, size = np.zeros(vocab_size, np.int64), [], 0
        for number, document in enumerate(self._documents, 1):
            ids, written = self.table.document(document)
            waiting.append(ids[written])
            size += len(waiting[-1])
            # Many documents at once, since a table of counts is as long as the vocabulary.
            if size > 1 << 20 or number == len(self._documents):
                counts += np.bincount(np.concatenate(waiting), minlength=vocab_size)
                waiting, size = [], 0
        return torch.from_numpy(counts)

    def _row(self, number: int) -> list[Document]:
        """Return the documents of row `number` of the endless stream."""
        if self.rollouts is not None:
            before, is_rollout = self.rollouts.share_of(number)
            if is_rollout:
                return self.rollouts.row(before)
            # Rows of the data are numbered separately, so that an epoch has every pack once.
            number -= before
        return self.documents_of_pack(self.pack_of(number))

    def pack_of(self, number: int) -> int:
        """Return the pack of row `number` in the endless stream of the data's rows."""
        epoch, index = divmod(number, self.packs)
        if epoch != self._epoch:
            self._epoch = epoch
            # Seeded by the epoch, so that a resume can make the order of any epoch without those
            # before it.
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.packs)
        return int(self._order[index])

    def documents_of_pack(self, index: int) -> list[Document]:
        """Return the documents of a pack, (ids, mask) each."""
        return [self.table.document(self._documents[i]) for i in self._packs[index]]


def collate(rows: Sequence[Sequence[Document]], numbers: tuple[int, ...] = ()) -> Batch:
    """Lay the documents of each row end to end and pad to the longest row."""
    width = max(sum(len(ids) for ids, _ in row) for row in rows)
    shape = (len(rows), width)
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    documents, mask = np.full(shape, PADDING, np.int64), np.zeros(shape, np.bool_)
    for r, row in enumerate(rows):
        at = 0
        for number, (document, written) in enumerate(row):
            span = slice(at, at + len(document))
            ids[r, span], mask[r, span] = document, written
            positions[r, span], documents[r, span] = np.arange(len(document)), number
            at += len(document)
        # Positions of padding restart at 0 as those of a document, so that it attends to none.
        positions[r, at:] = np.arange(width - at)
    tensors = map(torch.from_numpy, (ids, positions, documents, mask))
    return Batch(*tensors, numbers=numbers)
