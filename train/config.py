"""Configuration of a training run, and the callbacks of a program that starts one.

The configuration of a method adds two sections of its own, `heads` (`draft_model` for distill) and
`objective`. Unknown keys are errors. The docstrings are the help texts of the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from ..heads.errors import UserError
from ..heads.exchange.engines import ENGINES
from ..heads.files import JsonObject
from ..inference.base.console import plural
from ..inference.base.settings import (
    TargetConfig,
    choice_named,
)
from .data.config import Data, Evaluation, FeatureOptions, check_held_out

Tracker = Literal[
    "none", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio",
    "wandb",
]  # fmt: skip
"""Trackers of accelerate, by the names of their packages."""
LEAST_STEPS = 50  # fewest steps between two evaluations whose interval is a share of the run


@dataclass
class Optim:
    """Optimiser and the schedule of its learning rate."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: for all parameters; muon: orthogonalised updates for the matrices of the layers, AdamW
    for the rest (embeddings, output matrices, norms, biases). Both use lr."""
    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Rate after the warm-up. cosine: falls to min_lr_share; wsd: constant, then linear decay to
    min_lr_share at the end; constant: remains at the peak."""
    warmup_share: float = 0.02
    """Share of the steps over which the rate rises from zero."""
    decay_share: float = 0.2
    """Share of the steps over which wsd decays."""
    min_lr_share: float = 0.0
    """Rate at the end, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = 0.0
    """AdamW's weight decay of matrices; biases and norms do not decay."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient; a larger gradient is scaled down to it."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.clip_norm <= 0:
            raise UserError("optim.lr and optim.clip_norm must be above 0")
        if not all(0 <= beta < 1 for beta in self.betas) or self.weight_decay < 0:
            raise UserError("optim.betas must lie in [0, 1), optim.weight_decay be at least 0")
        if not (0 <= self.warmup_share < 1 and 0 <= self.decay_share <= 1):
            raise UserError("optim.warmup_share and optim.decay_share must lie between 0 and 1")


@dataclass
class Checkpoints:
    """Checkpoints that are kept on disk."""

    every: int = 200
    """Number of steps between checkpoints; every evaluation makes one too."""
    keep: int = 2
    """Number of the latest checkpoints that are kept, besides the best one."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise UserError("checkpoints.every and checkpoints.keep must be at least 1")


@dataclass
class Memory:
    """Memory settings of an objective."""

    recompute: bool = False
    """Keep only the states between EAGLE's unrolled steps, or between the layers of a draft model
    or block drafter, and compute the rest again in the backward pass: less memory, up to a third
    more time."""
    rows_per_chunk: int = 1024
    """Number of positions whose logits are in memory at a time."""

    def __post_init__(self) -> None:
        if self.rows_per_chunk < 1:
            raise UserError("objective.rows_per_chunk must be at least 1")


def examples_of(method: str) -> tuple[str, ...]:
    """Return the examples of a method's help page."""
    return (
        f"draftsmith train {method} --config configs/{method}/quickstart.yaml",
        f"draftsmith train {method} --target TARGET --data.sources replies.jsonl --out runs/mine "
        "--optim.lr 1e-4",
        f"accelerate launch --config_file configs/accelerate/ddp.yaml -m draftsmith.train {method} "
        "--config run.yaml",
    )


