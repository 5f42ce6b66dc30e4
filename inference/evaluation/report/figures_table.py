"""One table of figures for a paper: of one report, of several, or the mean over several seeds."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ....heads.errors import UserError
from ..compare import check_alike
from ..definitions import Number
from ..intervals import LEVEL, student_t
from ..remarks import UNTRAINED_MARK, untrained_part
from ..results import DrafterFigures, Report, SettingFigures, known
from .lineage import Named, in_all
from .tables import Table, by_column, factor, interval, number

PROMPTS, SEEDS = "prompts", "seeds"
"""Names of what the intervals of a row are over."""


@dataclass
class Row:
    """Figures of one way to decode in one setting. Unknown ones are None."""

    report: str
    """Path of the report; empty for a mean over seeds."""
    drafter: str
    temperature: float
    batch_size: int
    lossless: bool
    seeds: int
    """Trainings that the figures are of: 1 where all reports have the same weights, or none."""
    tau: Number
    tau_low: Number
    tau_high: Number
    speedup: Number
    speedup_low: Number
    speedup_high: Number
    interval_over: str
    """`prompts`, `seeds`, or empty where there is no interval."""


def rows_of(reports: Sequence[Named]) -> list[Row]:
    """Return a row for each setting and way to decode of each report, with intervals over prompts.

    Raises `UserError` if no report has figures of drafters.
    """
    rows = []
    for path, report in reports:
        for setting in report.settings:
            rows += [_row(path, setting, name, of) for name, of in setting.drafters.items()]
    if not rows:
        raise UserError("there are no figures of drafters; name a JSON of draftsmith evaluate")
    return rows


def _row(path: str, setting: SettingFigures, name: str, figures: DrafterFigures) -> Row:
    tau, speedup = figures.tau_ci95 or (None, None), figures.speedup_ci95 or (None, None)
    if name == "plain":  # by definition 1
        tau = speedup = (None, None)
    over = PROMPTS if known(tau[0]) or known(speedup[0]) else ""
    where = (path, name, setting.temperature, setting.batch, setting.lossless, 1)
    return Row(*where, figures.tau_incl_bonus, *tau, figures.speedup, *speedup, over)


def over_seeds(reports: Sequence[Named]) -> list[Row]:
    """Return the means over reports of several seeds, for each setting that all have.

    Drafters are matched by name, or else by method and settings. The intervals are Student's t
    intervals over seeds: mean +- t(97.5%, n - 1) s / sqrt(n), with the standard deviation s over n
    seeds. They cover the randomness of training, not the choice of prompts, which all seeds share.
    A drafter with the same weights in all reports, and one without training, is no sample of
    seeds: it has a mean without interval. A single report has its intervals over prompts.

    Raises `UserError` for reports that differ in more than the drafters' weights, and for those of
    which some, but not all, hold the same weights.
    """
    measured = [(path, report) for path, report in reports if report.settings]
    if len(measured) < 2:
        return rows_of(measured)
    paths, found = [path for path, _ in measured], [report for _, report in measured]
    check_alike(found, paths)
    rows = []
    for first in found[0].settings:
        settings = [same for report in found if (same := _same_setting(report, first)) is not None]
        if len(settings) < len(found):
            continue
        for label, names in in_all(found).items():
            figures = [s.drafters.get(name) for s, name in zip(settings, names, strict=True)]
            present = [of for of in figures if of is not None]
            if len(present) == len(figures):
                seeds = _seeds(label, names, present, measured)
                rows.append(_mean(first, label, present, seeds))
    if not rows:
        raise UserError("the reports have no drafter and no setting in common")
    return rows


def _same_setting(report: Report, of: SettingFigures) -> SettingFigures | None:
    """Return the setting of a report that has the conditions of another one."""
    key = of.temperature, of.batch, of.lossless
    alike = (s for s in report.settings if (s.temperature, s.batch, s.lossless) == key)
    return next(alike, None)


def _seeds(
    label: str, names: Sequence[str], figures: Sequence[DrafterFigures], reports: Sequence[Named]
) -> int:
    """Return the number of trainings that a drafter's figures are of. Raises `UserError`."""
    if label == "plain" or untrained_part(label, figures[0]) == UNTRAINED_MARK:
        return 1
    paths: dict[str, list[str]] = {}
    for name, of, (path, report) in zip(names, figures, reports, strict=True):
        by_spec = {origin.spec: origin for origin in report.drafters.values()}
        origin = report.drafters.get(name) or by_spec.get(of.spec or "")
        # weights of which nothing is known are taken for those of another seed
        paths.setdefault((origin and origin.sha256) or path, []).append(path)
    if 1 < len(paths) < len(reports):
        same = next(alike for alike in paths.values() if len(alike) > 1)
        raise UserError(
            f"{' and '.join(same)} have the same weights of {label}; give one report of each seed"
        )
    return len(paths)


