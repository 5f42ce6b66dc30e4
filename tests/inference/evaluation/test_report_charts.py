"""Charts of the report: every mark stands where its number is, and no text is hidden."""

from __future__ import annotations

import re

import pytest

from draftsmith.inference.evaluation.report import axes
from draftsmith.inference.evaluation.report.axes import Axis, spread, ticks
from draftsmith.inference.evaluation.report.charts import (
    Bar,
    Series,
    Shares,
    bar_chart,
    line_chart,
    share_chart,
)
from draftsmith.inference.evaluation.report.page import Figure, side_by_side
from draftsmith.inference.evaluation.report.tables import size


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 3, [0, 1, 2, 3]),
        (0, 1404, [0, 250, 500, 750, 1000, 1250]),
        (0.93, 1.11, [0.95, 1, 1.05, 1.1]),
        (2, 2, [2]),
    ],
)
def test_ticks_are_round_numbers_within(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_labels_move_apart_and_keep_their_order() -> None:
    assert spread([10, 50], 15, 0, 100) == [10, 50]
    assert spread([50, 51, 49], 15, 0, 100) == [64, 79, 49]
    assert spread([95, 99, 2], 15, 0, 100) == [85, 100, 2], "none below the chart"
    assert axes.nudged(1, 2) == [0] and axes.nudged(3, 2) == [-1, 0, 1]
    assert [axes.shown(v) for v in (0.25, 1500, 25_000, 2.5e6)] == ["0.25", "1500", "25k", "2.5M"]
    assert axes.short("a-very-long-name-of-a-drafter") == "a-very-lon…a-drafter"
    assert [size(n) for n in (0, 999, 3_940_000, 2_000_000_000_000)] == [
        "\u2013",
        "999 B",
        "3.94 MB",
        "2e+03 GB",
    ]


def coordinates(svg: str, kind: str) -> list[list[float]]:
    """Numbers in the paths of that class."""
    return [
        [float(n) for n in re.findall(r"-?[\d.]+", d)]
        for d in re.findall(rf'<path class="{kind}[^"]*" d="([^"]*)"', svg)
    ]


def test_a_line_goes_where_its_numbers_are() -> None:
    """Between 0 and 1: half way up is half way between the grid's lines."""
    line = Series(
        "a",
        [(1, 0.0), (2, 0.5), (3, 1.0), (4, float("nan"))],
        1,
        [None, (0.25, 0.75), (float("nan"), 1.0), None],
    )
    svg = line_chart([line], Axis("x", 1, 3), Axis("y", 0, 1))
    ((x1, y1, x2, y2, x3, y3),) = coordinates(svg, "line")
    assert (
        x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
        and y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
        and y1 > y3
    )
    (whisker,) = coordinates(svg, "whisker")
    assert whisker[0] == x2 and sorted(whisker[1:3]) == pytest.approx(
        [(y2 + y3) / 2, (y1 + y2) / 2], abs=0.2
    )
    assert "nan" not in svg and line_chart([Series("a", [], 1)], Axis("x"), Axis("y")) == ""
    assert line_chart([Series("one", [(1, 2.0)], 1)], Axis("x"), Axis("y")), (
        "a single point is a chart too"
    )


def test_bars_are_as_long_as_their_numbers() -> None:
    svg = bar_chart(
        [("g", [Bar("a", 1.0, 1), Bar("b", 2.0, 2, (1.0, 3.0)), Bar("c", float("nan"), 3)])],
        "tau",
    )
    one, two = (float(w) for w in re.findall(r'class="bar[^>]* width="([\d.]+)"', svg))
    assert two == pytest.approx(2 * one, abs=0.2)
    (whisker,) = coordinates(svg, "whisker over")
    assert whisker[2] - whisker[0] == pytest.approx(2 * one, abs=0.2)
    assert bar_chart([("g", [])], "tau") == ""


def test_shares_fill_the_whole_and_a_part_below_nothing_is_none() -> None:
    svg = share_chart([Shares("a", [1.0, 3.0, -0.5], "8 ms")], ["x", "y", "z"])
    _, _, _, x, y, z = (
        float(w) for w in re.findall(r'<rect class="part[^>]* width="([\d.]+)"', svg)
    )
    assert (
        y == pytest.approx(3 * x, abs=0.05)
        and z == 0
        and ">25%<" in svg
        and ">75%<" in svg
        and ">8 ms<" in svg
    )
    assert share_chart([], ["x"]) == ""


def test_no_line_goes_through_a_value_or_a_heading() -> None:
    """A value takes about 7 units a character; its place is that of its first one."""
    bars = []
    for i in range(60):
        value = 0.5 + 0.01 * i
        bars.append(Bar("a", value, 1, (0.4, value) if i % 2 else None))
    svg = bar_chart([("heading one", bars[:30]), ("heading two", bars[30:])], "speed-up", 1.0)
    (rule,) = re.findall('<path class="rule" d="([^"]*)"', svg)
    lines = re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)", rule)
    at = float(lines[0][0])
    values = [float(x) for x in re.findall(r'<text class="value" x="([\d.]+)"', svg)]
    assert len(values) == 60 and all(x > at + 3 or x + 4 * 7 < at - 3 for x in values)
    assert any(x < at for x in values) and any(x > at for x in values)
    for baseline in re.findall(r'<text class="group" x="0" y="([\d.]+)"', svg):
        for _, low, high in lines:
            assert not float(low) < float(baseline) - 5 < float(high), "between the lines"


