"""Settings of distillation. Nothing here imports torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..heads.errors import UserError

Divergence = Literal[
    "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "lk-hybrid", "ce", "top-k-kl", "ce-l1"
]
NEEDS_LABELS = ("ce", "ce-l1")
LABELS_ONLY = ("ce",)  # no distribution of the target
Choice = Literal["even", "ends", "importance"]


@dataclass
class DraftModelConfig:
    """Origin of the draft model: `path`, `config`, or a cut of the target if neither is given."""

    path: str | None = None
    """A model folder with the target's tokenizer."""
    config: str | None = None
    """A folder with a config.json, or the file itself: a draft model with random weights and the
    target's vocabulary."""
    layers: int | list[int] | None = None
    """Cut: the number of the target's layers to keep, or a list of them (from 0); an eighth of them
    if not given."""
    choose: Choice = "even"
    """Cut: rule for choosing that number of layers: evenly spread, half from each end, or by
    importance (1 - cosine between a layer's input and output, on training text)."""
    vocab_size: int | None = None
    """Cut: number of tokens, the first ones, that are kept. The others are never drafted, and
    engines that want equal vocabularies refuse the draft model. Padding rows after the tokenizer's
    last token can be cut off without loss."""

    def __post_init__(self) -> None:
        cuts = []
        for name, field in self.__dataclass_fields__.items():
            if name not in ("path", "config") and getattr(self, name) != field.default:
                cuts.append(name)
        given = [name for name in ("path", "config") if getattr(self, name) is not None]
        if len(given) > 1 or (given and cuts):
            first, second = (given + cuts)[:2]
            raise UserError(
                f"draft_model.{first} and draft_model.{second} exclude each other; give one"
            )
        if isinstance(self.layers, list) and self.choose != "even":
            raise UserError(
                f"draft_model.layers names them, so draft_model.choose {self.choose} means "
                "nothing; leave it out"
            )
        if self.vocab_size is not None and self.vocab_size < 1:
            raise UserError(f"draft_model.vocab_size must be at least 1, not {self.vocab_size}")
