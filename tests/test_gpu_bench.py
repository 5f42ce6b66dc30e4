"""The GPU benchmark, run on a CPU with tiny shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

QUICK = "machine,eager,training"


@pytest.mark.full
@pytest.mark.parametrize(
    "stages", [QUICK, pytest.param("exactness,captured,peers", marks=pytest.mark.full)]
)
def test_stages_run_on_a_cpu(stages: str, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/bench/gpu.py", "--device", "cpu", "--tiny"]
    command += ["--out", tmp_path, "--stages", stages]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    entries = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert {entry["stage"] for entry in entries} == set(stages.split(","))
    assert all(entry.get("holds", True) for entry in entries)
    if stages == QUICK:
        rounds = {
            e["figure"]: e["value"] for e in entries if e["stage"] == "eager" and "figure" in e
        }
        # The known text is accepted on one path: three drafts and one token of the target.
        assert rounds["dflash, chain"]["tau"] > 3
        assert {"eagle", "dflash", "dspark", "medusa"} <= {
            e["figure"].split(",")[0] for e in entries if e["stage"] == "training" and "figure" in e
        }
    table = (tmp_path / "gpu.md").read_text()
    assert all(stage in table for stage in stages.split(","))


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/bench/gpu.py", "--out", tmp_path, "--stages", "x"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "unknown stage x" in ran.stderr
