"""Charts as inline SVG: lines and bars with intervals, and shares of a whole.

No library is used. Colours are CSS classes (`c0` is the neutral one, then `c1`, `c2`, ..), so that
the page's style decides them, in light and in dark mode. Lengths are in units of the view box,
about a pixel each. Every name that comes from outside (drafters, categories, runs) is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

WIDTH = 470  # of every chart
COLOURS, SHAPES = 7, 4  # of lines beside the neutral one, and of their markers
# Colour and shape both advance from drafter to drafter. The two counts have no common factor, so
# this many drafters differ in at least one of them.
LOOKS = COLOURS * SHAPES
# Width of a character, rather too large than too small: bold, at the 13 px that a phone gets.
CHARACTER = 7.8
LONGEST_NAME = 20
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Series:
    """A line: points (x, y) from left to right, each with an interval of y where it is known."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    """Number of its look, see `LOOKS`; 0 is neutral."""
    intervals: Sequence[Interval] = ()
    """One for each point, or none at all."""
    dashed: bool = False
    joined: bool = True
    """False draws the points only, without lines between them."""
    label: str | None = None
    """Text at the line's right end: the name if `None`, nothing if empty."""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar from 0 to `value`, with its interval where that is known."""

    name: str
    value: float
    colour: int
    interval: Interval = None
    mark: float | None = None
    """Another number to compare `value` with, shown by a tick across the bar."""


@dataclass(frozen=True)
class Shares:
    """A whole and its parts, in any unit.

    A part below 0 is drawn as 0: the difference of two clocks may be slightly negative.
    """

    name: str
    parts: Sequence[float]
    label: str


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
    placed: list[float] = []
    for i in order:
        placed.append(max(wanted[i], low, placed[-1] + gap if placed else low))
    limit = high
    for k in reversed(range(len(placed))):
        placed[k] = min(placed[k], limit)
        limit = placed[k] - gap
    positions = [0.0] * len(wanted)
    for i, position in zip(order, placed, strict=True):
        positions[i] = position
    return positions


def shown(value: float) -> str:
    """Return a number as an axis shows it: 0.25, 1500, 25k, 2.5M."""
    # Thousands are abbreviated from 10,000 on only, so that 1500 stays as it is.
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


def short(name: str, longest: int = LONGEST_NAME) -> str:
    """Return `name` in at most `longest` characters; an ellipsis replaces its middle if needed."""
    if len(name) <= longest:
        return name
    # One character is the ellipsis: "abcdefghij" in 7 characters is "abc…hij".
    half = (longest - 1) // 2
    return f"{name[: longest - 1 - half]}…{name[len(name) - half :]}"


def line_chart(series: Sequence[Series], x: Axis, y: Axis, rule: float | None = None) -> str:
    """Return lines on a common grid, each named at its right end; "" if no point is finite.

    `rule` is a level that is drawn across the chart, such as plain decoding's.
    """
    finite = [_finite(line) for line in series]
    lines = [line for line in finite if line.points]
    if not lines:
        return ""
    # The ticks' texts need room at the left, the lines' names and their leaders at the right.
    names = [short(_label(line)) for line in lines if _label(line)]
    left, right, top, height = 46.0, 14 + CHARACTER * max(map(len, names), default=0), 28.0, 300.0
    if names:
        right += 18
    bottom = height - 42
    positions: list[float] = []
    levels: list[float] = [] if rule is None else [rule]
    for line in lines:
        for position, level in line.points:
            positions.append(position)
            levels.append(level)
        for interval in line.intervals:
            levels.extend(interval or ())
    x_low, x_high, x_ticks = _marks(x, positions, False)
    y_low, y_high, y_ticks = _marks(y, levels, True)
    across = _scale(x_low, x_high, left + 8, WIDTH - right)
    up = _scale(y_low, y_high, bottom, top)  # SVG counts y from the top
    parts = [f'<text class="axis" x="0" y="12">{escape(y.label)}</text>']
    parts += [_gridline(left, WIDTH - right + 8, up(level), text) for level, text in y_ticks]
    for position, text in x_ticks:
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{across(position):.1f}" '
            f'y="{bottom + 18:.1f}">{escape(text)}</text>'
        )
    middle = (left + 8 + WIDTH - right) / 2
    parts.append(
        f'<text class="axis" text-anchor="middle" x="{middle:.1f}" '
        f'y="{height - 6:.1f}">{escape(x.label)}</text>'
    )
    if rule is not None:
        parts.append(f'<path class="rule" d="M{left} {up(rule):.1f}H{WIDTH - right + 8:.1f}"/>')
    # What is drawn later lies above: dashed lines go below the others.
    parts += [_line(line, across, up) for line in sorted(lines, key=lambda line: not line.dashed)]
    parts += _end_labels(lines, across, up, (top, bottom))
    description = f"{y.label} over {x.label}: {', '.join(line.name for line in lines)}"
    return _svg(height, parts, description)


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    label: str,
    rule: float | None = None,
    high: float | None = None,
) -> str:
    """Return groups of horizontal bars, each with its name before it and its value behind it.

    `groups` are headings (none if empty) with their bars; bars without a finite value are left out,
    and "" is returned if none remains. `label` is the axis's, `rule` a value that is drawn through
    all bars, `high` a value that the axis reaches at least.
    """
    finite_groups = []
    bars: list[Bar] = []
    for name, group in groups:
        finite = [bar for bar in group if math.isfinite(bar.value)]
        finite_groups.append((name, finite))
        bars += finite
    if not bars:
        return ""
    left = 12 + CHARACTER * max(len(short(bar.name)) for bar in bars)
    edges: list[float] = []
    for bar in bars:
        # The axis begins at 0 anyway, so 0 stands for a mark or a rule that is not given.
        edges += [bar.value, *(bar.interval or ()), bar.mark or 0, rule or 0]
    low, high, grid = _marks(Axis(label, 0, high), [e for e in edges if math.isfinite(e)], True)
    across = _scale(low, high, left, WIDTH - 44)
    rows, y = [], 8.0
    for name, group in finite_groups:
        if name:
            heading = escape(short(name, 60))
            rows.append(f'<text class="group" x="0" y="{y + 12:.1f}">{heading}</text>')
            y += 20
        for bar in group:
            rows.append(_bar(bar, across, y, left))
            y += 19
        y += 9
    # The grid is made last, since it is as high as all rows, but comes first so that bars cover it.
    back = []
    for at, text in grid:
        back.append(
            f'<path class="grid" d="M{across(at):.1f} 4V{y:.1f}"/>'
            f'<text class="tick" text-anchor="middle" x="{across(at):.1f}" '
            f'y="{y + 15:.1f}">{text}</text>'
        )
    if rule is not None:
        back.append(f'<path class="rule" d="M{across(rule):.1f} 4V{y:.1f}"/>')
    foot = (
        f'<text class="axis" text-anchor="middle" x="{(left + WIDTH - 44) / 2:.1f}" '
        f'y="{y + 33:.1f}">{escape(label)}</text>'
    )
    description = f"{label}: {', '.join(dict.fromkeys(bar.name for bar in bars))}"
    return _svg(y + 40, [*back, *rows, foot], description)


