"""Charts as inline SVG, without a library: lines with intervals, bars with intervals, and shares of
a whole.

Colours are classes (`c0` the neutral one, `c1`, `c2`, ..), so that the page's style decides them,
in light and in dark. Lengths are in the units of the view box, which are about pixels. Every name
that comes from outside is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 470
COLOURS, SHAPES = 7, 4  # of lines beside the neutral one, and of their markers
# both count on from drafter to drafter, so that so many differ in one or the other
LOOKS = COLOURS * SHAPES
CHARACTER = 7.8  # width of one, on the wide side: bold, at the 13 px that a phone gets
LONGEST_NAME = 20
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Series:
    """A line: points from left to right, with an interval about each if it is known."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    intervals: Sequence[Interval] = ()
    dashed: bool = False
    joined: bool = True
    label: str | None = None
    """Written at its right end; the name if not given, nothing if empty."""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar from 0 to `value`, with its interval and another number marked by a tick, if
    they are known."""

    name: str
    value: float
    colour: int
    interval: Interval = None
    mark: float | None = None


@dataclass(frozen=True)
class Shares:
    """One whole and its parts, in any unit; a part below 0 (a difference of clocks) is drawn as
    0."""

    name: str
    parts: Sequence[float]
    label: str


@dataclass(frozen=True)
class Axis:
    """What an axis measures, with its unit, and what it must show. `ticks`, if given, are all of
    them: places and texts."""

    label: str
    low: float | None = None
    high: float | None = None
    ticks: Sequence[tuple[float, str]] = field(default_factory=list)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers that lie within [low, high]: multiples of 1, 2, 2.5 or 5 times a
    power of ten."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 2.5, 5, 10, 20):
        step = factor * power
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [round(i * step, 12) for i in range(first, last + 1)]
    return [low]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near those wanted, at least `gap` apart and within [low, high] as long as they fit, in
    the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], low, placed[-1] + gap if placed else low))
    limit = high
    for k in reversed(range(len(placed))):
        placed[k] = min(placed[k], limit)
        limit = placed[k] - gap
    found = [0.0] * len(wanted)
    for i, place in zip(order, placed, strict=True):
        found[i] = place
    return found


def shown(value: float) -> str:
    """A number as an axis shows it: 0.25, 1500, 2.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


def short(name: str, longest: int = LONGEST_NAME) -> str:
    """A name that fits beside a chart; its middle is left out where it is long."""
    if len(name) <= longest:
        return name
    half = (longest - 1) // 2
    return f"{name[: longest - 1 - half]}…{name[len(name) - half :]}"


def line_chart(series: Sequence[Series], x: Axis, y: Axis, rule: float | None = None) -> str:
    """Lines over a common grid, each named at its right end. `rule`: a level that is drawn across,
    such as plain decoding's."""
    lines = [line for one in series if (line := _finite(one)).points]
    if not lines:
        return ""
    names = [short(_label(line)) for line in lines if _label(line)]
    left, right, top, height = 46.0, 14 + CHARACTER * max(map(len, names), default=0), 28.0, 300.0
    if names:
        right += 18
    bottom = height - 42
    marks = _marks(x, [p[0] for line in lines for p in line.points], False)
    levels = [p[1] for line in lines for p in line.points] + ([rule] if rule is not None else [])
    levels += [edge for line in lines for pair in line.intervals if pair for edge in pair]
    grid = _marks(y, levels, True)
    across = _scale(marks[0], marks[1], left + 8, WIDTH - right)
    up = _scale(grid[0], grid[1], bottom, top)
    parts = [f'<text class="axis" x="0" y="12">{escape(y.label)}</text>']
    parts += [_gridline(left, WIDTH - right + 8, up(at), text) for at, text in grid[2]]
    for at, text in marks[2]:
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{across(at):.1f}" '
            f'y="{bottom + 18:.1f}">{escape(text)}</text>'
        )
    middle = (left + 8 + WIDTH - right) / 2
    parts.append(
        f'<text class="axis" text-anchor="middle" x="{middle:.1f}" '
        f'y="{height - 6:.1f}">{escape(x.label)}</text>'
    )
    if rule is not None:
        parts.append(f'<path class="rule" d="M{left} {up(rule):.1f}H{WIDTH - right + 8:.1f}"/>')
    # dashed ones lie below
    parts += [_line(line, across, up) for line in sorted(lines, key=lambda line: not line.dashed)]
    parts += _end_labels(lines, across, up, (top, bottom))
    return _svg(
        height, parts, f"{y.label} over {x.label}: {', '.join(line.name for line in lines)}"
    )


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    label: str,
    rule: float | None = None,
    high: float | None = None,
) -> str:
    """Groups of horizontal bars, the name of each before it and its value behind it. `high`: where
    the axis ends at the least."""
    bars = [bar for _, group in groups for bar in group if math.isfinite(bar.value)]
    if not bars:
        return ""
    left = 12 + CHARACTER * max(len(short(bar.name)) for bar in bars)
    edges = [
        edge
        for bar in bars
        for edge in (bar.value, *(bar.interval or ()), bar.mark or 0, rule or 0)
    ]
    low, high, grid = _marks(Axis(label, 0, high), [e for e in edges if math.isfinite(e)], True)
    across = _scale(low, high, left, WIDTH - 44)
    rows, y = [], 8.0
    for name, group in groups:
        if name:
            rows.append(
                f'<text class="group" x="0" y="{y + 12:.1f}">{escape(short(name, 60))}</text>'
            )
            y += 20
        for bar in (bar for bar in group if math.isfinite(bar.value)):
            rows.append(_bar(bar, across, y, left))
            y += 19
        y += 9
    back = [
        f'<path class="grid" d="M{across(at):.1f} 4V{y:.1f}"/>'
        f'<text class="tick" text-anchor="middle" x="{across(at):.1f}" '
        f'y="{y + 15:.1f}">{text}</text>'
        for at, text in grid
    ]
    if rule is not None:
        back.append(f'<path class="rule" d="M{across(rule):.1f} 4V{y:.1f}"/>')
    foot = (
        f'<text class="axis" text-anchor="middle" x="{(left + WIDTH - 44) / 2:.1f}" '
        f'y="{y + 33:.1f}">{escape(label)}</text>'
    )
    return _svg(
        y + 40,
        [*back, *rows, foot],
        f"{label}: {', '.join(dict.fromkeys(bar.name for bar in bars))}",
    )


