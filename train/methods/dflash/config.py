"""Configuration of a DFlash run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

from ....distill.settings import Divergence
from ....heads.errors import UserError
from ...config import Memory, Optim, RunConfig, examples_of
from ...losses.settings import MUON, check_positive


@dataclass
class DFlashConfig:
    """Options of a block drafter.

    Width, attention heads, rotary positions and norm epsilon are the target's own.
    """

    num_layers: int = 5
    """Number of decoder layers."""
    block_size: int = 8
    """Number of slots of a block, the anchor's own among them: one draft fewer per round."""
    taps: list[int] | None = None
    """Hidden states that are fused, ascending; if not given, as many as there are decoder layers,
    spread evenly from 2 to L - 2 (L: layers of the target)."""
    mask_token: int | None = None
    """Id of the token in the slots to be filled, one that no text holds; if not given, an unused
    token of the target."""
    draft_vocab_size: int | None = None
    """Number of tokens that can be drafted, the most frequent of the training replies; all tokens
    if not given. Fewer make training and drafting cheaper, most of all for small targets. Not for
    engines, which run the target's whole head for block drafters."""
    intermediate_size: int | None = None
    """Width of the MLP; the target's if not given."""

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise UserError(
                f"heads.block_size must be at least 2, not {self.block_size}: the first slot is "
                "the anchor's own"
            )
        check_positive(self, "num_layers", "intermediate_size", "draft_vocab_size")


@dataclass
class BlockLoss(Memory):
    """Settings of a block drafter's loss."""

    loss: Divergence = "ce"
    """Divergence of the drafter's distribution from the text's tokens (ce) or the target's
    distribution (the others; ce-l1: both)."""
    weighting: Literal["decay", "survival", "d-pace"] = "d-pace"
    """Weights of a block's drafts. decay: exp(-(d - 1) / gamma) for draft d. survival: the accepted
    drafts that a better draft d would earn, by the overlaps (with lk-alpha this is end-to-end TV).
    d-pace: the same by the smoothed probabilities of the labels (D-PACE, for ce)."""
    gamma: float | None = None
    """Length of weighting decay; half the block if not given (the paper: 7, 5, 4 for blocks of 16,
    10, 8)."""
    anchors: int = 512
    """Blocks in a packed row, at roots drawn again each time that the row is seen. Rows with fewer
    roots leave some over."""
    rows_per_chunk: int = 16
    """Blocks whose logits exist at one time."""

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise UserError("objective.anchors must be at least 1")
        if self.gamma is not None and self.gamma <= 0:
            raise UserError("objective.gamma must be above 0")
        if self.gamma is not None and self.weighting != "decay":
            raise UserError(
                f"objective.gamma is of weighting decay, not {self.weighting}; set it to null"
            )
        if self.weighting == "d-pace" and self.loss != "ce":
            raise UserError(
                f"d-pace weighs ce, not {self.loss}; give objective.weighting decay or survival "
                "with it"
            )
        super().__post_init__()

    def resolved(self, block_size: int) -> Self:
        """Return these settings with the default of gamma, half of a block's slots, filled in."""
        if self.weighting != "decay" or self.gamma is not None:
            return self
        return replace(self, gamma=float((block_size + 1) // 2))


@dataclass
class DFlashRun(RunConfig):
    """Train a DFlash drafter for a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("dflash")

    heads: DFlashConfig = field(default_factory=DFlashConfig)
    objective: BlockLoss = field(default_factory=BlockLoss)
    # docs/results.md#parts-of-a-dspark-recipe: with AdamW a DSpark's tau is lower by 21% to 28%.
    optim: Optim = field(default_factory=MUON)
