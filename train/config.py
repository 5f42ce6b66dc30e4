"""Configuration of a training run.

The run of a method has the parts here and two of its own, `heads` (`draft_model` for distill) and
`objective`. Unknown keys are errors. The docstrings are the help texts of the options.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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
"""Trackers of accelerate, whose names are those of their packages."""
LEAST_STEPS = 50  # between two evaluations that are asked for as a share of a run


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
    """AdamW's weight decay of matrices; biases and norms have none."""
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
    """Positions whose logits exist at one time."""

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
    """Number of packed rows in an optimiser step, which all ranks share: a step means the same on
    any number of them."""
    batch_rows: int = 4
    """Most packed rows in a forward pass of one rank, as its memory allows; a rank whose share of
    the step is larger adds up the gradients of several passes."""
    precision: Literal["no", "bf16"] = "no"
    """Precision of the drafter's computation. no: float32; bf16: autocast with float32 weights."""
    init_from: str | None = None
    """Drafter to start from; its shape, taps, vocabulary and norms are kept."""
    retarget: bool = False
    """Allow `init_from` to name a drafter of another target of the same shape, such as the base
    model of a fine-tuned one."""
    for_: list[str] = field(default_factory=list)
    """Name of a serving engine that has to take the drafter, such as vllm; may be given several
    times. A run whose drafter it would not take is refused at once."""
    seed: int = 0
    """Seed of the held-out rows, the order of the data and the initial weights."""
    log_every: int = 10
    """Number of steps between log lines."""
    tracker: Tracker = "none"
    """Tracker of accelerate that gets the metrics and this configuration besides the log. Each
    reads its own variables, such as WANDB_MODE=offline, MLFLOW_TRACKING_URI and TRACKIO_DIR."""

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
        # A feature store has data of its own.
        if self.features.store is None:
            check_held_out(self.data)

    def as_json(self) -> JsonObject:
        """Return all values as nested tables."""
        return msgspec.to_builtins(self)

    def as_yaml(self) -> str:
        """Return all values as a config file."""
        return yaml.safe_dump(self.as_json(), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class Division:
    """Share of one rank in a step.

    A configuration states the rows of a step, which mean the same on any number of ranks; how many
    forward passes a rank makes of its share follows from the rows that one pass may have.
    """

    rows: int
    """Packed rows of a forward pass."""
    passes: int
    """Forward passes of a step; the gradients are added up."""


def divided(run: RunConfig, ranks: int) -> Division:
    """Return the share of each of `ranks` in a step of the run, with as few passes as fit.

    Raises `UserError` where the rows of a step cannot be shared evenly, with the nearest that can.

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
    return Division(share // passes, passes)


def most_ranks(rows: int, ranks: int) -> int:
    """Return the most of at most `ranks` ranks that can share `rows` evenly."""
    return max(number for number in range(1, min(rows, ranks) + 1) if rows % number == 0)


def interval(every: int | float, total_steps: int) -> int:
    """Return the steps between two events of which one comes `every` steps.

    A float of at most 1 is a share of the run: 0.1 of 1,000 steps are 100, and 1.0 all of them,
    where the integer 1 is a single step. A share is at least `LEAST_STEPS`, or half of the run if
    that is less: ten evaluations of a run of 30 steps would take most of its time.
    """
    if isinstance(every, float) and every <= 1:
        return max(1, round(every * total_steps), min(LEAST_STEPS, total_steps // 2))
    return max(1, round(every))
