"""The command `draftsmith report`: evaluations and training runs as one self-contained page.

Its inputs are JSON reports of `draftsmith evaluate` and the logs of training runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ....heads.errors import UserError
from ....heads.files import JsonObject, check_output, read_json, whole_file
from ..evaluate import BASELINES
from ..options import ReportOptions as Options
from ..results import Report, read_report
from ..training_log import METRICS_FILE, read_metrics
from . import sections
from .page import folded, page
from .tables import Training, categories, firsts, served, summary, trainings

HTML_FILE = "report.html"


@dataclass
class Found:
    """Reports and training runs that the named files and folders hold."""

    reports: list[tuple[str, Report]]
    """Each behind the path that it was read from."""
    trainings: list[Training]


def run(options: Options) -> None:
    """Write the page, or the tables as Markdown, to `options.out` or its default.

    Raises `UserError` for inputs that cannot be read and for a file that cannot be written.
    """
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
    # Writing would replace an input with the page made of it.
    overwritten = [path for path, _ in found.reports if Path(path).resolve() == Path(out).resolve()]
    if overwritten or Path(out).is_dir():
        why = "it is what the report is made of" if overwritten else "it is a folder"
        raise UserError(f"cannot write {out}: {why}; name another file with --out")
    with whole_file(out) as aside:
        aside.write_bytes(text)
    print(f"report: {out}")


def gather(paths: Sequence[str]) -> Found:
    """Return all reports and training runs that the paths name, each once.

    A path is a JSON report, the log or the folder of a training run, or a folder that holds JSON
    reports or training runs. Raises `UserError` for a path that does not exist or holds neither,
    and for a file that cannot be read.
    """
    reports: dict[Path, tuple[str, Report]] = {}
    runs: dict[Path, list[JsonObject]] = {}
    for text in paths:
        path = Path(text)
        if path.is_file() and path.name != METRICS_FILE:
            reports[path.resolve()] = (text, read_report(text))
        elif path.is_dir() or path.is_file():
            folder = path if path.is_dir() else path.parent
            before = len(reports) + len(runs)
            # A folder of which everything was named before adds nothing, and is no mistake.
            folder_path = folder.resolve()
            known = False
            for path_before in (*reports, *runs):
                if folder_path in (path_before, *path_before.parents):
                    known = True
            for log in [folder / METRICS_FILE, *sorted(folder.glob(f"*/{METRICS_FILE}"))]:
                if log.is_file():
                    runs[log.parent.resolve()] = read_metrics(log)
            for file in sorted(folder.glob("*.json")):
                if is_report(file):
                    reports[file.resolve()] = (str(file), read_report(str(file)))
            if len(reports) + len(runs) == before and not known:
                raise UserError(
                    f"{text} holds neither {METRICS_FILE} nor a JSON of draftsmith evaluate; name "
                    "a training run's folder, or write a JSON with draftsmith evaluate --json"
                )
        else:
            raise UserError(
                f"{text} does not exist; name a JSON of draftsmith evaluate or a training run's "
                "folder"
            )
    return Found(list(reports.values()), _labelled(runs))


def _labelled(runs: dict[Path, list[JsonObject]]) -> list[Training]:
    """Return training runs under the names of their folders, given the rows of each folder.

    The parent folder's name precedes a name that several of them have.
    """
    names = [folder.name for folder in runs]
    labelled = []
    for folder, rows in runs.items():
        unique = names.count(folder.name) == 1
        label = folder.name if unique else f"{folder.parent.name}/{folder.name}"
        labelled.append(Training(label, rows))
    return labelled


def is_report(file: Path) -> bool:
    """Return true if a JSON file found in a folder is a report of `draftsmith evaluate`.

    Folders hold other JSON files too, so one that is not a report, or cannot be read, is no error
    unless the user has named it.
    """
    try:
        value = read_json(file, finite=False)
    except UserError:
        return False
    return isinstance(value, dict) and {"settings", "prompt_set"} <= value.keys()


def html(found: Found) -> bytes:
    """Return the page: a part for each report, then training runs and definitions."""
    reports = [report for _, report in found.reports]
    several = len(reports) > 1
    colours = sections.colours_of(reports, BASELINES)
    targets = dict.fromkeys(report.target_name for report in reports)
    title = ", ".join(targets) or f"Training of {', '.join(run.name for run in found.trainings)}"
    body = [f'<p class="kicker">draftsmith report</p>\n<h1>{escape(title)}</h1>']
    links: list[tuple[str, str]] = []
    for index, (path, report) in enumerate(found.reports):
        if several:
            links.append((f"report-{index}", path))
            body.append(f'<h2 id="report-{index}">{escape(path)}</h2>')
        body += [sections.verdict(report), sections.facts(report, path)]
        level = "h3" if several else "h2"
        for name, text in parts_of(report, colours):
            # Several reports repeat the same sections, so the number keeps the ids apart.
            anchor = f"{name.split()[0].lower()}-{index}"
            if not several:
                links.append((anchor, name))
            body.append(f'<{level} id="{anchor}">{name}</{level}>\n{text}')
    table = trainings(found.trainings)
    if table is not None:
        links.append(("training", "Training"))
        curves = sections.training(found.trainings)
        body.append(f'<h2 id="training">Training</h2>\n{table.html()}{curves}')
    definitions = _definitions(reports)
    if definitions:
        links.append(("definitions", "Definitions"))
        body.append(f'<h2 id="definitions">Definitions</h2>\n{definitions}')
    # The contents stand under the title, but are known only now.
    anchors = "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name in links)
    body.insert(1, f"<nav aria-label=contents>{anchors}</nav>")
    return page(f"{title} - draftsmith report", "\n".join(body))


def _definitions(reports: Sequence[Report]) -> str:
    """Return the definitions that the reports give of their numbers, folded; "" without any."""
    definitions: dict[str, str] = {}
    for report in reports:
        definitions |= report.definitions
    if not definitions:
        return ""
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>"
        for name, meaning in definitions.items()
    )
    return folded("What each number means", f"<dl class=words>{rows}</dl>")


def parts_of(report: Report, colours: dict[str, int]) -> list[tuple[str, str]]:
    """Return headings and HTML of the sections that have something to show, in their order."""
    table = served(report)
    every = [
        ("Summary", sections.summaries(report, colours)),
        ("Server", "" if table is None else table.html()),
        ("Acceptance by position", sections.acceptance(report, colours)),
        ("Categories", sections.by_category(report, colours)),
        ("Speed-up", sections.speed(report, colours)),
        ("Time of a round", sections.times(report)),
        ("Replies token by token", sections.replies(report, colours)),
    ]
    return [(name, text) for name, text in every if text]


def markdown(found: Found) -> str:
    """Return the tables of all reports and training runs as Markdown."""
    blocks = []
    for path, report in found.reports:
        prompts = report.prompt_set.prompts
        blocks.append(f"## {report.target_name}\n\n{prompts} prompts, {path}\n")
        for setting in report.settings:
            blocks.append(summary(setting, report.drafter_bytes).markdown())
        tables = [served(report), *(categories(setting) for setting in firsts(report))]
        blocks += [table.markdown() for table in tables if table is not None]
    table = trainings(found.trainings)
    if table is not None:
        blocks.append(table.markdown())
    return "\n".join(blocks)
