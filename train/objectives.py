"""Interface between a method and the training loop, and what objectives share: weights, metrics.

Shapes: R roots, D draft depths.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..heads.errors import UserError
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

    taps: tuple[int, ...]
    all_last: bool
    """True if the last hidden state is read at every position, false if only where a reply token
    comes next."""

    def begin(self, progress: float) -> None:
        """Prepare for an optimiser step; `progress` is the share of the run that lies before it.

        For objectives that change during the run; by default nothing changes.
        """
        return

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
        """Return the loss and metric sums of a batch; without `measured` there are no sums.

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


def static_decay(depths: int, decay: float) -> list[float]:
    """Return the weights `decay^k` over their sum, k = 0 .. depths - 1."""
    # The division makes the learning rate independent of the number of depths.
    raw = [decay**k for k in range(depths)]
    return [weight / sum(raw) for weight in raw]


def survival_weights(chances: Tensor, valid: Tensor) -> Tensor:
    """Return `w_i = sum_{j >= i} prod_{l <= j} c_l` `[R, D]`, without gradient.

    This is what a better draft at depth i earns at its root, in accepted drafts. `chances` `[R, D]`
    are the c, chances of acceptance; where `valid` `[R, D]` is false a depth counts as 1 in the
    products and earns nothing.

    With c = alpha, `sum_i w_i (-log alpha_i)` has the gradient of `-(expected accepted drafts)`:
    end-to-end TV (arXiv 2606.12370) times its number of depths. With c = `smoothed(q(x*))` and
    cross-entropy it is D-PACE (arXiv 2605.18810).
    """
    chances = torch.where(valid, chances.detach(), 1.0)
    survived = chances.cumprod(-1) * valid
    # Sum over j >= i: a cumulative sum from the right.
    return survived.flip(-1).cumsum(-1).flip(-1) * valid


def smoothed(chances: Tensor, share: float) -> Tensor:
    """Return (1 - share) c + share, D-PACE's smoothing (arXiv 2605.18810).

    Without it deep positions learn nothing while the shallow ones are still wrong.
    """
    return (1 - share) * chances + share


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
    by_depth = [value for key, value in metrics.items() if key.startswith("surv@")]
    # A depth without roots has a mean of NaN.
    return {"tau_rows": 1 + sum(value for value in by_depth if not math.isnan(value))}


def check_backend(backend: str, device: torch.device) -> None:
    """Raise `UserError` for a backend of attention that has no gradients on this device."""
    if backend == "flex" and device.type == "cpu":
        raise UserError("objective.attention is flex, which has no gradients on a CPU; use auto")


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
    metrics = {}
    for name, (total, count) in zip(names, table.tolist(), strict=True):
        metrics[name] = total / count if count else math.nan
    return metrics | acceptance_lengths(metrics)
