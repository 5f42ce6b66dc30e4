"""Tables of figures: the same rows and texts in the terminal, in Markdown and on the page.

`show` prints them; `report` makes Markdown and the page.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Group
from rich.text import Text

from ..base.console import OutputConsole, plain_table
from .figure_text import (
    NOTHING,
    SHOWN,
    caption,
    equal_replies_text,
    fastest,
    headline,
    interval_text,
    is_measured,
    number_text,
    number_with_interval,
    ratio_text,
    survival_text,
)
from .results import DrafterFigures, Report, ServerReport, SettingFigures

UNNAMED = "(none)"  # the category of prompts that have none
MOST = 8  # columns of a table, unless a reader asks for all
LONGEST_NAME = 24  # longer names are folded in a narrow terminal
TITLE = 12  # characters of a line of a column's title
IN_A_FILE = 120  # columns of a terminal's table that goes to a file
FASTEST = "*"
ACCEPTED = f"accepted 1-{SHOWN}"
IMPORTANT = (
    "drafter", "speed-up", "tau", "identical replies", "tau, 95% interval",
    "speed-up, 95% interval", "tokens a second", "drafted tokens a round",
)  # fmt: skip


@dataclass(frozen=True)
class FigureTable:
    """Table of texts, whose first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: Collection[int] = ()
    """Numbers of the rows in bold type, from 0."""
    switches: Sequence[str] = ()
    """Columns by whose values a reader of the page can filter rows."""
    important: Sequence[str] = ()
    """Columns that a narrow table keeps, the most important first; the others follow in order."""

    def few(self, most: int = MOST) -> list[int]:
        """Return the indices of the `most` most important columns, in their order."""
        others = (column for column in self.columns if column not in self.important)
        ranked = [*self.important, *others][:most]
        return [place for place, column in enumerate(self.columns) if column in ranked]

    def fitting(self, width: int) -> int:
        """Return how many columns, `MOST` at most, a terminal of `width` characters holds."""
        for most in range(MOST, 2, -1):
            needed = 2 + sum(self._needed(place) + 2 for place in self.few(most))
            if needed <= width:
                return most
        return 2

    def _needed(self, place: int) -> int:
        """Return the width of a column for its cells and its folded title."""
        cells = max(len(row[place]) for row in self.rows)
        if place == 0:
            return min(cells, LONGEST_NAME)
        return max(cells, *map(len, textwrap.wrap(self.columns[place], TITLE)))

    def of(self, places: Sequence[int], title: str | None = None) -> FigureTable:
        """Return the table with the columns at `places`, under another title if one is given."""
        rows = [[row[place] for place in places] for row in self.rows]
        columns = [self.columns[place] for place in places]
        return replace(self, title=title or self.title, columns=columns, rows=rows)

    def split(self, most: int = MOST) -> list[FigureTable]:
        """Return tables of at most `most` columns that together have all; each has the first."""
        tables = []
        for start in range(1, len(self.columns), most - 1):
            places = [0, *range(start, min(start + most - 1, len(self.columns)))]
            tables.append(self.of(places, self.title + ", further columns" * (start > 1)))
        return tables

    def markdown(self) -> str:
        """Return the table as Markdown, its title in bold above it."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in cells) + " |"

        separator = "| --- |" + " ---: |" * (len(self.columns) - 1)
        lines = [f"**{_one_line(self.title)}**", "", line(self.columns), separator]
        return "\n".join([*lines, *map(line, self.rows)]) + "\n"

    def terminal(self) -> Group:
        """Return the table as rich prints it, its title above it."""
        table = plain_table(None)
        table.add_column(self.columns[0], overflow="fold", min_width=self._needed(0))
        for place, column in enumerate(self.columns[1:], 1):
            title = textwrap.fill(column, TITLE)
            table.add_column(title, justify="right", overflow="fold", min_width=self._needed(place))
        for number, row in enumerate(self.rows):
            table.add_row(*map(Text, row), style="bold" if number in self.best else "")
        # a title of rich's own would be folded to the width of the table
        return Group(Text(self.title, "italic"), table)


def table_of(
    title: str,
    rows: Sequence[Mapping[str, str]],
    best: Collection[int] = (),
    switches: Sequence[str] = (),
    important: Sequence[str] = (),
) -> FigureTable:
    """Return the table of `rows`, at least one, each with its texts by the same columns."""
    cells = [list(row.values()) for row in rows]
    return FigureTable(title, list(rows[0]), cells, best, switches, important)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def summary(report: Report) -> FigureTable:
    """Return the table of all settings, with a row for each setting and each way of decoding.

    The fastest drafter of each setting is in bold.
    """
    rows, best = [], []
    for setting in report.settings:
        winner = fastest(setting)
        for name in by_speed(setting):
            figures = setting.drafters[name]
            if name == winner:
                best.append(len(rows))
            rows.append(cells_of(setting, name, figures, report.drafter_bytes.get(name)))
    title = caption(*report.settings) if len(report.settings) == 1 else "Every setting"
    switches = ("temperature", "batch size")
    # a value that all rows share is shown above the charts already
    differing = [column for column in switches if len({row[column] for row in rows}) > 1]
    important = (*IMPORTANT[:2], *differing, *IMPORTANT[2:])
    return table_of(title, rows, best=best, switches=switches, important=important)


def by_speed(setting: SettingFigures) -> list[str]:
    """Return the names of the ways to decode, the fastest first, those without a speed-up last."""

    def slowness(name: str) -> float:
        speedup = setting.drafters[name].speedup
        return -speedup if is_measured(speedup) else math.inf

    return sorted(setting.drafters, key=slowness)


def cells_of(
    setting: SettingFigures, name: str, s: DrafterFigures, weights: int | None = None
) -> dict[str, str]:
    """Return the row of one way of decoding; `weights` are the drafter's own, in bytes."""
    # without drafts tau is 1 by definition, and there is nothing to accept
    drafts = bool(s.mean_n_draft)
    ttft, tpot = s.ttft_quantiles_s or {}, s.tpot_quantiles_s or {}
    own_speedup = None if name == "plain" else s.speedup_ci95
    return {
        "drafter": name,
        "speed-up": ratio_text(s.speedup),
        "temperature": f"{setting.temperature:g}",
        "batch size": str(setting.batch),
        "tau": number_text(s.tau_incl_bonus),
        "identical replies": equal_replies_text(s.equal_to_ar, s.requests),
        "tau, 95% interval": (interval_text(s.tau_ci95) if drafts else "") or NOTHING,
        "speed-up, 95% interval": interval_text(own_speedup) or NOTHING,
        "tokens a second": number_text(s.tokens_s, ".0f" if (s.tokens_s or 0) >= 10 else ".1f"),
        "drafted tokens a round": number_text(s.mean_n_draft if drafts else None, ".1f"),
        "share of them accepted": number_text(s.accept_rate if drafts else None),
        ACCEPTED: survival_text(s.survival),
        "time to first token, median, ms": number_text(ttft.get("p50"), ".1f", 1000),
        "time per later token, median, ms": number_text(tpot.get("p50"), ".2f", 1000),
        "95th percentile of that, ms": number_text(tpot.get("p95"), ".2f", 1000),
        "size of the drafter": size(weights),
        "tau if no reply stopped inside a round": number_text(s.tau_untruncated),
        "loops": number_text(s.loop_share, ".0%"),
    }


