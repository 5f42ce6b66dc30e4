"""Packed rows and their order.

Which rows a step sees is a pure function of seed and step, so a resumed run sees what it would have
seen.

Shapes: B packed rows, S positions, D draft depths, V vocabulary.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...inference.rounds.device import send
from .tables import TokenTable

PADDING = -1  # document number of padding
GOLDEN = (5**0.5 - 1) / 2  # inverse of the golden ratio, see `RowShares`
ANY = -(1 << 20)  # in `rounds`: an ordinary position, which may be a root; below any real count


class Roots(NamedTuple):
    """R rows before roots, as indices into all packed rows end to end, and what they learn."""

    rows: Tensor
    """The rows `[R]`."""
    teachers: Tensor
    """Positions `[R, D]` whose distributions the drafts learn: t + 1, t + 2, .. for row t."""
    text: Tensor
    """Token ids `[R, D + 1]`: the root and the labels."""
    valid: Tensor
    """[R, D] bool: which of the labels there are; the others, and their teachers, are arbitrary."""

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
    """Number of each row in the endless stream of rows, the same on any number of ranks. What is
    random about a row is drawn from it."""
    rounds: Tensor | None = None
    """In texts decoded with the drafter (train/data/rollouts.py), `[B, S]`: at the root of each
    round, how many of its drafts were looked at. It is m > 0 if the last of these m was rejected,
    -m if all m were accepted, and 0 at other positions. ANY, or no tensor: ordinary text."""

    def __post_init__(self) -> None:
        self.numbers = self.numbers or tuple(range(len(self.ids)))

    def draft_weights(self, steps: int, accepted: float) -> Tensor:
        """Return the weight of the draft of each depth from a root at each position `[B, S, D]`.

        D is `steps`. The weight is 1 in ordinary texts; in decoded ones it is 1 for the draft that
        was rejected, `accepted` for those that were accepted, and 0 for what was not looked at.
        """
        if self.rounds is None:
            return torch.ones(*self.ids.shape, steps)
        # With accepted weight 0.5 and four steps, a root with 3 (the third draft was rejected) has
        # the weights 0.5 0.5 1 0, and one with -2 (both were accepted) 0.5 0.5 0 0. A position with
        # 0 is no root, and all its weights are 0.
        rounds, depth = self.rounds[..., None], torch.arange(1, steps + 1)
        looked_at = torch.where((rounds > 0) & (depth == rounds), 1.0, accepted) * (
            depth <= rounds.abs()
        )
        return torch.where(rounds == ANY, 1.0, looked_at)

    def row_weights(self, accepted: float) -> Tensor:
        """Return the weight of each row `[B, S]` for a draft model.

        These are the `draft_weights`, moved to the rows that make the drafts: that of depth d of
        root n is made at row n + d - 1. Rounds do not overlap, so a row gets one weight at most.
        """
        if self.rounds is None:
            return torch.ones(self.ids.shape)
        decoded = torch.where(self.rounds == ANY, 0, self.rounds)
        depths = int(decoded.abs().max())
        total = (self.rounds == ANY).float()
        # Ordinary positions have the weight 1 in every column of `draft_weights`; they are in
        # `total` already, so they are taken out here.
        table = self.draft_weights(max(depths, 1), accepted) * (decoded != 0)[..., None]
        for d in range(depths):  # depth d + 1
            # Depth 2 in a row of 5 positions: rows 1 .. 4 get the weights of the roots 0 .. 3.
            row, root = slice(d, None), slice(None, table.shape[1] - d)
            # A text may have been cut within its last round, and the row then belongs to the next
            # document.
            same = self.documents[:, row] == self.documents[:, root]
            total[:, row] += table[:, root, d] * same
        return total

    def document_lengths(self) -> Tensor:
        """Return the length of the document that each position belongs to `[B, S]`."""
        columns = self.documents + 1  # PADDING, which is -1, becomes column 0
        # A row of S positions has at most S documents, hence S + 1 columns.
        counts = torch.zeros(len(columns), columns.shape[1] + 1, dtype=torch.long).scatter_add_(
            1, columns, torch.ones_like(columns)
        )
        return counts.gather(1, columns)

    def reply_run(self, first: int, last: int) -> Tensor:
        """Return R(t + first .. t + last) for every position t `[B, S]`, bool.

        It is true where these are all reply tokens of t's own document: a draft can be reached only
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
        """Return whether each row has a root, and a label at each depth `[B, S, D]`, bool.

        The root of row t is t + 1; the label at depth d = 1, 2, .. is the token at t + 1 + d.
        """
        return torch.stack([self.reply_run(1, 2 + k) for k in range(depths)], dim=-1)

    def roots(self, depths: int) -> Roots:
        """Return the rows with a label at the first depth, and what they learn, on the CPU."""
        valid, ids = self.learned(depths).flatten(0, 1), self.ids.flatten()
        # Rows of deeper drafts are among those of the first, since R(a .. b) only falls with b. The
        # index is made on the CPU, where its length is known without waiting.
        rows = valid[:, 0].nonzero()[:, 0]
        # Rows without a label may point into the next packed row or past the last one.
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
        # A row that is full now is not put back.
        if free > lengths[item]:
            bisect.insort(open_rows, (free - lengths[item], row))
    return rows


