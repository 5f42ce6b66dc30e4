"""The door between a method and the loop, and what objectives share: weights of draft depths, and
metrics by depth.

Shapes: R roots, D draft depths.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .data.batches import Batch
from .features import Features

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count), both scalars; reduced over ranks and steps before they are
divided."""


class Objective(Protocol):
    """How a drafter learns. Nothing here averages: the loop knows the global counts, an objective
    only its own batch."""

    taps: tuple[int, ...]
    all_last: bool
    """Whether the last state is read at every position, not only where a reply token comes next."""

    def begin(self, progress: float) -> None:
        """An optimiser step begins, after this share of the run: for objectives that change on the
        way."""
        ...

    def weights(self, batch: Batch) -> dict[str, float]:
        """For each term of the loss, the sum of its weights in this batch, from masks alone."""
        ...

    def forward(
        self, drafter: Any, features: Features, denominators: dict[str, float]
    ) -> tuple[Tensor, Sums]:
        """The loss (a sum over this batch, each term divided by its global denominator) and metric
        sums.

        Every trainable parameter takes part even when the batch has nothing to learn from, or ranks
        would wait for each other.
        """
        ...


class TrainingModule(nn.Module):
    """Drafter and objective as the one module that accelerate wraps, so that DDP and its kin see
    every forward."""

    def __init__(self, drafter: nn.Module, objective: Objective, bf16: bool = False) -> None:
        """`bf16`: autocast over fp32 weights."""
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        self._bf16 = bf16

    def forward(self, features: Features, denominators: dict[str, float]) -> tuple[Tensor, Sums]:
        with torch.autocast(features.last.device.type, torch.bfloat16, enabled=self._bf16):
            loss, sums = self.objective.forward(self.drafter, features, denominators)
        return loss.float(), sums


def add_sums(into: Sums, more: Sums) -> None:
    """Add metric sums in place."""
    for name, (total, count) in more.items():
        old = into.get(name)
        into[name] = (total, count) if old is None else (old[0] + total, old[1] + count)


def static_decay(depths: int, decay: float) -> list[float]:
    """decay^k over their sum, k = 0 .. depths - 1: dividing keeps the learning rate independent of
    the number of depths."""
    raw = [decay**k for k in range(depths)]
    return [weight / sum(raw) for weight in raw]


def survival_weights(chances: Tensor, valid: Tensor) -> Tensor:
    """`w_i = sum_{j >= i} prod_{l <= j} c_l` `[R, D]`, no gradient: what a better depth i earns
    here, in accepted drafts.

    `chances` `[R, D]` of acceptance; where `valid` is false a depth counts as 1 in the products and
    earns nothing. With c = alpha, `sum_i w_i (-log alpha_i)` has the gradient of `-(expected
    accepted drafts)`: end-to-end TV (arXiv 2606.12370) times its number of depths. With c =
    `smoothed(q(x*))` and cross-entropy it is D-PACE (arXiv 2605.18810).
    """
    chances = torch.where(valid, chances.detach(), 1.0)
    survived = chances.cumprod(-1) * valid
    return survived.flip(-1).cumsum(-1).flip(-1) * valid


def smoothed(chances: Tensor, share: float) -> Tensor:
    """(1 - share) c + share: keeps deep positions from starving while the shallow ones are still
    wrong (D-PACE's alpha)."""
    return (1 - share) * chances + share


def end_to_end_tv(alphas: Tensor, valid: Tensor) -> Tensor:
    """1 - (1/D) sum_j prod_{i <= j} alpha_i `[R]`, over depths `valid` `[R, D]` (arXiv 2606.12370,
    equation of the loss)."""
    return 1 - (torch.where(valid, alphas, 1.0).cumprod(-1) * valid).sum(-1) / alphas.shape[-1]


def depth_metrics(losses: Tensor, right: Tensor, alpha: Tensor, valid: Tensor) -> Sums:
    """The metrics of drafter-recipes 0.6 as (sum, count); all arguments `[R, D]`, one row a root,
    `valid` with weight.

    `right`: the draft's best token is the target's. `surv`: right at all depths so far, over roots
    with that many labels; `cond`: the same over roots right at all depths before; `reach`: product
    of the overlaps so far. From them `acceptance_lengths` makes tau_greedy and tau_sampled.
    """
    sums: Sums = {}
    valid = valid.bool()
    right = right.bool() & valid
    survived = right.cumprod(-1).bool()
    reach = torch.where(valid, alpha, 1.0).cumprod(-1)
    before = torch.cat([torch.ones_like(survived[:, :1]), survived[:, :-1]], dim=-1) & valid
    counts = valid.sum(0)
    for d in range(right.shape[1]):
        here = valid[:, d]
        for name, values in (
            ("loss", losses),
            ("top1", right),
            ("alpha", alpha),
            ("surv", survived),
            ("reach", reach),
        ):
            sums[f"{name}@{d + 1}"] = ((values[:, d] * here).sum().double(), counts[d])
        sums[f"cond@{d + 1}"] = ((survived[:, d] & before[:, d]).sum().double(), before[:, d].sum())
    return sums


def acceptance_lengths(metrics: dict[str, float]) -> dict[str, float]:
    """tau_greedy = 1 + sum of surv, tau_sampled = 1 + sum of reach (a product a row, then the
    mean), from reduced metrics.

    Averages over all training rows: decoding visits other ones, so they are compared with nothing.
    """
    return {
        name: 1
        + sum(
            value for key, value in metrics.items() if key.startswith(part + "@") and value == value
        )
        for name, part in (("tau_greedy", "surv"), ("tau_sampled", "reach"))
        if part + "@1" in metrics
    }
