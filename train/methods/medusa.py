"""How Medusa heads learn: every head from the same frozen state, each with its own label shift and
its own global count.

Index table (drafter-recipes 0.3): head i (0-based) at row t reads h_t, its label is x[t+2+i], its
teacher p[t+1+i], its weight R(t+1 .. t+2+i). Shapes: R rows with weight, H hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...distill.divergences import Divergence, divergence, log_probs, overlap, sum_in_chunks
from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...heads.medusa import MedusaConfig, MedusaHeads
from ...inference.proposers.medusa import accepted_by_root, calibrate
from ...inference.proposers.medusa import teacher_forced as teacher_forced_by_last
from ...inference.target import Hidden, Target
from ..config import RunConfig
from ..data.batches import Batch, Batches
from ..data.rollouts import Rollouts, Writer
from ..features import Features
from ..objectives import Sums, depth_metrics, static_decay
from ..outline import ConfigOnly, Outline

__all__ = [
    "REPLAYED",
    "Run",
    "accepted_by_root",
    "calibrate",
    "features_of",
    "make_drafter",
    "make_objective",
    "outline",
    "teacher_forced",
    "writers",
]

SURENESS = 0.45
"""Heads begin with the target's output matrix times this. With the matrix as it is they are as sure
as the target, and wrong: with SmolLM2 the divergences of three heads begin at 9.0, 11.1 and 11.4,
times 0.45 at 5.7, 6.7 and 6.8. The least lies between 0.4 and 0.5, with the quickstart target too
(EXPERIMENTS.md)."""
REPLAYED: dict[str, int] = {}  # `accepted_by_root` estimates what the proposer drafts by default


@dataclass
class MedusaLoss:
    """Loss settings."""

    loss: Divergence = "kl"
    """Between a head's distribution and the target's: kl, reverse-kl, jsd, tv, lk-alpha, lk-hybrid,
    ce (the text's tokens), top-k-kl, ce-l1."""
    head_decay: float = 0.8
    """Weight of head i is this to the power i, over the sum of all."""
    rows_per_chunk: int = 1024
    """Positions whose logits exist at one time."""

    def __post_init__(self) -> None:
        if not 0 < self.head_decay <= 1 or self.rows_per_chunk < 1:
            raise UserError(
                "objective.head_decay must lie in (0, 1] and objective.rows_per_chunk be at least 1"
            )


@dataclass
class Run(RunConfig):
    """Train Medusa heads for a frozen target."""

    example: ClassVar[str] = (
        "accelerate launch -m draftsmith.train medusa --config configs/medusa/quickstart.yaml "
        "--optim.lr 3e-4"
    )

    heads: MedusaConfig = field(default_factory=MedusaConfig)
    objective: MedusaLoss = field(default_factory=MedusaLoss)


def features_of(run: Run, target: Target) -> tuple[tuple[int, ...], bool]:
    """Taps that the run reads, and whether it reads the last state everywhere; see `Objective`."""
    return (), False


def outline(run: Run, target: ConfigOnly) -> Outline:
    """See `Outline`."""
    heads = MedusaHeads(
        run.heads, target.config.hidden_size, target.vocab_size, target.embedding_and_head.head
    )
    borrowed = (
        run.heads.num_heads * target.config.hidden_size * target.vocab_size
        if run.heads.shared_head
        else 0
    )
    return Outline(heads, borrowed_params=borrowed)


def make_drafter(
    run: Run, target: Target, batches: Batches, before: Artifact | None
) -> MedusaHeads:
    """Untrained heads: each starts as the target's own, so it guesses the next token's token. A
    warm start keeps its shape."""
    if before is not None:
        shape: MedusaConfig = before.drafter.config
        if run.heads not in (MedusaConfig(), shape):
            raise UserError(
                f"init_from {run.init_from} has {shape}, this run's heads are {run.heads}; leave "
                "heads out"
            )
        return MedusaHeads(shape, target.hidden_size, target.vocab_size, target.head)
    drafter = MedusaHeads(run.heads, target.hidden_size, target.vocab_size, target.head)
    drafter.start_from(target.head_weight.float() * SURENESS)
    return drafter


def make_objective(run: Run, target: Target, drafter: MedusaHeads) -> MedusaObjective:
    return MedusaObjective(run.objective, run.heads.num_heads, target.head)


class MedusaObjective:
    """Medusa-1: the target is frozen, so decoding stays lossless relative to it."""

    taps: tuple[int, ...] = ()
    all_last = False

    def __init__(
        self, config: MedusaLoss, num_heads: int, target_head: Callable[[Tensor], Tensor]
    ) -> None:
        self._config, self._num_heads, self._target_head = config, num_heads, target_head
        self.head_weights = static_decay(num_heads, config.head_decay)

    def begin(self, progress: float) -> None: ...

    def weights(self, batch: Batch) -> dict[str, float]:
        return {
            f"head{i}": float(batch.reply_run(1, 2 + i).sum(dtype=torch.float64))
            for i in range(self._num_heads)
        }

    def forward(
        self, drafter: MedusaHeads, features: Features, denominators: dict[str, float]
    ) -> tuple[Tensor, Sums]:
        batch, last = features.batch, features.last.flatten(0, 1)
        valid = torch.stack(
            [batch.reply_run(1, 2 + i).flatten() for i in range(self._num_heads)], dim=-1
        )
        # on the CPU; the rows of deeper heads are among those of the first
        rows = valid[:, 0].nonzero()[:, 0]
        valid = valid[rows]
        device_valid = valid.to(last.device, non_blocking=True)
        factors = device_valid * last.new_tensor(
            [w / max(denominators[f"head{i}"], 1.0) for i, w in enumerate(self.head_weights)],
            dtype=torch.float32,
        )
        dtype = next(drafter.parameters()).dtype
        loss, losses, right, alpha = sum_in_chunks(
            lambda *parts: self._table(drafter, last, batch.ids.flatten(), *parts),
            last[rows.to(last.device)].to(dtype),
            (rows, factors),
            list(drafter.parameters()),
            self._config.rows_per_chunk,
        )
        return loss, depth_metrics(losses, right, alpha, device_valid)

    def _table(
        self,
        drafter: MedusaHeads,
        last: Tensor,
        ids: Tensor,
        hidden: Tensor,
        rows: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The loss, and `[R, M]` each: losses, whether the best token is the target's, overlap.

        `last` is `[positions, H]` on the device; `ids` `[positions]` and `rows` `[R]` are on the
        CPU, so that finding the distinct teachers waits for nothing. A position teaches up to M
        heads; its distribution is made once.
        """
        # teacher i at t + 1 + i
        ahead = (rows[:, None] + torch.arange(1, self._num_heads + 1)).clamp(max=ids.shape[0] - 1)
        labels = ids[(ahead + 1).clamp(max=ids.shape[0] - 1)].to(last.device, non_blocking=True)
        positions, teacher = (
            t.to(last.device, non_blocking=True) for t in ahead.unique(return_inverse=True)
        )
        with torch.no_grad():
            target_log_probs = log_probs(self._target_head(last[positions]))
        tables = []
        for i in range(self._num_heads):
            log_q, log_p = log_probs(drafter.logits(hidden, i)), target_log_probs[teacher[:, i]]
            losses = divergence(self._config.loss, log_q, log_p, labels[:, i])
            with torch.no_grad():
                right = (log_q.argmax(-1) == log_p.argmax(-1)).float()
                tables.append((losses, right, overlap(log_q, log_p)))
        losses, right, alpha = (torch.stack(column, dim=-1) for column in zip(*tables, strict=True))
        return (losses * factors).sum(), losses, right, alpha


def writers(run: Run, target: Target, drafter: MedusaHeads) -> list[tuple[str, Rollouts, Writer]]:
    """Nothing is written while heads are trained: they draft from the target's states alone,
    whatever was drafted before."""
    return []


def teacher_forced(heads: MedusaHeads, hidden: Hidden, ids: Tensor) -> Tensor:
    """As in `inference/proposers/medusa.py`, of all features."""
    return teacher_forced_by_last(heads, hidden.last, ids)
