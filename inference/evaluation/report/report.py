"""The command `draftsmith report`: evaluations and training runs as one self-contained page.

Its inputs are JSON reports of `draftsmith evaluate` and the logs of training runs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ....heads.errors import UserError
from ....heads.files import JsonObject, check_output, read_json, whole_file
from ..evaluate import BASELINES
from ..remarks import headline
from ..results import Report, read_report
from ..training_log import METRICS_FILE, read_metrics
from . import sections, speed
from .figures_table import csv_of, over_seeds, rows_of, table_of
from .lineage import Part, before_after, compare_table, parts_of_page
from .options import ReportOptions as Options
from .page import folded, page
from .replies import replies
from .tables import Colours, categories, served, summary
from .training import Training, curves, trainings

HTML_FILE = "report.html"
ENDINGS = {
    ".html": "html", ".htm": "html", ".md": "md", ".markdown": "md", ".csv": "csv", ".tex": "tex",
}  # fmt: skip


@dataclass
class Found:
    """Reports and training runs that the named files and folders hold."""

    reports: list[tuple[str, Report]]
    """Each after the path that it was read from."""
    trainings: list[Training]


def run(options: Options) -> None:
    """Write the page, or tables in another format, to `options.out` or its default.

    Raises `UserError` for inputs that cannot be read and for a file that cannot be written.
    """
    if not options.runs:
        raise UserError(
            "name at least one run: a JSON of draftsmith evaluate, or a training run's folder"
        )
    check_output(options.out, "--out")
    given = Counter(str(Path(path).resolve()) for path in options.runs)
    if options.over_seeds and (twice := [path for path, count in given.items() if count > 1]):
        raise UserError(f"{twice[0]} is given twice; --over-seeds takes one report of each seed")
    found = gather(options.runs)
    by_default = None if options.over_seeds or options.format not in (None, "html") else HTML_FILE
    out = options.out or by_default
    if out is not None:
        # Writing would replace an input with the page made of it.
        place = Path(out).resolve()
        overwritten = [path for path, _ in found.reports if Path(path).resolve() == place]
        if overwritten or Path(out).is_dir():
            why = "it is what the report is made of" if overwritten else "it is a folder"
            raise UserError(f"cannot write {out}: {why}; name another file with --out")
    form = format_of(options)
    text = html(found) if form == "html" else as_text(found, form, options).encode(errors="replace")
    if out is None:
        sys.stdout.write(text.decode())
        return
    with whole_file(out) as aside:
        aside.write_bytes(text)
    print(f"report: {out}")


def as_text(found: Found, form: str, options: Options) -> str:
    """Return what was found in the format `form`: md, csv or tex. Raises `UserError`."""
    if form == "md" and not options.over_seeds:
        return markdown(found, cut=options.columns == "few")
    rows = over_seeds(found.reports) if options.over_seeds else rows_of(found.reports)
    if form == "csv":
        return csv_of(rows)
    table = table_of(rows)
    return table.markdown() if form == "md" else table.latex()


def format_of(options: Options) -> str:
    """Return the format to write. Raises `UserError` if --out has another's ending."""
    ending = Path(options.out or "").suffix.lower()
    named = ENDINGS.get(ending)
    if ending and named is None and options.format is None:
        raise UserError(
            f"--out {options.out} ends in none of .html, .md, .csv and .tex; give --format too"
        )
    if options.format is not None and named not in (None, options.format):
        raise UserError(
            f"--out {options.out} has the ending of another format than --format {options.format}; "
            "change one of them"
        )
    form = options.format or named or ("md" if options.over_seeds else "html")
    if options.over_seeds and form == "html":
        raise UserError("--over-seeds makes one table, not a page; give --format md, csv or tex")
    return form


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
            known = any(folder.resolve() in (p, *p.parents) for p in (*reports, *runs))
            for log in [folder / METRICS_FILE, *sorted(folder.glob(f"*/{METRICS_FILE}"))]:
                if log.is_file():
                    runs[log.parent.resolve()] = read_metrics(log)
            files = filter(is_report, sorted(folder.glob("*.json")))
            inside = [(str(file), read_report(str(file))) for file in files]
            # Their names say nothing about which is before and which after.
            for name, report in sorted(inside, key=lambda entry: entry[1].started_at):
                reports[Path(name).resolve()] = (name, report)
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
    """Return the page: its parts of one report or one lineage, then training runs, definitions."""
    parts = parts_of_page(found.reports)
    reports = [part.report for part in parts]
    several = len(parts) > 1
    colours = sections.colours_of(reports, BASELINES)
    targets = dict.fromkeys(report.target_name for report in reports)
    title = ", ".join(targets) or f"Training of {', '.join(run.name for run in found.trainings)}"
    body = [f'<p class="kicker">draftsmith report</p>\n<h1>{escape(title)}</h1>']
    links: list[tuple[str, str]] = []
    for index, (part, report) in enumerate(zip(parts, reports, strict=True)):
        if several:
            links.append((f"report-{index}", part.title))
            body.append(f'<h2 id="report-{index}">{escape(part.title)}</h2>')
        body += [sections.alerts(report), sections.verdict(report)]
        body.append(sections.tau_and_speed(report, colours))
        level = "h3" if several else "h2"
        for name, text in parts_of(part, report, colours):
            # Several reports repeat the same sections, so the number keeps the ids apart.
            anchor = f"{name.split()[0].lower()}-{index}"
            if not several:
                links.append((anchor, name))
            body.append(f'<{level} id="{anchor}">{name}</{level}>\n{text}')
    table = trainings(found.trainings)
    trained = "" if table is None else table.html() + curves(found.trainings)
    for name, text in (("Training", trained), ("Definitions", _definitions(reports))):
        if text:
            links.append((name.lower(), name))
            body.append(f'<h2 id="{name.lower()}">{name}</h2>\n{text}')
    # The contents are under the title, but are known only now.
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
    rows = sections.terms(definitions)
    return folded("What each key of the JSON means", f"<dl class=words>{rows}</dl>")