def share_chart(rows: Sequence[Shares], names: Sequence[str]) -> str:
    """Wholes of equal width, cut into their parts; a legend above, the label of each behind it."""
    if not rows:
        return ""
    left = 12 + CHARACTER * max(len(short(row.name)) for row in rows)
    right = WIDTH - 16 - CHARACTER * max(len(row.label) for row in rows)
    parts, x = [], max(min(left, WIDTH - sum(30 + CHARACTER * len(name) for name in names)), 0)
    for number, name in enumerate(names):
        parts.append(f'<rect class="part p{number}" x="{x:.1f}" y="2" width="11" height="11"/>')
        parts.append(f'<text class="tick" x="{x + 16:.1f}" y="12">{escape(name)}</text>')
        x += 30 + CHARACTER * len(name)
    for place, row in enumerate(rows):
        y = 26.0 + 27 * place
        whole = sum(max(part, 0) for part in row.parts)
        parts.append(
            f'<text class="name" text-anchor="end" x="{left - 8:.1f}" '
            f'y="{y + 14:.1f}">{escape(short(row.name))}</text>'
        )
        start = left
        for number, (name, part) in enumerate(zip(names, row.parts, strict=True)):
            width = (right - left) * max(part, 0) / whole if whole else 0.0
            about = (
                f"<title>{escape(row.name)}, {escape(name)}: "
                f"{part / whole if whole else 0:.1%}</title>"
            )
            parts.append(
                f'<rect class="part p{number}" x="{start:.2f}" y="{y:.1f}" width="{width:.2f}" '
                f'height="20">{about}</rect>'
            )
            if width > 34:
                middle = f'x="{start + width / 2:.1f}" y="{y + 14:.1f}"'
                parts.append(
                    f'<text class="inside p{number}" text-anchor="middle" '
                    f"{middle}>{part / whole:.0%}</text>"
                )
            start += width
        parts.append(
            f'<text class="value" x="{right + 8:.1f}" y="{y + 14:.1f}">{escape(row.label)}</text>'
        )
    return _svg(
        30.0 + 27 * len(rows),
        parts,
        f"shares of {', '.join(names)}: {', '.join(row.name for row in rows)}",
    )


def _svg(height: float, parts: Sequence[str], about: str) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(about)}">{"".join(parts)}</svg>'


def _finite(series: Series) -> Series:
    """Without the points that are no numbers."""
    intervals = series.intervals or [None] * len(series.points)
    kept = [
        (p, i)
        for p, i in zip(series.points, intervals, strict=True)
        if math.isfinite(p[0]) and math.isfinite(p[1])
    ]
    pairs = [i if i and all(map(math.isfinite, i)) else None for _, i in kept]
    return Series(
        series.name,
        [p for p, _ in kept],
        series.colour,
        pairs,
        series.dashed,
        series.joined,
        series.label,
    )


def _label(series: Series) -> str:
    return series.name if series.label is None else series.label


def _marks(
    axis: Axis, values: Sequence[float], rounded: bool
) -> tuple[float, float, list[tuple[float, str]]]:
    """Where the axis begins and ends, and its ticks; an axis that is `rounded` ends on one."""
    low = min(values) if axis.low is None else min([axis.low, *values])
    high = max(values) if axis.high is None else max([axis.high, *values])
    if not high > low:
        low, high = low - 0.5, high + 0.5
    if axis.ticks:
        return low, high, list(axis.ticks)
    places = ticks(low, high)
    if rounded and len(places) > 1:
        step = places[1] - places[0]
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        places = [round(low + i * step, 12) for i in range(round((high - low) / step) + 1)]
    return low, high, [(at, shown(at)) for at in places]


