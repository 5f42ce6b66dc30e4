"""Rows of sources, their split into training and held-out rows, and removal of contaminated ones.

A training row is contaminated if it shares a prompt or a run of 13 words with a held-out row.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...heads.errors import UserError
from ...inference.conversations.selection import CategoryPath
from .config import HeldOutConfig
from .templates import Encoded

log = logging.getLogger(__name__)

NGRAM_WORDS = 13
WORD = re.compile(r"\w+|[^\w\s]")  # a word, or a punctuation mark
# A run of words is common if it is in more units than COMMON_UNITS and COMMON_SHARE of all, and in
# several held-out ones: a question that has leaked into training is in one held-out unit.
COMMON_SHARE, COMMON_UNITS, COMMON_HELD_OUT = 0.005, 10, 2


@dataclass
class SourceRow:
    """Row of a source that can be learned from."""

    source: str
    """Name of the source."""
    encoded: list[Encoded]
    """The conversation as one or more sequences of tokens."""
    words: str
    """Text of user and model, which is compared for contamination."""
    held_out: bool
    copies: int
    """Number of times that the row is in an epoch."""
    unit: int
    """Number of the conversation or prompt."""
    prompt: int
    """Number of the prompt."""
    group: CategoryPath
    """Source and category."""


def is_held_out(held_out: HeldOutConfig, source: str, unit: int, seed: int) -> bool:
    """Return whether a row is held out.

    By row, this only depends on the seed and the row's unit (`selection.Units`), so that
    all rows of a conversation or prompt are on one side.
    """
    if held_out.by == "source":
        return source in held_out.sources
    return chance("held out", seed, unit) < held_out.share


def chance(*what: object) -> float:
    """Return a number in [0, 1), evenly distributed, that only depends on the arguments.

    The first one is a word for the purpose, without which the same rows would be held out and
    copied.
    """
    # Not Python's `hash`, which differs between processes.
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8]) / 2**64


def clean(
    train: Sequence[SourceRow], held_out: Sequence[SourceRow], allowed: float
) -> list[SourceRow]:
    """Return the training rows that share no prompt or words with a held-out row.

    Common runs of words (`COMMON_UNITS`), such as an instruction, a disclaimer or a template, do
    not count. Raises `UserError` if a source loses more than the share `allowed` of its training
    rows; otherwise the losses are logged.
    """
    prompts = {row.prompt for row in held_out}
    grams = [ngrams(row.words) for row in held_out]
    forbidden: set[int] = set().union(*grams)
    shared = [ngrams(row.words) & forbidden for row in train]
    common = _common(held_out, grams, train, shared)
    removed: dict[str, list[tuple[SourceRow, set[int]]]] = {}
    cleaned = []
    for row, own in zip(train, shared, strict=True):
        if row.prompt in prompts or own - common:
            removed.setdefault(row.source, []).append((row, own - common))
        else:
            cleaned.append(row)
    for source, lost in removed.items():
        _check_removed(source, lost, sum(row.source == source for row in train), allowed)
    return cleaned


def _common(
    held_out: Sequence[SourceRow],
    grams: Sequence[set[int]],
    train: Sequence[SourceRow],
    shared: Sequence[set[int]],
) -> set[int]:
    """Return the n-grams that many units have.

    `grams` are those of each held-out row, `shared` those of them in each training row.
    """
    units, count = _units([*held_out, *train], [*grams, *shared])
    of_held_out, _ = _units(held_out, grams)
    most = max(COMMON_UNITS, COMMON_SHARE * count)
    common = {
        gram
        for gram, number in units.items()
        if number > most and of_held_out[gram] >= COMMON_HELD_OUT
    }
    if common:
        log.info(
            "%d runs of %d words, each in more than %d conversations, do not count as "
            "contamination",
            len(common), NGRAM_WORDS, most,
        )  # fmt: skip
    return common


def _units(rows: Sequence[SourceRow], grams: Sequence[set[int]]) -> tuple[Counter[int], int]:
    """Return the number of units with each n-gram, and the number of units."""
    by_unit: dict[int, set[int]] = {}
    for row, own in zip(rows, grams, strict=True):
        by_unit.setdefault(row.unit, set()).update(own)
    return Counter(gram for own in by_unit.values() for gram in own), len(by_unit)


def _check_removed(
    source: str, removed: Sequence[tuple[SourceRow, set[int]]], total: int, allowed: float
) -> None:
    """Raise `UserError` if a source loses more than the share `allowed` of its `total` rows.

    `removed` are these rows, each with the runs that it shares. Otherwise the loss is logged.
    """
    share = len(removed) / total
    lost = f"{len(removed)} of {total} training rows share words with held-out rows"
    found = "they have the prompt of a held-out row"
    shared = (words for row, own in removed for words in _grams(row.words) if hash(words) in own)
    if words := next(shared, ()):
        found = f'such as "{" ".join(words)}"'
    if share > allowed:
        raise UserError(
            f"data source {source}: {lost} ({found}); hold out whole sources, accept it with "
            f"data.max_contaminated_share={min(1.0, share + 0.005):.2f}, or set "
            "data.decontaminate to false"
        )
    log.warning("data source %s: %s and are left out (%s)", source, lost, found)


def ngrams(text: str) -> set[int]:
    """Return hashes, valid in this process, of the 13-grams of words and marks in lower case."""
    return {hash(gram) for gram in _grams(text)}


def _grams(text: str) -> list[tuple[str, ...]]:
    words = WORD.findall(text.lower())
    return [tuple(words[i : i + NGRAM_WORDS]) for i in range(len(words) - NGRAM_WORDS + 1)]
