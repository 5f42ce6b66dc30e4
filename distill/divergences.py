"""Losses between a drafter's law q and the target's law p, per position, and their sums over many positions in bounded memory.

Laws come as log-probabilities, so that one softmax serves a loss and its metrics. Shapes: R rows (positions), V vocabulary.
Gradients with respect to logits z are listed in reference/objectives.md section 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def log_law(logits: Tensor) -> Tensor:
    """log softmax in fp32: bf16 logits lose the tail."""
    return torch.log_softmax(logits.float(), dim=-1)


def cross_entropy(log_q: Tensor, labels: Tensor) -> Tensor:
    """-log q(x*) `[R]`. d/dz = q - onehot."""
    return -log_q.gather(-1, labels[..., None])[..., 0]


def forward_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(p || q) `[R]`. d/dz = q - p. Its minimum is zero, unlike that of soft cross-entropy."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def overlap(log_q: Tensor, log_p: Tensor) -> Tensor:
    """alpha = sum_v min(p, q) `[R]`: the largest chance that any lossless rule accepts one sampled draft."""
    return torch.minimum(log_q, log_p).exp().sum(-1)


def sum_in_chunks(
    function: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...], rows_per_chunk: int
) -> tuple[Tensor, ...]:
    """Sum over all rows of what `function(*rows)` sums over some, holding the logits of one chunk at a time.

    `function` takes slices of `rows` (tensors of equal first dimension) and returns sums. Its inside is recomputed in the
    backward pass, so memory is one `[rows_per_chunk, V]` instead of `[R, V]` (objectives 10). With no rows it runs once on
    empty slices, so that every parameter still takes part.
    """
    count = rows[0].shape[0]
    totals: tuple[Tensor, ...] | None = None
    for start in range(0, max(count, 1), rows_per_chunk):
        part = [row[start : start + rows_per_chunk] for row in rows]
        sums: tuple[Tensor, ...] = checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
        totals = sums if totals is None else tuple(a + b for a, b in zip(totals, sums, strict=True))
    assert totals is not None
    return totals
