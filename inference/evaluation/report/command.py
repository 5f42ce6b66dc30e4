"""`draftsmith report`: evaluations and training runs as one self-contained page.

Its inputs are JSON reports of `draftsmith evaluate` and the logs of training runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ....heads.errors import UserError
from ....heads.files import JsonObject, read_json, whole_file
from ...base.output_paths import check_output
from ..figure_text import headline
from ..options import ReportOptions as Options
from ..results import Report, read_report
from ..tables import categories, server_table, summary
from ..training_log import METRICS_FILE, Training, read_metrics, trainings
from . import page
from .lineage import NamedReport, PagePart, before_after, compare_table, parts_of_page
from .page import Block, heading

HTML_FILE = "report.html"
ENDINGS = {".html": "html", ".htm": "html", ".md": "md", ".markdown": "md"}


@dataclass
class ReportInputs:
    """Reports and training runs that the named files and folders hold."""

    reports: list[NamedReport]
    trainings: list[Training]


def run(options: Options) -> None:
    """Write the page, or its tables as Markdown, to `options.out` or its default.

    Raises `UserError` for inputs that cannot be read and for a file that cannot be written.
    """
    if not options.runs:
        raise UserError(
            "name at least one run: a JSON of draftsmith evaluate, or a training run's folder"
        )
    check_output(options.out, "--out")
    found = gather(options.runs)
    out = options.out or (HTML_FILE if options.format != "md" else None)
    if out is not None:
        # The page must not replace one of its inputs.
        place = Path(out).resolve()
        overwritten = [path for path, _ in found.reports if Path(path).resolve() == place]
        if overwritten or Path(out).is_dir():
            why = "it is what the report is made of" if overwritten else "it is a folder"
            raise UserError(f"cannot write {out}: {why}; name another file with --out")
    form = format_of(options)
    text = html(found) if form == "html" else markdown(found).encode(errors="replace")
    if out is None:
        sys.stdout.write(text.decode())
        return
    with whole_file(out) as aside:
        aside.write_bytes(text)
    print(f"report: {out}")


def format_of(options: Options) -> str:
    """Return the format to write. Raises `UserError` if --out has another's ending."""
    ending = Path(options.out or "").suffix.lower()
    named = ENDINGS.get(ending)
    if options.format is None and ending and named is None:
        raise UserError(f"--out {options.out} ends in neither .html nor .md; give --format too")
    if options.format is not None and named not in (None, options.format):
        raise UserError(
            f"--out {options.out} has the ending of another format than --format {options.format}; "
            "change one of them"
        )
    return options.format or named or "html"


def gather(paths: Sequence[str]) -> ReportInputs:
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
            # A folder that was named before adds nothing, which is not a mistake.
            known = any(folder.resolve() in (p, *p.parents) for p in (*reports, *runs))
            for log in [folder / METRICS_FILE, *sorted(folder.glob(f"*/{METRICS_FILE}"))]:
                if log.is_file():
                    runs[log.parent.resolve()] = read_metrics(log)
            files = filter(is_report, sorted(folder.glob("*.json")))
            inside = [(str(file), read_report(str(file))) for file in files]
            # Their names do not tell their order.
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
    return ReportInputs(list(reports.values()), _labelled(runs))


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

    Folders hold other JSON files too, so one that is not a report, or cannot be read, is an error
    only if the user has named it.
    """
    try:
        value = read_json(file, finite=False)
    except UserError:
        return False
    return isinstance(value, dict) and {"settings", "prompt_set"} <= value.keys()


def html(found: ReportInputs) -> bytes:
    """Return the page: its parts of one report or one lineage, then training runs."""
    parts = parts_of_page(found.reports)
    reports = [part.report for part in parts]
    several = len(parts) > 1
    targets = dict.fromkeys(report.target_name for report in reports)
    title = ", ".join(targets) or f"Training of {', '.join(run.name for run in found.trainings)}"
    blocks: list[Block] = []
    for part, report in zip(parts, reports, strict=True):
        if several:
            blocks.append(heading(part.title))
        blocks += page.verdict(report)
        for name, section in sections(part, report):
            blocks += [heading(name, 3 if several else 2), *section] if section else []
    if training := page.training(found.trainings):
        blocks += [heading("Training"), *training]
    return page.html(title, blocks, page.looks_of(reports))


def sections(part: PagePart, report: Report) -> list[tuple[str, list[Block]]]:
    """Return headings and blocks of all sections in their order, empty ones included.

    `report` is that of the part, or its lineage merged into one.
    """
    conditions = []
    for label, (path, own) in zip(part.labels, part.reports, strict=True):
        conditions += [heading(label, 4)] if len(part.reports) > 1 else []
        conditions.append(page.facts(own, path))
    return [
        ("Before and after", before_after(part)),
        ("Summary", page.summaries(report)),
        ("Server", page.server(report)),
        ("Acceptance by position", page.acceptance(report)),
        ("Categories", page.by_category(report)),
        ("Speed-up by batch size", page.speed(report)),
        ("Time of a round", page.times(report)),
        ("Replies token by token", page.replies(report)),
        ("Measured on", conditions),
    ]


def markdown(found: ReportInputs) -> str:
    """Return the tables of all reports, lineages and training runs as Markdown.

    Tables have their most important columns only; those of many drafters are split.
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
            server_table(report),
        ]
        tables = [table.of(table.few()) for table in whole if table is not None]
        for table in categories(report.settings):
            tables += table.split() if len(table.rows) > 1 else []
        blocks += [table.markdown() for table in tables]
    if (table := trainings(found.trainings)) is not None:
        blocks.append(table.markdown())
    return "\n".join(blocks)