def share_chart(rows: Sequence[Shares], names: Sequence[str]) -> str:
    """Return wholes of equal width, cut into their parts; "" without rows.

    `names` are those of the parts, in the order of `Shares.parts`; a legend above the rows shows
    them. The label of each whole stands behind it.
    """
    if not rows:
        return ""
    left = 12 + CHARACTER * max(len(short(row.name)) for row in rows)
    right = WIDTH - 16 - CHARACTER * max(len(row.label) for row in rows)
    # The legend begins where the rows do, or further left if it would not fit.
    legend_width = sum(30 + CHARACTER * len(name) for name in names)
    elements, x = [], max(min(left, WIDTH - legend_width), 0)
    for number, name in enumerate(names):
        elements.append(f'<rect class="part p{number}" x="{x:.1f}" y="2" width="11" height="11"/>')
        elements.append(f'<text class="tick" x="{x + 16:.1f}" y="12">{escape(name)}</text>')
        x += 30 + CHARACTER * len(name)
    for index, row in enumerate(rows):
        y = 26.0 + 27 * index
        whole = sum(max(part, 0) for part in row.parts)
        elements.append(
            f'<text class="name" text-anchor="end" x="{left - 8:.1f}" '
            f'y="{y + 14:.1f}">{escape(short(row.name))}</text>'
        )
        start = left
        for number, (name, part) in enumerate(zip(names, row.parts, strict=True)):
            width = (right - left) * max(part, 0) / whole if whole else 0.0
            share = part / whole if whole else 0
            title = f"<title>{escape(row.name)}, {escape(name)}: {share:.1%}</title>"
            elements.append(
                f'<rect class="part p{number}" x="{start:.2f}" y="{y:.1f}" width="{width:.2f}" '
                f'height="20">{title}</rect>'
            )
            if width > 34:  # wide enough for a percentage
                middle = f'x="{start + width / 2:.1f}" y="{y + 14:.1f}"'
                elements.append(
                    f'<text class="inside p{number}" text-anchor="middle" '
                    f"{middle}>{share:.0%}</text>"
                )
            start += width
        elements.append(
            f'<text class="value" x="{right + 8:.1f}" y="{y + 14:.1f}">{escape(row.label)}</text>'
        )
    description = f"shares of {', '.join(names)}: {', '.join(row.name for row in rows)}"
    return _svg(30.0 + 27 * len(rows), elements, description)


def _svg(height: float, parts: Sequence[str], about: str) -> str:
    """Return a whole chart; `about` is its description for those who cannot see it."""
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(about)}">{"".join(parts)}</svg>'


def _finite(series: Series) -> Series:
    """Return the series without points that are NaN or infinite.

    Its `intervals` are as many as its points; those that are not finite become `None`.
    """
    points, intervals = [], []
    known = series.intervals or [None] * len(series.points)
    for point, interval in zip(series.points, known, strict=True):
        if not (math.isfinite(point[0]) and math.isfinite(point[1])):
            continue
        points.append(point)
        intervals.append(interval if interval and all(map(math.isfinite, interval)) else None)
    return replace(series, points=points, intervals=intervals)


