"""Charts as inline SVG: lines and bars with intervals, and shares of a whole.

No library is used: those that are small enough to be stored in the page draw on a canvas, which
shows nothing without a script, has no text for a search or a screen reader, and does not print
sharply.

Colours are CSS classes (`c0` is the neutral one, then `c1`, `c2`, ..), so that the page's style
decides them, in light and in dark mode. Lengths are in units of the view box, about a pixel each.
Every name that comes from outside (drafters, categories, runs) is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from .axes import (
    CHARACTER,
    HALF,
    LONGEST_NAME,
    Axis,
    Scale,
    columns,
    marks,
    short,
    shown,
    spread,
)

COLOURS, SHAPES = 7, 4  # of lines besides the neutral one, and of their markers
# Colour and shape both advance from drafter to drafter. The two counts have no common factor, so
# this many drafters differ in at least one of them.
LOOKS = COLOURS * SHAPES
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
    named: bool = True
    """False writes no name at the line's right end."""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar from 0 to `value`, with its interval where that is known."""

    name: str
    value: float
    colour: int
    interval: Interval = None
    """Ends of the interval, both finite."""
    text: str = ""
    """The value as it is written after the bar; two decimals if empty."""

    @property
    def written(self) -> str:
        return self.text or f"{self.value:.2f}"

    @property
    def reach(self) -> list[float]:
        """The value, and both ends of the interval where that is known."""
        return [self.value, *(self.interval or ())]


@dataclass(frozen=True)
class Shares:
    """A whole and its parts, in any unit.

    A part below 0 is drawn as 0: the difference of two clocks may be slightly negative.
    """

    name: str
    parts: Sequence[float]
    label: str


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, rule: float | None = None, width: int = HALF
) -> str:
    """Return lines on a common grid, each named at its right end; "" if no point is finite.

    `rule` is a level that is drawn across the chart, such as plain decoding's.
    """
    lines = [line for line in map(_finite, series) if line.points]
    if not lines:
        return ""
    # The ticks' texts need room at the left, the lines' names and their leaders at the right.
    names = [short(line.name) for line in lines if line.named]
    left, top, height = 46.0, 28.0, 300.0
    right = 14 + CHARACTER * max(map(columns, names), default=0)
    if names:
        right += 18
    bottom = height - 42
    positions = [position for line in lines for position, _ in line.points]
    levels: list[float] = [] if rule is None else [rule]
    for line in lines:
        levels += [level for _, level in line.points]
        levels += [end for interval in line.intervals for end in interval or ()]
    x_low, x_high, x_ticks = marks(x, positions, False)
    y_low, y_high, y_ticks = marks(y, levels, True)
    across = Scale(x_low, x_high, left + 8, width - right)
    up = Scale(y_low, y_high, bottom, top)  # SVG counts y from the top
    end = width - right + 8
    parts = [_text("axis", 0, 12, y.label)]
    for level, text in y_ticks:
        parts.append(f'<path class="grid" d="M{left:.1f} {up(level):.1f}H{end:.1f}"/>')
        parts.append(_text("tick", left - 8, up(level) + 4, text, "end"))
    for position, text in x_ticks:
        parts.append(_text("tick", across(position), bottom + 18, text, "middle"))
    parts.append(_text("axis", (left + end) / 2, height - 6, x.label, "middle"))
    if rule is not None:
        parts.append(f'<path class="rule" d="M{left} {up(rule):.1f}H{end:.1f}"/>')
    # What is drawn later lies above: dashed lines go below the others.
    parts += [_line(line, across, up) for line in sorted(lines, key=lambda line: not line.dashed)]
    parts += _end_labels(lines, across, up, (top, bottom))
    description = f"{y.label} over {x.label}: {', '.join(line.name for line in lines)}"
    return _svg(width, height, parts, description)


