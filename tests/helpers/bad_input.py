"""Command lines that have to be refused in one line."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from draftsmith.commands.cli import main


def expect(done: subprocess.CompletedProcess[str], *says: str) -> None:
    """Exit code 2, and on stderr exactly one line that begins with `error:` and says it all."""
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr and "usage:" not in done.stderr
    for text in says:
        assert text in errors[0]


def quick(capsys: pytest.CaptureFixture[str], *arguments: Any) -> subprocess.CompletedProcess[str]:
    """`draftsmith ...` in this process."""
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    out = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, int(stopped.value.code or 0), out.out, out.err)
