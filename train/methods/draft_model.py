"""How a draft language model learns: from the target's distribution at every position of a reply
(DistillSpec, arXiv 2310.08461).

Index table (drafter-recipes 0.3): row t reads the text up to x[t], its label is x[t+1], its teacher
p[t], its weight R(t+1). Shapes: R rows with weight, S positions, h student width, H target width, V
target vocabulary, Vs the student's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...distill.divergences import (
    NEEDS_LABELS,
    Divergence,
    divergence,
    log_probs,
    overlap,
    sum_in_chunks,
)
from ...distill.students import StudentConfig, chosen_layers, make_student, plan_of, smaller
from ...heads.artifact import Artifact
from ...heads.draft_model import DraftModel
from ...heads.errors import UserError
from ...heads.layout import place
from ...inference.proposers.draft_model import accepted_by_root, calibrate
from ...inference.spread import decoder_layers
from ...inference.target import Hidden, Target
from ..config import RunConfig
from ..data.batches import Batch, Batches
from ..data.rollouts import Errors, Rollouts, Writer, decoded_rounds, student_texts
from ..features import Features, check_packing
from ..memory import Memory, recomputed
from ..objectives import Sums, depth_metrics
from ..outline import ConfigOnly, Outline, config_at, empty

log = logging.getLogger(__name__)

__all__ = [
    "REPLAYED", "Run", "accepted_by_root", "calibrate", "features_of", "make_drafter",
    "make_objective",
    "outline", "teacher_forced", "writers",
]  # fmt: skip

# `accepted_by_root` estimates what the proposer drafts by default: a chain
REPLAYED: dict[str, int] = {}
ROWS_AT_ONCE = 1024  # whose logits exist at one time while held-out texts are judged
STUDIED_TEXTS = 32  # training texts by which layers and dimensions are judged


@dataclass
class DistillLoss(Memory):
    """Loss settings."""

    loss: Divergence = "kl"
    """Between the student's distribution and the target's; ce learns the text's tokens:
    sequence-level distillation if the target wrote them, plain language modelling if not."""
    temperatures: list[float] = field(default_factory=lambda: [1.0])
    """Each text is taught at one of these, drawn anew every time: both distributions are warped by
    it; 0: the target's best token."""
    hidden_weight: float = 0.0
    """Weight of SmoothL1 between the target's last state and a linear projection of the student's,
    which is not kept."""
    rows_per_chunk: int = 1024
    """Positions whose logits exist at one time."""

    def __post_init__(self) -> None:
        if self.rows_per_chunk < 1 or self.hidden_weight < 0:
            raise UserError(
                "objective.rows_per_chunk must be at least 1, objective.hidden_weight at least 0"
            )
        super().__post_init__()
        if not self.temperatures or min(self.temperatures) < 0:
            raise UserError(
                "objective.temperatures must name at least one temperature of 0 or more"
            )
        if self.loss in NEEDS_LABELS and self.temperatures != [1.0]:
            raise UserError(
                f"objective.loss {self.loss} learns the text's tokens, to which "
                "objective.temperatures means nothing"
            )


@dataclass
class Run(RunConfig):
    """Distil a small language model from a frozen target."""

    example: ClassVar[str] = (
        "accelerate launch -m draftsmith.train distill --config configs/distill/quickstart.yaml "
        "--optim.lr 3e-4"
    )

    student: StudentConfig = field(default_factory=StudentConfig)
    objective: DistillLoss = field(default_factory=DistillLoss)
    rollouts: Rollouts = field(default_factory=Rollouts)
    errors: Errors = field(default_factory=Errors)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective.loss in NEEDS_LABELS and self.rollouts.share:
            raise UserError(
                f"objective.loss {self.objective.loss} would teach the student its own words; use "
                "kl with rollouts.share"
            )


def features_of(run: Run, target: Target) -> tuple[tuple[int, ...], bool]:
    """Taps that the run reads, and whether it reads the last state everywhere; see `Objective`."""
    return (), False


def outline(run: Run, target: ConfigOnly) -> Outline:
    """See `Outline`."""
    return Outline(empty(_student_config(run.student, target)))


