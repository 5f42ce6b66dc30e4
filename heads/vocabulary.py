"""Draft vocabularies: the part of the target's tokens that a drafter with its own head can propose.

A draft vocabulary is stored as engines read it (docs/checkpoint-formats.md#draft-vocabulary):
`d2t` int64 `[Vd]` holds offsets (target id = i + d2t[i]), and `t2d` bool `[V]` is true for the
tokens in it. Target ids are ascending.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from .errors import UserError
from .layout import Head, place


class VocabularyMaps(nn.Module):
    """Base of drafters that may have a draft vocabulary: its maps, as buffers."""

    resizable = True
    vocab_size: int
    """Number of the target's tokens, V."""
    drafted_rows: tuple[str, ...] = ()
    """Modules whose weight has a row for each token that can be drafted."""
    read_rows: tuple[str, ...] = ()
    """Modules whose weight has a row for each token of the target."""
    d2t: Tensor | None
    t2d: Tensor | None
    embedding_and_head: Any
    """The target's `EmbeddingAndHead`; None for a drafter that borrows neither."""
    # The target's parts, and their head of the draft vocabulary's tokens.
    _part: tuple[Any, Head] | None = None

    def add_maps(self, drafted: int, vocab_size: int) -> None:
        """Register maps of `drafted` tokens, to be filled; a drafter of all has none."""
        self.vocab_size = vocab_size
        reduced = drafted < vocab_size
        d2t = torch.zeros(drafted, dtype=torch.int64)
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        self.register_buffer("d2t", d2t if reduced else None)
        self.register_buffer("t2d", t2d if reduced else None)

    @torch.no_grad()
    def set_maps(self, ids: Tensor) -> None:
        """Make the ascending target ids `ids` `[Vd]` the draft vocabulary."""
        assert self.d2t is not None and self.t2d is not None, "a full vocabulary keeps every token"
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    def maps(self) -> dict[str, Tensor]:
        """Return the maps under their names on disk; nothing for a drafter of all tokens."""
        if self.d2t is None or self.t2d is None:
            return {}
        return {"d2t": self.d2t, "t2d": self.t2d}

    @property
    def draft_vocab_ids(self) -> Tensor | None:
        """Target ids `[Vd]` of the draft vocabulary; None if it has all tokens."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def borrowed_head(self) -> Head:
        """The target's head, of which a draft vocabulary has the rows of its own tokens."""
        target = self.embedding_and_head
        if self.d2t is None:
            return target.head
        # Not before the first use: the maps are filled, and moved to a device, after `__init__`.
        if self._part is None or self._part[0] is not target:
            # The first use may be a decoded text, and a tensor of inference mode cannot be learned
            # through afterwards.
            with torch.inference_mode(False):
                ids = self.draft_vocab_ids
                assert ids is not None
                self._part = target, target.head_of(ids)
        return self._part[1]

    def check(self) -> None:
        """Raise `UserError` if `d2t` and `t2d` are broken or name different tokens."""
        if self.d2t is not None and self.t2d is not None:
            ids = ids_of_offsets(self.d2t, len(self.t2d))
            if not torch.equal(self.t2d.nonzero()[:, 0], ids):
                raise UserError(
                    "the drafter's two vocabulary maps (d2t and t2d) name different tokens"
                )

    @abstractmethod
    def untrained(self, drafted: int, vocab_size: int) -> Self:
        """Return an untrained drafter like this one that drafts `drafted` of `vocab_size` tokens.

        Raises `UserError` if this is impossible.
        """

    @torch.no_grad()
    def resized(self, vocab_size: int, added: Sequence[int] = ()) -> Self:
        """Return this drafter for a target of `vocab_size` tokens; it drafts those that it knows.

        It is for models that were tuned from its target, with tokens added at the end. `added` are
        the ids that it does not know, though it may have rows there: vocabularies are padded. Rows
        that it has for other tokens are cut off, and those that it lacks are zeros. An added token
        in the text is thus read as the target reads it where the target's embedding is borrowed,
        and otherwise as one without any information. Raises `UserError` for a drafter that needs a
        token that the target lacks.
        """
        ids = self.draft_vocab_ids
        ids = torch.arange(self.vocab_size) if ids is None else ids.cpu()
        rows = (ids < min([vocab_size, *added])).nonzero()[:, 0]
        new = self.untrained(len(rows), vocab_size)
        if new.d2t is not None:
            new.set_maps(ids[rows])
        state = new.maps()
        for name, tensor in self.state_dict().items():
            module = name.partition(".")[0]
            if module in self.drafted_rows:
                tensor = tensor[rows]
            elif module in self.read_rows:
                missing = tensor.new_zeros(max(vocab_size - len(tensor), 0), tensor.shape[1])
                tensor = torch.cat([tensor[:vocab_size], missing])
            if name not in ("d2t", "t2d"):
                state[name] = tensor
        return new.fill(state, next(self.parameters()))

    def fill(self, state: dict[str, Tensor], like: Tensor) -> Self:
        """Load `state`, on the device and in the type of `like`; return the drafter, frozen."""
        # Cast first, because loading a state dict would cast the tensors to the module's float32.
        place(self, like.device, like.dtype)
        self.load_state_dict(state)
        self.check()
        return self.eval().requires_grad_(False)


def most_frequent(counts: Tensor, size: int, always: Iterable[int]) -> Tensor:
    """Return the ascending target ids `[size]` of a draft vocabulary.

    They are all of `always`, then the tokens with the highest `counts` `[V]`, of equal counts the
    lowest id. Tokens that were never counted fill up the rest, so there are always `size` of them.
    Raises `UserError` if `size` is less than the tokens of `always` or more than V.
    """
    vocab = counts.shape[0]
    required = sorted({token for token in always if 0 <= token < vocab})
    if not len(required) <= size <= vocab or size < 1:
        raise UserError(
            f"a draft vocabulary of {size} tokens cannot be made: it must hold the {len(required)} "
            "special tokens and can hold the "
            f"target's {vocab} at most; change heads.draft_vocab_size"
        )
    rank = counts.double().clone()
    rank[torch.tensor(required, dtype=torch.long)] = torch.inf
    # The sort is stable, so that equal counts stay in the order of their ids.
    return rank.sort(descending=True, stable=True).indices[:size].sort().values


def spread_ids(vocab_size: int, count: int) -> Tensor:
    """Return `count` token ids, int64, evenly spread from the first of a vocabulary to its last.

    They are a sample that stands for all tokens where a statistic over the vocabulary is needed.
    """
    return torch.arange(count) * (vocab_size - 1) // max(count - 1, 1)


def ids_of_offsets(d2t: Tensor, vocab_size: int) -> Tensor:
    """Return the target ids `[Vd]` of stored offsets `d2t` `[Vd]`.

    Raises `UserError` if they are not ascending, distinct and within the target's vocabulary.
    """
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    if not (bool((ids[1:] > ids[:-1]).all()) and bool(ids[0] >= 0) and bool(ids[-1] < vocab_size)):
        raise UserError(
            "the drafter's vocabulary map (d2t) names tokens twice, out of order or outside the "
            "target's vocabulary"
        )
    return ids


def to_target(logits: Tensor, ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits `[..., V]` over the target's vocabulary for `logits` `[..., Vd]`.

    `ids` `[Vd]` are the target ids of the draft vocabulary; None stands for all tokens. The other
    tokens get minus infinity, so that they are never drafted.
    """
    if ids is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    full[..., ids] = logits
    return full
