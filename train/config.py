"""Configuration of a training run.

The run of a method has the parts here and two of its own, `heads` (`draft_model` for distill) and
`objective`. Unknown keys are errors. The docstrings are the help texts of the options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import yaml

from ..heads.errors import UserError
from ..heads.exchange.engines import ENGINES
from ..heads.files import JsonObject
from ..inference.console import several
from ..inference.settings import (
    BadRows,
    RowSource,
    Rule,
    Sampling,
    TargetConfig,
    check_url,
    choice_named,
)

StoreType = Literal["float32", "bfloat16", "fp8"]
"""Type of the features in a store."""
Tracker = Literal[
    "none", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio",
    "wandb",
]  # fmt: skip
"""Trackers of accelerate, whose names are those of their packages."""
LEAST_STEPS = 50  # between two evaluations that are asked for as a share of a run


@dataclass
class Source(RowSource):
    """One source of training rows."""

    weight: float = 1.0
    """Number of times that a row is taken on average: 0.5 takes a seeded half of the source, 2
    takes every row twice."""
    name: str | None = None
    """Name of the source in counts and errors; its path if not given."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise UserError(f"data source {self.path}: weight must be above 0")


@dataclass
class HeldOutConfig:
    """Rows that training leaves out, to calibrate trees and to choose the best checkpoint."""

    by: Literal["row", "source"] = "row"
    """row: a seeded share of all rows; source: whole sources."""
    share: float = 0.05
    """Share of the rows that is held out (by row)."""
    sources: list[str] = field(default_factory=list)
    """Name of a source that is held out (by source); may be given several times."""

    def __post_init__(self) -> None:
        if self.by == "row" and not 0 < self.share < 1:
            raise UserError("data.held_out.share must lie between 0 and 1")
        if self.by == "source" and not self.sources:
            raise UserError("data.held_out.by is source, but data.held_out.sources names none")


@dataclass
class Data:
    """Training data, and what is left out of it."""

    sources: list[Source]
    """Sources of rows."""
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    max_length: int = 1024
    """Number of tokens in a packed row; longer conversations are dropped and counted."""
    bad_rows: BadRows = "stop"
    """Treatment of a malformed row: stop the command, or skip the row; it is named either way."""
    max_lost_share: float = 0.01
    """Largest share of a source's rows that may be malformed, too long, or without anything to
    learn from; more is an error."""
    deduplicate: bool = True
    """Drop rows whose tokens equal an earlier row's."""
    decontaminate: bool = True
    """Drop training rows that have the prompt of a held-out row, or share a 13-gram of words with
    one; 13-grams that many rows have do not count."""
    max_contaminated_share: float = 0.1
    """Largest share of a source's rows that may be dropped so; more is an error."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking."""


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
class Evaluation:
    """Decoding of held-out prompts during training.

    The measured tau, never a loss, decides which checkpoint is the best.
    """

    every: int | float = 0.1
    """Number of steps between evaluations, or the share of the run if it is a fraction: 0.5 is
    twice in a run, 1.0 once, 1 after every step. A share is at least 50 steps, or half of a run
    of fewer than 100. There is always one at the end."""
    limit: int = 32
    """Number of held-out prompts that are decoded."""
    max_new_tokens: int = 128
    """Largest number of tokens of a reply."""
    tree_nodes: int = 16
    """Number of drafted nodes of the tree that is decoded with; 0 decodes with a chain, as most
    engines draft."""
    temperature: float = 0.0
    """Temperature of the replies; 0 is greedy decoding. Above it the drafts are the drafter's best
    tokens, as most engines choose them."""

    def __post_init__(self) -> None:
        if not 0 < self.every < math.inf or self.limit < 1 or self.tree_nodes < 0:
            raise UserError(
                "evaluation.every must be above 0, evaluation.limit at least 1, "
                "evaluation.tree_nodes at least 0"
            )
        if self.every > 1 and self.every % 1:
            raise UserError(
                f"evaluation.every is {self.every}; give a whole number of steps, or a share of "
                "the run of at most 1.0"
            )
        if self.max_new_tokens < 2:
            raise UserError(
                "evaluation.max_new_tokens must be at least 2: the first token of a reply comes "
                "without a draft, so that there is no tau of one"
            )
        _ = self.sampling  # has its settings checked

    @property
    def sampling(self) -> Sampling:
        """Sampling of the target's replies, and of decoding them with the drafter."""
        # In decoding, a repetition penalty from the target's own config would change the target's
        # choices; replay knows nothing of it, so the two would differ. Under `match` a replay that
        # drafts the best tokens along a reply counts the rounds of decoding it.
        rule: Rule = "match" if self.temperature else "auto"
        return Sampling(self.temperature, repetition_penalty=1.0, rule=rule)


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
class FeatureOptions:
    """Source of the target's features: a store, a server, or the target in this process."""

    store: str | None = None
    """Feature store that `draftsmith data extract` wrote for this run. The target itself is not
    loaded then, and no held-out text is decoded."""
    server: str | None = None
    """Address of a running vLLM that gives hidden states, such as http://localhost:8000/v1; only
    the target's embedding, norm and head are loaded, from target.path."""
    server_layers: list[int] = field(default_factory=list)
    """Layer ids that the server was started with, ascending: the run's taps and, last, the number
    of the target's layers."""
    server_model: str = "target"
    """Name of the target on the server."""

    @property
    def live(self) -> bool:
        """True if the target runs in the training's own processes."""
        return self.store is None and self.server is None

    def __post_init__(self) -> None:
        check_url(self.server, "features.server")
        if self.store is not None and self.server is not None:
            raise UserError("features.store and features.server exclude each other; leave one out")


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


@dataclass
class Rollouts:
    """Texts that the draft model writes itself and the target judges (on-policy distillation)."""

    share: float = 0.0
    """Share of the packed rows that hold such texts; 0 writes none, 1 uses nothing else. Epochs
    count all rows, these too."""
    begin: float = 0.0
    """Share of the run that is over when the first of them are written."""
    every: int = 200
    """Steps after which they are written again."""
    limit: int = 128
    """Training prompts that are answered each time."""
    max_new_tokens: int = 128
    """Most tokens that are written after a prompt."""
    temperature: float = 1.0
    """Sampling temperature; best as in serving."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not 0 <= self.begin < 1:
            raise UserError("rollouts.share must lie in [0, 1], rollouts.begin in [0, 1)")
        if min(self.every, self.limit, self.max_new_tokens) < 1:
            raise UserError("rollouts.every, limit and max_new_tokens must be at least 1")
        # Made only to have its settings checked.
        self.sampling(0)

    def sampling(self, seed: int) -> Sampling:
        return Sampling(self.temperature, repetition_penalty=1.0, seed=seed)


def check_held_out(data: Data) -> None:
    """Raise `UserError` if whole sources are held out that the run does not have.

    They are usually those of a configuration whose sources were replaced on the command line.
    """
    names = [source.name or source.path for source in data.sources]
    wanted = data.held_out.sources
    if data.held_out.by == "source" and wanted and not {*wanted} & {*names}:
        several = ", several as a list [a,b]" if any("," in name for name in wanted) else ""
        raise UserError(
            f"data.held_out.sources asks to hold out {', '.join(wanted)}, which none of the "
            f"sources is ({', '.join(names)}); name one of these{several}, or hold out a share of "
            "all rows: --data.held-out.by row"
        )


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
            f"a step of {several(rows, 'row')} cannot be shared evenly by "
            f"{several(ranks, 'rank')}; use --rows-per-step {' or '.join(map(str, nearest))}, or "
            f"{several(most_ranks(rows, ranks), 'rank')}"
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
