"""JSON files of a run and of a feature store, each as a type; see `heads/documents.py`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from ...heads.documents import Count, Document, FileFacts
from ...heads.files import JsonObject


class TrainerState(Document, kw_only=True):
    """`trainer.json` of a checkpoint: facts that a resume needs.

    Weights, optimiser and random number generators are stored next to it. The position in the data
    is a function of the step.
    """

    what: ClassVar[str] = "the state of a training run"

    step: Count = 0
    """Number of optimiser steps that are done."""
    tokens: Count = 0
    """Number of positions seen, padding included."""
    best_tau: float = 0.0
    """Highest tau of all evaluations so far."""
    best_step: Annotated[int, Meta(ge=-1)] = -1
    """Step of that evaluation; -1 before the first one."""
    evaluated: Count = 0
    """Last step that was evaluated. A run that is asked to stop at a step that is to be evaluated
    leaves the evaluation to the resumed run."""
    rows_per_step: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Packed rows of a step; a resume with another number would skip or repeat data."""
    ranks: Annotated[int, Meta(ge=1)] = 1
    """Number of processes that wrote the checkpoint."""
    engine: str = "replicated"
    """Form of weights and optimiser in the checkpoint, see `parallel.engine_of`."""
    skipped: Count = 0
    """Number of steps whose gradient was not finite."""
    skipped_in_a_row: Count = 0
    """Number of the latest of them, without a good step in between."""
    total_steps: Count = 0
    """Number of steps of the whole run."""
    identity: JsonObject = {}
    """Hashes of the target's weights and of the data, which the config names by path only, and the
    `numbers` of the target's configuration."""
    schema: Annotated[int, Meta(ge=1)] = 1


class TableCounts(Document):
    """`counts.json` next to the token tables of a run: the origin and the size of the tables."""

    what: ClassVar[str] = "the note of a run's tables of tokens"

    key: str
    """Hash of everything that the tables depend on, from `data.tables.tables_key`; sources count
    by size and time, so it shows when the tables have to be built again."""
    counts: dict[str, dict[str, Count]]
    """Number of rows for each source and outcome, such as "train" or "malformed"."""
    files: dict[str, FileFacts]
    """Sizes and checksums of the tables."""
    identity: str
    """Hash of the tables' content, by which a resume knows them."""
    groups: list[tuple[str, str]] = []
    """Sources with their categories; the tables hold indices into this list."""
    schema: Annotated[int, Meta(ge=1)] = 1


class WrittenRow(Struct):
    """Line of the output of `data regenerate`, as far as a resume reads it."""

    id: str
    """Name of the conversation."""
    last_part: bool
    """True in the last of the lines that the conversation becomes."""
    regenerated: JsonObject
    """Provenance: facts about the target and the sampling that wrote the replies."""


class ShardNote(Document):
    """`shard-N.json` of a feature store, written when the shard is whole."""

    what: ClassVar[str] = "the note of a shard"

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    bytes: Count
    positions: Count = 0


class Wanted(Document):
    """`wanted.json` of a ring: the message of a trainer to its extractor."""

    what: ClassVar[str] = "what a trainer says to its extractor"

    first: Count
    """First packed row that the trainer still needs."""
    done: bool
    """True when the training is over and no more rows are needed."""
