"""Tables of a report, as HTML and as Markdown: the same cells in both."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeGuard

from ..results import DrafterFigures, Report, SettingFigures, caption

# Typographic signs, written as codes because they look like others.
NOTHING, TO, TIMES = "\u2013", "\u2013", "\u00d7"
UNNAMED = "(none)"  # the category of prompts that have none
Colours = Mapping[str, int]
"""Numbers of looks (`charts.LOOKS`) by drafters' names."""


@dataclass(frozen=True)
class Table:
    """Texts in rows and columns; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Collection[int] = ()
    """Numbers of the rows that are set in bold, from 0."""
    switches: Sequence[str] = ()
    """Columns of few values, by which a reader of the page can choose rows."""
    narrow: Sequence[str] = ()
    """Columns that a phone shows; all if not given. The page says that there are others."""

    def markdown(self) -> str:
        """Return the table as Markdown, its title in bold above it."""

        def line(cells):
            return "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in cells) + " |"

        title = f"**{_one_line(self.title)}**"
        separator = "| --- |" + " ---: |" * (len(self.columns) - 1)
        lines = [title, "", line(self.columns), separator, *map(line, self.rows)]
        return "\n".join(lines) + "\n"

    def html(self, colours: Mapping[str, int] | None = None) -> str:
        """Return the table as HTML, which the page's script makes sortable.

        Rows that `colours` names get a key in their colour, so that the table is the legend of the
        charts below it.
        """
        more = [' class="more"' * self._left_out(column) for column in self.columns]
        heads = ""
        for column, hidden in zip(self.columns, more, strict=True):
            heads += f'<th scope="col"{hidden}>{escape(column)}</th>'
        body = []
        for number, (name, *cells) in enumerate(self.rows):
            key = f'<i class="key c{colours[name]}"></i>' if colours and name in colours else ""
            values = ""
            for cell, hidden in zip(cells, more[1:], strict=True):
                values += f"<td{hidden}>{escape(cell)}</td>"
            best = ' class="best"' if number in self.best else ""
            head = f'<th scope="row">{key}<bdi>{escape(name)}</bdi></th>'
            body.append(f"<tr{best}>{head}{values}</tr>")
        caption = f"<caption>{escape(self.title)}</caption>"
        places = " ".join(str(list(self.columns).index(column)) for column in self.switches)
        switches = f' data-switches="{places}"' if places else ""
        table = (
            f"<table{switches}>{caption}<thead><tr>{heads}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table>"
        )
        hint = ""
        if left_out := sum(map(self._left_out, self.columns)):
            hint = (
                f'<p class="note phone">{left_out} more columns are shown where the window is '
                "wider: turn the phone, or open the page on a computer.</p>"
            )
        return (
            '<div class="wide" tabindex="0" role="region" '
            f'aria-label="{escape(self.title)}">{table}</div>{hint}'
        )

    def _left_out(self, column: str) -> bool:
        """Return whether a phone does not show a column."""
        return bool(self.narrow) and column not in self.narrow


def is_finite(value: object) -> TypeGuard[float]:
    """True for numbers that a float can hold; JSON knows larger integers."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def number(value: object, form: str = ".2f", scale: float = 1.0) -> str:
    """Return `value * scale` in the format `form`; a dash for all but finite numbers."""
    if not is_finite(value):
        return NOTHING
    return format(value * scale, form)


def interval(pair: Sequence[float | None] | None) -> str:
    """Return an interval as `2.01-2.34`; a dash where it is not known."""
    known = finite_pair(pair)
    return NOTHING if known is None else f"{known[0]:.2f}{TO}{known[1]:.2f}"


def factor(value: object) -> str:
    """Return a ratio with a multiplication sign after it; a dash where there is none."""
    text = number(value)
    return text if text == NOTHING else text + TIMES


def finite_pair(pair: Sequence[float | None] | None) -> tuple[float, float] | None:
    """Return both ends of an interval; `None` unless it has two and they are finite numbers."""
    if pair is None or len(pair) != 2:
        return None
    low, high = pair
    if low is None or high is None or not (is_finite(low) and is_finite(high)):
        return None
    return low, high


def size(count: int | None) -> str:
    """Return a number of bytes in B, kB, MB or GB (powers of 1000); a dash for none."""
    if not count:
        return NOTHING
    unit = min(int(math.log10(count)) // 3, 3)
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}"


def firsts(report: Report) -> list[SettingFigures]:
    """Return the setting of the smallest batch for each temperature, lossless and lossy apart."""
    smallest: dict[tuple[float, bool], SettingFigures] = {}
    for setting in report.settings:
        key = setting.temperature, setting.lossless
        if key not in smallest or setting.batch < smallest[key].batch:
            smallest[key] = setting
    return list(smallest.values())


def loop_shares(report: Report, every: bool = False) -> str:
    """Return a sentence with the share of plain decoding's replies that loop, by setting.

    It names `every` setting, or the smallest batch of each temperature. It is empty where loops
    were not counted; see docs/metrics.md#doubtful-figures.
    """
    known = []
    for setting in report.settings if every else firsts(report):
        if (share := setting.plain.loop_share) is not None:
            known.append(f"{share:.0%} ({caption(setting)})")
    if not known:
        return ""
    listed = ", ".join(known)
    return f"Loop share (replies that repeat an 8-gram): {listed}; loops flatter every drafter."


def fastest(setting: SettingFigures) -> str | None:
    """Return the drafter of the highest speed-up; `None` if none is faster than plain decoding."""
    name, gain = None, 1.0
    for drafter, figures in setting.drafting.items():
        if figures.speedup is not None and figures.speedup > gain:
            name, gain = drafter, figures.speedup
    return name