class RowShares:
    """Division of an endless stream of rows among several parts.

    Each part takes a share of the rows, from a first row on, evenly spread. All other rows go to
    one more part after the last.

    Row n goes to the part in whose interval of [0, 1) the fraction of (n + 1/2) * GOLDEN lies. Any
    stretch of these fractions is spread evenly over [0, 1), so a part gets its share in any stretch
    of rows. Rows are counted in blocks, to find how many of them a part had before a given row
    without a pass over the whole stream.
    """

    BLOCK = 1 << 12

    def __init__(self, parts: Sequence[tuple[float, int]]) -> None:
        """`parts`: share and first row of each; the shares sum to 1 at most."""
        self._parts = parts
        self._before = [np.zeros(len(parts) + 1, np.int64)]  # rows of each part before every block

    def of(self, number: int) -> tuple[int, int]:
        """Return the part that takes row `number`, and how many rows it has taken before."""
        block, inside = divmod(number, self.BLOCK)
        # Counts of the blocks before this one, each made once, in order.
        while len(self._before) <= block:
            owners = self._owners(len(self._before) - 1)
            counts = np.bincount(owners, minlength=len(self._parts) + 1)
            self._before.append(self._before[-1] + counts)
        owners = self._owners(block)
        owner = int(owners[inside])
        return owner, int(self._before[block][owner] + (owners[:inside] == owner).sum())

    def _owners(self, block: int) -> np.ndarray:
        """Return the part of each row of a block, `[BLOCK]`."""
        numbers = np.arange(block * self.BLOCK, (block + 1) * self.BLOCK)
        points = (numbers + 0.5) * GOLDEN % 1.0
        # Shares of 0.3 and 0.2: part 0 has the points of [0, 0.3), part 1 those of [0.3, 0.5), and
        # the rest is the data's. Before a part's first row its points are the data's too.
        owners, low = np.full(self.BLOCK, len(self._parts)), 0.0
        for i, (share, first) in enumerate(self._parts):
            owners[(points >= low) & (points < low + share) & (numbers >= first)] = i
            low += share
        return owners


