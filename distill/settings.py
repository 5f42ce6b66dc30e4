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


@dataclass
class DraftModelConfig:
    """Origin of the draft model: `path`, or a cut of the target if that is not given."""

    path: str | None = None
    """A model folder with the target's tokenizer."""
    layers: int | list[int] | None = None
    """Cut: the number of the target's layers to keep, evenly spread, or a list of them (from 0); an
    eighth of them if not given."""

    def __post_init__(self) -> None:
        if self.path is not None and self.layers is not None:
            raise UserError("draft_model.path and draft_model.layers exclude each other; give one")
