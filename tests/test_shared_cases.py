"""The cases of ../shared/cases: inputs that reviewers found to be misread, each with a script that
ends with status 0 once it is right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPTS = sorted((ROOT.parent / "shared" / "cases" / "data").glob("*/run.sh"))
LOSSLESS = sorted((ROOT.parent / "shared" / "cases" / "lossless").glob("*.py"))


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_the_case_is_right(script: os.PathLike[str]) -> None:
    environment = {**os.environ, "DRAFTSMITH_ROOT": str(ROOT), "DRAFTSMITH_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(script)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("script", LOSSLESS, ids=lambda script: script.stem)
def test_the_text_is_the_targets(script: os.PathLike[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
