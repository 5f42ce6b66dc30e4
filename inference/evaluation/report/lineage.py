"""Reports of one drafter before and after training: one part of the page with their comparison.

The figures are those of `draftsmith compare`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape

import msgspec

from ....heads.errors import UserError
from ..compare import ALL, Change, Comparison, compared, own_drafters
from ..results import Report, SettingFigures
from .charts import Bar, bar_chart
from .page import Figure, folded, side_by_side
from .sections import BARS, command, numbered, with_all_columns
from .tables import NOTHING, TO, UNNAMED, Colours, Table, by_column, finite_pair, with_interval

Named = tuple[str, Report]
"""A report after the path that it was read from."""
Drafters = dict[str, tuple[list[str], list[Comparison]]]
"""Name of each drafter in each of several reports, and its comparisons."""


@dataclass
class Part:
    """Reports that share a part of the page: one, or several of the same drafters in time."""

    reports: list[Named]
    drafters: Drafters = field(default_factory=dict)
    """Those that all reports have; empty for a single report."""

    @property
    def labels(self) -> list[str]:
        """Names of the reports in the lineage: `before`, `after`, or several with numbers."""
        later = len(self.reports) - 1
        return ["before", *("after" if later == 1 else f"after {i + 1}" for i in range(later))]

    @property
    def title(self) -> str:
        """The reports' paths."""
        return ", then ".join(path for path, _ in self.reports)

    @property
    def report(self) -> Report:
        """The only report, or one of all: see `merged`."""
        return merged(self) if self.drafters else self.reports[0][1]


def parts_of_page(reports: Iterable[Named]) -> list[Part]:
    """Return the reports in parts: those that `draftsmith compare` takes are together.

    They are of the same prompts, target, sampling and lengths, and share a drafter: one of the same
    name, or the only one of the same method and settings.
    """
    parts: list[Part] = []
    for entry in reports:
        for part in parts:
            together = [*part.reports, entry]
            if drafters := _compared_by_drafter(together):
                part.reports, part.drafters = together, drafters
                break
        else:
            parts.append(Part([entry]))
    return parts


def _compared_by_drafter(entries: Sequence[Named]) -> Drafters:
    """Return the drafters that all reports have, by name, or by method where names differ."""
    paths, reports = [path for path, _ in entries], [report for _, report in entries]
    found: Drafters = {}
    own = {*own_drafters(reports[0])}
    for label, names in in_all(reports).items():
        if names[0] not in own:
            continue
        try:
            settings = compared(reports, names, paths, 0.0)
        except UserError:  # they cannot be compared, so each gets a part of its own
            continue
        if any(setting.rows for setting in settings):
            found[label] = names, settings
    return found


def in_all(reports: Sequence[Report]) -> dict[str, list[str]]:
    """Return the names in each report of the ways to decode that all have, by a name for all.

    They have the same name everywhere, or else each report has one drafter of that method and
    settings, by which it is then called.
    """
    found = {}
    for name in reports[0].settings[0].drafters if reports[0].settings else ():
        kind = _kind(reports[0], name)
        if all(report.settings and name in report.settings[0].drafters for report in reports):
            found[name] = [name] * len(reports)
        elif names := _of_kind(reports, kind):
            found[kind] = names
    return found


def _kind(report: Report, name: str) -> str:
    """Return method and settings of a drafter, or its name where a report does not have them."""
    return report.settings[0].drafters[name].kind or name


def _of_kind(reports: Sequence[Report], kind: str) -> list[str]:
    """Return the drafter of one kind of each report; nothing unless each has one such drafter."""
    found = []
    for report in reports:
        found += [name for name in own_drafters(report) if _kind(report, name) == kind]
    return found if len(found) == len(reports) else []


def versioned(name: str, label: str) -> str:
    """Return the name of a drafter at one point of its lineage."""
    return f"{name}, {label}"


