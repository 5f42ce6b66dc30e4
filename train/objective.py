"""The door between a method and the loop."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from .batches import Batch
from .features import Features

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count), both scalars; reduced over ranks and steps before they are divided."""


class Objective(Protocol):
    """How a drafter learns. Nothing here averages: the loop knows the global counts, an objective only its own batch."""

    taps: tuple[int, ...]

    def weights(self, batch: Batch) -> dict[str, float]:
        """For each term of the loss, the sum of its weights in this batch, from masks alone."""
        ...

    def forward(self, drafter: Any, features: Features, denominators: dict[str, float]) -> tuple[Tensor, Sums]:
        """The loss (a sum over this batch, each term divided by its global denominator) and metric sums.

        Every trainable parameter takes part even when the batch has nothing to learn from, or ranks would wait for each other.
        """
        ...


class TrainingModule(nn.Module):
    """Drafter and objective as the one module that accelerate wraps, so that DDP and its kin see every forward."""

    def __init__(self, drafter: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective

    def forward(self, features: Features, denominators: dict[str, float]) -> tuple[Tensor, Sums]:
        return self.objective.forward(self.drafter, features, denominators)


def add_sums(into: Sums, more: Sums) -> None:
    """Add metric sums in place."""
    for name, (total, count) in more.items():
        old = into.get(name)
        into[name] = (total, count) if old is None else (old[0] + total, old[1] + count)
