"""The JSON files of a run and of a feature store, each as a type; see `heads/documents.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta, Struct

from ..heads.documents import Count, Document, FileFacts


class TrainerState(Document, kw_only=True):
    """`trainer.json` of a checkpoint: what a resume needs besides weights, optimiser and RNG.

    The data position is a function of the step.
    """

    what: ClassVar[str] = "the state of a training run"

    step: Count = 0
    """Optimiser steps done."""
    tokens: Count = 0
    """Positions seen, padding included."""
    best_tau: float = 0.0
    best_step: Annotated[int, Meta(ge=-1)] = -1
    evaluations_without_gain: Count = 0
    evaluated: Count = 0
    """The last step that was evaluated: one that was asked to stop leaves that to the run that goes
    on."""
    rows_per_step: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Ranks times accumulation times batch; a resume under another value would skip or repeat
    data."""
    ranks: Annotated[int, Meta(ge=1)] = 1
    """Processes that wrote the checkpoint."""
    engine: str = "replicated"
    """How weights and optimiser lie in the checkpoint, see `parallel.engine_of`."""
    skipped: Count = 0
    """Steps whose gradient was not finite."""
    skipped_in_a_row: Count = 0
    total_steps: Count = 0
    identity: dict[str, str] = {}
    """Hashes of the target's weights and of the data: the config names both only by path."""
    schema: Annotated[int, Meta(ge=1)] = 1

    def as_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


class Counts(Document):
    """`counts.json` beside the tables of a run: what they depend on, and how they came about."""

    what: ClassVar[str] = "the note of a run's tables of tokens"

    key: str
    """Of `data.tables_key`."""
    counts: dict[str, dict[str, Count]]
    """Rows by source and by what became of them."""
    files: dict[str, FileFacts] = {}
    """Of the tables; runs of version 0.1 noted none."""
    schema: Annotated[int, Meta(ge=1)] = 1


class WrittenRow(Struct):
    """A line of what `data regenerate` writes: what going on needs of it."""

    id: str
    last_part: bool
    regenerated: dict[str, Any]


class ShardNote(Document):
    """`shard-N.json`: written when the shard is whole."""

    what: ClassVar[str] = "the note of a shard"

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    bytes: Count
    positions: Count = 0


class Wanted(Document):
    """`wanted.json` of a ring: the first row that its trainer still needs."""

    what: ClassVar[str] = "what a trainer says to its extractor"

    first: Count
    done: bool