def merged(part: Part) -> Report:
    """Return one report with the drafters of all, those of the lineage named `NAME, before`.

    Plain decoding and baselines are those of the last report that has them, as is all else.
    """
    settings: dict[tuple[float, int, bool], SettingFigures] = {}
    sizes: dict[str, int | None] = {}
    for number, (label, (_, report)) in enumerate(zip(part.labels, part.reports, strict=True)):
        in_common = {names[number]: name for name, (names, _) in part.drafters.items()}

        def named(name: str, common: dict[str, str] = in_common, label: str = label) -> str:
            return versioned(common[name], label) if name in common else name

        for setting in report.settings:
            key = setting.temperature, setting.batch, setting.lossless
            drafters = {**settings[key].drafters} if key in settings else {}
            for name, figures in setting.drafters.items():
                drafters[named(name)] = figures
            settings[key] = msgspec.structs.replace(setting, drafters=drafters)
        for name, size in report.drafter_bytes.items():
            sizes[named(name)] = size
    last = part.reports[-1][1]
    return msgspec.structs.replace(last, settings=list(settings.values()), drafter_bytes=sizes)


@dataclass
class _LineageRow:
    """A change with where it was measured: the drafter, the setting and the later report."""

    drafter: str
    setting: Comparison
    change: Change
    label: str


def _rows(part: Part) -> list[_LineageRow]:
    """Return every change of a part, by drafter and setting."""
    return [
        _LineageRow(drafter, setting, change, part.labels[change.report])
        for drafter, (_, settings) in part.drafters.items()
        for setting in settings
        for change in setting.rows
    ]


def before_after(part: Part, colours: Colours) -> str:
    """Return what changed: sentences, a chart of the changes, and a table of all figures.

    "" is returned for a part of one report.
    """
    if (table := compare_table(part)) is None:
        return ""
    rows = _rows(part)
    return (
        "\n".join(_sentences(part, rows))
        + _charts(part, rows, colours)
        + with_all_columns(table)
        + '<p class="note">tau with 95% intervals over prompts; those of the change are of pairs '
        "of prompts, and narrower. Only tau is compared: the speeds of two runs are of two "
        "moments. Plain decoding and baselines below are those of the last report; each speed-up "
        "is over plain decoding of its own report.</p>"
        f'<p class="note">The same in the terminal: {command(_command(part))}</p>\n'
    )


def compare_table(part: Part) -> Table | None:
    """Return the table of a lineage; None for a part of one report.

    Every change is a row; columns that would hold one value only are left out.
    """
    if not part.drafters:
        return None
    left_out = []
    if len(part.drafters) == 1:
        left_out.append("drafter")
    if len(part.reports) == 2:
        left_out.append("report")
    rows = []
    for row in _rows(part):
        change = row.change
        cells = {
            "category": change.category or UNNAMED,
            "change": f"{change.change:+.1%}",
            "temperature": f"{row.setting.temperature:g}",
            "batch size": str(row.setting.batch),
            "drafter": row.drafter,
            "report": row.label,
            "requests": str(change.requests),
            "tau before": with_interval(change.tau_before, change.tau_before_ci95),
            "tau after": with_interval(change.tau_after, change.tau_after_ci95),
            "change, 95% interval": _percent_interval(change),
            "outcome": _outcome(change),
        }
        rows.append({name: text for name, text in cells.items() if name not in left_out})
    columns, texts = by_column(rows)
    narrow = ["category", "change", "drafter", "report", "tau before", "tau after", "outcome"]
    switches = [c for c in ("temperature", "batch size", "drafter", "report") if c in columns]
    differing = [name for name in switches if len({row[name] for row in rows}) > 1]
    important = [
        "category", "change", *differing, "tau before", "tau after", "outcome",
        "change, 95% interval", "requests",
    ]  # fmt: skip
    title = f"Tau by category, before: {part.reports[0][0]} {TO} after: {part.reports[-1][0]}"
    return Table(title, columns, texts, switches=switches, narrow=narrow, important=important)


def _where(row: _LineageRow) -> str:
    return f"T = {row.setting.temperature:g}, batch {row.setting.batch}"


def _subject(part: Part, row: _LineageRow) -> str:
    """Return the drafter of a row, and which of several later reports it is of."""
    return row.drafter if len(part.reports) == 2 else versioned(row.drafter, row.label)


def _outcome(change: Change) -> str:
    """Return what the interval of a change allows to say."""
    if change.regressed:
        return "regressed"
    low, high = change.change_ci95
    return "gained" if low > 0 else "lost" if high < 0 else "no clear change"


