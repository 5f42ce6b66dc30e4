"""Batches of EAGLE training that can be checked by eye."""

from __future__ import annotations

import numpy as np

from draftsmith.train.data.batches import Batch, collate


def batch_of(*documents: tuple[int, list[tuple[int, int]]], pad: int = 0) -> Batch:
    """One packed row of documents (length, reply spans), with `pad` padding positions behind."""
    row = []
    for number, (length, spans) in enumerate(documents):
        mask = np.zeros(length, bool)
        for start, end in spans:
            mask[start:end] = True
        row.append((np.arange(length) % 50 + 10 * number + 5, mask))
    batch = collate(
        [
            row,
            [
                (
                    np.zeros(sum(n for n, _ in documents) + pad, int),
                    np.zeros(sum(n for n, _ in documents) + pad, bool),
                )
            ],
        ]
    )
    return Batch(batch.ids[:1], batch.positions[:1], batch.documents[:1], batch.mask[:1])


def cut(batch: Batch, start: int, end: int) -> Batch:
    """Positions `start` .. `end` of every row."""
    ids, positions, documents, mask = (
        t[:, start:end] for t in (batch.ids, batch.positions, batch.documents, batch.mask)
    )
    return Batch(ids, positions, documents, mask)
