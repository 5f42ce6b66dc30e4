"""Tables of an evaluation in the terminal: one of all settings, one of tau by category."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence

import rich.table
from rich.measure import Measurement
from rich.text import Text

from ..console import Console, plain_table
from .remarks import headline
from .results import Report, SettingFigures, caption, known
from .server.report import show as show_server
from .tables import ACCEPTED, LONGEST_NAME, MOST, categories, cells_of, remarks_of

IN_A_FILE = 120  # columns of a terminal's table that goes to a file
FASTEST = "*"
IN_TERMINAL = {
    "tau": "tau",
    "tau, 95% interval": "95%",
    ACCEPTED: ACCEPTED,
    "tokens a second": "tok/s",
    "speed-up": "speed-up",
    "replies equal to plain decoding's": "identical",
    "loops": "loops",
}
"""Columns of the terminal's table of settings, with the shorter titles that they have there."""
LEFT_OUT_FIRST = (ACCEPTED, "tokens a second", "tau, 95% interval", "loops")
"""Columns that a narrow terminal leaves out, the first one first."""


def show(report: Report, console: Console | None = None) -> None:
    """Print the table of all settings with its warnings, tau by category, and the server's table.

    The tables are as wide as the console; without a terminal 120 columns, unless COLUMNS is set.
    """
    if console is None:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = IN_A_FILE
    if report.settings:
        show_settings(report, console)
    if len(report.prompt_set.categories) > 1:
        for table in categories(report.settings, intervals=False):
            # a column has ten characters for the name, which may be folded, and two next to them
            first = max(len(row[0]) for row in table.rows)
            for part in table.split(min(max((console.width - first - 4) // 12, 1) + 1, MOST)):
                console.print()
                console.print(part.terminal())
    for name, reason in report.left_out.items():
        console.print(f"{name} is left out: {reason}", highlight=False, markup=False)
    if report.server is not None:
        show_server(report.server, console)


def show_settings(report: Report, console: Console) -> None:
    """Print the headline, the table of all settings, what its marks mean, and the warnings."""
    titles = list(IN_TERMINAL)
    for title in LEFT_OUT_FIRST:
        if wide(settings_table(report, titles), console) <= console.width:
            break
        titles.remove(title)
    # A name is folded only where it has to be.
    spare = console.width - wide(settings_table(report, titles), console)
    longest = LONGEST_NAME + max(spare, 0)
    for line in headline(report):
        console.print(line, style="bold", highlight=False, markup=False)
    console.print()
    console.print(settings_table(report, titles, longest))
    notes = [
        f"{FASTEST}: the fastest of its setting. tau: tokens a round.",
        f"{ACCEPTED}: rounds that accept at least so many drafts." if ACCEPTED in titles else "",
        "loops: replies that repeat an 8-gram, which flatter every drafter."
        if "loops" in titles
        else "",
    ]
    if missing := [short for title, short in IN_TERMINAL.items() if title not in titles]:
        notes.append(f"Left out at {console.width} columns: {', '.join(missing)}.")
    lines = [" ".join(filter(None, notes)), *remarks_of(report)]
    for line in lines:
        console.print(line, highlight=False, markup=False)


def wide(table: rich.table.Table, console: Console) -> int:
    """Return the number of columns that a table takes where it need not fold a cell."""
    unlimited = console.options.update(width=10_000)
    return Measurement.get(console, unlimited, table).maximum


def settings_table(
    report: Report, titles: Sequence[str], longest: int = LONGEST_NAME
) -> rich.table.Table:
    """Return the table of all settings with the columns `titles`, a group of rows for each.

    A group is headed by its setting and sorted by speed-up. Its fastest row is marked and bold.
    Names of more than `longest` characters are folded.
    """
    table = plain_table(f"{report.target_name}\n{report.scope}, {report.dtype}")
    table.add_column("drafter", overflow="fold", min_width=18, max_width=longest)
    for title in titles:
        table.add_column(IN_TERMINAL[title], justify="right", no_wrap=True)
    for setting in report.settings:
        table.add_section()
        table.add_row(Text(caption(setting), "underline"))
        for place, name in enumerate(by_speed(setting)):
            figures = setting.drafters[name]
            # without a speed-up nothing was measured that could win
            first = place == 0 and known(figures.speedup)
            cells = cells_of(setting, name, figures)
            words = f"{FASTEST if first else ' '} {'plain decoding' if name == 'plain' else name}"
            table.add_row(
                Text(textwrap.fill(words, longest, subsequent_indent="    ")),
                *(cells[title] for title in titles),
                style="bold" if first else "",
            )
    return table


def by_speed(setting: SettingFigures) -> list[str]:
    """Return the names of the ways to decode, the fastest first, those without a speed-up last."""

    def slowness(name: str) -> float:
        speedup = setting.drafters[name].speedup
        return -speedup if known(speedup) else math.inf

    return sorted(setting.drafters, key=slowness)
