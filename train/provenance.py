"""Where a checkpoint comes from: code, command, versions, machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "draftsmith",
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "deepspeed",
    "safetensors",
    "tokenizers",
)


def versions() -> dict[str, str | None]:
    """Installed versions; None for what is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def provenance() -> dict[str, Any]:
    return {
        "command": sys.argv,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": versions(),
        "platform": platform.platform(),
    }


def git_commit() -> str | None:
    """Revision of the checkout that this file stands in, with a plus sign if it was changed; None
    outside one."""
    try:
        folder = Path(__file__).parent
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")