class _scale:
    """From data to the view box, in a straight line."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._start, self._slope = low, start, (end - start) / (high - low)

    def __call__(self, value: float) -> float:
        return self._start + (value - self._low) * self._slope


def _gridline(left: float, right: float, y: float, text: str) -> str:
    label = (
        f'<text class="tick" text-anchor="end" x="{left - 8:.1f}" '
        f'y="{y + 4:.1f}">{escape(text)}</text>'
    )
    return f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>{label}'


def _line(series: Series, across: _scale, up: _scale) -> str:
    """The line, its intervals and a marker at each point, which says its numbers when pointed
    at."""
    places = [(across(x), up(y)) for x, y in series.points]
    path = "".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(places))
    dashes = " dashed" if series.dashed else ""
    found = [f'<path class="line c{series.colour}{dashes}" d="{path}"/>'] if series.joined else []
    for (x, _), pair in zip(places, series.intervals, strict=True):
        if pair:
            low, high = up(pair[0]), up(pair[1])
            found.append(
                f'<path class="whisker c{series.colour}" d="M{x:.1f} '
                f'{low:.1f}V{high:.1f}{_caps(x, low, high)}"/>'
            )
    if len(places) <= 30:
        for (x, y), (value_x, value) in zip(places, series.points, strict=True):
            about = (
                f"<title>{escape(series.name)} at {shown(round(value_x, 2))}: {value:.4g}</title>"
            )
            found.append(
                f'<path class="mark c{series.colour}{dashes}" '
                f'd="{marker(series.colour, x, y)}">{about}</path>'
            )
    return "".join(found)


def _caps(x: float, low: float, high: float) -> str:
    return "".join(f"M{x - 3:.1f} {y:.1f}H{x + 3:.1f}" for y in (low, high))


def marker(colour: int, x: float, y: float, size: float = 3.6) -> str:
    """A path about a point: a disc, a square, a triangle or a diamond, so that lines differ without
    colour too."""

    def at(dx, dy):
        return f"{x + dx * size:.1f} {y + dy * size:.1f}"

    if colour % SHAPES == 1:
        return f"M{at(-1, 0)}a{size} {size} 0 1 0 {2 * size} 0a{size} {size} 0 1 0 {-2 * size} 0Z"
    corners = {2: ((-1, -1), (1, -1), (1, 1), (-1, 1)), 3: ((0, -1.2), (1.2, 0.9), (-1.2, 0.9))}
    rhomb = ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0))
    return "M" + "L".join(at(*corner) for corner in corners.get(colour % SHAPES, rhomb)) + "Z"


def _end_labels(
    lines: Sequence[Series], across: _scale, up: _scale, between: tuple[float, float]
) -> list[str]:
    """Names at the right ends, moved apart where they would lie over each other, with a thin leader
    to those that moved."""
    named = [line for line in lines if _label(line)]
    if not named:
        return []
    ends = [(across(line.points[-1][0]), up(line.points[-1][1])) for line in named]
    x = max(across(line.points[-1][0]) for line in lines) + 20
    found = []
    for line, (end, y), at in zip(
        named, ends, spread([y for _, y in ends], 15, *between), strict=True
    ):
        found.append(
            f'<path class="leader c{line.colour}" d="M{end + 6:.1f} {y:.1f}L{x - 4:.1f} {at:.1f}"/>'
        )
        text = escape(short(_label(line)))
        found.append(
            f'<text class="name c{line.colour}" x="{x:.1f}" y="{at + 4:.1f}">{text}</text>'
        )
    return found


def _bar(bar: Bar, across: _scale, y: float, left: float) -> str:
    end = across(bar.value)
    found = [
        f'<text class="name" text-anchor="end" x="{left - 8:.1f}" '
        f'y="{y + 12:.1f}">{escape(short(bar.name))}</text>',
        f'<rect class="bar c{bar.colour}" x="{left:.1f}" y="{y + 2:.1f}" '
        f'width="{max(end - left, 0):.1f}" height="13">'
        f"<title>{escape(bar.name)}: {bar.value:.4g}</title></rect>",
    ]
    if bar.interval and all(map(math.isfinite, bar.interval)):
        low, high = map(across, bar.interval)
        middle = y + 8.5
        caps = "".join(f"M{x:.1f} {middle - 3:.1f}v6" for x in (low, high))
        found.append(f'<path class="whisker over" d="M{low:.1f} {middle:.1f}H{high:.1f}{caps}"/>')
        end = max(end, high)
    if bar.mark is not None and math.isfinite(bar.mark):
        found.append(f'<path class="predicted" d="M{across(bar.mark):.1f} {y:.1f}v17"/>')
        end = max(end, across(bar.mark))
    return (
        "".join(found)
        + f'<text class="value" x="{end + 7:.1f}" y="{y + 12:.1f}">{bar.value:.2f}</text>'
    )


def nudged(count: int, width: float) -> list[float]:
    """Small steps aside, about 0, so that `count` intervals at one place do not hide each other."""
    return [0.0] if count < 2 else [width * (i / (count - 1) - 0.5) for i in range(count)]
