"""Tables of a report, as HTML and as Markdown: the same cells in both."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TypeGuard

from ..remarks import fastest
from ..results import DrafterFigures, Report, SettingFigures, caption

# Typographic signs, written as codes because they look like others.
NOTHING, TO, TIMES = "\u2013", "\u2013", "\u00d7"
UNNAMED = "(none)"  # the category of prompts that have none
MOST = 8  # columns of a table, unless a reader asks for all
LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": "$<$", ">": "$>$", "|": "$|$", TIMES: r"$\times$", TO: "--",
}  # fmt: skip
"""Signs that LaTeX would take for commands or print as others, and how they are written."""
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
    important: Sequence[str] = ()
    """Columns that stay in a table of `MOST`, those of most weight first; further ones follow in
    their order."""

    def cut(self) -> Table:
        """Return the table with its `MOST` most important columns, in their order."""
        ranked = [*self.important, *(c for c in self.columns if c not in self.important)][:MOST]
        kept = [place for place, column in enumerate(self.columns) if column in ranked]

        def of(names: Sequence[str]) -> list[str]:
            return [name for name in names if name in ranked]

        rows = [[row[place] for place in kept] for row in self.rows]
        return replace(
            self, columns=of(self.columns), rows=rows, switches=of(self.switches),
            narrow=of(self.narrow),
        )  # fmt: skip

    def split(self) -> list[Table]:
        """Return tables of at most `MOST` columns that together have all; each has the first."""
        tables = []
        for start in range(1, len(self.columns), MOST - 1):
            title = self.title + ", further columns" * (start > 1)
            places = [0, *range(start, min(start + MOST - 1, len(self.columns)))]
            columns = [self.columns[place] for place in places]
            rows = [[row[place] for place in places] for row in self.rows]
            tables.append(replace(self, title=title, columns=columns, rows=rows))
        return tables

    def latex(self) -> str:
        """Return the table as LaTeX, which needs the package booktabs."""

        def line(cells: Sequence[str]) -> str:
            return "    " + " & ".join(map(latex, cells)) + r" \\"

        return "\n".join([
            r"% needs \usepackage{booktabs}", r"\begin{table}", r"  \centering",
            rf"  \caption{{{latex(self.title)}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(self.columns) - 1)}}}",
            r"    \toprule", line(self.columns), r"    \midrule", *map(line, self.rows),
            r"    \bottomrule", r"  \end{tabular}", r"\end{table}", "",
        ])  # fmt: skip

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
        left_out = [bool(self.narrow) and column not in self.narrow for column in self.columns]
        more = [' class="more"' * hidden for hidden in left_out]
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
        title = escape(self.title)
        places = " ".join(str(list(self.columns).index(column)) for column in self.switches)
        switches = f' data-switches="{places}"' if places else ""
        hint = ""
        if any(left_out):
            hint = (
                f'<p class="note phone">{sum(left_out)} more columns are shown where the window is '
                "wider: turn the phone, or open the page on a computer.</p>"
            )
        return (
            f'<div class="wide" tabindex="0" role="region" aria-label="{title}">'
            f"<table{switches}><caption>{title}</caption><thead><tr>{heads}</tr></thead>"
            f"<tbody>{''.join(body)}</tbody></table></div>{hint}"
        )


def latex(text: str) -> str:
    """Return a text in one line, with the signs of `LATEX` escaped."""
    return "".join(LATEX.get(sign, sign) for sign in _one_line(text))


def by_column(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells of `rows`, each with its texts by the same columns; at least one."""
    return list(rows[0]), [list(row.values()) for row in rows]


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
    return (low, high) if is_finite(low) and is_finite(high) else None


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


def loop_shares(report: Report) -> str:
    """Return a sentence with the share of plain decoding's replies that loop, by setting.

    It is empty where loops were not counted; see docs/metrics.md#doubtful-figures.
    """
    known = []
    for setting in report.settings:
        if (share := setting.plain.loop_share) is not None:
            known.append(f"{share:.0%} ({caption(setting)})")
    said = f"Loop share (replies that repeat an 8-gram): {', '.join(known)}"
    return f"{said}; loops flatter every drafter." if known else ""


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
    title = caption(*report.settings) if len(report.settings) == 1 else "Every setting"
    if len(report.settings) > 1 and any(not setting.lossless for setting in report.settings):
        title += ", LOSSY typical acceptance"
    switches = ["temperature", "batch size"]
    # What is the same in all rows is above the charts already.
    differing = [column for column in switches if len({row[column] for row in rows}) > 1]
    narrow = ["drafter", "speed-up", "tau", "replies equal to plain decoding's", *differing]
    important = [
        "drafter", "speed-up", *differing, "tau", "replies equal to plain decoding's",
        "tau, 95% interval", "speed-up, 95% interval", "tokens a second", "drafted tokens a round",
    ]  # fmt: skip
    return Table(title, *by_column(rows), best, switches, narrow, important)