@dataclass
class RunConfig:
    """Training run: the part that all methods share."""

    out: str
    """Folder for checkpoints and the finished drafter."""
    target: TargetConfig
    """The model that the drafter is trained for; it stays frozen."""
    data: Data
    optim: Optim = field(default_factory=Optim)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    features: FeatureOptions = field(default_factory=FeatureOptions)
    epochs: float = 1.0
    """Number of passes over the data; fractions are fine."""
    max_steps: int | None = None
    """Number of optimiser steps, in place of epochs; the schedule ends there too."""
    rows_per_step: int = 4
    """Number of packed rows in an optimiser step, over all ranks: a step is the same on any number
    of ranks."""
    batch_rows: int = 4
    """Largest number of packed rows in a forward pass of one rank, as its memory allows; a rank
    whose share of the step is larger adds up the gradients of several passes."""
    precision: Literal["no", "bf16"] = "no"
    """Precision of the drafter's computation. no: float32; bf16: autocast with float32 weights."""
    init_from: str | None = None
    """Drafter to start from; its shape, taps, vocabulary and norms are kept."""
    retarget: bool = False
    """Allow `init_from` to name a drafter of another target of the same shape, such as the base
    model of a fine-tuned one."""
    for_: list[str] = field(default_factory=list)
    """Name of a serving engine that has to support the drafter, such as vllm; may be given several
    times. A run whose drafter it would not support is refused at once."""
    seed: int = 0
    """Seed of the held-out rows, the order of the data and the initial weights."""
    log_every: int = 10
    """Number of steps between log lines."""
    tracker: Tracker = "none"
    """Tracker of accelerate that also gets the metrics and this configuration. Each reads its own
    variables, such as WANDB_MODE=offline, MLFLOW_TRACKING_URI and TRACKIO_DIR."""

    def __post_init__(self) -> None:
        if min(self.rows_per_step, self.batch_rows, self.log_every) < 1 or self.epochs <= 0:
            raise UserError(
                "rows_per_step, batch_rows and log_every must be at least 1, epochs above 0"
            )
        if self.seed < 0:
            raise UserError("seed must be at least 0")
        if not self.data.sources:
            raise UserError("data.sources names nothing; name at least one file or data set")
        self.for_ = [choice_named(name, ENGINES) for name in self.for_]
        if unknown := [name for name in self.for_ if name not in ENGINES]:
            raise UserError(f"--for takes {', '.join(ENGINES)}, not {unknown[0]}")
        if self.max_steps is not None and self.max_steps < 1:
            raise UserError("max_steps must be at least 1")
        if self.features.store is None:  # a feature store has its own data
            check_held_out(self.data)

    def as_json(self) -> JsonObject:
        """Return all values as nested tables."""
        return msgspec.to_builtins(self)

    def as_yaml(self) -> str:
        """Return all values as a config file."""
        return yaml.safe_dump(self.as_json(), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class RankShare:
    """Share of one rank in a step."""

    rows: int
    """Packed rows of a forward pass."""
    passes: int
    """Forward passes of a step, whose gradients are added up."""


def divided(run: RunConfig, ranks: int) -> RankShare:
    """Return the share of each of `ranks` in a step of the run, with as few passes as possible.

    Raises `UserError` if the ranks cannot share the rows of a step evenly.

    Example: 24 rows a step on 2 ranks with at most 5 rows a pass are 3 passes of 4 rows.
    """
    rows, most = run.rows_per_step, run.batch_rows
    share, left_over = divmod(rows, ranks)
    if left_over or not share:
        nearest = [number * ranks for number in (share, share + 1) if number]
        raise UserError(
            f"a step of {plural(rows, 'row')} cannot be shared evenly by "
            f"{plural(ranks, 'rank')}; use --rows-per-step {' or '.join(map(str, nearest))}, or "
            f"{plural(most_ranks(rows, ranks), 'rank')}"
        )
    passes = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= most)
    return RankShare(share // passes, passes)


def most_ranks(rows: int, ranks: int) -> int:
    """Return the largest number of ranks, at most `ranks`, that can share `rows` evenly."""
    return max(number for number in range(1, min(rows, ranks) + 1) if rows % number == 0)


def interval(every: int | float, total_steps: int) -> int:
    """Return the number of steps between two events, from `every` as `evaluation.every` has it.

    A float of at most 1 is a share of the run: of 1,000 steps 0.1 is 100 and 1.0 all of them,
    whereas the integer 1 is a single step. A share is at least `LEAST_STEPS`, or half of the run if
    that is less: ten evaluations of a run of 30 steps would take most of its time.
    """
    if isinstance(every, float) and every <= 1:
        return max(1, round(every * total_steps), min(LEAST_STEPS, total_steps // 2))
    return max(1, round(every))


class Callback:
    """Base class of callbacks, each method of which may be overridden.

    They are called on the main process, with the metrics of all ranks as in `metrics.jsonl`
    (docs/metrics.md#training-metrics). An exception ends the training with that exception.
    """

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Handle the metrics of the steps since the last call, every `log_every` steps.

        `step` counts from 1. Return True to end the training: the drafter is then evaluated and
        saved, as after the last step.
        """

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Handle an evaluation, such as `tau_measured`; return True to end the training."""

    def on_checkpoint(self, step: int, folder: Path, best: bool) -> None:
        """Handle a checkpoint: the drafter's folder, and whether it is the best so far."""

    def on_end(self, best: Path) -> None:
        """Handle the end of a training that was not asked to stop; `best` is the best drafter."""
