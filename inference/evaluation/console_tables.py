"""Tables of an evaluation in the terminal."""

from __future__ import annotations

from rich.table import Table

from ..console import Console, plain_table
from .report.tables import caption, firsts, loop_shares
from .results import NAN, SHOWN, Report, SettingFigures, by_depth, identical
from .server.report import show as show_server


def show(report: Report, console: Console | None = None) -> None:
    """Print a table for each setting with its warnings, then tau by category, then the server."""
    console = console or Console()
    for setting in report.settings:
        console.print(_table_of(setting, report))
        for name, figures in setting.drafters.items():
            for warning in figures.warnings:
                console.print(f"warning, {name}: {warning}")
            if (gap := figures.largest_gap) is not None:
                console.print(
                    f"{name}: where a reply first differs, the target's two best logits are at "
                    f"most {gap:.2g} apart."
                )
    if len(report.prompt_set.categories) > 1:
        for setting in firsts(report):
            console.print(_categories(setting))
    for name, reason in report.left_out.items():
        console.print(f"{name} is left out: {reason}")
    if report.settings:
        console.print(f"tau: tokens a round. {loop_shares(report)}", highlight=False)
    if report.server is not None:
        show_server(report.server, report.settings, console)


def _table_of(setting: SettingFigures, report: Report) -> Table:
    """Return the table of one setting, a row for each way to decode."""
    requests = setting.plain.requests
    conditions = f"T = {setting.temperature:g}"
    if not setting.lossless:
        conditions += ", LOSSY typical acceptance"
    prompts = f"{requests} held-out prompt{'s' if requests > 1 else ''}"
    table = plain_table(
        f"{report.target_name}\n{prompts}, {conditions}, batch {setting.batch}, {report.dtype}"
    )
    table.add_column("drafter", overflow="fold", min_width=18)
    for column in ("tau", "95%", f"accepted 1-{SHOWN}", "tok/s", "speed-up", "identical"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, figures in setting.drafters.items():
        low, high = figures.tau_ci95 or (NAN, NAN)
        table.add_row(
            name,
            f"{figures.tau_incl_bonus:.2f}",
            f"{low:.2f}-{high:.2f}" if figures.mean_n_draft else "-",
            by_depth(figures.survival),
            f"{figures.tokens_s:.0f}",
            f"{figures.speedup:.2f}x",
            identical(figures.equal_to_ar, requests),
        )
    return table


def _categories(setting: SettingFigures) -> Table:
    """Return the table of tau by category of the prompts, a column for each drafter that drafts."""
    drafting = {}
    for name, figures in setting.drafters.items():
        if figures.mean_n_draft:
            drafting[name] = figures.by_category
    table = plain_table(f"tau by category, {caption(setting)}")
    table.add_column("category")
    for name in drafting:
        table.add_column(name, justify="right", overflow="fold")
    for category in sorted(set().union(*drafting.values())):
        cells = []
        for by_category in drafting.values():
            known = category in by_category
            cells.append(f"{by_category[category].tau_incl_bonus:.2f}" if known else "-")
        table.add_row(category or "-", *cells)
    return table
