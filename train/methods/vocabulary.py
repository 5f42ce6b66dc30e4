"""Draft vocabularies in training: their tokens, and targets' distributions over them.

Shapes: J teacher positions, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...distill.divergences import log_probs, wide_dtype
from ...heads.vocabulary import VocabularyMaps, most_frequent
from ...inference.targets.target import TargetSource
from ..data.batches import Batches


def special_ids(target: TargetSource) -> set[int]:
    """Return the end tokens, without which no draft ends a reply, and all special tokens."""
    special = set(target.eos_ids)
    if (tokenizer := target.tokenizer) is not None:
        tokens = [*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()]
        # A tokenizer may have more tokens than the target's embedding has rows.
        special |= {token for token in tokens if token < target.vocab_size}
    return special


def draft_vocabulary(size: int, target: TargetSource, batches: Batches) -> Tensor | None:
    """Return the ascending target ids `[Vd]` of a draft vocabulary of `size` tokens.

    They are those that the target writes most often in the data, and those that end its replies.
    None stands for all tokens of the target. Raises `UserError` for too small a size.
    """
    if size >= target.vocab_size:
        return None
    return most_frequent(batches.token_counts(target.vocab_size), size, special_ids(target))


class VocabularyMap:
    """Map from target ids to columns of the drafter's head.

    Example: with the draft vocabulary 2, 5, 6 of 8 tokens, the ids 0 .. 7 have the columns
    -1 -1 0 -1 -1 1 2 -1. Without a draft vocabulary, columns are ids.
    """

    def __init__(self, drafter: VocabularyMaps) -> None:
        self._draft_vocab_ids = ids = drafter.draft_vocab_ids
        if ids is not None:
            assert drafter.t2d is not None
            self._columns = torch.full(drafter.t2d.shape, -1, dtype=torch.long, device=ids.device)
            self._columns[ids] = torch.arange(len(ids), device=ids.device)

    @property
    def reduced(self) -> bool:
        """True if there are tokens that cannot be drafted."""
        return self._draft_vocab_ids is not None

    def columns(self, ids: Tensor) -> Tensor:
        """Return the columns of target `ids`, -1 for tokens that cannot be drafted and for -1."""
        if self._draft_vocab_ids is None:
            return ids
        return torch.where(ids < 0, -1, self._columns[ids])

    def restrict(self, probs: Tensor) -> Tensor:
        """Return the draft vocabulary's part `[J, Vd]` of `[J, V]`.

        What is left out is put nowhere else, so probabilities may sum to less than one.
        """
        if self._draft_vocab_ids is None:
            return probs
        # several times as fast on a CPU as indexing by brackets
        return probs.index_select(1, self._draft_vocab_ids)

    def probs(self, target_logits: Tensor) -> Tensor:
        """Return the draft vocabulary's part `[J, Vd]` of the softmax of logits `[J, V]`."""
        dtype = wide_dtype(target_logits.dtype)
        return self.restrict(torch.softmax(target_logits, -1, dtype=dtype))

    def teacher(self, loss: str, target_logits: Tensor, rows: Tensor | slice) -> Tensor:
        """Return the log-probabilities `[rows, Vd]` that teach by `loss`, of logits `[J, V]`.

        `kl`, which renormalises them, is spared the sum over all tokens.
        """
        inside = self.restrict(target_logits)[rows]
        if loss == "kl" or not self.reduced:
            return log_probs(inside)
        wide = inside.to(wide_dtype(inside.dtype))
        return wide - target_logits.to(wide.dtype).logsumexp(-1, keepdim=True)[rows]
