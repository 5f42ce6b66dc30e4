"""`draftsmith compare`: reports of successive versions of one drafter on the same prompts.

An example is a public head before and after training on a user's own traffic: the comparison shows
what it gained and lost in each category. Intervals are of paired replies, because a prompt that is
easy before is easy after, too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..base.console import OutputConsole
from ..metrics import tau
from .drafter_names import BASELINES
from .engines import AS_IN
from .figure_text import NOTHING, interval_text, number_with_interval
from .intervals import LEVEL, interval, pooled, tau_interval
from .options import CompareOptions as Options
from .results import FEWEST, Report, RequestRecord, SettingFigures, read_measured
from .tables import UNNAMED, table_of

REGRESSED = 3  # exit code
ALL = "all"
Pairs = list[tuple[RequestRecord, RequestRecord]]
"""Replies before and after to the same requests."""


def run(options: Options) -> None:
    """Compare the reports and print a table.

    Ends with exit code 3 if a row regressed and `fail_on_regression` is given. Raises `UserError`.
    """
    limit = _share(options.fail_on_regression)
    if len(options.reports) == 1 and len(options.drafter) == 2:
        options.reports *= 2  # two drafters of one report
    if len(options.reports) < 2:
        raise UserError("give at least two reports: draftsmith compare before.json after.json")
    if options.drafter and len(options.drafter) != len(options.reports):
        raise UserError(
            f"--drafter must be given once for each of the {len(options.reports)} reports, or not "
            "at all"
        )
    reports = [read_measured(path) for path in options.reports]
    names = options.drafter or chosen_drafters(reports, options.reports)
    settings = compared(reports, names, options.reports, limit or 0.0)
    show(settings, options.reports, names, OutputConsole())
    if limit is None:
        return
    for setting in settings:
        if any(row.regressed for row in setting.rows):
            raise SystemExit(REGRESSED)


def check_alike(reports: Sequence[Report], paths: Sequence[str]) -> None:
    """Raise `UserError` unless the reports differ in nothing but the drafter."""

    def facts_of(report: Report) -> JsonObject:
        # temperatures are matched setting by setting in `compared`
        sampling = {**(report.sampling or {})}
        sampling.pop("temperature", None)
        return {
            "prompts": (report.prompt_set.sha256, report.prompt_set.prompts),
            "targets": (report.target or {}).get("weights_hash"),
            "lengths of replies (max_new_tokens)": (report.options or {}).get("max_new_tokens"),
            "sampling": sampling,
        }

    for what, expected in facts_of(reports[0]).items():
        for report, path in zip(reports[1:], paths[1:], strict=True):
            if facts_of(report)[what] != expected:
                raise UserError(
                    f"{paths[0]} and {path} are of different {what}; evaluate both alike"
                )


@dataclass
class Change:
    """Tau of two drafters over the same requests of one category, and its relative change."""

    category: str
    report: int
    """Number of the later report among all, from 1."""
    requests: int
    tau_before: float
    tau_before_ci95: tuple[float, float]
    tau_after: float
    tau_after_ci95: tuple[float, float]
    change: float
    change_ci95: tuple[float, float]
    regressed: bool
    """True if tau fell by more than the limit and the interval of `Comparison.level` is below 0."""


@dataclass
class Comparison:
    """Changes at one temperature and batch size: by category, then by report."""

    temperature: float
    batch: int
    rows: list[Change]
    tests: int
    """Rows of all settings that have an interval, each of which may be flagged."""
    level: float
    """Level of the intervals by which `Change.regressed` is judged: 1 - 5% / `tests`."""

    @property
    def caption(self) -> str:
        return f"T = {self.temperature:g}, batch {self.batch}"


def compared(
    reports: Sequence[Report], names: Sequence[str], paths: Sequence[str], limit: float
) -> list[Comparison]:
    """Return a comparison for each setting that all reports have.

    `names` are the drafters, one of each report; `limit` is the share by which tau may fall. The
    intervals that may flag a row share an error of 5% (Bonferroni), so that at most 5% of
    comparisons of equal drafters flag anything. Raises `UserError`.
    """
    check_alike(reports, paths)
    settings_by_key = []
    for report in reports:
        settings_by_key.append({(s.temperature, s.batch): s for s in report.settings})
    # A report may have settings that another lacks; the common ones are compared.
    common = [key for key in settings_by_key[0] if all(key in keys for keys in settings_by_key)]
    if not common:
        raise UserError("the reports have no temperature and batch size in common")
    found: list[list[tuple[str, int, Pairs]]] = []
    for key in common:
        requests = []
        for by_key, name, path in zip(settings_by_key, names, paths, strict=True):
            requests.append(_requests(by_key[key], name, path))
        found.append([])
        for number, after in enumerate(requests[1:], 1):
            found[-1] += _by_category(requests[0], after, number, paths)
    units = [{first.unit for first, _ in pairs} for rows in found for *_, pairs in rows]
    tests = sum(len(of_row) >= FEWEST for of_row in units)
    level = 1 - (1 - LEVEL) / max(tests, 1)
    comparisons = []
    for (temperature, batch), rows in zip(common, found, strict=True):
        changes = [_change(*row, limit, level) for row in rows]
        comparisons.append(Comparison(temperature, batch, changes, tests, level))
    return comparisons


def _by_category(
    before: list[RequestRecord], after: list[RequestRecord], number: int, paths: Sequence[str]
) -> list[tuple[str, int, Pairs]]:
    """Return category, `number` and pairs of all prompts, and then of each category.

    `number` is that of the later report. Raises `UserError` if its requests differ.
    """
    if [(r.id, r.turn) for r in before] != [(r.id, r.turn) for r in after]:
        raise UserError(
            f"{paths[number]} holds other requests than {paths[0]}; evaluate both on the same "
            "prompts"
        )
    # A reply without a round, whose only token is the prefill's, has no tau.
    both = zip(before, after, strict=True)
    counted = [(first, second) for first, second in both if first.rounds and second.rounds]
    categories = sorted({r.category for r in before})
    rows = []
    # The row of a single category would repeat that of all prompts.
    for category in [ALL, *(categories if len(categories) > 1 else [])]:
        pairs = [(a, b) for a, b in counted if category in (ALL, a.category)]
        if pairs:
            rows.append((category, number, pairs))
    return rows


def _change(category: str, number: int, pairs: Pairs, limit: float, level: float) -> Change:
    """Return tau before and after over the same requests, and the relative change with interval.

    The turns of a prompt, and the rows of one id, are one unit. `limit` and `level` are those by
    which a change counts as regressed.
    """
    of_units = [first.unit for first, _ in pairs]
    before = [first.emitted for first, _ in pairs]
    after = [second.emitted for _, second in pairs]
    rows = []
    for first, second in zip(before, after, strict=True):
        rows.append((sum(first), len(first), sum(second), len(second)))
    # Tokens and rounds of a prompt before and after are paired, so that its difficulty cancels out.
    units = pooled(rows, of_units)
    low, high = interval(units, _ratio)
    change = tau(after) / tau(before) - 1
    _, highest = interval(units, _ratio, level)
    return Change(
        category=category,
        report=number,
        requests=len(pairs),
        tau_before=tau(before),
        tau_before_ci95=tau_interval(before, of_units, most_drafts(first for first, _ in pairs)),
        tau_after=tau(after),
        tau_after_ci95=tau_interval(after, of_units, most_drafts(second for _, second in pairs)),
        change=change,
        change_ci95=(low - 1, high - 1),
        # False without an interval, whose ends are NaN
        regressed=change < -limit and highest < 1,
    )


def most_drafts(records: Iterable[RequestRecord]) -> int:
    """Return the most nodes that a round of these replies drafted."""
    return max((drafted for one in records for drafted, _, _ in one.rounds), default=0)


def _ratio(tokens: float, rounds: float, later_tokens: float, later_rounds: float) -> float:
    """Return tau after over tau before."""
    return (later_tokens / later_rounds) / (tokens / rounds)


def _requests(setting: SettingFigures, name: str, path: str) -> list[RequestRecord]:
    """Return the replies of drafter `name` in one setting of the report `path`. Raises `UserError`.

    `name` may also be the `kind` of a single drafter.
    """
    if name not in setting.drafters:
        alike = [own for own, figures in setting.drafters.items() if figures.kind == name]
        name = alike[0] if len(alike) == 1 else name
    if name not in setting.drafters:
        raise UserError(f"{path} has no drafter {name!r}; there are: {', '.join(setting.drafters)}")
    return setting.drafters[name].per_request


def non_baseline_drafters(report: Report) -> list[str]:
    """Return the drafters of a report's first setting without the baselines."""
    names = report.settings[0].drafters if report.settings else ()
    return [name for name in names if name not in ("plain", *BASELINES)]


