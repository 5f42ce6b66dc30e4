"""Options of `draftsmith report`. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal


@dataclass
class ReportOptions:
    """Evaluations and training runs as one HTML file that opens anywhere, or as Markdown.

    It shows acceptance, speed, replies token by token and training curves.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith report out.json runs/medusa --out report.html",
        "draftsmith report before.json after.json --format md",
        "draftsmith report before.json after.json --out report.md",
    )
    first: ClassVar[tuple[str, ...]] = (
        "runs",
        "out",
        "format",
    )

    runs: list[str] = field(default_factory=list, metadata={"positional": "RUN"})
    """JSON files of draftsmith evaluate, folders of training runs, or folders that hold such files
    or runs."""
    out: str | None = field(default=None, metadata={"form": "FILE"})
    """File to write. If not given, HTML goes to report.html and Markdown to the terminal."""
    format: Literal["html", "md"] | None = None
    """html: a page; md: its tables alone, as Markdown. If not given, the ending of --out decides,
    and html is written without one."""
