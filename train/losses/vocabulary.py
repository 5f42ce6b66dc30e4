"""Tokens in training: draft vocabularies, targets' distributions over them, and the mask token.

The mask token is in the slots of a block that are to be drafted. It is one that texts do not hold,
so that a drafter reads it as a slot and as nothing else. A text that holds it all the same is
decoded as correctly as any other, only drafted worse.

Shapes: J teacher positions, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...distill.divergences import RENORMALISED, log_probs, wide_dtype
from ...heads.errors import UserError
from ...heads.vocabulary import VocabularyMaps, most_frequent, spread_ids
from ...inference.targets.target import TargetSource
from ..data.batches import Batches

log = logging.getLogger(__name__)

SMALLEST_ROW = 0.1  # smallest fit embedding row of a mask token, as a share of the usual size


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

        Losses that renormalise them are spared the sum over all tokens.
        """
        inside = self.restrict(target_logits)[rows]
        if loss in RENORMALISED or not self.reduced:
            return log_probs(inside)
        wide = inside.to(wide_dtype(inside.dtype))
        return wide - target_logits.to(wide.dtype).logsumexp(-1, keepdim=True)[rows]


def mask_token_for(asked: int | None, target: TargetSource, batches: Batches) -> int:
    """Return a token that no reply holds and that has an embedding.

    It is `asked` if given, else the first of `unused` that is fit. Raises `UserError` for an
    `asked` token that is not fit, and where no token is known.
    """
    if asked is not None and not 0 <= asked < target.vocab_size:
        raise UserError(
            f"heads.mask_token {asked} is no token: the target has {target.vocab_size}, from 0"
        )
    reply_counts = batches.token_counts(target.vocab_size)
    if asked is not None:
        if (reason := unfit(asked, target, reply_counts)) is not None:
            raise UserError(
                f"heads.mask_token {asked} {reason}; name a token that texts never hold"
            )
        return asked
    for token in unused(target):
        if unfit(token, target, reply_counts) is None:
            return token
    raise UserError(
        "no unused token is known to mask drafts with; name one that texts never hold with "
        "heads.mask_token"
    )


def warn_of_mask_token(token: int, target: TargetSource, batches: Batches) -> None:
    """Log a warning if the mask token that a drafter has learned with is not fit for these texts.

    It cannot have another one: texts that hold it are drafted worse, and decoded as correctly.
    """
    reason = unfit(token, target, batches.token_counts(target.vocab_size))
    if reason is not None:
        log.warning("the drafter's mask token, %d, %s", token, reason)


def unfit(token: int, target: TargetSource, counts: Tensor) -> str | None:
    """Return the reason why a token cannot be the mask, as a part of a message; None if it can.

    `counts` `[V]` says how often the texts hold each token.
    """
    # A median, because the rows of unused tokens, which may be near zero, hardly move it.
    usual = float(row_sizes(spread_ids(target.vocab_size, 256), target).median())
    # Norms make a small row large, but only down to their epsilon: from a row near zero all queries
    # would be near zero too.
    if row_sizes(torch.tensor([token]), target) < SMALLEST_ROW * usual:
        return "has next to no embedding, from which nothing is drafted"
    if token in target.eos_ids:
        return "ends replies"
    return f"occurs {int(counts[token])} times in the training replies" if counts[token] else None


def row_sizes(ids: Tensor, target: TargetSource) -> Tensor:
    """Return the norms of the embedding's rows of `ids`, on the CPU."""
    return target.embedding_and_head.rows(ids.to(target.device)).float().norm(dim=-1).cpu()


def unused(target: TargetSource) -> list[int]:
    """Return tokens that texts can be trusted not to hold, best first.

    These are the first row of the embedding past the tokenizer's own tokens, the mask token, tokens
    whose names call them mask, reserved or unused, and the padding.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        return []
    named = []
    for token, added in tokenizer.added_tokens_decoder.items():
        if any(word in str(added).lower() for word in ("mask", "reserved", "unused")):
            named.append(token)
    # Embeddings are often padded to a round size: the first row after the tokens is in no text. The
    # padding comes last: some tokenizers use a token for it that has another meaning too.
    tokens = [len(tokenizer), tokenizer.mask_token_id, *sorted(named), tokenizer.pad_token_id]
    # A tokenizer may have more tokens than the target's embedding has rows.
    return [token for token in tokens if token is not None and token < target.vocab_size]
