"""Interface between a method and the training loop, and what objectives share: weights, metrics.

Shapes: R roots, D draft depths.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple, Protocol, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..distill.divergences import Teacher, loss_of_logits, overlap
from ..distill.settings import NEEDS_LABELS, Divergence
from .data.batches import Batch
from .data.features import Features

SMOOTHING = 0.5  # of D-PACE's chances, the paper's value
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


def smoothed(chances: Tensor) -> Tensor:
    """Return (1 - s) c + s, D-PACE's smoothing (arXiv 2605.18810), s = `SMOOTHING`.

    Without it deep positions learn nothing while the shallow ones are still wrong.
    """
    return (1 - SMOOTHING) * chances + SMOOTHING


class Drafts(NamedTuple):
    """Drafts compared with what they have to learn; tensors of the shape of their labels."""

    losses: Tensor
    """Losses of the tokens, the only ones that carry a gradient."""
    right: Tensor | None
    """1 where the draft's best token is the target's, else 0; None without one to compare."""
    overlaps: Tensor | None
    """Overlaps of both distributions; None where they were not asked for."""
    chances: Tensor | None
    """Chances of acceptance for `survival_weights`; None where neither was asked for."""


def compared(
    loss: Divergence,
    logits: Tensor,
    labels: Tensor,
    best: Tensor | None,
    log_p: Tensor | None,
    p: Tensor | None = None,
    teacher: Teacher | None = None,
    outside: Tensor | None = None,
    overlaps: bool = True,
    d_pace: bool = False,
) -> Drafts:
    """Return drafts with `logits` `[.., Vd]`, as the losses of all objectives judge them.

    `labels` and `best`, the text's and the target's best tokens, are columns of the drafter's head,
    -1 for a token that it does not have. `log_p`, or the `teacher` made of it, is what teaches;
    `overlaps` are those with `p`, else with `log_p`. Chances are the overlaps, or with `d_pace` the
    smoothed probabilities of the labels.

    What cannot be drafted teaches nothing: a draft has no loss where `outside` is true, nor without
    a column for its label if the loss reads labels.
    """
    # A label without a column is clamped to have one; its loss is set to 0.
    columns = labels.clamp(min=0)
    found = loss_of_logits(loss, logits, log_p, columns, p, teacher)
    losses = found.losses
    if outside is not None:
        losses = losses.masked_fill(outside, 0.0)
    if loss in NEEDS_LABELS:
        losses = losses.masked_fill(labels < 0, 0.0)
    with torch.no_grad():
        # A best token of -1 equals no column, so a draft that cannot be made is a miss.
        right = None if best is None else (found.best == best).float()
        chances = alpha = found.overlaps
        if alpha is None and overlaps and log_p is not None:
            chances = alpha = overlap(logits - found.log_sums[..., None], log_p)
        if d_pace:
            label_logits = logits.gather(-1, columns[..., None])[..., 0]
            chances = smoothed((label_logits - found.log_sums).exp() * (labels >= 0))
    return Drafts(losses, right, alpha, chances)


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
