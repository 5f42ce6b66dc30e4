"""Rows of sources, and their split into those that are learned and those that are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ...heads.errors import UserError
from ...inference.conversations.choice import Group
from ..config import HeldOutConfig
from .templates import Encoded


@dataclass
class SourceRow:
    """A row of a source that can be learned from."""

    source: str
    """Name of the source."""
    encoded: list[Encoded]
    """The conversation as one or more sequences of tokens."""
    words: str
    """Text of user and model, which is compared for contamination."""
    held_out: bool
    copies: int
    """Number of times that an epoch takes the row."""
    unit: int
    """Number of its conversation or prompt."""
    prompt: int
    """Number of its prompt."""
    group: Group
    """Source and category."""


def is_held_out(
    held_out: HeldOutConfig, source: str, raw: Any, row_name: str, unit: int, seed: int
) -> bool:
    """Return whether a row is kept away from training.

    By row, it depends on the seed and the row's unit (`conversations.choice.Units`) alone, so
    that all rows of a conversation or prompt lie on one side. Raises `UserError` for a row without
    the field to split by, or whose field is not a time.
    """
    if held_out.by == "source":
        return source in held_out.sources
    if held_out.by == "row":
        return chance("held out", seed, unit) < held_out.share
    # A malformed row has no field; it is counted as malformed later.
    if not isinstance(raw, dict):
        return False
    if held_out.time_field not in raw:
        raise UserError(
            f"row {row_name} has no field {held_out.time_field!r} to split by time; set "
            "data.held_out.time_field"
        )
    moment = _moment(raw[held_out.time_field], row_name)
    return moment >= _moment(held_out.since, "data.held_out.since")


def with_one_held_out(rows: Sequence[SourceRow], seed: int) -> list[SourceRow]:
    """Return rows of which none is held out with one unit held out, if there are two or more.

    A share of few rows may hold out none by chance. The unit is the one that a growing share
    would hold out first.
    """
    units = {row.unit for row in rows}
    if len(units) < 2:
        return [*rows]
    first = min(units, key=lambda unit: chance("held out", seed, unit))
    return [replace(row, held_out=True, copies=1) if row.unit == first else row for row in rows]


def chance(*what: object) -> float:
    """Return a number in [0, 1), evenly spread, that depends on nothing but its arguments."""
    # Not Python's `hash`, which gives other numbers for a text in every process. The first of the
    # arguments is a word for the purpose: otherwise the rows that are held out would be those that
    # are copied.
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8]) / 2**64


def _moment(value: Any, where: str) -> float:
    """Return a time, given as a number or an ISO date, as a number.

    Raises `UserError`, which names `where` it is.
    """
    with suppress(TypeError, ValueError):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError as error:
        raise UserError(f"{where}: {value!r} is neither a number nor an ISO date") from error
