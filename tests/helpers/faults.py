"""Training runs that are killed, damaged or disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

from tests.conftest import PYTHON
from tests.helpers.training import (
    LAUNCH,
    environment,
)


def disturb(
    command: list[str], step: int, number: int, rank: int | None = None, timeout: float = 120
) -> tuple[int, str, str]:
    """Start a run and send it a signal when the line of `step` is printed: one rank alone, or the
    process started.

    Returns its exit code and what it printed.
    """
    with subprocess.Popen(
        command,
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(f"step {step}/"):
                (process if rank is None else ranks_of(process)[rank]).send_signal(number)
                break
        out, errors = process.communicate(timeout=timeout)
        return process.returncode, "".join(lines) + out, errors


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The launcher's workers by rank."""
    children = psutil.Process(process.pid).children(recursive=True)
    return sorted(
        (c for c in children if "RANK" in c.environ()), key=lambda c: int(c.environ()["RANK"])
    )


def command_of(config: Path, method: str = "medusa", ranks: int = 1) -> list[str]:
    if ranks == 1:
        return [PYTHON, "-m", "draftsmith.train", method, "--config", str(config)]
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *LAUNCH,
        "--multi_gpu",
        "--num_processes",
        str(ranks),
    ]
    return [*launcher, "-m", "draftsmith.train", method, "--config", str(config)]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """step -> loss and gradient norm, as logged last."""
    rows = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