def _sentences(part: Part, rows: Sequence[_LineageRow]) -> list[str]:
    """Return paragraphs: the change over all prompts, and what has regressed."""
    said = []
    seen = set()
    for row in rows:
        key = row.drafter, row.label, row.setting.temperature
        if row.change.category != ALL or key in seen:
            continue
        seen.add(key)  # of each temperature only its first batch size
        change = row.change
        said.append(
            f'<p class="verdict">{escape(_where(row))}: tau of <strong>'
            f"{escape(_subject(part, row))}</strong> {change.tau_before:.2f} → "
            f"{change.tau_after:.2f}, <strong>{change.change:+.1%}</strong> "
            f"({_percent_interval(change)}), {_outcome(change)}.</p>"
        )
    worse = []
    for row in rows:
        if row.change.regressed:
            category = row.change.category or UNNAMED
            worse.append(f"{_subject(part, row)}, {category} ({_where(row)})")
    if worse:
        said.append(f'<p class="alert" role="alert">Regressed: {escape("; ".join(worse))}.</p>')
    same = [name for name, (names, _) in part.drafters.items() if _same_weights(part, names)]
    if same:
        names = escape(", ".join(same))
        said.append(
            f'<p class="note">{names}: the weights are the same in all reports, so that a change '
            "is one of the measurement.</p>"
        )
    return said


def _same_weights(part: Part, names: Sequence[str]) -> bool:
    """Return whether all reports say that a drafter, of these `names`, has the same weights."""
    hashes = set()
    for own, (_, report) in zip(names, part.reports, strict=True):
        origin = report.drafters.get(own)
        hashes.add(None if origin is None else origin.sha256)
    return len(hashes) == 1 and hashes != {None}


def _percent_interval(change: Change) -> str:
    if (known := finite_pair(change.change_ci95)) is None:
        return NOTHING
    low, high = known
    return f"{low:+.1%} to {high:+.1%}"


def _charts(part: Part, rows: Sequence[_LineageRow], colours: Colours) -> str:
    """Return charts of the changes with their intervals, those of larger batches folded."""
    by_setting: dict[str, list[_LineageRow]] = {}
    for row in rows:
        by_setting.setdefault(_where(row), []).append(row)
    smallest: dict[float, str] = {}
    for row in sorted(rows, key=lambda row: row.setting.batch):
        smallest.setdefault(row.setting.temperature, _where(row))
    in_sight, others = [], []
    for where, of_setting in by_setting.items():
        figures = _figures_of(part, where, of_setting, colours)
        (in_sight if where in smallest.values() else others).extend(figures)
    return side_by_side(in_sight) + folded("Other batch sizes", side_by_side(others))


def _figures_of(
    part: Part, where: str, rows: Sequence[_LineageRow], colours: Colours
) -> list[Figure]:
    """Return the charts of one setting: a group of categories for each drafter."""
    groups: dict[str, list[Bar]] = {}
    for row in rows:
        low, high = row.change.change_ci95
        look = colours.get(versioned(row.drafter, row.label), 1)
        bar = Bar(
            row.change.category or UNNAMED,
            100 * row.change.change,
            look,
            finite_pair((100 * low, 100 * high)),
            f"{row.change.change:+.1%}",
        )
        groups.setdefault(_subject(part, row), []).append(bar)
    pieces = []
    for name, bars in groups.items():
        for start in range(0, len(bars), BARS):
            pieces.append((name if len(groups) > 1 else "", bars[start : start + BARS]))
    figures = []
    for (name, bars), suffix in zip(pieces, numbered(len(pieces)), strict=True):
        draw = partial(bar_chart, [(name, bars)], "change of tau, %", 0.0, dots=True)
        note = "whiskers: 95% intervals over pairs of prompts; dotted: no change"
        figures.append(Figure(f"Change of tau, {where}{suffix}", draw, note))
    return figures


def _command(part: Part) -> str:
    """Return the command that prints this comparison, of the first drafter if there are several."""
    words = ["draftsmith", "compare", *(path for path, _ in part.reports)]
    if any(len(own_drafters(report)) > 1 for _, report in part.reports):
        names, _ = next(iter(part.drafters.values()))
        for name in names:
            words += ["--drafter", name]
    return shlex.join(words)
