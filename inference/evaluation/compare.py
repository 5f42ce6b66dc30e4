"""`draftsmith compare`: two or more reports of one drafter's lineage on the same prompts, category
by category.

Such as a public head, then the same head trained on own traffic: what it gained there, and what it
lost elsewhere. Prompts are resampled in pairs, so that an easy prompt is easy in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from ...heads.documents import read_document
from ...heads.errors import UserError
from ...heads.files import check_output, whole_file, write_json
from ..console import Console
from ..documents import ReportFile
from ..metrics import bootstrap, pooled, tau
from .evaluate import BASELINES
from .measure import FEWEST
from .options import CompareOptions as Options

REGRESSED = 3  # exit code
ALL = "all"


def run(options: Options) -> None:
    limit = _share(options.fail_on_regression)
    check_output(options.json, "--json")
    if len(options.report) < 2:
        raise UserError("give at least two reports: --report before.json --report after.json")
    if options.drafter and len(options.drafter) != len(options.report):
        raise UserError(
            f"--drafter must be given once for each of the {len(options.report)} reports, or not "
            "at all"
        )
    reports = [load_measured(path) for path in options.report]
    names = options.drafter or [
        _only_drafter(report, path) for report, path in zip(reports, options.report, strict=True)
    ]
    found = compared(reports, names, options.report, limit or 0.0)
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(
                aside,
                {
                    "reports": options.report,
                    "drafters": names,
                    "fail_on_regression": limit,
                    "settings": found,
                },
            )
    show(found, options.report, Console())
    if limit is not None and any(row["regressed"] for setting in found for row in setting["rows"]):
        raise SystemExit(REGRESSED)


def load_report(path: str) -> dict[str, Any]:
    """A report of `draftsmith evaluate`. Raises `UserError`."""
    return read_document(
        Path(path), ReportFile, "write the report again with draftsmith evaluate --json"
    )[1]


def load_measured(path: str) -> dict[str, Any]:
    """A report that has drafters. Raises `UserError`."""
    report = load_report(path)
    if not report["settings"]:
        raise UserError(
            f"{path} holds the figures of a server only; evaluate with a --drafter too to compare "
            "it"
        )
    return report


def check_alike(reports: Sequence[dict[str, Any]], paths: Sequence[str]) -> None:
    """Demand that nothing but the drafter differs. Raises `UserError`."""
    for report, path in zip(reports, paths, strict=True):
        if report.get("partial"):
            raise UserError(
                f"{path} holds only {report['partial']}; let its command finish (it goes on where "
                "it stopped)"
            )
    facts = {
        "prompts": lambda r: (r["prompt_set"]["sha256"], r["prompt_set"]["prompts"]),
        "targets": lambda r: (r.get("target") or {}).get("weights_hash"),
        "lengths of replies (max_new_tokens)": lambda r: (r.get("options") or {}).get(
            "max_new_tokens"
        ),
        "sampling": lambda r: {
            key: value for key, value in (r.get("sampling") or {}).items() if key != "temperature"
        },
    }
    for what, fact in facts.items():
        for report, path in zip(reports[1:], paths[1:], strict=True):
            if fact(report) != fact(reports[0]):
                raise UserError(
                    f"{paths[0]} and {path} are of different {what}; evaluate both alike"
                )


def compared(
    reports: Sequence[dict[str, Any]], names: Sequence[str], paths: Sequence[str], limit: float
) -> list[dict[str, Any]]:
    """For each setting that all reports have, a row for each category and each report after the
    first."""
    check_alike(reports, paths)
    keyed = [
        {(s["temperature"], s["batch"], s["lossless"]): s for s in report["settings"]}
        for report in reports
    ]
    common = [key for key in keyed[0] if all(key in other for other in keyed)]
    if not common:
        raise UserError("the reports have no temperature and batch size in common")
    found = []
    for key in common:
        requests = [
            _requests(by_key[key], name, path)
            for by_key, name, path in zip(keyed, names, paths, strict=True)
        ]
        before = requests[0]
        categories = [ALL, *sorted({r.category for r in before})]
        rows = []
        for number, after in enumerate(requests[1:], 1):
            if [r.name for r in before] != [r.name for r in after]:
                raise UserError(
                    f"{paths[number]} holds other requests than {paths[0]}; evaluate both on the "
                    "same prompts"
                )
            for category in categories if len(categories) > 2 else [ALL]:
                both = zip(before, after, strict=True)
                pairs = [
                    (a, b) for a, b in both if category in (ALL, a.category) and a.kept and b.kept
                ]
                if pairs:
                    rows.append({"category": category, "report": number, **_change(pairs, limit)})
        found.append({"temperature": key[0], "batch": key[1], "rows": rows})
    return found


@dataclass
class _Request:
    name: tuple[str, int]
    """Id and turn."""
    category: str
    prompt: int
    kept: list[int]
    """Tokens kept in each round."""


def _change(pairs: list[tuple[_Request, _Request]], limit: float) -> dict[str, Any]:
    """Tau before and after over the same requests, and the relative change with its interval; turns
    of a prompt go together."""
    prompts = [a.prompt for a, _ in pairs]
    before, after = (pooled([pair[side].kept for pair in pairs], prompts) for side in (0, 1))

    def relative(sample):
        return tau([b for _, b in sample]) / tau([a for a, _ in sample]) - 1

    both = list(zip(before, after, strict=True))
    low, high = bootstrap(both, relative)
    change = relative(both)
    return {
        "requests": len(pairs),
        "tau_before": tau(before),
        "tau_before_ci95": bootstrap(before, tau),
        "tau_after": tau(after),
        "tau_after_ci95": bootstrap(after, tau),
        "change": change,
        "change_ci95": [low, high],
        "regressed": change < -limit and high < 0 and len(both) >= FEWEST,
    }


def _requests(setting: dict[str, Any], name: str, path: str) -> list[_Request]:
    if name not in setting["drafters"]:
        raise UserError(
            f"{path} has no drafter {name!r}; there are: {', '.join(setting['drafters'])}"
        )
    requests = setting["drafters"][name]["per_request"]
    return [
        _Request(
            (r["id"], r["turn"]),
            r["category"],
            r.get("prompt", place),
            [kept for _, _, kept in r["rounds"]],
        )
        for place, r in enumerate(requests)
    ]


def _only_drafter(report: dict[str, Any], path: str) -> str:
    drafters = report["settings"][0]["drafters"]
    names = [
        name
        for name in drafters
        if name not in ("plain", *BASELINES) and not name.startswith("assisted (")
    ]
    if len(names) != 1:
        raise UserError(
            f"{path} has {len(names)} drafters besides the baselines ({', '.join(names)}); name "
            "one with --drafter"
        )
    return names[0]


def _share(text: str | None) -> float | None:
    """`2%` or `0.02` -> 0.02."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UserError(f"--fail-on-regression takes a share such as 2%, not {text!r}")
    return value