def test_long_and_wide_names_find_room() -> None:
    name = "a-very-long-name-of-a-drafter"
    svg = bar_chart([("", [Bar(name, 1, 1)])], "y")
    (x,) = re.findall(rf'x="(\d+)" y="[\d.]+">{name}</text>', svg)
    assert x == "8", "above its bar, not abbreviated"
    assert [axes.columns(text) for text in ("ab", "\u65e5\u672c", "e\u0301")] == [2, 4, 1]
    assert axes.short("\u65e5" * 20, 7) == "\u65e5\u2026\u65e5"
    assert axes.columns(axes.short("\u65e5" * 20)) <= axes.LONGEST_NAME
    starts = []
    for name in ("a" * 8, "\u65e5" * 4):
        svg = bar_chart([("", [Bar(name, 1, 1)])], "y")
        starts += re.findall(r'class="bar c1" x="([\d.]+)"', svg)
    assert starts[0] == starts[1]


def test_dots_stand_on_an_axis_with_values_below_nothing() -> None:
    bars = [Bar("a", -10.0, 1, (-20.0, 0.0), "-10.0%"), Bar("b", 10.0, 1, (0.0, 20.0), "+10.0%")]
    svg = bar_chart([("", bars)], "change, %", 0.0, dots=True)
    (low, y, middle, *_), (start, _, high, *_) = coordinates(svg, "whisker over")
    assert middle == start and high - start == pytest.approx(middle - low, abs=0.2)
    assert svg.count('class="mark c1"') == 2 and 'class="bar' not in svg and y > 0
    assert ">-10.0%</text>" in svg and ">+10.0%</text>" in svg


def test_a_chart_alone_in_its_row_fills_it() -> None:
    def draw(width: int) -> str:
        return line_chart([Series("a", [(1, 1.0), (2, 2.0)], 1)], Axis("x"), Axis("y"), width=width)

    figures = [Figure(title, draw) for title in "abc"]
    one, two, three = (side_by_side(figures[:count]) for count in (1, 2, 3))
    assert one.count("<svg") == 2 and f'<svg class="full" viewBox="0 0 {axes.FULL} ' in one
    assert "alone" not in two and three.count('<figure class="alone">') == 1
    assert three.index("alone") > three.index(">b<"), "the last one"
    assert side_by_side([Figure("empty", lambda width: "")]) == ""