def bar_chart(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    label: str,
    rule: float | None = None,
    high: float | None = None,
    width: int = HALF,
    dots: bool = False,
) -> str:
    """Return groups of horizontal bars, each with its name before it and its value after it.

    `groups` are headings (none if empty) with their bars; bars without a finite value are left out,
    and "" is returned if none remains. `label` is the axis's, `rule` a value that is drawn through
    all bars, `high` a value that the axis reaches at least. `dots` draws a marker at each value
    instead of a bar, on an axis that does not have to begin at 0. Names too long to be before
    their bars are above them.
    """
    finite_groups = [(name, [b for b in bars if math.isfinite(b.value)]) for name, bars in groups]
    bars = [bar for _, group in finite_groups for bar in group]
    if not bars:
        return ""
    longest_name = max(columns(bar.name) for bar in bars)
    above = longest_name > LONGEST_NAME
    longest_line = int(width / 9)  # in bold and alone on its line
    left = 8.0 if above else 12 + CHARACTER * longest_name
    right = width - 16 - CHARACTER * max(len(bar.written) for bar in bars)
    edges = [] if rule is None else [rule]
    for bar in bars:
        edges += bar.reach
    low, top, grid = marks(Axis(label, None if dots else 0, high), edges, True)
    across = Scale(low, top, left, right)
    rows, y = [], 8.0
    spans: list[tuple[float, float]] = []  # of the bars: the rule leaves out headings
    for name, group in finite_groups:
        if name:
            rows.append(_text("group", 0, y + 12, short(name, longest_line)))
            y += 20
        for bar in group:
            if above:
                rows.append(_text("name", 8, y + 12, short(bar.name, longest_line)))
                y += 17
            else:
                rows.append(_text("name", left - 8, y + 12, bar.name, "end"))
            rows.append(_bar(bar, across, y, rule, dots))
            spans.append((y - 1, y + 18))
            y += 19
        y += 9
    # The grid is made last, since it is as high as all rows, but comes first so that bars cover it.
    spans.append((y - 9, y))
    back = []
    for at, text in grid:
        back.append(f'<path class="grid" d="M{across(at):.1f} 4V{y:.1f}"/>')
        back.append(_text("tick", across(at), y + 15, text, "middle"))
    if rule is not None:
        back.append(f'<path class="rule" d="{_uprights(across(rule), spans)}"/>')
    foot = _text("axis", (left + right) / 2, y + 33, label, "middle")
    description = f"{label}: {', '.join(dict.fromkeys(bar.name for bar in bars))}"
    return _svg(width, y + 40, [*back, *rows, foot], description)


def share_chart(rows: Sequence[Shares], names: Sequence[str], width: int = HALF) -> str:
    """Return wholes of equal width, cut into their parts; "" without rows.

    `names` are those of the parts, in the order of `Shares.parts`; a legend above the rows shows
    them. The label of each whole comes after it.
    """
    if not rows:
        return ""
    left = 12 + CHARACTER * max(columns(short(row.name)) for row in rows)
    right = width - 16 - CHARACTER * max(len(row.label) for row in rows)
    # The legend begins where the rows do, or further left if it would not fit.
    legend_width = sum(30 + CHARACTER * len(name) for name in names)
    elements, x = [], max(min(left, width - legend_width), 0)
    for number, name in enumerate(names):
        elements.append(f'<rect class="part p{number}" x="{x:.1f}" y="2" width="11" height="11"/>')
        elements.append(_text("tick", x + 16, 12, name))
        x += 30 + CHARACTER * len(name)
    for index, row in enumerate(rows):
        y = 26.0 + 27 * index
        whole = sum(max(part, 0) for part in row.parts)
        elements.append(_text("name", left - 8, y + 14, short(row.name), "end"))
        start = left
        for number, (name, part) in enumerate(zip(names, row.parts, strict=True)):
            share = part / whole if whole else 0.0
            length = (right - left) * max(share, 0)
            title = f"<title>{escape(row.name)}, {escape(name)}: {share:.1%}</title>"
            elements.append(
                f'<rect class="part p{number}" x="{start:.2f}" y="{y:.1f}" width="{length:.2f}" '
                f'height="20">{title}</rect>'
            )
            if length > 34:  # wide enough for a percentage
                kind, middle = f"inside p{number}", start + length / 2
                elements.append(_text(kind, middle, y + 14, f"{share:.0%}", "middle"))
            start += length
        elements.append(_text("value", right + 8, y + 14, row.label))
    description = f"shares of {', '.join(names)}: {', '.join(row.name for row in rows)}"
    return _svg(width, 30.0 + 27 * len(rows), elements, description)


def _svg(width: int, height: float, parts: Sequence[str], about: str) -> str:
    """Return a whole chart; `about` is its description for those who cannot see it."""
    size = f'viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(about)}">{"".join(parts)}</svg>'


