"""The cases of ../shared/cases: inputs that reviewers found to be misread, each with a script that
ends with status 0 once it is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CASES = ROOT.parent / "shared" / "cases"
SCRIPTS = sorted((CASES / "data").glob("*/run.sh"))
PROGRAMS = sorted([*(CASES / "lossless").glob("*.py"), *(CASES / "engines").glob("*/case.py")])


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_shell_script_of_shared_case_succeeds(script: os.PathLike[str]) -> None:
    environment = {**os.environ, "DRAFTSMITH_ROOT": str(ROOT), "DRAFTSMITH_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(script)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "script", PROGRAMS, ids=lambda script: str(script.relative_to(CASES).with_suffix(""))
)
def test_python_script_of_shared_case_succeeds(script: os.PathLike[str]) -> None:
    # They call `draftsmith` too, which is next to the interpreter.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
