"""Provenance of a checkpoint: code, command, versions and machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ..command_line.process import versions
from ..heads.files import JsonObject
from ..inference.base.settings import RowSource
from ..inference.conversations.sources import rows_of, source_files


def provenance() -> JsonObject:
    """Return the facts about this process that a checkpoint records, as JSON."""
    import torch  # here, since the command line imports this module before torch

    return {
        "command": command_line(sys.argv),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": versions(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),  # they change the last bits of the weights
    }


def data_sets(sources: Sequence[RowSource]) -> list[str]:
    """Return the names of the data sets on the hub that sources are, or were regenerated from.

    The first row of a file names its data set. Raises `UserError` for an unreadable source.
    """
    names = []
    for source in sources:
        if source_files(source) is None:
            names.append(source.path)
            continue
        _, row = next(rows_of(source), ("", None))
        written = row.get("regenerated") if isinstance(row, dict) else None
        if isinstance(written, dict) and isinstance(name := written.get("dataset"), str):
            names.append(name)
    return list(dict.fromkeys(names))


def command_line(argv: list[str]) -> list[str]:
    """Return a command as a user types it, without the path of the program.

    Example: `/opt/venv/draftsmith/train/__main__.py dspark` is `python -m draftsmith.train dspark`.
    """
    path = Path(argv[0])
    if path.name != "__main__.py":
        return [path.name, *argv[1:]]
    inner = "" if path.parent.name == "draftsmith" else f".{path.parent.name}"
    return ["python", "-m", f"draftsmith{inner}", *argv[1:]]


def git_commit() -> str | None:
    """Return the commit of this checkout, with "+" after it if files were changed, or None."""

    def git(*arguments: str) -> str:
        command, folder = ["git", *arguments], Path(__file__).parent
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        # Without locks: a `git status` that is killed would leave one.
        dirty = git("--no-optional-locks", "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if dirty else "")
