"""Which token stands in the slots of a block that are still to be drafted: one that texts do not
hold.

A text that holds it all the same is decoded as correctly as any other, only drafted worse.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from ...heads.errors import UserError
from ...heads.vocabulary import spread_ids
from ...inference.target import Target
from ..data.batches import Batches

log = logging.getLogger(__name__)

SMALLEST_ROW = 0.1  # of the usual size of an embedding's rows
PROPOSED = 3  # candidates in an error message


def mask_token_for(asked: int | None, target: Target, batches: Batches) -> int:
    """A token that no reply holds and that has an embedding: the one asked for, or the first of
    `unused` and `spare` that is fit.

    Raises `UserError` for one that is not fit, and where none is known, with candidates.
    """
    if asked is not None and not 0 <= asked < target.vocab_size:
        raise UserError(
            f"heads.mask_token {asked} is no token: the target has {target.vocab_size}, from 0"
        )
    if asked is not None:
        if (reason := unfit(asked, target, batches.token_counts(target.vocab_size))) is not None:
            raise UserError(
                f"heads.mask_token {asked} {reason}; name a token that texts never hold"
            )
        return asked
    replies = batches.token_counts(target.vocab_size)
    for token in unused(target):
        if unfit(token, target, replies) is None:
            return token
    texts = batches.token_counts(target.vocab_size, prompts=True)
    for token in spare(target):
        if unfit(token, target, texts) is None:
            log.info(
                "mask token: %d (%s), a special token that no training text holds",
                token,
                name_of(token, target),
            )
            return token
    proposals = candidates(target, texts)
    listed = ", ".join(f"{token} ({name_of(token, target)})" for token in proposals)
    hint = f"; no training text holds {listed}" if proposals else ""
    raise UserError(
        "no unused token is known to mask drafts with; name one that texts never hold with "
        f"heads.mask_token{hint}"
    )


def unfit(token: int, target: Target, counts: Tensor) -> str | None:
    """Why a token cannot be the mask; None if it can. `counts` `[V]`: how often texts hold each.

    Norms make a little row large only down to their epsilon: of a row near zero all queries would
    be near zero too.
    """
    if row_sizes(torch.tensor([token]), target) < SMALLEST_ROW * usual_size(target):
        return "has next to no embedding, from which nothing is drafted"
    if token in target.eos_ids:
        return "ends replies"
    return f"stands {int(counts[token])} times in the training replies" if counts[token] else None


def row_sizes(ids: Tensor, target: Target) -> Tensor:
    """Norms of the embedding's rows."""
    return target.embedding_and_head.rows(ids.to(target.device)).float().norm(dim=-1).cpu()


def usual_size(target: Target) -> float:
    return float(row_sizes(spread_ids(target.vocab_size, 256), target).median())


def unused(target: Target) -> list[int]:
    """Tokens that texts can be trusted not to hold, best first: the first row of the embedding past
    the tokenizer's own tokens, its mask token, those that their names call mask, reserved or
    unused, its padding."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return []
    names = {token: str(name).lower() for token, name in tokenizer.added_tokens_decoder.items()}
    named = sorted(
        token
        for token, name in names.items()
        if any(part in name for part in ("mask", "reserved", "unused"))
    )
    past = [len(tokenizer)] if len(tokenizer) < target.vocab_size else []
    known = (tokenizer.mask_token_id, *named, tokenizer.pad_token_id)
    return [*past, *(token for token in known if token is not None and token < target.vocab_size)]


def spare(target: Target) -> list[int]:
    """Special tokens without a part in conversations, last first: ordinary text is never read as
    one of them, and neither the chat template nor the end of a reply uses it. Those of SmolLM2 mark
    files and issues in what it was pretrained on."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        return []
    template = str(getattr(tokenizer, "chat_template", None) or "")
    roles = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.unk_token_id,
        tokenizer.pad_token_id,
    }
    special = {
        token: str(added)
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special
    }
    fit = [token for token, name in special.items() if token not in roles and name not in template]
    return sorted((token for token in fit if token < target.vocab_size), reverse=True)


def candidates(target: Target, texts: Tensor) -> list[int]:
    """Some tokens that no text holds and that could be the mask, for a person to choose from; the
    rarest come last in most vocabularies."""
    never = (texts == 0).nonzero()[:, 0].flip(0)[:1024]
    sizes = row_sizes(never, target)
    large = never[sizes >= SMALLEST_ROW * usual_size(target)].tolist()
    return [token for token in large if token not in target.eos_ids][:PROPOSED]


def name_of(token: int, target: Target) -> str:
    """How the tokenizer writes it."""
    tokenizer = target.tokenizer
    named = (
        tokenizer.convert_ids_to_tokens(token)
        if tokenizer is not None and token < len(tokenizer)
        else None
    )
    return repr(named) if named is not None else "no text"