def _label(series: Series) -> str:
    return series.name if series.label is None else series.label


def _marks(
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
        positions = []
        for number in range(count):
            # Rounded, since 3 * 0.1 is 0.30000000000000004.
            positions.append(round(low + number * step, 12))
    return low, high, [(position, shown(position)) for position in positions]


class _scale:
    """Linear map from data to the view box: `low` becomes `start`, and `high` becomes `end`."""

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
    """Return the line, its intervals, and a marker at each point with its numbers as a tooltip.

    `series` has to come from `_finite`, which gives every point an interval or `None`.
    """
    points = [(across(x), up(y)) for x, y in series.points]
    # SVG's M moves to a point without drawing, L draws a line to one.
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashes = " dashed" if series.dashed else ""
    elements = []
    if series.joined:
        elements.append(f'<path class="line c{series.colour}{dashes}" d="{path}"/>')
    for (x, _), interval in zip(points, series.intervals, strict=True):
        if interval:
            low, high = up(interval[0]), up(interval[1])
            elements.append(
                f'<path class="whisker c{series.colour}" d="M{x:.1f} '
                f'{low:.1f}V{high:.1f}{_caps(x, low, high)}"/>'
            )
    # The markers of a long curve, such as a training loss, would hide it.
    if len(points) <= 30:
        for (x, y), (x_value, y_value) in zip(points, series.points, strict=True):
            numbers = f"{escape(series.name)} at {shown(round(x_value, 2))}: {y_value:.4g}"
            elements.append(
                f'<path class="mark c{series.colour}{dashes}" '
                f'd="{marker(series.colour, x, y)}"><title>{numbers}</title></path>'
            )
    return "".join(elements)


def _caps(x: float, low: float, high: float) -> str:
    return "".join(f"M{x - 3:.1f} {y:.1f}H{x + 3:.1f}" for y in (low, high))


def marker(colour: int, x: float, y: float, size: float = 3.6) -> str:
    """Return a path around a point: a disc, a square, a triangle or a diamond.

    The look `colour` decides which, so that lines differ without colour too.
    """

    def at(dx, dy):
        return f"{x + dx * size:.1f} {y + dy * size:.1f}"

    if colour % SHAPES == 1:
        return f"M{at(-1, 0)}a{size} {size} 0 1 0 {2 * size} 0a{size} {size} 0 1 0 {-2 * size} 0Z"
    corners = {2: ((-1, -1), (1, -1), (1, 1), (-1, 1)), 3: ((0, -1.2), (1.2, 0.9), (-1.2, 0.9))}
    diamond = ((0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0))
    return "M" + "L".join(at(*corner) for corner in corners.get(colour % SHAPES, diamond)) + "Z"


def _end_labels(
    lines: Sequence[Series], across: _scale, up: _scale, between: tuple[float, float]
) -> list[str]:
    """Return the names at the right ends of the lines, joined to them by thin leaders.

    Names are moved apart where they would overlap, and stay `between` top and bottom of the chart
    while they fit there.
    """
    named = [line for line in lines if _label(line)]
    if not named:
        return []
    ends = [(across(line.points[-1][0]), up(line.points[-1][1])) for line in named]
    # Lines may end at different x; all names stand in one column, right of the longest line.
    x = max(across(line.points[-1][0]) for line in lines) + 20
    label_ys = spread([y for _, y in ends], 15, *between)
    elements = []
    for line, (end, y), label_y in zip(named, ends, label_ys, strict=True):
        elements.append(
            f'<path class="leader c{line.colour}" d="M{end + 6:.1f} {y:.1f}'
            f'L{x - 4:.1f} {label_y:.1f}"/>'
        )
        text = escape(short(_label(line)))
        elements.append(
            f'<text class="name c{line.colour}" x="{x:.1f}" y="{label_y + 4:.1f}">{text}</text>'
        )
    return elements


def _bar(bar: Bar, across: _scale, y: float, left: float) -> str:
    """Return a bar with its name, interval, mark and value; `y` is the top of its row.

    `left` is where bars begin. The value stands behind whatever reaches furthest to the right.
    """
    end = across(bar.value)
    elements = [
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
        whisker = f"M{low:.1f} {middle:.1f}H{high:.1f}{caps}"
        elements.append(f'<path class="whisker over" d="{whisker}"/>')
        end = max(end, high)
    if bar.mark is not None and math.isfinite(bar.mark):
        elements.append(f'<path class="predicted" d="M{across(bar.mark):.1f} {y:.1f}v17"/>')
        end = max(end, across(bar.mark))
    elements.append(
        f'<text class="value" x="{end + 7:.1f}" y="{y + 12:.1f}">{bar.value:.2f}</text>'
    )
    return "".join(elements)


def nudged(count: int, width: float) -> list[float]:
    """Return `count` offsets around 0, spread over `width`.

    They move intervals at one x apart, so that none hides another.
    """
    if count < 2:
        return [0.0]
    offsets = []
    for i in range(count):
        share = i / (count - 1)  # from 0 to 1
        offsets.append(width * (share - 0.5))
    return offsets
