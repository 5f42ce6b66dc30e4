"""A draft vocabulary: the part of the target's tokens that a drafter with its own head can propose.

Stored as engines read it (reference/checkpoint-formats.md section 4): `d2t` `[N]` int64 offsets,
target id = i + d2t[i], and `t2d` `[V]` bool, true for the tokens kept. Ids are ascending.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .errors import UserError


def most_frequent(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """Ids `[size]`, ascending: all of `always`, then the tokens of highest `counts` `[V]`; of
    equals the lowest id.

    Tokens that were never counted fill up what is left, so there are always `size`. Raises
    `UserError` if that is impossible.
    """
    vocab = counts.shape[0]
    kept = sorted({token for token in always if 0 <= token < vocab})
    if not len(kept) <= size <= vocab or size < 1:
        raise UserError(
            f"a draft vocabulary of {size} tokens cannot be made: it must hold the {len(kept)} "
            "special tokens and can hold the "
            f"target's {vocab} at most; change heads.draft_vocab_size"
        )
    rank = counts.double().clone()
    rank[torch.tensor(kept, dtype=torch.long)] = torch.inf
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def spread_ids(vocab_size: int, count: int) -> Tensor:
    """`count` token ids, int64, evenly spread from the first of a vocabulary to its last: a sample
    to judge the others by."""
    return torch.arange(count) * (vocab_size - 1) // max(count - 1, 1)


def offsets(ids: Tensor) -> Tensor:
    """`d2t` `[N]` of ascending ids `[N]`."""
    return ids - torch.arange(len(ids), device=ids.device)


def ids_of_offsets(d2t: Tensor, vocab_size: int) -> Tensor:
    """Target ids `[N]` of a stored map. Raises `UserError` if they are not ascending, distinct and
    within the vocabulary."""
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    if not (bool((ids[1:] > ids[:-1]).all()) and bool(ids[0] >= 0) and bool(ids[-1] < vocab_size)):
        raise UserError(
            "the drafter's vocabulary map (d2t) names tokens twice, out of order or outside the "
            "target's vocabulary"
        )
    return ids


def to_target(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits `[..., N]` over the kept `ids` -> `[..., V]` over the target's vocabulary; what is not
    kept is never drafted."""
    if ids is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    full[..., ids] = logits
    return full