def chosen_drafters(reports: Sequence[Report], paths: Sequence[str]) -> list[str]:
    """Return the drafter of each report if the user named none.

    It is the only one besides the baselines. If every report has one drafter and its row of
    `--like` with the same engine and settings, it is that row, since the engine would serve it.
    Raises `UserError` for other reports, with the options that name a drafter of each.
    """
    found = [non_baseline_drafters(report) for report in reports]
    if all(len(names) == 1 for names in found):
        return [names[0] for names in found]
    rows = [_engine_row(names) for names in found]
    if all(rows) and len({name.partition(AS_IN)[2] for name in rows}) == 1:
        return rows
    names, path = next((n, path) for n, path in zip(found, paths, strict=True) if len(n) != 1)
    first = (of_one[0] if of_one else "NAME" for of_one in found)
    options = shlex.join(word for name in first for word in ("--drafter", name))
    raise UserError(
        f"{path} has {len(names)} drafters besides the baselines ({', '.join(names)}); name one of "
        f"each report, such as {options}"
    )


def _engine_row(names: Sequence[str]) -> str:
    """Return the name of the drafter that is the other one as in an engine, else ""."""
    first, last = sorted(names, key=len) if len(names) == 2 else ("", "")
    return last if last.startswith(first + AS_IN) else ""


