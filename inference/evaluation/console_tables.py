"""Tables of an evaluation in the terminal: one of all settings, one of tau by category."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..console import Console, plain_table
from .remarks import headline
from .results import (
    SHOWN,
    DrafterFigures,
    Report,
    SettingFigures,
    by_depth,
    caption,
    identical,
    interval_text,
    known,
    written,
)
from .server.report import show as show_server

ACCEPTED = f"accepted 1-{SHOWN}"
COLUMNS = ("tau", "95%", ACCEPTED, "tok/s", "speed-up", "identical", "loops")
LEFT_OUT_FIRST = (ACCEPTED, "tok/s", "95%", "loops")
"""Columns that a narrow terminal leaves out, the first one first."""
MOST = 8  # columns of a table
LONGEST_NAME = 30  # longer names of drafters are folded
IN_A_FILE = 120  # columns of a table that goes to a file
FASTEST = "*"
NOTICEABLE = 0.02  # share by which tau changes where replies are cut inside a round


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
        for table in category_tables(report.settings, console.width):
            console.print()
            console.print(table)
    for name, reason in report.left_out.items():
        console.print(f"{name} is left out: {reason}", highlight=False, markup=False)
    if report.server is not None:
        show_server(report.server, console)


def show_settings(report: Report, console: Console) -> None:
    """Print the headline, the table of all settings, what its marks mean, and the warnings."""
    titles = list(COLUMNS)
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
    if missing := [title for title in COLUMNS if title not in titles]:
        notes.append(f"Left out at {console.width} columns: {', '.join(missing)}.")
    lines = [" ".join(filter(None, notes)), *uncut_lines(report.settings)]
    for setting in report.settings:
        for name, figures in setting.drafters.items():
            where = f"{caption(setting)}, {name}"
            lines += [f"warning, {where}: {warning}" for warning in figures.warnings]
            if figures.untuned is not None:
                lines.append(f"{where}: {over_untuned(figures)}.")
            if (gap := figures.largest_gap) is not None:
                lines.append(
                    f"{where}: where a reply first differs, the target's two best logits are at "
                    f"most {gap:.2g} apart."
                )
    for line in lines:
        console.print(line, highlight=False, markup=False)


def uncut_lines(settings: Sequence[SettingFigures]) -> list[str]:
    """Return a line for the settings whose tau is noticeably below `tau_untruncated`.

    The tokens that a round emits after the end of a reply do not count in tau, which matters where
    replies are short. Settings with the same figures share a line.
    """
    found: dict[tuple[float, bool, str], list[SettingFigures]] = {}
    for setting in settings:
        parts = []
        for name in drafting(setting):
            figures = setting.drafters[name]
            tau, uncut = figures.tau_incl_bonus, figures.tau_untruncated
            if known(tau) and known(uncut) and uncut - tau > NOTICEABLE * tau:
                parts.append(f"{name} {uncut:.2f}")
        if parts:
            key = setting.temperature, setting.lossless, ", ".join(parts)
            found.setdefault(key, []).append(setting)
    what = "tau_untruncated, of rounds that the end of a reply does not cut"
    return [f"{caption(*group)}: {what}: {parts}." for (_, _, parts), group in found.items()]


def wide(table: Table, console: Console) -> int:
    """Return the number of columns that a table takes where it need not fold a cell."""
    unlimited = console.options.update(width=10_000)
    return Measurement.get(console, unlimited, table).maximum


def settings_table(report: Report, titles: Sequence[str], longest: int = LONGEST_NAME) -> Table:
    """Return the table of all settings with the columns `titles`, a group of rows for each.

    A group is headed by its setting and sorted by speed-up. Its fastest row is marked and bold.
    Names of more than `longest` characters are folded.
    """
    counted = report.scope
    table = plain_table(f"{report.target_name}\n{counted}, {report.dtype}")
    table.add_column("drafter", overflow="fold", min_width=18, max_width=longest)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for setting in report.settings:
        table.add_section()
        table.add_row(Text(caption(setting), "underline"))
        for place, name in enumerate(by_speed(setting)):
            figures = setting.drafters[name]
            # without a speed-up nothing was measured that could win
            first = place == 0 and known(figures.speedup)
            cells = cells_of(figures)
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


def cells_of(figures: DrafterFigures) -> dict[str, str]:
    """Return the texts of a row by the titles of their columns."""
    return {
        "tau": written(figures.tau_incl_bonus),
        "95%": (interval_text(figures.tau_ci95) if figures.mean_n_draft else "") or "-",
        ACCEPTED: by_depth(figures.survival),
        "tok/s": written(figures.tokens_s, ".0f"),
        "speed-up": written(figures.speedup) + "x" * known(figures.speedup),
        "identical": identical(figures.equal_to_ar, figures.requests),
        "loops": written(figures.loop_share, ".0%"),
    }


def over_untuned(figures: DrafterFigures) -> str:
    """Return what a tuned drafter gains over the same one without the profile, in words."""
    if figures.gain_over_default == 1:
        return f"the profile keeps the tree of {figures.untuned}, so both are one decoding"
    ratio = f"{written(figures.gain_over_default)}x"
    interval = interval_text(figures.gain_ci95, " (95%: {:.2f} to {:.2f})")
    return f"{ratio}{interval} the tokens per second of {figures.untuned}"


def category_tables(settings: Sequence[SettingFigures], width: int) -> list[Table]:
    """Return tau by category (rows) and drafter (columns), a group of rows for each setting.

    Settings that differ in their batch size only and have the same figures are one group. Drafters
    that do not fit into `width` columns follow in further tables.
    """
    names = list(dict.fromkeys(name for setting in settings for name in drafting(setting)))
    drafted = [setting.drafters[name] for setting in settings for name in drafting(setting)]
    categories = sorted({category for figures in drafted for category in figures.by_category})
    first = max(map(len, ["T = 0.7, batch 16", *categories]))
    # A column has ten characters for the name, which may be folded, and two next to them.
    columns = min(max((width - first - 4) // 12, 1), MOST - 1)
    tables = []
    for start in range(0, len(names), columns):
        shown = names[start : start + columns]
        table = plain_table("tau by category" + (", further drafters" if start else ""))
        table.add_column("category", overflow="fold", max_width=LONGEST_NAME)
        for name in shown:
            table.add_column(name, justify="right", overflow="fold", min_width=min(len(name), 10))
        groups: dict[str, tuple[list[SettingFigures], list[list[str]]]] = {}
        for setting in settings:
            rows = [[_tau(setting, name, category) for name in shown] for category in categories]
            key = repr((setting.temperature, setting.lossless, rows))
            groups.setdefault(key, ([], rows))[0].append(setting)
        for group, rows in groups.values():
            table.add_section()
            table.add_row(Text(caption(*group), "underline"))
            for category, cells in zip(categories, rows, strict=True):
                table.add_row(Text(f"  {category or '-'}"), *cells)
        tables.append(table)
    return tables


def drafting(setting: SettingFigures) -> list[str]:
    """Return the names of the ways to decode that draft."""
    return [name for name, figures in setting.drafters.items() if figures.mean_n_draft]


def _tau(setting: SettingFigures, name: str, category: str) -> str:
    """Return a drafter's tau in one category; a dash where it has none."""
    figures = setting.drafters.get(name)
    of_one = figures.by_category.get(category) if figures is not None else None
    return written(of_one.tau_incl_bonus if of_one is not None else None)
