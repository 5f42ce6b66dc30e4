"""What this checkout decodes and learns equals what the commit in `record.base` did.

A change of structure keeps every token and every weight. A commit that changes one of them on
purpose writes its own hash into `record.base` and says why in CHANGELOG.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

BASE = Path(__file__).with_name("record.base")
SCRIPT = ROOT / "scripts" / "record.py"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Return a folder with the files of the base commit."""
    commit = BASE.read_text().split()[0]
    folder = tmp_path / "base"
    folder.mkdir()
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], stdout=subprocess.PIPE, check=False
    )
    if archive.returncode:
        pytest.skip(f"the commit {commit} is not in this clone: git fetch --unshallow")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def record(root: Path, out: Path) -> None:
    """Record what the checkout in `root` decodes and learns."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(SCRIPT), "--root", str(root), "--out", str(out)]
    subprocess.run(command, env=environment, check=True)


@pytest.mark.full
def test_decoding_and_training_equal_those_of_the_base_commit(base: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    record(base, old)
    record(ROOT, new)
    command = [sys.executable, str(SCRIPT), "--compare", str(old), str(new)]
    compared = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compared.returncode == 0, compared.stdout + compared.stderr
