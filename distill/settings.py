"""Settings of distillation. Nothing here imports torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..heads.errors import UserError

Divergence = Literal["kl", "tv", "lk-alpha", "lk-hybrid", "ce", "ce-l1"]
NEEDS_LABELS = ("ce", "ce-l1")
LABELS_ONLY = ("ce",)  # no distribution of the target


@dataclass
class DraftModelConfig:
    """Origin of the draft model: `path`, or a cut of the target if that is not given."""

    path: str | None = None
    """A model folder with the target's tokenizer."""
    layers: int | list[int] | None = None
    """Cut: the number of the target's layers to keep, evenly spread, or a list of them (from 0); an
    eighth of them if not given."""
    vocab_size: int | None = None
    """Cut: number of tokens, the first ones, that are kept. The others are never drafted, and
    engines that want equal vocabularies refuse the draft model. Padding rows after the tokenizer's
    last token can be cut off without loss."""

    def __post_init__(self) -> None:
        cuts = {"layers": self.layers, "vocab_size": self.vocab_size}
        for name, value in cuts.items():
            if self.path is not None and value is not None:
                raise UserError(
                    f"draft_model.path and draft_model.{name} exclude each other; give one"
                )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise UserError(f"draft_model.vocab_size must be at least 1, not {self.vocab_size}")