def _student_config(config: StudentConfig, target: ConfigOnly) -> Any:
    if (path := config.path or config.config) is not None:
        found = config_at(path)
        if config.config is not None:
            found.vocab_size = target.vocab_size
        return found
    # any of them: they are of one size
    kept = chosen_layers(config, target.num_layers, lambda: [0.0] * target.num_layers)
    return smaller(config, cast(Any, target), kept)


def make_drafter(run: Run, target: Target, batches: Batches, before: Artifact | None) -> DraftModel:
    """The student that the run asks for, or the one `before`; prints what it will cost."""
    if before is not None:
        if run.student != StudentConfig():
            raise UserError("init_from and student exclude each other; leave out student")
        student = before.drafter.requires_grad_(True)
        place(student, target.device, torch.float32)
    elif target.together and run.student.path is None and run.student.config is None:
        raise UserError(
            "a student is cut from a whole target; give student.path, or leave out target.spread"
        )
    elif not target.whole and run.student.path is None and run.student.config is None:
        raise UserError(
            "a student is cut from the whole target; give student.path, or leave out the features "
            "section"
        )
    else:
        student = make_student(run.student, target, lambda: batches.sample(STUDIED_TEXTS))
    for line in plan_of(student.model, target.model).lines(torch.float32):
        log.info(line)
    check_student(runner_of(student), run.data.max_length)
    return student


def check_student(student: Target, longest: int) -> None:
    """Demand what training and decoding rely on, before either begins."""
    if student.max_positions < longest:
        raise UserError(
            f"the student has {student.max_positions} positions, data.max_length is {longest}; "
            "lower it"
        )
    try:
        student.check_head()
        check_packing(student, student.name)
        student.check_tree()
    except UserError as error:
        raise UserError(f"this student cannot be used as a draft model: {error}") from error


def runner_of(drafter: DraftModel) -> Target:
    """The student behind the interface of a target: prefill, trees, head."""
    return Target(drafter.model, drafter.tokenizer, "student", frozen=False)


def make_objective(run: Run, target: Target, drafter: DraftModel) -> DistillObjective:
    return DistillObjective(
        run.objective, runner_of(drafter), target, run.seed, run.errors.accepted_weight
    )


