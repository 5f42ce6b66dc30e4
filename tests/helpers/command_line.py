"""The command line in a process of its own."""

from __future__ import annotations

import subprocess

from tests.conftest import PYTHON
from tests.helpers.training import environment


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from draftsmith.commands.cli import main; main()"
    return subprocess.run(
        [PYTHON, "-c", code, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
