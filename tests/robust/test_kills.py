"""Killed at any moment of any stage: the same command goes on, and what it ends with is what an
undisturbed one ends with."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import PYTHON, QUICKSTART, ROOT
from tests.helpers.rows import write
from tests.helpers.stores import config_for
from tests.helpers.training import LAUNCH, environment, make_config

DRAFTER = QUICKSTART.parent / "drafters" / "eagle3"
CLI = ["-c", "from draftsmith.commands.cli import main; main()"]
SIGNALS = (signal.SIGKILL, signal.SIGTERM)


@dataclass(frozen=True)
class Stage:
    """A command that writes below a folder, and what of that must not depend on how often it was
    killed."""

    command: Callable[[Path, Path], list[str]]
    """Of the folder and the tiny target; begins with Python."""
    result: Callable[[Path], Any]
    family: bool = False
    """True for a run by a launcher, which is killed alternately with its child."""


def prompts_in(folder: Path) -> str:
    rows = [{"id": i, "prompt": f"def add{i}(a, b):\n    # Add two numbers."} for i in range(8)]
    return write(folder / "p.jsonl", rows)


def regenerate(folder: Path, target: Path) -> list[str]:
    sampled = [
        "--sampling.temperature",
        "0.8",
        "--max-new-tokens",
        "64",
        "--batch-size",
        "1",
    ]
    base = ["data", "regenerate", "--target", str(QUICKSTART), "--data", prompts_in(folder)]
    return [PYTHON, *CLI, *base, *sampled, "--out", str(folder / "out.jsonl")]


def extract(folder: Path, target: Path) -> list[str]:
    config = config_for(folder / "run", target, "eagle")
    base = [
        "data",
        "extract",
        "--method",
        "eagle",
        "--config",
        str(config),
        "--out",
        str(folder / "store"),
    ]
    return [PYTHON, "-m", "draftsmith.train", *base, "--rows-per-shard", "1"]


def train(folder: Path, target: Path) -> list[str]:
    config = make_config(folder, target, "eagle", checkpoints={"every": 2})
    return [PYTHON, "-m", "draftsmith.train", "eagle", "--config", str(config)]


def launched(folder: Path, target: Path) -> list[str]:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, "--num_processes", "1"]
    return [*launcher, *train(folder, target)[1:]]


def evaluate(folder: Path, target: Path) -> list[str]:
    base = [
        "evaluate",
        "--target",
        str(QUICKSTART),
        "--prompts",
        prompts_in(folder),
        "--drafter",
        str(DRAFTER),
    ]
    sized = ["--max-new-tokens", "48", "--repeats", "2", "--temperature", "0,1", "--no-baselines"]
    return [PYTHON, *CLI, *base, *sized, "--json", str(folder / "out.json")]


def tune(folder: Path, target: Path) -> list[str]:
    base = [
        "tune",
        "--target",
        str(QUICKSTART),
        "--prompts",
        prompts_in(folder),
        "--drafter",
        "ngram",
        "--drafter",
        "ngram:longest=5,name=longer",
    ]
    sized = ["--budget", "0.02"]
    return [PYTHON, *CLI, *base, *sized, "--out", str(folder / "out.json")]


def export(folder: Path, target: Path) -> list[str]:
    return [
        PYTHON,
        *CLI,
        "export",
        "--drafter",
        str(DRAFTER),
        "--to",
        "vllm",
        "--out",
        str(folder / "out"),
    ]


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def counted(folder: Path) -> Any:
    """All of a report that is not a time."""
    found = json.loads((folder / "out.json").read_text())
    return [
        [
            (name, r["id"], r["equal_to_ar"], r["rounds"])
            for name, s in setting["drafters"].items()
            for r in s["per_request"]
        ]
        for setting in found["settings"]
    ]


def tuned(folder: Path) -> Any:
    """Acceptance is counted, and does not depend on times."""
    found = json.loads((folder / "out.json").read_text())
    return {
        name: [(row["default"]["label"], row["default"]["measured"]["tau"]) for row in rows]
        for name, rows in found["drafters"].items()
    }


def trained(folder: Path) -> dict[str, bytes]:
    return bytes_below(folder / "run" / "checkpoints" / "step-000020" / "drafter")


def without_provenance(found: dict[str, bytes], name: str) -> dict[str, Any]:
    own = json.loads(found[name])
    own.pop("provenance", None)
    return {**found, name: own}


STAGES: dict[str, Stage] = {
    "regenerate": Stage(regenerate, lambda folder: (folder / "out.jsonl").read_bytes()),
    "extract": Stage(
        extract, lambda folder: without_provenance(bytes_below(folder / "store"), "manifest.json")
    ),
    "train": Stage(train, lambda folder: without_provenance(trained(folder), "draftsmith.json")),
    "train, launched": Stage(
        launched, lambda folder: without_provenance(trained(folder), "draftsmith.json"), True
    ),
    "evaluate": Stage(evaluate, counted),
    "tune": Stage(tune, tuned),
    "export": Stage(export, lambda folder: bytes_below(folder / "out")),
}


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those that have the folder in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(
                str(folder) in word for word in process.cmdline()
            ):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def killed(stage: Stage, command: list[str], number: int, moment: float, child: bool) -> bool:
    """Start the command and send it, or the child that it launched, a signal after so many seconds;
    False if it was too late."""
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(moment)
        return False
    except subprocess.TimeoutExpired:
        members = psutil.Process(process.pid).children(recursive=True) if child else []
        (members[0] if members else process).send_signal(number)
        process.wait(60)
        return process.returncode != 0


def outputs_gone(folder: Path, inputs: set[Path]) -> None:
    for path in sorted(set(folder.rglob("*")) - inputs, reverse=True):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(
            missing_ok=True
        )


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("extract", 1),
        ("export", 1),
        *(pytest.param(name, 5, marks=pytest.mark.full) for name in STAGES),
    ],
)
def test_killed_stage_resumes_to_the_undisturbed_result(
    name: str, count: int, tmp_path: Path, saved_tiny: Path
) -> None:
    """In the same folder each time, since paths are part of what is compared."""
    stage, folder = STAGES[name], tmp_path / "here"
    folder.mkdir()
    command = stage.command(folder, saved_tiny)
    inputs, length = set(folder.rglob("*")), 0.0
    for _ in range(2):  # the first time pays for caches
        outputs_gone(folder, inputs)
        began = time.monotonic()
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        length = time.monotonic() - began
    expected, draw, kills, late = stage.result(folder), random.Random(7), 0, 0
    outputs_gone(folder, inputs)
    while kills < count:
        if killed(
            stage,
            command,
            SIGNALS[kills % 2],
            draw.uniform(0.2, 0.95) * length,
            stage.family and kills % 4 > 1,
        ):
            kills += 1
        else:
            late, length = late + 1, 0.9 * length
            outputs_gone(folder, inputs)
            assert late < 20
        # a child notices within a second or two that its launcher is gone
        until = time.monotonic() + 15
        while (left := processes_of(folder)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, left
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert stage.result(folder) == expected