def _mean(setting: SettingFigures, name: str, figures: Sequence[DrafterFigures], seeds: int) -> Row:
    """Return the mean of one drafter's figures, with an interval if they are of several seeds."""
    tau = t_interval([of.tau_incl_bonus for of in figures], seeds, 1.0)
    speedup = t_interval([of.speedup for of in figures], seeds, 0.0)
    over = SEEDS if seeds > 1 and known(tau[1]) else ""
    where = ("", name, setting.temperature, setting.batch, setting.lossless, seeds)
    return Row(*where, *tau, *speedup, over)


def t_interval(values: Sequence[Number], seeds: int, least: float) -> tuple[Number, Number, Number]:
    """Return mean and t interval over seeds, cut at `least`, the smallest value that there can be.

    All three are None if a value is not known; the interval is None for one seed.
    """
    numbers = [value for value in values if known(value)]
    if len(numbers) < len(values):
        return None, None, None
    count = len(numbers)
    mean = sum(numbers) / count
    if seeds < 2:
        return mean, None, None
    deviation = math.sqrt(sum((value - mean) ** 2 for value in numbers) / (count - 1))
    reach = student_t((1 + LEVEL) / 2, count - 1) * deviation / math.sqrt(count)
    return mean, max(mean - reach, least), mean + reach


def table_of(rows: Sequence[Row]) -> Table:
    """Return the table of rows, with at most eight columns; what is the same in all is its title.

    The title says what the intervals are.
    """
    temperatures, sizes = {row.temperature for row in rows}, {row.batch_size for row in rows}
    several, seeds = len({row.report for row in rows}) > 1, max(row.seeds for row in rows)
    title = []
    if len(temperatures) == 1:
        title.append(f"T = {rows[0].temperature:g}")
    if len(sizes) == 1:
        title.append(f"batch {rows[0].batch_size}")
    if SEEDS in {row.interval_over for row in rows}:
        title.append(
            f"means over {seeds} seeds with 95% t intervals over seeds (prompts are fixed); rows "
            "that no seed changes have none"
        )
    else:
        title.append("95% intervals over prompts")
    cells = []
    for row in rows:
        every = {
            "drafter": row.drafter + " (lossy)" * (not row.lossless),
            "report": row.report,
            "temperature": f"{row.temperature:g}",
            "batch size": str(row.batch_size),
            "seeds": str(row.seeds),
            "tau": number(row.tau),
            "tau, 95% interval": interval((row.tau_low, row.tau_high)),
            "speed-up": factor(row.speedup),
            "speed-up, 95% interval": interval((row.speedup_low, row.speedup_high)),
        }
        shown = {
            "report": several,
            "temperature": len(temperatures) > 1,
            "batch size": len(sizes) > 1,
            "seeds": seeds > 1,
        }
        cells.append({name: text for name, text in every.items() if shown.get(name, True)})
    return Table("Tau and speed-up: " + ", ".join(title), *by_column(cells))


def csv_of(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with the names of the fields of `Row` as heading and unrounded numbers.

    What is not known is an empty cell.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, asdict(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        cells = asdict(row).items()
        writer.writerow({
            key: "" if isinstance(value, float) and not known(value) else value
            for key, value in cells
        })  # fmt: skip
    return out.getvalue()
