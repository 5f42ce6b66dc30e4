"""Axes of the charts: round numbers along them, and room for the texts next to them."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

HALF, FULL = 470, 980  # widths of a chart in half of the page's width and in all of it
# Width of a character, rather too large than too small: bold, at the 13 px that a phone gets.
CHARACTER = 7.8
LONGEST_NAME = 20


@dataclass(frozen=True)
class Axis:
    """Label of an axis with its unit, and the range that it must show."""

    label: str
    low: float | None = None
    """A value that the axis reaches down to, even if all data are above it."""
    high: float | None = None
    """A value that the axis reaches up to, even if all data are below it."""
    ticks: Sequence[tuple[float, str]] = field(default_factory=list)
    """All ticks, as positions and texts; chosen automatically if empty."""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers within [low, high], or [low] if that range is empty.

    They are multiples of 1, 2, 2.5 or 5 times a power of ten.
    """
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    # A step of 10 * power is always large enough in exact arithmetic; 20 is there for a power that
    # was rounded down too far.
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * power
        # The tolerance keeps a limit that is itself a multiple of the step.
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [round(i * step, 12) for i in range(first, last + 1)]
    return [low]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return a position near each wanted one, all at least `gap` apart, in the same order.

    They lie within [low, high] as long as they fit there; otherwise the first ones lie below `low`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # Upwards, each position is pushed away from the one before it. Downwards, those that were
    # pushed beyond `high` come back, and push those before them.
    positions = list(wanted)
    limit = low
    for i in order:
        positions[i] = max(positions[i], limit)
        limit = positions[i] + gap
    limit = high
    for i in reversed(order):
        positions[i] = min(positions[i], limit)
        limit = positions[i] - gap
    return positions


def shown(value: float) -> str:
    """Return a number as an axis shows it: 0.25, 1500, 25k, 2.5M."""
    # Thousands are abbreviated from 10,000 on only, so that 1500 stays as it is.
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


def columns(text: str) -> int:
    """Return the width of `text` in characters: wide ones (CJK) count 2, combining marks 0."""
    own = [character for character in text if not unicodedata.combining(character)]
    return len(own) + sum(unicodedata.east_asian_width(character) in "WF" for character in own)


def short(name: str, longest: int = LONGEST_NAME) -> str:
    """Return `name` in at most `longest` columns; an ellipsis replaces its middle if needed."""
    if columns(name) <= longest:
        return name
    # One column is the ellipsis: "abcdefghij" in 7 columns is "abc…hij".
    half = (longest - 1) // 2
    return f"{_fitting(name, longest - 1 - half)}…{_fitting(name[::-1], half)[::-1]}"


def _fitting(text: str, room: int) -> str:
    """Return as much of the beginning of `text` as has at most `room` columns."""
    end = 0
    while end < len(text) and columns(text[: end + 1]) <= room:
        end += 1
    return text[:end]


def marks(
    axis: Axis, values: Sequence[float], rounded: bool
) -> tuple[float, float, list[tuple[float, str]]]:
    """Return where the axis begins and ends, and its ticks as positions and texts.

    `values` are those that it has to show, at least one. An axis that is `rounded` begins and ends
    on a tick, unless `axis.ticks` gives them.
    """
    low = min(values) if axis.low is None else min([axis.low, *values])
    high = max(values) if axis.high is None else max([axis.high, *values])
    # An axis needs a length, which a single value does not give.
    if not high > low:
        low, high = low - 0.5, high + 0.5
    if axis.ticks:
        return low, high, list(axis.ticks)
    positions = ticks(low, high)
    if rounded and len(positions) > 1:
        step = positions[1] - positions[0]
        # The tolerance keeps an end that is a tick already: 0.3 / 0.1 is 2.9999999999999996, and
        # its floor 2.
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        count = round((high - low) / step) + 1
        # Rounded, since 3 * 0.1 is 0.30000000000000004.
        positions = [round(low + number * step, 12) for number in range(count)]
    return low, high, [(position, shown(position)) for position in positions]


class Scale:
    """Linear map from data to the view box: `low` becomes `start`, and `high` becomes `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start, self._slope = low, start, (end - start) / (high - low)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._slope


def nudged(count: int, width: float) -> list[float]:
    """Return `count` offsets around 0, spread over `width`.

    They move intervals at one x apart, so that none hides another.
    """
    if count < 2:
        return [0.0]
    return [width * (i / (count - 1) - 0.5) for i in range(count)]
