"""The target's embedding and head, which a drafter borrows instead of owning copies of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

Head = Callable[[Tensor], Tensor]
"""Function from states `[..., Ht]` after the final norm to logits."""


@dataclass(frozen=True)
class EmbeddingAndHead:
    """The frozen target's embedding and head, with its vocabulary.

    They are no parameters of the drafter that borrows them and are not stored with it.
    """

    embed: Callable[[Tensor], Tensor]
    """Function from token ids `[...]` to the target's embeddings `[..., Ht]`."""
    head: Head
    """The target's head, whose logits are `[..., V]`."""
    vocab_size: int = 0
    """Number of tokens in the target's vocabulary, V."""
    tokenizer: Any = None
    """The target's tokenizer; None for a target without one."""
    scale: float = 1.0
    """Factor by which `embed` multiplies the rows of the embedding matrix."""
    part: Callable[[Tensor], Head] | None = None
    """Function from token ids `[Vd]` to a head that computes their logits alone; None: the whole
    head is computed, and the rest left out."""

    allow_added_tokens: bool = False
    """True if drafters may lack tokens at the end of the vocabulary (`added_tokens`)."""

    def head_of(self, ids: Tensor) -> Head:
        """Return a function from states `[..., Ht]` to the logits `[..., Vd]` of `ids` `[Vd]`."""
        if self.part is not None:
            return self.part(ids)
        return lambda last: self.head(last)[..., ids]

    def rows(self, ids: Tensor) -> Tensor:
        """Return the unscaled rows `[..., Ht]` of the embedding matrix for token ids `[...]`.

        Serving engines pass these rows to block drafters, so that training has to use them too.
        """
        embedded = self.embed(ids)
        return embedded if self.scale == 1 else embedded / self.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the same object: a copy of a drafter borrows from the same target."""
        return self


def usual_scale(model_type: str, hidden_size: int) -> float:
    """Return the factor of a target's embedding by its family, where it cannot be measured.

    That is for targets that are not loaded. Of transformers' causal language models, those of
    Gemma's families have an embedding that multiplies; others multiply afterwards or not at all.
    """
    return float(hidden_size) ** 0.5 if model_type.startswith("gemma") else 1.0
