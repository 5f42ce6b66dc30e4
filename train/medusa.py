"""How Medusa heads learn: every head from the same frozen state, each with its own label shift and its own global count.

Index table (drafter-recipes 0.3): head i (0-based) at row t reads h_t, its label is x[t+2+i], its teacher p[t+1+i], its weight
R(t+1 .. t+2+i). Shapes: R rows with weight, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..distill.divergences import cross_entropy, forward_kl, log_law, overlap, sum_in_chunks
from ..heads.errors import UserError
from ..heads.medusa import MedusaConfig, MedusaHeads
from ..inference.target import Target
from .batches import Batch
from .config import RunConfig
from .features import Features
from .objective import Sums

EXAMPLE = "accelerate launch -m draftsmith.train medusa --config configs/medusa/quickstart.yaml --optim.lr 3e-4"


@dataclass
class MedusaLoss:
    """What the heads are told."""

    loss: Literal["kl", "ce"] = "kl"
    """kl: the target's distribution; ce: the tokens of the text."""
    head_decay: float = 0.8
    """Weight of head i is this to the power i, over the sum of all."""
    rows_per_chunk: int = 1024
    """Positions whose logits exist at one time."""

    def __post_init__(self) -> None:
        if not 0 < self.head_decay <= 1 or self.rows_per_chunk < 1:
            raise UserError("objective.head_decay must lie in (0, 1] and objective.rows_per_chunk be at least 1")


@dataclass
class Run(RunConfig):
    """Train Medusa heads for a frozen target."""

    heads: MedusaConfig = field(default_factory=MedusaConfig)
    objective: MedusaLoss = field(default_factory=MedusaLoss)


def make_drafter(run: Run, target: Target) -> MedusaHeads:
    """Untrained heads: each starts as the target's own head, so it guesses the next token's token."""
    drafter = MedusaHeads(run.heads, target.hidden_size, target.vocab_size, target.head)
    drafter.start_from(target.head_weight.float())
    return drafter


def make_objective(run: Run, target: Target) -> MedusaObjective:
    return MedusaObjective(run.objective, run.heads.num_heads, target.head)


class MedusaObjective:
    """Medusa-1: the target is frozen, so decoding stays lossless relative to it."""

    taps: tuple[int, ...] = ()

    def __init__(self, config: MedusaLoss, num_heads: int, target_head: Callable[[Tensor], Tensor]) -> None:
        self._config, self._num_heads, self._target_head = config, num_heads, target_head
        raw = [config.head_decay**i for i in range(num_heads)]
        self.head_weights = [weight / sum(raw) for weight in raw]

    def weights(self, batch: Batch) -> dict[str, float]:
        return {f"head{i}": float(batch.reply_run(1, 2 + i).sum()) for i in range(self._num_heads)}

    def forward(self, drafter: MedusaHeads, features: Features, denominators: dict[str, float]) -> tuple[Tensor, Sums]:
        batch, last = features.batch, features.last.flatten(0, 1)
        valid = torch.stack([batch.reply_run(1, 2 + i).flatten() for i in range(self._num_heads)], dim=-1)
        rows = valid[:, 0].nonzero()[:, 0]  # on the CPU; the rows of deeper heads are among those of the first
        losses, right, alpha = sum_in_chunks(
            lambda rows, valid: self._sums(drafter, last, batch.ids.flatten(), rows, valid),
            (rows, valid[rows]),
            self._config.rows_per_chunk,
        )
        factors = [w / max(denominators[f"head{i}"], 1.0) for i, w in enumerate(self.head_weights)]
        loss = (losses * losses.new_tensor(factors)).sum()
        sums: Sums = {}
        for i, count in enumerate(valid.sum(0)):
            for name, values in (("loss", losses), ("top1", right), ("alpha", alpha)):
                sums[f"{name}@{i + 1}"] = (values[i].detach(), count)
        return loss, sums

    def _sums(self, drafter: MedusaHeads, last: Tensor, ids: Tensor, rows: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """Each `[M]`, over the rows that are valid for the head: loss, rows whose best token is the target's, overlap.

        `last` is `[positions, H]` on the device; `ids` `[positions]`, `rows` `[R]` and `valid` `[R, M]` are on the CPU, so that
        finding the distinct teachers waits for nothing. A position teaches up to M heads; its law is made once.
        """
        ahead = (rows[:, None] + torch.arange(1, self._num_heads + 1)).clamp(max=ids.shape[0] - 1)  # teacher i at t + 1 + i
        labels = ids[(ahead + 1).clamp(max=ids.shape[0] - 1)].to(last.device, non_blocking=True)
        positions, teacher = ahead.unique(return_inverse=True)
        device_rows, positions, teacher, valid = (t.to(last.device, non_blocking=True) for t in (rows, positions, teacher, valid))
        with torch.no_grad():
            log_laws = log_law(self._target_head(last[positions]))
        hidden = last[device_rows].to(next(drafter.parameters()).dtype)
        sums = []
        for i in range(self._num_heads):
            log_q, log_p = log_law(drafter.logits(hidden, i)), log_laws[teacher[:, i]]
            losses = forward_kl(log_q, log_p) if self._config.loss == "kl" else cross_entropy(log_q, labels[:, i])
            with torch.no_grad():
                right = (log_q.argmax(-1) == log_p.argmax(-1)).float()
                alpha = overlap(log_q, log_p)
            sums.append(torch.stack([(values * valid[:, i]).sum() for values in (losses, right, alpha)]))
        return tuple(torch.stack(sums, dim=-1))