class DistillObjective(nn.Module):
    """A divergence at every row that predicts a reply token."""

    taps: tuple[int, ...] = ()
    all_last = False

    def __init__(
        self,
        config: DistillLoss,
        student: Target,
        target: Target,
        seed: int = 0,
        accepted_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.config, self._target_head, self._seed = config, target.head, seed
        self._accepted_weight = accepted_weight
        # Not a module of this one: its parameters are the drafter's.
        self._student = [student]
        self.projection = None
        if config.hidden_weight:
            self.projection = nn.Linear(student.hidden_size, target.hidden_size, bias=False)
            nn.init.eye_(self.projection.weight)
            self.projection.to(target.device)

    def begin(self, progress: float) -> None: ...

    def row_weights(self, batch: Batch) -> Tensor:
        """`[B, S]` on the CPU: what the loss at each row is multiplied with before it is divided by
        the sum of all."""
        return batch.reply_run(1, 1) * batch.row_weights(self._accepted_weight)

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"rows": float(self.row_weights(batch).sum(dtype=torch.float64))}

    def forward(
        self, drafter: DraftModel, features: Features, denominators: dict[str, float]
    ) -> tuple[Tensor, Sums]:
        batch, device = features.batch, features.last.device
        student = self._student[0]
        send = partial(torch.Tensor.to, device=device, non_blocking=True)
        ids = send(batch.ids)
        again = (
            decoder_layers(student.decoder, student.num_layers)[1] if self.config.recompute else []
        )
        with recomputed(again, self.config.offload):
            hidden = student.forward(
                ids.clamp(max=student.vocab_size - 1), send(batch.positions)
            ).last.flatten(0, 1)
        weights = self.row_weights(batch).flatten()
        places = weights.nonzero()[:, 0]  # on the CPU
        rows = send(places)
        factors = send(weights[places]) / max(denominators["rows"], 1e-9)
        last = features.last.flatten(0, 1)
        hidden, labels = hidden[rows], ids.flatten()[(rows + 1) % ids.numel()]
        temperatures = send(self._temperatures(batch).flatten()[places])
        loss, losses, right, alpha = sum_in_chunks(
            partial(self._table, student, last),
            hidden,
            (rows, labels, temperatures, factors),
            student.head_parameters,
            self.config.rows_per_chunk,
        )
        if self.projection is not None:
            apart = functional.smooth_l1_loss(
                self.projection(hidden), last[rows].to(hidden.dtype), reduction="none"
            ).mean(-1)
            loss = loss + self.config.hidden_weight * (apart * factors).sum()
        tables = (table[:, None] for table in (losses, right, alpha, torch.ones_like(losses)))
        return loss, depth_metrics(*tables)

    def _temperatures(self, batch: Batch) -> Tensor:
        """`[B, S]` on the CPU: one for each document, a pure function of seed and place in the
        data, whatever the ranks."""
        choices = np.array(self.config.temperatures, np.float32)
        if len(choices) == 1:
            return torch.full(batch.ids.shape, float(choices[0]))
        count = int(batch.documents.max()) + 2  # padding is document -1
        drawn = [
            np.random.default_rng([self._seed, number]).choice(choices, count)
            for number in batch.numbers
        ]
        return torch.from_numpy(np.stack(drawn)).gather(1, batch.documents + 1)

    def _table(
        self,
        student: Target,
        last: Tensor,
        hidden: Tensor,
        rows: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The loss, and `[R]` each: losses, whether the best token is the target's, overlap; the
        last two at T = 1.

        Tokens that the student does not have keep their share of the target's distribution, so
        overlap counts them as missed.
        """
        with torch.no_grad():
            teacher = self._target_head(last[rows])
            best = teacher.argmax(-1)
        # a student's padding rows are never drafted
        logits = student.head(hidden)[:, : teacher.shape[-1]]
        size = logits.shape[-1]
        warm = self.config.temperatures != [1.0]
        warmth = torch.where(temperatures > 0, temperatures, 1.0)[:, None]
        if warm:
            log_p, log_q = log_probs(teacher / warmth)[:, :size], log_probs(logits / warmth)
        else:
            log_p, log_q = log_probs(teacher)[:, :size], log_probs(logits)
        named = labels.clamp(max=size - 1)
        losses = divergence(self.config.loss, log_q, log_p, named)
        if self.config.loss in NEEDS_LABELS:
            losses = losses.masked_fill(labels >= size, 0.0)
        if warm:  # the gradient of a warped loss carries 1 / T
            losses = losses * warmth[:, 0]
        if 0.0 in self.config.temperatures:
            cold = divergence("ce", log_q, log_p, best.clamp(max=size - 1)).masked_fill(
                best >= size, 0.0
            )
            losses = torch.where(temperatures > 0, losses, cold)
        with torch.no_grad():
            right = (logits.argmax(-1) == best).float()
            alpha = (
                overlap(log_probs(logits), log_probs(teacher)[:, :size])
                if warm
                else overlap(log_q, log_p)
            )
        return (losses * factors).sum(), losses, right, alpha


def writers(run: Run, target: Target, drafter: DraftModel) -> list[tuple[str, Rollouts, Writer]]:
    """What writes texts while the run goes on: name, how often, how."""
    student = runner_of(drafter)
    return [
        ("rollouts", run.rollouts, partial(student_texts, run.rollouts, student, target.eos_ids)),
        ("errors", run.errors, partial(decoded_rounds, run.errors, target, drafter)),
    ]


@torch.no_grad()
def teacher_forced(drafter: DraftModel, hidden: Hidden, ids: Tensor) -> Tensor:
    """`[S, 2]` of a text: whether the student's best token after each row is the text's own, and
    how likely it holds it."""
    student = runner_of(drafter)
    seen = ids[: student.max_positions].clamp(max=student.vocab_size - 1)
    found = torch.zeros(len(ids), 2, device=ids.device)
    for start, states in enumerate(student.forward(seen[None]).last[0].split(ROWS_AT_ONCE)):
        part = slice(start * ROWS_AT_ONCE, start * ROWS_AT_ONCE + len(states))
        found[part, 1], best = (
            student.head(states).float()[:, : drafter.vocab_size].softmax(-1).max(-1)
        )
        found[part, 0] = (
            best == functional.pad(ids, (0, 1), value=-1)[part.start + 1 : part.stop + 1]
        )
    return found
