"""Interface between a method and the training loop, and the metrics of all objectives.

Shapes: R roots, D draft depths.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..inference.rounds.device import send
from .data.batches import Batch
from .data.features import Features

Sums = dict[str, tuple[Tensor, Tensor]]
"""Metric name -> (sum, count), both scalars. They are added up over steps and ranks before they are
divided."""


class Objective(Protocol):
    """Loss and metrics of a method for one batch.

    Nothing here averages: the loop knows the global counts, an objective only its own batch
    (docs/objectives.md#global-denominators).
    """

    taps: tuple[int, ...] = ()
    """Taps that the drafter reads, or the loss."""
    all_last: bool = False
    """True if the last hidden state is read at every position, false if only where a reply token
    comes next."""

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the sum of weights in this batch for each term of the loss, from masks alone.

        Every batch has the same names, with 0 for a term of which it has nothing.
        """
        ...

    def forward(
        self,
        drafter: Any,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        """Return the loss and metric sums of a batch; without sums unless `measured`.

        What only metrics need is left out then, and the loss stays the same in every bit. It is a
        sum over the batch, with each term divided by its global denominator: `denominators` are the
        sums of `weights` over all ranks and micro-batches of a step. The metric named `loss` is
        added by the trainer. Every trainable parameter takes part even if the batch has nothing to
        learn from; otherwise ranks would wait for each other's gradients forever.
        """
        ...


class TrainingModule(nn.Module):
    """Drafter and objective as one module.

    accelerate wraps it, so that DDP, FSDP2 and DeepSpeed see every forward pass.
    """

    def __init__(self, drafter: nn.Module, objective: Objective, bf16: bool = False) -> None:
        """With `bf16` the forward pass runs under autocast, over fp32 weights."""
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        self._bf16 = bf16
        if bf16:
            # torch says once that a norm over bf16 with an fp32 weight has no fused kernel.
            warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")

    def forward(
        self, features: Features, denominators: dict[str, float], measured: bool = True
    ) -> tuple[Tensor, Sums]:
        with torch.autocast(features.last.device.type, torch.bfloat16, enabled=self._bf16):
            loss, sums = self.objective.forward(self.drafter, features, denominators, measured)
        # Autocast may leave the loss in bf16, which is too coarse to add up.
        return loss.float(), sums


def add_sums(into: Sums, more: Sums) -> None:
    """Add the metric sums `more` to `into`, in place."""
    for name, (total, count) in more.items():
        old = into.get(name)
        into[name] = (total, count) if old is None else (old[0] + total, old[1] + count)


class DepthObjective(Objective):
    """Base of objectives with a weight for each draft depth, the same at every root.

    A depth is divided by its own global count of drafts. Deep ones have fewer, and with one count
    for all they would weigh less than their weights say.
    """

    def __init__(self, depths: int, decay: float) -> None:
        """The weights are `decay^k` over their sum, k = 0 .. depths - 1."""
        # The division makes the learning rate independent of the number of depths.
        raw = [decay**k for k in range(depths)]
        self.depths, self.depth_weights = depths, [weight / sum(raw) for weight in raw]

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of drafts with weight at each depth, from masks alone."""
        totals = batch.learned(self.depths).sum((0, 1), dtype=torch.float64).tolist()
        return {f"depth{k}": total for k, total in enumerate(totals)}

    def factors(self, valid: Tensor, denominators: dict[str, float]) -> Tensor:
        """Return the factors of the losses `[R, D]`, 0 where `valid` `[R, D]` is."""
        # Where no rank has a draft the count is 0, and 0 / 0 would be NaN.
        weights = enumerate(self.depth_weights)
        scales = [weight / max(denominators[f"depth{k}"], 1.0) for k, weight in weights]
        return valid * send(scales, valid.device)


def depth_metrics(losses: Tensor, right: Tensor, alpha: Tensor, valid: Tensor) -> Sums:
    """Return the metrics by depth of docs/metrics.md#training-metrics, as (sum, count).

    All arguments are `[R, D]`, one row for each root. `valid` is not 0 where the draft has weight;
    `right` where the draft's best token is the target's best token.

    - `surv@d`: right at all depths up to d, over roots with a label at depth d;
    - `cond@d`: the same, over those of them that are right at all depths before d;
    - `reach@d`: product of the overlaps `alpha` at the depths up to d.

    `acceptance_lengths` makes tau_rows of these.
    """
    sums: Sums = {}
    valid = valid.bool()
    right = right.bool() & valid
    survived = right.cumprod(-1).bool()
    reach = torch.where(valid, alpha, 1.0).cumprod(-1)
    # Shifted by one depth: right at all depths before this one, which is always so at the first.
    before = torch.cat([torch.ones_like(survived[:, :1]), survived[:, :-1]], dim=-1) & valid
    counts = valid.sum(0)
    columns = {"loss": losses, "top1": right, "alpha": alpha, "surv": survived, "reach": reach}
    for d in range(right.shape[1]):
        valid_at_depth = valid[:, d]
        for name, values in columns.items():
            total = (values[:, d] * valid_at_depth).sum().double()
            sums[f"{name}@{d + 1}"] = (total, counts[d])
        sums[f"cond@{d + 1}"] = ((survived[:, d] & before[:, d]).sum().double(), before[:, d].sum())
    return sums


def acceptance_lengths(metrics: dict[str, float]) -> dict[str, float]:
    """Return tau_rows = 1 + sum of `surv@d` of reduced `metrics`, empty without those.

    It is an average over all training roots; decoding visits other positions, so it is not
    comparable with any other tau.
    """
    if "surv@1" not in metrics:
        return {}
    by_depth = (value for key, value in metrics.items() if key.startswith("surv@"))
    # A depth without roots has a mean of NaN.
    return {"tau_rows": 1 + sum(value for value in by_depth if not math.isnan(value))}


def means(sums: Sums, accelerator: Accelerator) -> dict[str, float]:
    """Return the metrics of all ranks since the last log: sums are reduced, then divided once.

    A metric without a count is NaN. All ranks call this.
    """
    # The loss has row 0, so that its count can be corrected below.
    names = ["loss", *(name for name in sums if name != "loss")]
    # In float64, which holds counts above 2^24 exactly, as float32 does not.
    table = torch.stack([torch.stack([x.double().cpu() for x in sums[name]]) for name in names])
    if accelerator.num_processes > 1:
        table = cast(Tensor, accelerator.reduce(table.to(accelerator.device), "sum")).cpu()
        # The other metrics are means over roots. The loss is one number for each step, of which
        # every rank holds its share, while each of them has counted the step.
        table[0, 1] /= accelerator.num_processes
    pairs = zip(names, table.tolist(), strict=True)
    metrics = {name: total / count if count else math.nan for name, (total, count) in pairs}
    return metrics | acceptance_lengths(metrics)
