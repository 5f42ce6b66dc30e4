"""Drafters of a model for another one that was tuned from it, with tokens added at the end.

Such a drafter drafts the tokens that it was trained with. An added token in the text it reads as
the target does, if it borrows the target's embedding, and otherwise as one that it knows nothing
about. The text is the target's own either way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import UserError
from .fingerprint import tokens_with_hash
from .layout import place
from .medusa import MedusaHeads

OPTION = "--allow-added-tokens"
# Tensors of drafters with a row for each token that they draft, and for each one that they read.
DRAFTED = re.compile(r"(lm_head|transition_out|outputs\.\d+)\.weight")
READ = ("embedding.weight", "transition_in.weight")
D = TypeVar("D")


def added_ids(tokenizer: Any, tokenizer_hash: str) -> list[int] | None:
    """Return the ids of the tokens that a target has in addition to those of the hash.

    They come after all others; an empty list means the same tokens. Returns None if the others are
    not the same, or if there is no tokenizer to compare.
    """
    if tokenizer is None or not tokenizer_hash:
        return None
    ids = sorted(tokenizer.get_vocab().values())
    known = tokens_with_hash(tokenizer, tokenizer_hash)
    return None if known is None else ids[known:]


def said_of(ids: Sequence[int], before: int, now: int) -> str:
    """Return a clause about what a target has that a drafter of it does not know.

    `ids` are those of the added tokens; `before` and `now` are the sizes of the vocabularies.
    """
    if not ids:
        return f"the target has {now:,} rows for tokens, the drafter {before:,}"
    listed = ", ".join(map(str, ids)) if len(ids) <= 3 else f"{ids[0]} to {ids[-1]}"
    return f"the target has {len(ids):,} tokens that the drafter does not know (ids {listed})"


def effect_of(ids: Sequence[int], before: int, now: int) -> str:
    """Return a sentence about what changes for decoding, with the arguments of `said_of`."""
    never = "they are never drafted, and after one of them fewer drafts may be accepted"
    said = said_of(ids, before, now)
    return f"{said}: {never}; the text is the target's own" if ids else said


@torch.no_grad()
def resized(drafter: D, vocab_size: int, added: Sequence[int] = ()) -> D:
    """Return `drafter` for a target of `vocab_size` tokens, of which it drafts those it knows.

    `added` are the ids that it does not know, though it may have rows there: vocabularies are
    padded. Rows that it has for other tokens are cut off, and those that it lacks are zeros, so
    that reading such a token says nothing. Raises `UserError` for a drafter that cannot go without
    a token that the target lacks.
    """
    old: Any = drafter
    known = min([vocab_size, *added])
    sizes = old if isinstance(old, MedusaHeads) else old.shape
    ids = old.draft_vocab_ids
    ids = torch.arange(sizes.vocab_size) if ids is None else ids.cpu()
    rows = (ids < known).nonzero()[:, 0]
    new = _empty(old, vocab_size, len(rows))
    if new.d2t is not None:
        new.set_maps(ids[rows])
    state = {name: part for name, part in old.state_dict().items() if name not in ("d2t", "t2d")}
    state |= {name: state[name][rows] for name in state if DRAFTED.fullmatch(name)}
    state |= {name: _with_rows(state[name], vocab_size) for name in READ if name in state}
    weight = next(old.parameters())
    # Cast first, because loading a state dict would cast the tensors to the new module's float32.
    place(new, weight.device, weight.dtype)
    new.load_state_dict(state | new.maps())
    new.check()
    return new.eval().requires_grad_(False)


def _empty(old: Any, vocab_size: int, drafted: int) -> Any:
    """Return an untrained drafter like `old` that drafts so many of `vocab_size` tokens.

    Raises `UserError` if its mask token is none of them.
    """
    if isinstance(old, MedusaHeads):
        config = replace(old.config, draft_vocab_size=drafted)
        return MedusaHeads(config, old.hidden_size, vocab_size, old.embedding_and_head)
    if (mask := getattr(old.shape, "mask_token", 0)) >= vocab_size:
        raise UserError(
            f"the drafter's mask_token_id {mask} is none of the target's {vocab_size} tokens; it "
            "cannot draft for this target"
        )
    shape = replace(old.shape, vocab_size=vocab_size, draft_vocab_size=drafted)
    if drafted == vocab_size and hasattr(shape, "mask_token"):
        shape = replace(shape, draft_vocab_size=None)
    return type(old)(shape, old.embedding_and_head)


def _with_rows(matrix: Tensor, count: int) -> Tensor:
    """Return the first `count` rows of `matrix`, after its last one rows of zeros."""
    missing = matrix.new_zeros(max(count - len(matrix), 0), matrix.shape[1])
    return torch.cat([matrix[:count], missing])
