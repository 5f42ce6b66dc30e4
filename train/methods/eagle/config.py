"""Configuration of an EAGLE run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ....heads.errors import UserError
from ...config import Optim, RunConfig, examples_of
from ...losses.settings import MUON, UnrolledLoss, check_positive


@dataclass
class EagleConfig:
    """Options of an EAGLE drafter.

    Attention heads, rotary positions and norm epsilon are the target's own.
    """

    version: Literal[1, 3] = 3
    """Version of EAGLE. 3: fused taps, own norms and head, trained on its own states. 1: the last
    hidden state and the target's head (arXiv 2401.15077)."""
    taps: list[int] | None = None
    """Version 3: hidden states that are fused, ascending; if not given, 2, L/2 and L-3 of a target
    with L layers, at least 7."""
    draft_vocab_size: int | None = None
    """Version 3: number of tokens that can be drafted, the most frequent of the training replies;
    all tokens if not given."""
    norm_taps: bool | None = None
    """EAGLE-3.1: a norm for each tap before they are fused; on by default for version 3. Not for
    llama.cpp."""
    norm_output: bool | None = None
    """EAGLE-3.1: recycle the state after the final norm instead of before it; on by default for
    version 3. Not for llama.cpp."""
    num_layers: int = 1
    """Number of decoder layers; engines load one."""
    shared_head: bool = False
    """Version 3: use the target's own head, which is neither trained nor stored with the drafter,
    instead of an output matrix. The file of a small target's drafter is half as large."""
    qk_norm: bool = False
    """Version 3: norms on queries and keys, as in Qwen3; vLLM only."""
    hidden_size: int | None = None
    """Version 3: a width other than the target's; the drafter then has its own embedding."""
    intermediate_size: int | None = None
    """Width of the MLP; the target's if not given."""

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "draft_vocab_size", "hidden_size", "intermediate_size")
        if self.version == 1:
            for name in (
                "taps", "draft_vocab_size", "norm_taps", "norm_output", "shared_head", "qk_norm",
                "hidden_size",
            ):  # fmt: skip
                if getattr(self, name):
                    raise UserError(
                        f"heads.{name} is for version 3; EAGLE-1 reads the target's last feature "
                        "and uses its head"
                    )


EAGLE_DEFAULTS = {
    1: {"steps": 1, "feature_weight": 1.0, "token_weight": 0.1},
    3: {"steps": 7, "feature_weight": 0.0, "token_weight": 1.0},
}
"""Values of those settings of `EagleLoss` that are None, by the version of EAGLE."""


@dataclass
class EagleLoss(UnrolledLoss):
    """Settings of an EAGLE drafter's loss."""

    feature_weight: float | None = None
    """Weight of SmoothL1 between the drafter's state, taken before a final norm of its own, and the
    target's next feature; if not given, 1 for version 1, 0 for version 3. With little data it helps
    version 3 too, together with token_weight 0.1 and freeze_head."""
    token_weight: float | None = None
    """Weight of `loss`; if not given, 0.1 for version 1, 1 for version 3."""
    freeze_head: bool = False
    """Version 3: do not train the head, which is initialised from the target's; with
    feature_weight, the final norm is frozen too, because features are compared at its scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.feature_weight or 0, self.token_weight or 0) < 0:
            raise UserError("objective.feature_weight and token_weight must not be negative")

    @property
    def term_weights(self) -> tuple[float, float]:
        return self.feature_weight or 0.0, self.token_weight or 0.0

    def resolved(self, version: int) -> EagleLoss:
        """Return these settings with the defaults of an EAGLE version filled in."""
        defaults = EAGLE_DEFAULTS[version]
        missing = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        return replace(self, **missing)


@dataclass
class EagleRun(RunConfig):
    """Train an EAGLE drafter for a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("eagle")

    heads: EagleConfig = field(default_factory=EagleConfig)
    objective: EagleLoss = field(default_factory=EagleLoss)
    # docs/results.md#parts-of-an-eagle-3-recipe: with the norms of `heads`, twice AdamW's tau.
    optim: Optim = field(default_factory=MUON)
