"""Options of the commands about MTP layers. Nothing here imports torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ....inference.settings import TargetConfig


@dataclass
class ExtractLayerOptions:
    """Make a drafter of the MTP layer in a target's checkpoint, or in that of its base model.

    A base model's layer is as it was; train it on with `draftsmith train mtp --init-from`.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp extract --from Qwen/Qwen3.5-0.8B --out drafters/mtp",
        "draftsmith mtp extract --from FINE_TUNE --base Qwen/Qwen3.5-0.8B --out drafters/mtp",
    )

    from_: str
    """Folder of the target, or its name on the hub."""
    out: str
    """Folder of the drafter to write."""
    base: str | None = None
    """Folder or name of the model that the target was tuned from, to take its layer in place of the
    target's own, which was lost."""


@dataclass
class StitchOptions:
    """Write an MTP layer into a copy of its target's checkpoint, for engines.

    All other tensors and files are copied as they are.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp stitch --drafter runs/mtp/best --into FINE_TUNE --out model-with-mtp",
    )

    drafter: str
    """Folder of the drafter."""
    into: str = field(metadata={"form": "FOLDER"})
    """Folder of the target."""
    out: str
    """Folder to write."""


@dataclass
class ExamineOptions:
    """Examine the MTP layer of a target: is there one, is it alive, and was it tuned with it?

    Chains of three are drafted and verified with the layer as engines serve it; the exit status is
    2 if the layer has no use as it is.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp doctor --target Qwen/Qwen3.5-0.8B",
        "draftsmith mtp doctor --target FINE_TUNE --base Qwen/Qwen3.5-0.8B --prompts mine.jsonl",
    )

    target: TargetConfig = field(default_factory=lambda: TargetConfig(""))
    """Target whose layer is examined."""
    prompts: str | None = None
    """Prompts to decode, the first sixteen; if not given, some of draftsmith's own."""
    base: str | None = None
    """Folder or name of the model that the target was tuned from: is its layer the same?"""