class Batches:
    """The endless stream of packed rows, divided by step, accumulation and rank.

    Rows are shuffled again each epoch. n ranks with m accumulations take the same rows in a step as
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
        """Number of packed rows in an epoch, without those written during training."""
        self.rows, self.accumulation, self._ranks = rows, accumulation, ranks
        self.rows_per_step = rows * accumulation * ranks
        self.max_length, self.seed = max_length, seed
        self.written_parts: list[Any] = []
        """Parts of the stream that are written during training, see `rollouts.Written`."""
        self._epoch, self._order = -1, np.arange(0)

    @property
    def fill(self) -> float:
        """Share of positions that are not padding if every row is as long as the longest."""
        lengths = []
        for items in self._packs:
            lengths.append(sum(self.table.length(self._documents[i]) for i in items))
        return sum(lengths) / (max(lengths) * len(lengths))

    def micro_batch(self, step: int, accumulation: int, rank: int) -> Batch:
        """Return what `rank` sees in the given accumulation of `step` (all from 0)."""
        # The rows of a step are numbered by accumulation, then by rank. With 3 rows, 2 ranks and 2
        # accumulations: accumulation 0 has the rows 0 1 2 and 3 4 5, accumulation 1 has 6 7 8 and
        # 9 10 11, and the next step begins at 12.
        first = step * self.rows_per_step + (accumulation * self._ranks + rank) * self.rows
        numbers = range(first, first + self.rows)
        return collate([self._row(number) for number in numbers], tuple(numbers))

    def before_step(self, step: int) -> None:
        """Write the texts that are due before `step`; all ranks call this."""
        for written in self.written_parts:
            written.before_step(step)

    def sample(self, count: int) -> list[Tensor]:
        """Return token ids `[S]` of `count` documents evenly spread over the data, or of all."""
        return [torch.from_numpy(ids.astype(np.int64)) for ids, _ in self._spread(count)]

    def sample_ids(self, longest: int) -> list[int]:
        """Return pieces of 8 documents evenly spread over the data, joined, as token ids.

        A piece has 32 tokens around the place where the first reply begins; the whole has at most
        `longest`.
        """
        pieces: list[int] = []
        for ids, written in self._spread(8):
            start = max(int(written.argmax()) - 16, 0)
            pieces += ids[start : start + 32].tolist()
        return pieces[:longest]

    def _spread(self, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return `count` documents evenly spread over the data, or all of fewer."""
        # Of fewer documents than `count` the same one would be chosen several times.
        chosen = np.unique(np.linspace(0, len(self._documents) - 1, count).astype(int))
        return [self.table.document(self._documents[i]) for i in chosen]

    def token_counts(self, vocab_size: int, prompts: bool = False) -> Tensor:
        """Return how often the target writes each token in an epoch `[V]`, V = `vocab_size`.

        With `prompts`, how often the token occurs anywhere.
        """
        counts, waiting, size = np.zeros(vocab_size, np.int64), [], 0
        for number, document in enumerate(self._documents, 1):
            ids, written = self.table.document(document)
            waiting.append(ids if prompts else ids[written])
            size += len(waiting[-1])
            # A table of counts is as long as the vocabulary and a document is short, so many
            # documents are counted at once.
            if size > 1 << 20 or number == len(self._documents):
                counts += np.bincount(np.concatenate(waiting), minlength=vocab_size)
                waiting, size = [], 0
        return torch.from_numpy(counts)

    def _row(self, number: int) -> list[tuple[np.ndarray, ...]]:
        """Return the documents of row `number` of the endless stream.

        Each is (ids, mask), or (ids, mask, rounds) if it was written during training.
        """
        if self.written_parts:
            # From here on the number counts the rows of one part. The data's own are counted apart,
            # so that an epoch of them still has every pack once.
            owner, number = self._turns.of(number)
            if owner < len(self.written_parts):
                return self.written_parts[owner].row(number)
        return self.documents_of_pack(self.pack_of(number))

    @cached_property
    def _turns(self) -> RowShares:
        """Division of the stream, made when the first row is asked for: parts are added before."""
        return RowShares(
            [(written.config.share, written.first_row) for written in self.written_parts]
        )

    def pack_of(self, number: int) -> int:
        """Return which pack is row `number` of the endless stream of the data's own rows."""
        epoch, index = divmod(number, self.packs)
        if epoch != self._epoch:
            self._epoch = epoch
            # Seeded by the epoch, so that a resume can make the order of any epoch without those
            # before it. It is kept, since the next rows are mostly of the same epoch.
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.packs)
        return int(self._order[index])

    def documents_of_pack(self, index: int) -> list[tuple[np.ndarray, ...]]:
        """Return the documents of a pack, (ids, mask) each."""
        return [self.table.document(self._documents[i]) for i in self._packs[index]]


def collate(
    rows: Sequence[Sequence[tuple[np.ndarray, ...]]], numbers: tuple[int, ...] = ()
) -> Batch:
    """Lay the documents of each row end to end and pad to the longest row.

    A document is (ids, mask), with its `rounds` if it was decoded with the drafter; see `Batch`.
    """
    width = max(sum(len(ids) for ids, *_ in row) for row in rows)
    with_rounds = any(len(document) > 2 for row in rows for document in row)
    shape = (len(rows), width)
    # Tables hold ids as int32, but torch's indices are int64.
    ids, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    documents, mask = np.full(shape, PADDING, np.int64), np.zeros(shape, np.bool_)
    rounds = np.full(shape, ANY, np.int64) if with_rounds else None
    for r, row in enumerate(rows):
        at = 0
        for number, (document, written, *decoded) in enumerate(row):
            span = slice(at, at + len(document))
            ids[r, span], mask[r, span] = document, written
            positions[r, span], documents[r, span] = np.arange(len(document)), number
            if rounds is not None and decoded:
                rounds[r, span] = decoded[0]
            at += len(document)
        # Padding restarts at 0 as a document does, so that it sees none of them.
        positions[r, at:] = np.arange(width - at)
    tensors = map(torch.from_numpy, (ids, positions, documents, mask))
    return Batch(*tensors, numbers, None if rounds is None else torch.from_numpy(rounds))
