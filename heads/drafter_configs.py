"""Options of drafters as a run's config has them. Nothing here imports torch, so help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import UserError


def check_positive(config: object, *names: str) -> None:
    """Raise `UserError` for the first of the options `names` that is given and below 1."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            raise UserError(f"heads.{name} must be at least 1, not {value}")


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
    training several times as fast. Not for engines of others, which read no such heads."""

    def __post_init__(self) -> None:
        check_positive(self, "num_heads", "num_layers", "draft_vocab_size")


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
    """EAGLE-3.1: a norm for each tap before they are fused; version 3 has them if not given. Not
    for llama.cpp."""
    norm_output: bool | None = None
    """EAGLE-3.1: recycle the state after the final norm instead of before it; version 3 does if not
    given. Not for llama.cpp."""
    num_layers: int = 1
    """Number of decoder layers; engines load one."""
    shared_head: bool = False
    """Version 3: use the target's own head, of which nothing is trained or stored, instead of an
    output matrix. The file of a small target's drafter is half as large."""
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
class DSparkConfig(DFlashConfig):
    """Options of a DSpark drafter."""

    block_size: int = 7
    """Number of slots of a block, and of drafts per round: the anchor's slot drafts too."""
    markov_rank: int = 256
    """Rank of the transition bias, which has two matrices of vocabulary times rank numbers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 1:
            raise UserError(
                f"heads.markov_rank must be at least 1, not {self.markov_rank}; train dflash to "
                "have none"
            )


@dataclass
class MtpConfig:
    """Options of an MTP layer: none, since it is one of the target's own class and sizes."""