def _summary_row(
    setting: SettingFigures, name: str, s: DrafterFigures, weights: int | None
) -> dict[str, str]:
    """Return the row of one way of decoding; `weights` are the drafter's own, in bytes."""
    # Without drafts tau is 1 by definition, and there is nothing to accept.
    drafts = bool(s.mean_n_draft)
    ttft, tpot = s.ttft_quantiles_s or {}, s.tpot_quantiles_s or {}
    equal = None if name == "plain" else s.equal_to_ar
    return {
        "drafter": name,
        "speed-up": factor(s.speedup),
        "temperature": f"{setting.temperature:g}",
        "batch size": str(setting.batch),
        "tau": number(s.tau_incl_bonus),
        "replies equal to plain decoding's": _share_of(equal, s.requests),
        "tau, 95% interval": interval(s.tau_ci95 if drafts else None),
        "speed-up, 95% interval": interval(s.speedup_ci95 if name != "plain" else None),
        "tokens a second": number(s.tokens_s, ".0f" if (s.tokens_s or 0) >= 100 else ".1f"),
        "drafted tokens a round": number(s.mean_n_draft if drafts else None, ".1f"),
        "share of them accepted": number(s.accept_rate if drafts else None),
        "time to first token, median, ms": number(ttft.get("p50"), ".1f", 1000),
        "time per later token, median, ms": number(tpot.get("p50"), ".2f", 1000),
        "95th percentile of that, ms": number(tpot.get("p95"), ".2f", 1000),
        "size of the drafter": size(weights),
        "tau if no reply stopped inside a round": number(s.tau_untruncated),
    }


def _share_of(count: int | None, whole: int | None) -> str:
    return NOTHING if count is None else f"{count} of {whole}"


def served(report: Report) -> Table | None:
    """Return the table of a live server, with a row for each temperature and concurrency.

    `None` is returned if no server was measured. Its figures are defined in
    docs/metrics.md#servers-counters.
    """
    if (server := report.server) is None or not server.settings:
        return None
    rows = []
    for s in server.settings:
        ttft, tpot = s.ttft_quantiles_s or {}, s.tpot_quantiles_s or {}
        # Three columns of survival, whatever depth the server drafts to.
        first, second, third, *_ = [*s.survival, None, None, None]
        rows.append({
            "setting": f"T = {s.temperature:g}, {s.concurrency} at once",
            "tau": number(s.tau_incl_bonus),
            "tau, steps without a draft counted": number(s.tau_emitted),
            "accepted 1 or more": number(first),
            "2 or more": number(second),
            "3 or more": number(third),
            "share of drafted tokens accepted": number(s.accept_rate),
            "tokens a second": number(s.tokens_s, ".0f"),
            "time to first token, median, ms": number(ttft.get("p50"), ".1f", 1000),
            "95th percentile of that, ms": number(ttft.get("p95"), ".1f", 1000),
            "time per later token, median, ms": number(tpot.get("p50"), ".1f", 1000),
            "95th percentile of that one, ms": number(tpot.get("p95"), ".1f", 1000),
            "replies equal to plain decoding's": _share_of(s.equal_to_plain, s.compared),
        })  # fmt: skip
    narrow = ("setting", "tau", "tokens a second", "replies equal to plain decoding's")
    important = [
        *narrow, "accepted 1 or more", "time to first token, median, ms",
        "time per later token, median, ms", "share of drafted tokens accepted",
    ]  # fmt: skip
    return Table(server.title, *by_column(rows), narrow=narrow, important=important)


def categories(setting: SettingFigures) -> Table | None:
    """Return tau with its interval, by category (rows) and drafter (columns).

    `None` is returned where the prompts are of less than two categories.
    """
    by_drafter = {name: s.by_category for name, s in setting.drafting.items() if s.by_category}
    names = sorted({category for by in by_drafter.values() for category in by})
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


def with_interval(value: object, pair: Sequence[float | None] | None) -> str:
    """Return `2.31 (2.01-2.34)`, without the brackets where the interval is not known."""
    text = interval(pair)
    return number(value) + (f" ({text})" if text != NOTHING else "")


def _one_line(text: str) -> str:
    return " ".join(text.split())