def size(count: int | None) -> str:
    """Return a number of bytes in B, kB, MB or GB (powers of 1000); a dash for 0 or None."""
    if not count:
        return NOTHING
    unit = min(int(math.log10(count)) // 3, 3)
    return f"{count / 1000**unit:.3g} {('B', 'kB', 'MB', 'GB')[unit]}"


def server_table(report: Report) -> FigureTable | None:
    """Return the table of a live server, with a row for each temperature and concurrency, or None.

    docs/metrics.md#servers-counters defines its figures.
    """
    if (server := report.server) is None or not server.settings:
        return None
    rows = []
    for s in server.settings:
        ttft, tpot = s.ttft_quantiles_s or {}, s.tpot_quantiles_s or {}
        rows.append({
            "setting": f"T = {s.temperature:g}, {s.concurrency} at once",
            "tau": number_text(s.tau_incl_bonus),
            "tau, steps without a draft counted": number_text(s.tau_emitted),
            ACCEPTED: survival_text(s.survival),
            "share of drafted tokens accepted": number_text(s.accept_rate),
            "tokens a second": number_text(s.tokens_s, ".0f"),
            "time to first token, median, ms": number_text(ttft.get("p50"), ".1f", 1000),
            "95th percentile of that, ms": number_text(ttft.get("p95"), ".1f", 1000),
            "time per later token, median, ms": number_text(tpot.get("p50"), ".1f", 1000),
            "95th percentile of that one, ms": number_text(tpot.get("p95"), ".1f", 1000),
            "identical replies": equal_replies_text(s.equal_to_plain, s.compared),
        })  # fmt: skip
    important = (
        "setting", "tau", "tau, steps without a draft counted", "tokens a second", ACCEPTED,
        "identical replies", "time to first token, median, ms", "time per later token, median, ms",
    )  # fmt: skip
    return table_of(server.title, rows, important=important)


def categories(settings: Sequence[SettingFigures], intervals: bool = True) -> list[FigureTable]:
    """Return tables of tau by category (rows) and drafter (columns).

    Settings that differ in their batch size only and have the same figures share a table.
    """
    groups: dict[tuple[float, str], tuple[list[SettingFigures], FigureTable]] = {}
    for setting in settings:
        by_drafter = {name: s.by_category for name, s in setting.drafting.items() if s.by_category}
        names = sorted({category for by in by_drafter.values() for category in by})
        rows = []
        for category in names:
            cells = {"category": category or UNNAMED}
            for name, by in by_drafter.items():
                # a drafter whose replies had no round has no tau in that category
                of_one = by.get(category)
                tau, pair = (of_one.tau_incl_bonus, of_one.tau_ci95) if of_one else (None, None)
                cells[name] = number_with_interval(tau, pair if intervals else None)
            rows.append(cells)
        if rows:
            key = setting.temperature, repr(rows)
            groups.setdefault(key, ([], table_of("", rows)))[0].append(setting)
    return [
        replace(table, title=f"Tau by category, {caption(*group)}")
        for group, table in groups.values()
    ]


def remarks_of(report: Report) -> list[str]:
    """Return the remarks below the table of settings: warnings and near-ties."""
    lines = []
    for setting in report.settings:
        for name, figures in setting.drafters.items():
            where = f"{caption(setting)}, {name}"
            lines += [f"warning, {where}: {warning}" for warning in figures.warnings]
            if figures.largest_gap is not None:
                lines.append(f"{where}: {near_tie(figures.largest_gap)}")
    return lines


def near_tie(gap: float) -> str:
    """Return a sentence on the largest gap where a reply first differs from plain decoding's."""
    return f"where a reply first differs, the target's two best logits are at most {gap:.2g} apart."


def remarks_of_server(server: ServerReport) -> list[str]:
    """Return the remarks below a server's table: warnings, near-ties and definitions."""
    lines = []
    for s in server.settings:
        label = f"T = {s.temperature:g}, {s.concurrency} at once"
        lines += [f"warning, {label}: {warning}" for warning in s.warnings]
        if s.largest_gap is not None:
            lines.append(f"{label}: {near_tie(s.largest_gap)}")
    if any(setting.speculates is False for setting in server.settings):
        lines.append("The server does not speculate: it writes one token a step.")
    if definitions := dict.fromkeys(s.tau_definition for s in server.settings if s.speculates):
        lines += [f"The server's tau: {definition}." for definition in definitions]
        lines.append("Steps without a draft count in it, so it compares with a local tau.")
    lines.append(
        "Tokens a second: all replies together, prefills included; local ones are without."
    )
    return lines


def show(report: Report, console: OutputConsole | None = None) -> None:
    """Print the headline, the tables with as many columns as fit, and the remarks on them.

    The tables are as wide as the console; without a terminal 120 columns, unless COLUMNS is set.
    """
    if console is None:
        console = OutputConsole()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = IN_A_FILE

    def say(lines: Sequence[str], style: str = "") -> None:
        for line in lines:
            console.print(line, style=style, highlight=False, markup=False)

    def draw(table: FigureTable) -> None:
        console.print()
        few = table.of(table.few(table.fitting(console.width)))
        console.print(few.terminal())

    say(headline(report), "bold")
    if report.settings:
        table = summary(report)
        rows = [
            [f"{FASTEST if number in table.best else ' '} {row[0]}", *row[1:]]
            for number, row in enumerate(table.rows)
        ]
        draw(replace(table, title=f"{report.target_name}, {report.dtype}", rows=rows))
        mark = f"{FASTEST}: the fastest of its setting. tau: tokens a round."
        say([f"{mark} draftsmith report shows further columns.", *remarks_of(report)])
    if len(report.prompt_set.categories) > 1:
        for table in categories(report.settings, intervals=False):
            for part in table.split(table.fitting(console.width)):
                draw(part)
    say([f"{name} is left out: {reason}" for name, reason in report.left_out.items()])
    if (table := server_table(report)) is not None and report.server is not None:
        draw(table)
        say(remarks_of_server(report.server))