def _finite(series: Series) -> Series:
    """Return the series without points that are NaN or infinite.

    Its `intervals` are as many as its points; those that are not finite become `None`.
    """
    points, intervals = [], []
    known = series.intervals or [None] * len(series.points)
    for point, interval in zip(series.points, known, strict=True):
        if all(map(math.isfinite, point)):
            points.append(point)
            intervals.append(interval if interval and all(map(math.isfinite, interval)) else None)
    return replace(series, points=points, intervals=intervals)


def _text(kind: str, x: float, y: float, words: str, anchor: str = "") -> str:
    """Return a text of the class `kind`, which begins at x, or has its `anchor` there."""
    place = f'text-anchor="{anchor}" ' if anchor else ""
    x, y = round(x, 1), round(y, 1)
    return f'<text class="{kind}" {place}x="{x:g}" y="{y:g}">{escape(words)}</text>'


def _line(series: Series, across: Scale, up: Scale) -> str:
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
            low, high = map(up, interval)
            caps = "".join(f"M{x - 3:.1f} {y:.1f}H{x + 3:.1f}" for y in (low, high))
            whisker = f"M{x:.1f} {low:.1f}V{high:.1f}{caps}"
            elements.append(f'<path class="whisker c{series.colour}" d="{whisker}"/>')
    # The markers of a long curve, such as a training loss, would hide it.
    if len(points) <= 30:
        for (x, y), (x_value, y_value) in zip(points, series.points, strict=True):
            numbers = f"{escape(series.name)} at {shown(round(x_value, 2))}: {y_value:.4g}"
            elements.append(
                f'<path class="mark c{series.colour}{dashes}" '
                f'd="{marker(series.colour, x, y)}"><title>{numbers}</title></path>'
            )
    return "".join(elements)


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
    lines: Sequence[Series], across: Scale, up: Scale, between: tuple[float, float]
) -> list[str]:
    """Return the names at the right ends of the lines, joined to them by thin leaders.

    Names are moved apart where they would overlap, and stay `between` top and bottom of the chart
    while they fit there.
    """
    named = [line for line in lines if line.named]
    ends = [(across(line.points[-1][0]), up(line.points[-1][1])) for line in named]
    # Lines may end at different x; all names are in one column, right of the longest line.
    x = max(across(line.points[-1][0]) for line in lines) + 20
    label_ys = spread([y for _, y in ends], 15, *between)
    elements = []
    for line, (end, y), label_y in zip(named, ends, label_ys, strict=True):
        elements.append(
            f'<path class="leader c{line.colour}" d="M{end + 6:.1f} {y:.1f}'
            f'L{x - 4:.1f} {label_y:.1f}"/>'
        )
        elements.append(_text(f"name c{line.colour}", x, label_y + 4, short(line.name)))
    return elements


def _uprights(x: float, spans: Sequence[tuple[float, float]]) -> str:
    """Return a path of vertical lines at `x`, one for all `spans` of y that touch each other."""
    path, end = "", None
    for low, high in spans:
        path += f"V{high:.1f}" if low == end else f"M{x:.1f} {low:.1f}V{high:.1f}"
        end = high
    return path


def _bar(bar: Bar, across: Scale, y: float, rule: float | None, dots: bool) -> str:
    """Return a bar or a marker with its interval and value; `y` is the top of its row.

    The value comes after whatever reaches furthest to the right, and after the rule where that
    would go through it.
    """
    start, end, middle = across(0), across(bar.value), y + 8.5
    title = f"<title>{escape(bar.name)}: {escape(bar.written)}</title>"
    elements = []
    if not dots:
        elements.append(
            f'<rect class="bar c{bar.colour}" x="{start:.1f}" y="{y + 2:.1f}" '
            f'width="{max(end - start, 0):.1f}" height="13">{title}</rect>'
        )
    _, *ends = map(across, bar.reach)
    if ends:
        caps = "".join(f"M{x:.1f} {middle - 3:.1f}v6" for x in ends)
        whisker = f"M{ends[0]:.1f} {middle:.1f}H{ends[1]:.1f}{caps}"
        elements.append(f'<path class="whisker over" d="{whisker}"/>')
    if dots:
        shape = marker(bar.colour, end, middle, 4.6)
        elements.append(f'<path class="mark c{bar.colour}" d="{shape}">{title}</path>')
    x = max([end, *ends]) + 7
    if rule is not None and x - 4 < across(rule) < x + CHARACTER * len(bar.written) + 4:
        x = across(rule) + 7
    elements.append(_text("value", x, y + 12, bar.written))
    return "".join(elements)
