"""The GPU benchmark, run on a CPU with tiny shapes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

STAGES = ("machine", "exactness", "tests", "eager", "graph", "training", "peers")
NAMED = "torch transformers accelerate safetensors msgspec rich pytest hypothesis peft"
"""What the benchmark says that it needs."""
HUB = "httpx"
"""What an older huggingface_hub needs besides."""
OLD = {"transformers": "5.17.0", "huggingface_hub": "1.5.0"}
"""Versions that the GPU machine has."""


def requirements(names: list[str]) -> set[str]:
    """Return the installed packages that `names` need, they included."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name not in found:
            found.add(name)
            wanted = map(Requirement, metadata.requires(name) or ())
            names += [
                one.name
                for one in wanted
                if one.marker is None or one.marker.evaluate({"extra": ""})
            ]
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has these packages and what they need, and an older transformers."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages]
    wanted = [f"{name}=={version}" for name, version in OLD.items()]
    got = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False)
    if got.returncode:
        pytest.skip(f"the package registry does not give {wanted}: {got.stderr[-200:]}")
    for name in requirements([*NAMED.split(), HUB]) - {canonicalize_name(name) for name in OLD}:
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(found.locate_file(top)))
    return folder / "bin" / "python"


@pytest.mark.full
def test_every_stage_runs_in_a_bare_environment(bare_python: Path, tmp_path: Path) -> None:
    """Without datasets, deepspeed, wandb and an installed draftsmith, within its ten minutes."""
    missing = "import importlib.util as u; print([u.find_spec(x) for x in {!r}])"
    names = ["datasets", "deepspeed", "wandb", "jsonargparse", "draftsmith"]
    checked = [bare_python, "-c", missing.format(names)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, env=environment, capture_output=True, text=True, check=False)
    assert run(checked, cwd=tmp_path).stdout.split() == str([None] * len(names)).split()

    command = [bare_python, ROOT / "scripts/bench/gpu.py", "--device", "cpu", "--tiny"]
    begin = time.monotonic()
    ran = run([*command, "--out", tmp_path])
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert time.monotonic() - begin < 600
    entries = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert all(entry.get("holds", True) for entry in entries)
    figures = {stage: {} for stage in STAGES}
    for entry in entries:
        if "figure" in entry:
            figures[entry["stage"]][entry["figure"]] = entry["value"]
    # The other three are checks; on a CPU tests are collected only, and the peer needs its wheels.
    assert {entry["stage"] for entry in entries} == set(STAGES)
    assert all(figures[stage] for stage in ("machine", "eager", "graph", "training"))
    # The known text is accepted on one path: three drafts and one token of the target.
    assert figures["eager"]["dflash, chain"]["tau"] > 3
    trained = {name.split(",")[0] for name in figures["training"]}
    assert {"eagle", "dflash", "dspark", "medusa"} <= trained
    table = (tmp_path / "gpu.md").read_text()
    assert "- failed checks: none" in table
    assert all(stage in table for stage in STAGES)


def test_a_stage_that_is_cut_off_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one on a GPU left its tests running next to the stages after it."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    gpu = importlib.import_module("gpu")
    script = tmp_path / "stage.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    options = argparse.Namespace(out=tmp_path, device="cpu", tiny=True, contexts=(8,), nodes=(8,))
    assert gpu.run_process(options, "machine", 3) == "cut off after 3 s"
    child = Path("/proc", (tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while child.exists() and "Z" not in (child / "stat").read_text().split(")")[-1]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