COLUMNS = (
    "drafter",
    "speed-up",
    "temperature",
    "batch size",
    "tau",
    "replies equal to plain decoding's",
    "tau, 95% interval",
    "speed-up, 95% interval",
    "tokens a second",
    "drafted tokens a round",
    "share of them accepted",
    "time to first token, median, ms",
    "time per later token, median, ms",
    "95th percentile of that, ms",
    "size of the drafter",
    "tau if no reply stopped inside a round",
)


def summary(report: Report) -> Table:
    """Return the table of all settings, with a row for each setting and each way of decoding.

    The fastest drafter of each setting is in bold. A setting that is lossy says so.
    """
    rows, best = [], []
    for setting in report.settings:
        winner = fastest(setting)
        for name, figures in setting.drafters.items():
            if name == winner:
                best.append(len(rows))
            rows.append(_summary_row(setting, name, figures, report.drafter_bytes.get(name)))
    title = "Every setting"
    if any(not setting.lossless for setting in report.settings):
        title += ", LOSSY typical acceptance"
    # What is the same in all rows is above the charts already.
    narrow = ["drafter", "speed-up", "tau", "replies equal to plain decoding's"]
    for place in (2, 3):
        if len({row[place] for row in rows}) > 1:
            narrow.append(COLUMNS[place])
    return Table(title, COLUMNS, rows, best, ("temperature", "batch size"), narrow)


def _summary_row(
    setting: SettingFigures, name: str, s: DrafterFigures, weights: int | None
) -> list[str]:
    """Return the row of one way of decoding; `weights` are the drafter's own, in bytes."""
    # Without drafts tau is 1 by definition, and there is nothing to accept.
    drafts = bool(s.mean_n_draft)
    ttft, tpot = s.ttft_quantiles_s or {}, s.tpot_quantiles_s or {}
    equal = s.equal_to_ar
    return [
        name,
        factor(s.speedup),
        f"{setting.temperature:g}",
        str(setting.batch),
        number(s.tau_incl_bonus),
        NOTHING if equal is None or name == "plain" else f"{equal} of {s.requests}",
        interval(s.tau_ci95) if drafts else NOTHING,
        interval(s.speedup_ci95) if name != "plain" else NOTHING,
        number(s.tokens_s, ".0f" if (s.tokens_s or 0) >= 100 else ".1f"),
        number(s.mean_n_draft, ".1f") if drafts else NOTHING,
        number(s.accept_rate) if drafts else NOTHING,
        number(ttft.get("p50"), ".1f", 1000),
        number(tpot.get("p50"), ".2f", 1000),
        number(tpot.get("p95"), ".2f", 1000),
        size(weights),
        number(s.tau_untruncated),
    ]


SERVER_COLUMNS = (
    "setting",
    "tau",
    "tau, steps without a draft counted",
    "accepted 1 or more",
    "2 or more",
    "3 or more",
    "share of drafted tokens accepted",
    "tokens a second",
    "time to first token, median, ms",
    "95th percentile of that, ms",
    "time per later token, median, ms",
    "95th percentile of that one, ms",
    "replies equal to plain decoding's",
)


def served(report: Report) -> Table | None:
    """Return the table of a live server, with a row for each temperature and concurrency.

    `None` is returned if no server was measured. Its figures are defined in
    docs/metrics.md#servers-counters.
    """
    if (server := report.server) is None:
        return None
    rows = []
    for s in server.settings:
        ttft, tpot = s.ttft_quantiles_s or {}, s.tpot_quantiles_s or {}
        # Three columns of survival, whatever depth the server drafts to.
        survival = [*s.survival, None, None, None][:3]
        equal = s.equal_to_plain
        rows.append([
            f"T = {s.temperature:g}, {s.concurrency} at once",
            number(s.tau_incl_bonus),
            number(s.tau_emitted),
            *map(number, survival),
            number(s.accept_rate),
            number(s.tokens_s, ".0f"),
            number(ttft.get("p50"), ".1f", 1000),
            number(ttft.get("p95"), ".1f", 1000),
            number(tpot.get("p50"), ".1f", 1000),
            number(tpot.get("p95"), ".1f", 1000),
            NOTHING if equal is None else f"{equal} of {s.compared}",
        ])  # fmt: skip
    narrow = ("setting", "tau", "tokens a second", "replies equal to plain decoding's")
    return Table(server.title, SERVER_COLUMNS, rows, narrow=narrow)


def categories(setting: SettingFigures) -> Table | None:
    """Return tau with its interval, by category (rows) and drafter (columns).

    `None` is returned where the prompts are of less than two categories.
    """
    by_drafter = {name: s.by_category for name, s in setting.drafting.items() if s.by_category}
    found: set[str] = set()
    for by in by_drafter.values():
        found.update(by)
    names = sorted(found)
    if len(names) < 2:
        return None
    rows = []
    for category in names:
        cells = [category or UNNAMED]
        for by in by_drafter.values():
            c = by.get(category)
            # A drafter whose replies had no round has no tau in that category.
            cells.append(NOTHING if c is None else with_interval(c.tau_incl_bonus, c.tau_ci95))
        rows.append(cells)
    return Table(f"Tau by category, {caption(setting)}", ["category", *by_drafter], rows)


def with_interval(value: float, pair: Sequence[float | None] | None) -> str:
    """Return `2.31 (2.01-2.34)`, without the brackets where the interval is not known."""
    text = interval(pair)
    return number(value) + (f" ({text})" if text != NOTHING else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())
