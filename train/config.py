"""The configuration of a training run. Every method's run is these parts plus its own two (heads,
objective); unknown keys are errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..heads.errors import UserError
from ..inference.settings import BadRows, TargetConfig, check_url

__all__ = [
    "Checkpoints",
    "Data",
    "Evaluation",
    "HeldOutConfig",
    "Optim",
    "RunConfig",
    "Source",
    "TargetConfig",
]


@dataclass
class Source:
    """One source of training rows."""

    path: str
    """JSON, JSONL or parquet file, a folder of them, or a data set on the hub."""
    split: str = "train"
    """Split to take of a hub data set."""
    weight: float = 1.0
    """Rows taken for each row there is: 0.5 takes a seeded half of the source, 2 takes every row
    twice."""
    name: str | None = None
    """Name in counts and errors; the path if not given."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise UserError(f"data source {self.path}: weight must be above 0")


@dataclass
class HeldOutConfig:
    """Which rows are kept away from training, to calibrate trees and to choose the best
    checkpoint."""

    by: Literal["row", "source", "time"] = "row"
    """row: a seeded share of all rows; source: whole sources; time: rows at or after a moment."""
    share: float = 0.05
    """Share of rows held out (by row)."""
    sources: list[str] = field(default_factory=list)
    """Names of the sources held out (by source)."""
    time_field: str = "timestamp"
    """Row field that holds a number or an ISO date (by time)."""
    since: str = ""
    """First moment held out (by time)."""

    def __post_init__(self) -> None:
        if self.by == "row" and not 0 < self.share < 1:
            raise UserError("data.held_out.share must lie between 0 and 1")
        if self.by == "source" and not self.sources:
            raise UserError("data.held_out.by is source, but data.held_out.sources names none")
        if self.by == "time" and not self.since:
            raise UserError("data.held_out.by is time, but data.held_out.since is not given")


@dataclass
class Data:
    """What is learned from."""

    sources: list[Source]
    """Where rows come from."""
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    max_length: int = 1024
    """Tokens in a packed row; longer conversations are dropped and counted."""
    bad_rows: BadRows = "stop"
    """What a malformed row does: stop, or skip it (it is named)."""
    max_lost_share: float = 0.01
    """Error if more than this share of a source's rows is left out, over-long or has nothing to
    learn from."""
    deduplicate: bool = True
    """Drop rows whose tokens equal an earlier row's."""
    decontaminate: bool = True
    """Drop training rows that share a 13-gram of words with a held-out row."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template, such as enable_thinking."""


@dataclass
class Optim:
    """AdamW and its schedule."""

    lr: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warm-up: cosine to min_lr_share; constant then linear decay at the end (wsd); or
    constant."""
    warmup_share: float = 0.02
    """Share of the steps over which the rate rises from zero."""
    decay_share: float = 0.2
    """Share of the steps over which wsd decays."""
    min_lr_share: float = 0.0
    """Rate at the end, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = 0.0
    """Decay of matrices; biases and norms have none."""
    clip_norm: float = 1.0
    """Largest global gradient norm."""
    max_skipped: int = 10
    """Steps in a row that are skipped because their gradient is not finite; one more ends the
    run."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.clip_norm <= 0:
            raise UserError("optim.lr and optim.clip_norm must be above 0")
        if self.max_skipped < 0:
            raise UserError("optim.max_skipped must be at least 0")
        if not all(0 <= beta < 1 for beta in self.betas) or self.weight_decay < 0:
            raise UserError("optim.betas must lie in [0, 1), optim.weight_decay be at least 0")
        if not (0 <= self.warmup_share < 1 and 0 <= self.decay_share <= 1):
            raise UserError("optim.warmup_share and optim.decay_share must lie between 0 and 1")


@dataclass
class Evaluation:
    """Held-out decoding during training. Its measured tau chooses the best checkpoint; a loss never
    does."""

    every: int = 200
    """Steps between evaluations; there is always one at the end."""
    prompts: int = 32
    """Held-out prompts decoded."""
    max_new_tokens: int = 128
    """Longest reply."""
    tree_nodes: int = 16
    """Drafted nodes of the decoding tree."""
    patience: int = 0
    """Stop after this many evaluations without a better measured tau; 0 never stops early."""

    def __post_init__(self) -> None:
        if min(self.every, self.prompts, self.max_new_tokens, self.tree_nodes) < 1:
            raise UserError(
                "evaluation.every, prompts, max_new_tokens and tree_nodes must be at least 1"
            )
        if self.patience < 0:
            raise UserError("evaluation.patience must be at least 0")


@dataclass
class Checkpoints:
    """What is kept on disk."""

    every: int = 200
    """Steps between checkpoints; every evaluation makes one too."""
    keep: int = 2
    """Checkpoints kept, besides the best one."""
    resume: bool = True
    """Go on from the last whole checkpoint in the output folder, if there is one."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise UserError("checkpoints.every and checkpoints.keep must be at least 1")


