"""Options of the commands about MTP layers. Nothing here imports torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....heads.errors import UserError
from ....inference.settings import SourceOptions, TargetConfig


@dataclass
class ExtractLayerOptions:
    """Make a drafter of the MTP layer in a target's checkpoint."""

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp extract --from Qwen/Qwen3.5-0.8B --out drafters/mtp",
    )
    first: ClassVar[tuple[str, ...]] = ("from_", "out")

    from_: str
    """Folder of the target, or its name on the hub."""
    out: str
    """Folder of the drafter to write."""


@dataclass
class GraftOptions:
    """Make a drafter for a fine-tuned target of the MTP layer of the model it was tuned from.

    The layer is as it was; train it on with `draftsmith train mtp --init-from`.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp graft --from Qwen/Qwen3.5-0.8B --onto FINE_TUNE --out drafters/mtp",
    )
    first: ClassVar[tuple[str, ...]] = ("from_", "onto", "out")

    from_: str
    """Folder of the model with the layer, or its name on the hub."""
    onto: str
    """Folder of the target, or its name on the hub."""
    out: str
    """Folder of the drafter to write."""


@dataclass
class StitchOptions:
    """Write an MTP layer into a copy of its target's checkpoint, for engines.

    All other tensors and files are copied as they are; the copy is read back and compared.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp stitch --drafter runs/mtp/best --into FINE_TUNE --out model-with-mtp",
        "draftsmith mtp stitch --drafter runs/mtp/best --into FINE_TUNE --out layer --head-only",
    )
    first: ClassVar[tuple[str, ...]] = ("drafter", "into", "out", "head_only")

    drafter: str
    """Folder of the drafter."""
    into: str = field(metadata={"form": "FOLDER"})
    """Folder of the target."""
    out: str
    """Folder to write."""
    head_only: bool = False
    """Write the layer's tensors alone, under their names in the checkpoint."""


@dataclass
class ExamineOptions(SourceOptions):
    """Examine the MTP layer of a target: is there one, is it alive, and is it read as trained?

    Chains are drafted and verified with the layer as engines serve it, and with each mistake that
    servers made; the exit status is 2 if the layer has no use as it is.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp doctor --target Qwen/Qwen3.5-0.8B",
        "draftsmith mtp doctor --target FINE_TUNE --base Qwen/Qwen3.5-0.8B --prompts mine.jsonl",
    )
    first: ClassVar[tuple[str, ...]] = ("target.path", "prompts", "base", "drafts")

    target: TargetConfig = field(default_factory=lambda: TargetConfig(""))
    """Target whose layer is examined."""
    prompts: str | None = None
    """Prompts to decode; if not given, some of draftsmith's own."""
    base: str | None = None
    """Folder or name of the model that the target was tuned from: is its layer the same?"""
    drafts: int = 3
    """Drafts of a round."""
    limit: int = 16
    """Largest number of prompts."""
    max_new_tokens: int = 64
    """Largest number of tokens of a reply."""
    json: str | None = None
    """File to write the findings to; `-` prints them in place of the table."""

    def __post_init__(self) -> None:
        if min(self.drafts, self.limit) < 1:
            raise UserError("--drafts and --limit must be at least 1")
        # The prefill writes one token, and a round that accepts everything `drafts + 1`.
        if self.max_new_tokens < self.drafts + 2:
            raise UserError(
                f"--max-new-tokens must be at least {self.drafts + 2}, one whole round of "
                f"{self.drafts} drafts"
            )
