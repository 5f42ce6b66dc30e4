"""Options of `draftsmith report`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass
class ReportOptions:
    """Evaluations and training runs as one HTML file that opens anywhere, or as tables.

    The page shows acceptance, speed, replies token by token and training curves.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith report out.json runs/medusa --out report.html",
        "draftsmith report before.json after.json --format md",
        "draftsmith report before.json after.json --out report.md",
        "draftsmith report runs/seed-*.json --over-seeds --out table.tex",
    )
    first: ClassVar[tuple[str, ...]] = (
        "runs",
        "out",
        "format",
        "over_seeds",
    )

    runs: list[str] = field(default_factory=list, metadata={"positional": "RUN"})
    """JSON files of draftsmith evaluate, folders of training runs, or folders that hold such files
    or runs."""
    out: str | None = field(default=None, metadata={"form": "FILE"})
    """File to write. If not given, HTML goes to report.html and everything else to the terminal."""
    format: Literal["html", "md", "csv", "tex"] | None = None
    """html: a page; md: its tables alone, as Markdown; csv, tex: one table of tau and speed-up with
    their intervals, tex with booktabs. If not given, the ending of --out decides, and html is
    written without one, md with --over-seeds."""
    over_seeds: bool = False
    """The reports are of the same drafters, trained with different seeds: one table of the means,
    with 95% t intervals over seeds."""
    columns: Literal["few", "all"] = "few"
    """few: Markdown tables of at most eight columns; all: every column."""
