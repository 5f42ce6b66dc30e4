"""Configuration of a Medusa run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....distill.settings import Divergence
from ....heads.errors import UserError
from ...config import RunConfig, examples_of
from ...losses.settings import check_positive


@dataclass
class MedusaConfig:
    """Options of the Medusa heads."""

    num_heads: int = 4
    """Number of heads, each of which drafts one token: the longest path has as many drafts."""
    num_layers: int = 1
    """Number of residual blocks in each head."""
    shared_head: bool = False
    """Use the target's own head for all heads, instead of an output matrix for each."""
    draft_vocab_size: int | None = None
    """Number of tokens that can be drafted, the most frequent of the training replies; all tokens
    if not given. Each head has a row for each of them, so over a large vocabulary fewer make
    training several times as fast. Other engines cannot load such heads."""

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "num_layers", "draft_vocab_size")


@dataclass
class MedusaLoss:
    """Settings of the heads' loss."""

    loss: Divergence = "kl"
    """Divergence of a head's distribution from the target's: kl, reverse-kl, jsd, tv, lk-alpha,
    lk-hybrid, top-k-kl; from the text's tokens: ce; from both: ce-l1."""
    head_decay: float = 0.8
    """Decay of the loss over the heads: head i has weight head_decay^i, normalised so that the
    weights sum to 1."""
    rows_per_chunk: int = 1024
    """Positions whose logits exist at one time."""

    def __post_init__(self) -> None:
        if not 0 < self.head_decay <= 1 or self.rows_per_chunk < 1:
            raise UserError(
                "objective.head_decay must lie in (0, 1] and objective.rows_per_chunk be at least 1"
            )


@dataclass
class MedusaRun(RunConfig):
    """Train Medusa heads for a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("medusa")

    heads: MedusaConfig = field(default_factory=MedusaConfig)
    objective: MedusaLoss = field(default_factory=MedusaLoss)
