"""Reports of one drafter before and after training, compared in one part of the page.

The figures are those of `draftsmith compare`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ....heads.errors import UserError
from ....heads.files import JsonObject
from ..compare import ALL, Change, Comparison, cells_of, compared, non_baseline_drafters, outcome
from ..figure_text import interval_text
from ..results import Report, SettingFigures
from ..tables import UNNAMED, FigureTable, table_of
from .page import Block, bar, chart, charts, table, text

NamedReport = tuple[str, Report]
"""Path and content of a report."""
Drafters = dict[str, tuple[list[str], list[Comparison]]]
"""Name of each drafter in each of several reports, and its comparisons."""


@dataclass
class PagePart:
    """Part of the page: a report, or successive reports of the same drafters."""

    reports: list[NamedReport]
    drafters: Drafters = field(default_factory=dict)
    """Drafters that all reports have; empty for a single report."""

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
        """The only report, or all of them in one: see `merged`."""
        return merged(self) if self.drafters else self.reports[0][1]

    def named(self, drafter: str, change: Change) -> str:
        """Return the name of a drafter, with the later report's label if there are several."""
        return drafter if len(self.reports) == 2 else f"{drafter}, {self.labels[change.report]}"


def parts_of_page(reports: Iterable[NamedReport]) -> list[PagePart]:
    """Return the parts of the page; reports that `draftsmith compare` accepts share one.

    They have the same prompts, target, sampling and lengths, and share a drafter: one of the same
    name, or the only one of the same method and settings.
    """
    parts: list[PagePart] = []
    for entry in reports:
        for part in parts:
            together = [*part.reports, entry]
            if drafters := _compared_by_drafter(together):
                part.reports, part.drafters = together, drafters
                break
        else:
            parts.append(PagePart([entry]))
    return parts


def _compared_by_drafter(entries: Sequence[NamedReport]) -> Drafters:
    """Return the drafters that all reports have, by name, or by method where names differ."""
    paths, reports = [path for path, _ in entries], [report for _, report in entries]
    found: Drafters = {}
    for name in non_baseline_drafters(reports[0]):
        label, names = name, [name] * len(reports)
        if not all(name in non_baseline_drafters(report) for report in reports):
            label = _kind(reports[0], name)
            alike = [[n for n in non_baseline_drafters(r) if _kind(r, n) == label] for r in reports]
            if any(len(names_of_one) != 1 for names_of_one in alike):
                continue
            names = [names_of_one[0] for names_of_one in alike]
        try:
            settings = compared(reports, names, paths, 0.0)
        except UserError:  # they cannot be compared, so each gets its own part
            continue
        if any(setting.rows for setting in settings):
            found[label] = names, settings
    return found


def _kind(report: Report, name: str) -> str:
    """Return method and settings of a drafter, or its name if the report lacks them."""
    return report.settings[0].drafters[name].kind or name


def merged(part: PagePart) -> Report:
    """Return one report with the drafters of all, those of the lineage named `NAME, before`.

    Everything else, plain decoding and baselines included, is that of the last report that has it.
    """
    settings: dict[tuple[float, int], SettingFigures] = {}
    sizes: dict[str, int | None] = {}
    for number, (label, (_, report)) in enumerate(zip(part.labels, part.reports, strict=True)):
        names = {own[number]: f"{name}, {label}" for name, (own, _) in part.drafters.items()}
        for setting in report.settings:
            key = setting.temperature, setting.batch
            drafters = {**settings[key].drafters} if key in settings else {}
            for name, figures in setting.drafters.items():
                drafters[names.get(name, name)] = figures
            settings[key] = msgspec.structs.replace(setting, drafters=drafters)
        sizes |= {names.get(name, name): size for name, size in report.drafter_bytes.items()}
    last = part.reports[-1][1]
    return msgspec.structs.replace(last, settings=list(settings.values()), drafter_bytes=sizes)


def _changes(part: PagePart) -> list[tuple[str, Comparison, Change]]:

    return [
        (drafter, setting, change)
        for drafter, (_, settings) in part.drafters.items()
        for setting in settings
        for change in setting.rows
    ]


def compare_table(part: PagePart) -> FigureTable | None:
    """Return the table of a lineage; None for a part of one report.

    Every change is a row; columns that would hold a single value are left out.
    """
    rows = []
    for drafter, setting, change in _changes(part):
        places = {"temperature": f"{setting.temperature:g}", "batch size": str(setting.batch)}
        if len(part.drafters) > 1:
            places["drafter"] = drafter
        if len(part.reports) > 2:
            places["report"] = part.labels[change.report]
        cells = cells_of(change)
        rows.append({
            "category": cells.pop("category"), "change": cells.pop("change"),
            "outcome": outcome(change), **places, **cells,
        })  # fmt: skip
    if not rows:
        return None
    switches = [
        name for name in ("temperature", "batch size", "drafter", "report") if name in rows[0]
    ]
    differing = [name for name in switches if len({row[name] for row in rows}) > 1]
    important = ["category", "change", *differing, "before", "after", "outcome", "95%"]
    title = f"Tau by category, before: {part.reports[0][0]}, after: {part.reports[-1][0]}"
    return table_of(title, rows, switches=switches, important=important)


def before_after(part: PagePart) -> list[Block]:
    """Return sentences, charts and a table of all changes; [] for a part of one report."""
    if (of := compare_table(part)) is None:
        return []
    notes = (
        "before, after: tau with 95% intervals over prompts; those of the change are of pairs of "
        "prompts, and narrower. n: requests. Only tau is compared: the speeds of two runs are of "
        "two moments. Plain decoding and baselines below are those of the last report; each "
        "speed-up is over plain decoding of its own report."
    )
    return [*_sentences(part), *_charts(part), table(of), text(notes)]


def _sentences(part: PagePart) -> list[Block]:
    """Return paragraphs: the change over all prompts, and what has regressed."""
    sentences, worse = [], []
    seen = set()
    for drafter, setting, change in _changes(part):
        name, where = part.named(drafter, change), setting.caption
        if change.regressed:
            worse.append(f"{name}, {change.category or UNNAMED} ({where})")
        if change.category == ALL and (name, setting.temperature) not in seen:
            seen.add((name, setting.temperature))  # of each temperature only its first batch size
            between = interval_text(change.change_ci95, " ({:+.1%} to {:+.1%})")
            sentences.append(
                text(
                    f"{where}: tau of {name} {change.tau_before:.2f} → {change.tau_after:.2f}, "
                    f"{change.change:+.1%}{between}, {outcome(change)}.",
                    "verdict",
                )
            )
    if worse:
        sentences.append(text(f"Regressed: {'; '.join(worse)}.", "alert"))
    return sentences


def _charts(part: PagePart) -> list[Block]:
    """Return a chart of the changes with their intervals for each temperature and batch size."""
    rows: dict[str, list[JsonObject | None]] = {}
    for drafter, setting, change in _changes(part):
        name, category = part.named(drafter, change), change.category or UNNAMED
        row = bar(category, name, change.change, change.change_ci95, "{:+.1%}")
        rows.setdefault(setting.caption, []).append(row)
    note = "lines: 95% intervals over pairs of prompts; dashed: no change"
    axes = {"x": "change of tau", "rule": 0, "percent": True}
    return charts(
        chart("dots", f"Change of tau, {where}", note, found, **axes)
        for where, found in rows.items()
    )