def show(found: Sequence[dict[str, Any]], paths: Sequence[str], console: Console) -> None:
    """Print a table for each setting."""

    def with_interval(value, pair):
        return f"{value:.2f} ({pair[0]:.2f}-{pair[1]:.2f})"

    for setting in found:
        title = f"T = {setting['temperature']:g}, batch {setting['batch']}; before: {paths[0]}"
        table = Table(
            title=title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for place, column in enumerate(
            ("category", "requests", "before", "after", "change", "95%")
        ):
            table.add_column(column, justify="right" if place else "left", no_wrap=place > 0)
        fallen = []
        for row in setting["rows"]:
            low, high = row["change_ci95"]
            label = (row["category"] or "-") + (
                f" ({paths[row['report']]})" if len(paths) > 2 else ""
            )
            before = with_interval(row["tau_before"], row["tau_before_ci95"])
            after = with_interval(row["tau_after"], row["tau_after_ci95"])
            table.add_row(
                label,
                str(row["requests"]),
                before,
                after,
                f"{row['change']:+.1%}",
                f"{low:+.1%} to {high:+.1%}",
            )
            fallen += [label] if row["regressed"] else []
        console.print(table)
        if fallen:
            console.print(f"REGRESSED: {', '.join(fallen)}", style="bold")
    console.print("tau with 95% intervals over prompts; those of the change are of pairs.")
