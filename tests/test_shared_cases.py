"""The cases of ../shared/cases: inputs that reviewers found to be misread, each with a script that
ends with status 0 once it is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

CASES = ROOT.parent / "shared" / "cases"
SCRIPTS = sorted((CASES / "data").glob("*/run.sh"))
# Later requirements refuse what these scripts take.
SUPERSEDED = {
    "tool-arguments-encoded-twice": "its second template leaves out the tools, which is refused"
}
# Modules that a script imports by a name that they no longer have.
MOVED = {
    "tests.architectures": "tests.helpers.architectures",
    "tests.eagles": "tests.helpers.random_eagles",
    "tests.blocks": "tests.helpers.random_blocks",
}
RUN = """
import importlib, json, runpy, sys
for old, new in json.loads(sys.argv.pop(2)).items():
    sys.modules[old] = importlib.import_module(new)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MOVED_AWAY = {"recorded_lookup_scores.py"}
"""Scripts that import modules which were moved or split since, with tests of ours in their place:
tests/exact/test_recorded.py has the same drafters, tree and chain."""
PROGRAMS = sorted([*(CASES / "lossless").glob("*.py"), *(CASES / "engines").glob("*/case.py")])
PROGRAMS = [program for program in PROGRAMS if program.name not in MOVED_AWAY]


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_shell_script_of_shared_case_succeeds(script: Path, request: pytest.FixtureRequest) -> None:
    if reason := SUPERSEDED.get(script.parent.name):
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
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
    words = [sys.executable, "-c", RUN, str(script), json.dumps(MOVED)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
