"""Settings of training data: rows, held-out rows, features and rollouts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ...heads.errors import UserError
from ...inference.base.settings import BadRows, RowSource, Rule, Sampling, check_url

StoreType = Literal["float32", "bfloat16", "fp8"]
"""Type of the features in a store."""


@dataclass
class Source(RowSource):
    """One source of training rows."""

    weight: float = 1.0
    """Number of times that a row is used on average: 0.5 uses a seeded half of the source, 2 uses
    every row twice."""
    name: str | None = None
    """Name of the source in counts and errors; the path if not given."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise UserError(f"data source {self.path}: weight must be above 0")


@dataclass
class HeldOutConfig:
    """Rows that are not trained on, to calibrate trees and to choose the best checkpoint."""

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
            raise UserError("data.held_out.by is source, but data.held_out.sources is empty")


@dataclass
class Data:
    """Training data and held-out data."""

    sources: list[Source]
    """Sources of rows."""
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)
    max_length: int = 1024
    """Number of tokens in a packed row; longer conversations are dropped and counted."""
    bad_rows: BadRows = "stop"
    """Treatment of a malformed row: stop the command, or skip the row; the row is named in both
    cases."""
    max_lost_share: float = 0.01
    """Largest share of a source's rows that may be malformed, too long, or without a reply to
    learn; more is an error."""
    deduplicate: bool = True
    """Drop rows whose tokens equal an earlier row's."""
    decontaminate: bool = True
    """Drop training rows that have the prompt of a held-out row, or share a 13-gram of words with
    one; 13-grams that many rows have do not count."""
    max_contaminated_share: float = 0.1
    """Largest share of a source's rows that may be dropped for that reason; more is an error."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking."""


@dataclass
class Evaluation:
    """Decoding of held-out prompts during training.

    The measured tau, never a loss, decides which checkpoint is the best.
    """

    every: int | float = 0.1
    """Number of steps between evaluations, or the share of the run if it is a fraction: 0.5
    evaluates twice per run, 1.0 once, and the integer 1 after every step. A fraction stands for
    at least 50 steps, or half of a run of fewer than 100. The last step is always evaluated."""
    limit: int = 32
    """Number of held-out prompts that are decoded."""
    max_new_tokens: int = 128
    """Largest number of tokens of a reply."""
    tree_nodes: int = 16
    """Number of drafted nodes of the tree in decoding; 0 decodes with a chain, as most engines
    do."""
    temperature: float = 0.0
    """Temperature of the replies; 0 is greedy decoding. Above 0 the drafts are still the drafter's
    best tokens, as in most engines."""

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
                "evaluation.max_new_tokens must be at least 2: the first token of a reply is not "
                "drafted, so a reply of one token has no tau"
            )
        _ = self.sampling  # checks its settings

    @property
    def sampling(self) -> Sampling:
        """Sampling of the target's replies, and of decoding them with the drafter."""
        # A repetition penalty from the target's config would change the target's choices in
        # decoding, but not in replay. Under `match` a replay that drafts the best tokens along a
        # reply counts the rounds of decoding it.
        rule: Rule = "match" if self.temperature else "auto"
        return Sampling(self.temperature, repetition_penalty=1.0, rule=rule)


@dataclass
class FeatureOptions:
    """Source of the target's features: a store, a server, or the target in this process."""

    store: str | None = None
    """Feature store that `draftsmith data extract` wrote for this run. The target is then not
    loaded, and held-out texts are not decoded."""
    server: str | None = None
    """Address of a vLLM server that returns hidden states, such as http://localhost:8000/v1; only
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
class Rollouts:
    """Texts of the draft model that the target judges (on-policy distillation)."""

    share: float = 0.0
    """Share of the packed rows that hold such texts, from 0 to 1. Epochs count all rows, these
    too."""
    begin: float = 0.0
    """Share of the run before the first of these texts are written."""
    every: int = 200
    """Number of steps after which new texts are written."""
    limit: int = 128
    """Number of training prompts that are answered each time."""
    max_new_tokens: int = 128
    """Largest number of tokens of a reply."""
    temperature: float = 1.0
    """Sampling temperature; best as in serving."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1 or not 0 <= self.begin < 1:
            raise UserError("rollouts.share must lie in [0, 1], rollouts.begin in [0, 1)")
        if min(self.every, self.limit, self.max_new_tokens) < 1:
            raise UserError("rollouts.every, limit and max_new_tokens must be at least 1")
        self.sampling(0)  # checks its settings

    def sampling(self, seed: int) -> Sampling:
        return Sampling(self.temperature, repetition_penalty=1.0, seed=seed)


def check_held_out(data: Data) -> None:
    """Raise `UserError` if the run lacks all sources that are held out.

    They are usually those of a configuration whose sources were replaced on the command line.
    """
    names = [source.name or source.path for source in data.sources]
    wanted = data.held_out.sources
    if data.held_out.by == "source" and wanted and not {*wanted} & {*names}:
        several = ", several as a list [a,b]" if any("," in name for name in wanted) else ""
        raise UserError(
            f"data.held_out.sources asks to hold out {', '.join(wanted)}, but the sources are "
            f"{', '.join(names)}; name one of these{several}, or hold out a share of "
            "all rows: --data.held-out.by row"
        )
