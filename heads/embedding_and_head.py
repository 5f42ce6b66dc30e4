"""What a drafter may borrow of its target instead of owning it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor


@dataclass(frozen=True)
class EmbeddingAndHead:
    """The frozen target's two ends and its vocabulary. They are not parameters of a drafter and are
    not stored with it."""

    embed: Callable[[Tensor], Tensor]
    """Token ids `[...]` -> embeddings `[..., Ht]`."""
    head: Callable[[Tensor], Tensor]
    """`[..., Ht]` after the final norm -> the target's logits `[..., V]`."""
    vocab_size: int = 0
    tokenizer: Any = None
    scale: float = 1.0
    """What `embed` multiplies the rows of the embedding's matrix with."""

    def rows(self, ids: Tensor) -> Tensor:
        """Token ids `[...]` -> the embedding's own rows `[..., Ht]`, which is what engines hand to
        drafters."""
        embedded = self.embed(ids)
        return embedded if self.scale == 1 else embedded / self.scale

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy of a drafter borrows from the same target."""
        return self
