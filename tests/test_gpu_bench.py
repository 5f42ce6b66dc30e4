"""The GPU benchmark, run on a CPU with tiny shapes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

QUICK = "machine,eager,training"


@pytest.mark.full
@pytest.mark.parametrize(
    "stages", [QUICK, pytest.param("exactness,graph,peers", marks=pytest.mark.full)]
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
    assert "- failed checks: none" in table
    assert all(stage in table for stage in stages.split(","))


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts/bench/gpu.py", "--out", tmp_path, "--stages", "x"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "unknown stage x" in ran.stderr


@pytest.mark.full
def test_an_error_loses_one_way_of_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    stages = importlib.import_module("gpu_stages")
    report = importlib.import_module("gpu_report")

    def broken(*_: object) -> None:
        raise AttributeError("planted")

    monkeypatch.setattr(stages, "EagleProposer", broken)
    for stage in ("eager", "graph"):
        file = tmp_path / f"{stage}.jsonl"
        getattr(stages, stage)(report.Report(file, stage), torch.device("cpu"), tiny=True)
        entries = report.read(file)
        failed = [e["check"] for e in entries if e.get("holds") is False]
        assert failed and all("nodes" in name or "eagle" in name for name in failed)
        found = {e["figure"] for e in entries if "figure" in e}
        assert any("plain" in name for name in found) and "dflash, chain" in found
