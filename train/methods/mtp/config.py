"""Configuration of a run that trains a target's MTP layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ...config import RunConfig, examples_of
from ...losses.settings import UnrolledLoss

STEPS = 3  # where `MtpLoss.steps` is None


@dataclass
class MtpConfig:
    """Options of an MTP layer: none, since it is one of the target's own class and sizes."""


@dataclass
class MtpLoss(UnrolledLoss):
    """Settings of the loss of an MTP layer."""

    trained: Literal["all", "norms"] = "all"
    """Parameters that are trained: all of the layer, or its norms alone."""

    def resolved(self) -> MtpLoss:
        """Return these settings with the defaults filled in."""
        return replace(self, steps=STEPS if self.steps is None else self.steps)


@dataclass
class MtpRun(RunConfig):
    """Train the MTP layer of a frozen target."""

    examples: ClassVar[tuple[str, ...]] = examples_of("mtp")

    heads: MtpConfig = field(default_factory=MtpConfig)
    objective: MtpLoss = field(default_factory=MtpLoss)