@dataclass
class FeatureOptions:
    """Where the target's features come from; from the target in this process if nothing is
    given."""

    store: str | None = None
    """Folder that `draftsmith data extract` wrote for this run; the target is not loaded, and no
    held-out text is decoded."""
    server: str | None = None
    """Address of a running vLLM that gives hidden states, such as http://localhost:8000/v1; only
    the target's embedding, norm and head are loaded from target.path."""
    server_layers: list[int] = field(default_factory=list)
    """Layer ids that it was started with, ascending: the run's taps, and the number of layers."""
    server_model: str = "target"
    """Its name for the target."""
    concurrency: int = 8
    """Requests under way at one time, for each rank."""

    def __post_init__(self) -> None:
        check_url(self.server, "features.server")
        if self.store is not None and self.server is not None:
            raise UserError("features.store and features.server exclude each other; leave one out")
        if self.concurrency < 1:
            raise UserError("features.concurrency must be at least 1")


@dataclass
class ProfilerConfig:
    """A window of steps for the profiler."""

    first: int = 10
    """Steps before it, counted from the start of this process."""
    steps: int = 0
    """Steps in it; 0 profiles nothing. OUTPUT/profile/rank-N.json opens in Perfetto."""

    def __post_init__(self) -> None:
        if min(self.first, self.steps) < 0:
            raise UserError("profile.first and profile.steps must be at least 0")


@dataclass
class RunConfig:
    """What every method's run has."""

    output: str
    """Folder for checkpoints and the finished drafter."""
    target: TargetConfig
    """The frozen model."""
    data: Data
    optim: Optim = field(default_factory=Optim)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    features: FeatureOptions = field(default_factory=FeatureOptions)
    profile: ProfilerConfig = field(default_factory=ProfilerConfig)
    epochs: float = 1.0
    """Passes over the data; fractions are fine."""
    max_steps: int | None = None
    """Stop after this many optimiser steps, whatever epochs says; the schedule ends there."""
    batch_rows: int = 4
    """Packed rows in a forward pass of one rank."""
    accumulation: int = 1
    """Forward passes of one rank in an optimiser step; a resume on other ranks adjusts it, so that
    steps keep their rows."""
    precision: Literal["no", "bf16"] = "no"
    """bf16: autocast with fp32 master weights."""
    init_from: str | None = None
    """Start from the weights of this drafter; its shape, taps, vocabulary and norms are kept."""
    retarget: bool = False
    """Allow `init_from` a drafter of another target of the same shape, such as the base of a
    fine-tune."""
    seed: int = 0
    log_every: int = 10
    """Steps between log lines."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Where metrics go besides the log (wandb honours WANDB_MODE=offline)."""
    project: str = "draftsmith"
    """Project name for the tracker."""

    def __post_init__(self) -> None:
        if self.batch_rows < 1 or self.accumulation < 1 or self.epochs <= 0 or self.log_every < 1:
            raise UserError(
                "batch_rows, accumulation and log_every must be at least 1, epochs above 0"
            )
        if self.seed < 0 or not self.data.sources:
            raise UserError("seed must be at least 0, and data.sources name at least one source")
        if self.max_steps is not None and self.max_steps < 1:
            raise UserError("max_steps must be at least 1")