def parts_of(part: Part, report: Report, colours: Colours) -> list[tuple[str, str]]:
    """Return headings and HTML of the sections that have something to show, in their order.

    `report` is the one of the part, or all of its lineage in one.
    """
    table = served(report)
    every = [
        ("Before and after", before_after(part, colours)),
        ("Summary", sections.summaries(report, colours)),
        ("Server", "" if table is None else sections.with_all_columns(table)),
        ("Acceptance by position", sections.acceptance(report, colours)),
        ("Categories", sections.by_category(report, colours)),
        ("Speed-up", speed.speed(report, colours)),
        ("Time of a round", speed.times(report)),
        ("Replies token by token", replies(report, colours)),
        ("Measured on", _conditions(part)),
    ]
    return [(name, text) for name, text in every if text]


def _conditions(part: Part) -> str:
    """Return what each report of a part was measured on; a lineage says which is which."""
    blocks = []
    for label, (path, report) in zip(part.labels, part.reports, strict=True):
        heading = f"<h4>{escape(label)}</h4>" if len(part.reports) > 1 else ""
        blocks.append(heading + sections.facts(report, path))
    return "".join(blocks)


def markdown(found: Found, cut: bool = True) -> str:
    """Return the tables of all reports, lineages and training runs as Markdown.

    With `cut` they have their most important columns only, and many drafters share several tables.
    """
    blocks = []
    for part in parts_of_page(found.reports):
        report = part.report
        blocks.append(f"## {report.target_name}\n\n{report.scope}, {part.title}\n")
        if where := report.measured_on:
            blocks.append(f"Measured on {where}.\n")
        blocks += [f"{escape(line)}.\n" for line in headline(report)]
        whole = [
            compare_table(part),
            summary(report) if report.settings else None,
            served(report),
        ]
        tables = [table.cut() if cut else table for table in whole if table is not None]
        for table in map(categories, report.settings):
            if table is not None:
                tables += table.split() if cut else [table]
        blocks += [table.markdown() for table in tables]
    if (table := trainings(found.trainings)) is not None:
        blocks.append(table.markdown())
    return "\n".join(blocks)