def _share(text: str | None) -> float | None:
    """Return `2%` or `0.02` as 0.02, and None as None. Raises `UserError` for anything else."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0  # refused below
    if not 0 <= value < 1:
        raise UserError(f"--fail-on-regression takes a share such as 2% or 0.02, not {text!r}")
    return value


def outcome(change: Change) -> str:
    """Return the conclusion that the interval of a change allows."""
    if change.regressed:
        return "regressed"
    low, high = change.change_ci95
    return "gained" if low > 0 else "lost" if high < 0 else "no clear change"


def cells_of(change: Change) -> dict[str, str]:
    """Return the row of a change."""
    return {
        "category": change.category or UNNAMED,
        "n": str(change.requests),
        "before": number_with_interval(change.tau_before, change.tau_before_ci95),
        "after": number_with_interval(change.tau_after, change.tau_after_ci95),
        "change": f"{change.change:+.1%}",
        "95%": interval_text(change.change_ci95, "{:+.1%} to {:+.1%}") or NOTHING,
    }


def show(
    comparisons: Sequence[Comparison],
    paths: Sequence[str],
    names: Sequence[str],
    console: OutputConsole,
) -> None:
    """Print a table for each of `comparisons`; `paths` and drafters' `names` are of the reports."""
    what = names[0] if len({*names}) == 1 else ", then ".join(names)
    # Two drafters of one report are not one drafter before and after a change.
    worse = "REGRESSED" if len({*paths}) > 1 or len({*names}) == 1 else "LOWER"
    console.print(f"compared: {what}", highlight=False, markup=False)
    for setting in comparisons:
        rows = []
        for change in setting.rows:
            rows.append(cells_of(change))
            if len(paths) > 2:
                rows[-1]["category"] += f" ({paths[change.report]})"
        console.print(table_of(f"{setting.caption}; before: {paths[0]}", rows).terminal())
        pairs = zip(rows, setting.rows, strict=True)
        regressed = [cells["category"] for cells, change in pairs if change.regressed]
        if regressed:
            console.print(f"{worse}: {', '.join(regressed)}", style="bold")
    console.print(
        "n: requests. tau with 95% intervals over prompts; those of the change are of pairs."
        f" Fewer than {FEWEST} prompts have none."
    )
    tests, level = comparisons[0].tests, comparisons[0].level
    if tests > 1:
        console.print(
            f"{worse} is judged by intervals of {100 * level:.5g}%: {tests} rows share an error "
            "of 5%, so that equal drafters are flagged in 5% of all comparisons at most."
        )
