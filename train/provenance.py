"""Provenance of a checkpoint: code, command, versions and machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from ..command_line.endings import versions
from ..heads.files import JsonObject
from ..inference.base.settings import RowSource
from ..inference.conversations.sources import rows_of, source_files


def provenance() -> JsonObject:
    """Return the facts about this process that are noted with a checkpoint, as JSON."""
    import torch  # here, since the command line imports this module before torch

    return {
        "command": command_line(sys.argv),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": versions(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),  # what is trained depends on them in its last bits
    }


def data_sets(sources: Sequence[RowSource]) -> list[str]:
    """Return the names of the data sets on the hub that sources are, or were regenerated from.

    Of a file its first row says it. Raises `UserError` for a source that cannot be read.
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
    """Return a command as a user types it, without the path of what Python runs.

    Example: `/opt/venv/draftsmith/train/__main__.py dspark` is `python -m draftsmith.train dspark`.
    """
    path = Path(argv[0])
    if path.name != "__main__.py":
        return [path.name, *argv[1:]]
    inner = "" if path.parent.name == "draftsmith" else f".{path.parent.name}"
    return ["python", "-m", f"draftsmith{inner}", *argv[1:]]


def git_commit() -> str | None:
    """Return the revision of the checkout that this file is in; None outside a checkout.

    A plus sign follows it if files of the checkout were changed.
    """

    def git(*arguments: str) -> str:
        command, folder = ["git", *arguments], Path(__file__).parent
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        # Without locks: a `git status` that is killed, as on a full disk, would leave one.
        dirty = git("--no-optional-locks", "status", "--porcelain")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if dirty else "")
