"""`draftsmith report`: reports of `draftsmith evaluate` and training runs as one page that needs
nothing but itself."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ....heads.errors import UserError
from ....heads.files import check_output, read_json, whole_file
from ..compare import load_report
from ..evaluate import BASELINES
from ..options import ReportOptions as Options
from . import sections
from .page import folded, page
from .tables import Report, Training, categories, firsts, served, summary, trainings

METRICS_FILE = "metrics.jsonl"  # of a training run
HTML_FILE = "report.html"


@dataclass
class Found:
    """What the named files and folders hold."""

    reports: list[tuple[str, Report]]
    """Each with the path that it was read from."""
    trainings: list[Training]


def run(options: Options) -> None:
    if not options.runs:
        raise UserError(
            "name at least one run: a JSON of draftsmith evaluate, or a training run's folder"
        )
    check_output(options.out, "--out")
    found = gather(options.runs)
    text = html(found) if options.format == "html" else markdown(found).encode("utf-8", "replace")
    out = options.out or (HTML_FILE if options.format == "html" else None)
    if out is None:
        sys.stdout.write(text.decode())
        return
    taken = [path for path, _ in found.reports if Path(path).resolve() == Path(out).resolve()]
    if taken or Path(out).is_dir():
        why = "it is what the report is made of" if taken else "it is a folder"
        raise UserError(f"cannot write {out}: {why}; name another file with --out")
    with whole_file(out) as aside:
        aside.write_bytes(text)
    print(f"report: {out}")


def gather(paths: Sequence[str]) -> Found:
    """Everything that the paths name; what is named twice is taken once. Raises `UserError`."""
    reports: dict[Path, tuple[str, Report]] = {}
    runs: dict[Path, list[dict[str, Any]]] = {}
    for text in paths:
        path = Path(text)
        if path.is_file() and path.name != METRICS_FILE:
            reports[path.resolve()] = (text, load_report(text))
        elif path.is_dir() or path.is_file():
            folder = path if path.is_dir() else path.parent
            before = len(reports) + len(runs)
            known = any(
                folder.resolve() in one.parents or folder.resolve() == one
                for one in (*reports, *runs)
            )
            for log in [folder / METRICS_FILE, *sorted(folder.glob(f"*/{METRICS_FILE}"))]:
                if log.is_file():
                    runs[log.parent.resolve()] = read_metrics(log)
            for file in sorted(folder.glob("*.json")):
                if is_report(file):
                    reports[file.resolve()] = (str(file), load_report(str(file)))
            if len(reports) + len(runs) == before and not known:
                raise UserError(
                    f"{text} holds neither {METRICS_FILE} nor a JSON of draftsmith evaluate; name "
                    "a training run's folder, or "
                    "write a JSON with draftsmith evaluate --json"
                )
        else:
            raise UserError(
                f"{text} does not exist; name a JSON of draftsmith evaluate or a training run's "
                "folder"
            )
    names = [folder.name for folder in runs]
    labels = [
        folder.name if names.count(folder.name) == 1 else f"{folder.parent.name}/{folder.name}"
        for folder in runs
    ]
    return Found(
        list(reports.values()),
        [Training(label, rows) for label, rows in zip(labels, runs.values(), strict=True)],
    )


def is_report(file: Path) -> bool:
    """Whether a JSON that nobody has named is a report: folders hold other JSONs too."""
    try:
        value = read_json(file, finite=False)
    except UserError:
        return False
    return isinstance(value, dict) and {"settings", "prompt_set"} <= value.keys()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows that a training run has logged; a last line that a killed run has left half-written
    is passed over."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path} ({error}); name the folder of a training run"
        ) from error
    rows = []
    for place, line in enumerate(lines, 1):
        try:
            row = json_module.loads(line)
            _ = row["step"] + 0
            rows.append(row)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if place < len(lines):
                raise UserError(
                    f"{path} is no log of a training run: line {place} holds no step; mend or "
                    "remove it"
                ) from error
    if not rows:
        raise UserError(f"{path} holds no step yet; wait until the run has logged one")
    return rows


def html(found: Found) -> bytes:
    """The page."""
    reports = [report for _, report in found.reports]
    colours = sections.colours_of(reports, BASELINES)
    targets = list(
        dict.fromkeys(str((report.get("target") or {}).get("name", "target")) for report in reports)
    )
    title = ", ".join(targets) or f"Training of {', '.join(run.name for run in found.trainings)}"
    body = [f'<p class="kicker">draftsmith report</p>\n<h1>{escape(title)}</h1>']
    links: list[tuple[str, str]] = []
    for place, (path, report) in enumerate(found.reports):
        if len(reports) > 1:
            links.append((f"report-{place}", path))
            body.append(f'<h2 id="report-{place}">{escape(path)}</h2>')
        body += [sections.verdict(report), sections.facts(report, path)]
        level = "h3" if len(reports) > 1 else "h2"
        for name, text in parts_of(report, colours):
            mark = f"{name.split()[0].lower()}-{place}"
            links += [(mark, name)] if len(reports) == 1 else []
            body.append(f'<{level} id="{mark}">{name}</{level}>\n{text}')
    if (table := trainings(found.trainings)) is not None:
        links.append(("training", "Training"))
        body.append(
            f'<h2 id="training">Training</h2>\n{table.html()}{sections.training(found.trainings)}'
        )
    words = {
        name: meaning
        for report in reports
        for name, meaning in report.get("definitions", {}).items()
    }
    if words:
        links.append(("definitions", "Definitions"))
        rows = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in words.items()
        )
        meanings = folded("What each number means", f"<dl class=words>{rows}</dl>")
        body.append(f'<h2 id="definitions">Definitions</h2>\n{meanings}')
    anchors = "".join(f'<a href="#{mark}">{escape(name)}</a>' for mark, name in links)
    body.insert(1, f"<nav aria-label=contents>{anchors}</nav>")
    return page(f"{title} - draftsmith report", "\n".join(body))


def parts_of(report: Report, colours: dict[str, int]) -> list[tuple[str, str]]:
    """The sections of one report that have something to show, in their order."""
    every = [
        ("Summary", sections.summaries(report, colours)),
        ("Server", table.html() if (table := served(report)) is not None else ""),
        ("Acceptance by position", sections.acceptance(report, colours)),
        ("Categories", sections.by_category(report, colours)),
        ("Speed-up", sections.speed(report, colours)),
        ("Time of a round", sections.times(report)),
        ("Replies token by token", sections.replies(report, colours)),
    ]
    return [(name, text) for name, text in every if text]


def markdown(found: Found) -> str:
    """The tables alone."""
    blocks = []
    for path, report in found.reports:
        name = (report.get("target") or {}).get("name", "target")
        blocks.append(f"## {name}\n\n{report['prompt_set']['prompts']} prompts, {path}\n")
        blocks += [
            summary(setting, report.get("drafter_bytes", {})).markdown()
            for setting in report["settings"]
        ]
        blocks += [table.markdown()] if (table := served(report)) is not None else []
        blocks += [
            table.markdown()
            for setting in firsts(report)
            if (table := categories(setting)) is not None
        ]
    if (table := trainings(found.trainings)) is not None:
        blocks.append(table.markdown())
    return "\n".join(blocks)
