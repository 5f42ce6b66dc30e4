"""The job script with replacements for SLURM's commands: when it is queued again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.helpers.pages import blocks_of
from tests.helpers.training import environment, make_config, resumed_at

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"
# Of SLURM: a step is a process group of its own, to which signals to the step go.
COMMANDS = {
    "srun": """
        while [[ "$1" == --* ]]; do shift; done
        export SLURM_NODEID=0
        exec setsid bash -c 'echo $$ > "$STATE/step"; exec "$@"' step "$@" """,
    "scancel": """
        [ "$*" = "--signal=TERM 7.0" ] && kill -TERM -- "-$(cat "$STATE/step")" """,
    "scontrol": """
        case "$1" in
            show) printf 'localhost\\nanother\\n' ;;
            requeue) echo "$2" >> "$STATE/queued" ;;
        esac""",
    "squeue": 'cat "$STATE/state"',
}
# As the launcher does: its ranks save after a TERM, and it reports a failure.
LAUNCHER = """
    echo "$@" > "$STATE/launched"
    trap 'sleep 0.5; touch "$STATE/saved"; exit 1' TERM
    touch "$STATE/runs"
    for _ in $(seq 100); do
        sleep 0.1
        if [ -e "$STATE/end" ]; then exit "$(cat "$STATE/end")"; fi
    done"""


def started(
    folder: Path, arguments: list[str], commands: dict[str, str], **variables: str
) -> subprocess.Popen[str]:
    """The script as a job of one node with two GPUs; `folder` has the stand-ins' notes."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "state").write_text("RUNNING\n")
    for name, text in commands.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "4",
    }  # fmt: skip
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        cwd=folder,
        env={**environment(**job), "PATH": path, "STATE": str(folder), **variables},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def step_of(folder: Path) -> int:
    return int((folder / "step").read_text())


@pytest.mark.parametrize(
    ("end", "status", "queued"),
    [
        ("time is up", 0, True),
        ("preempted", 0, True),
        ("preempted, the script too", 0, True),
        ("scancel", 143, False),
        ("finished", 0, False),
        ("failed", 2, False),
    ],
)
def test_a_job_that_was_asked_to_stop_is_queued_again(
    end: str, status: int, queued: bool, tmp_path: Path
) -> None:
    """After scancel it is not; a preemption signals the step, and by a setting the script too."""
    process = started(tmp_path, ["eagle", "--out", "a b"], {**COMMANDS, "accelerate": LAUNCHER})
    wait_for(tmp_path / "runs")
    if end == "time is up":
        process.send_signal(signal.SIGUSR1)
    elif end in ("finished", "failed"):
        (tmp_path / "end").write_text("0" if end == "finished" else "2")
    else:
        if end == "scancel":
            (tmp_path / "state").write_text("COMPLETING\n")
        os.killpg(step_of(tmp_path), signal.SIGTERM)
        if end != "preempted":
            process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status, errors
    assert (tmp_path / "queued").exists() == queued
    assert (tmp_path / "saved").exists() == (end not in ("finished", "failed"))
    launched = (tmp_path / "launched").read_text()
    assert "--num_processes 2 --main_process_ip localhost --main_process_port 20007" in launched
    assert launched.endswith("-m draftsmith.train eagle --out a b\n")


def test_missing_accelerate_configuration_is_refused_with_alternatives(tmp_path: Path) -> None:
    process = started(tmp_path, ["eagle"], COMMANDS, ACCELERATE_CONFIG="ddp.yaml")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and not (tmp_path / "step").exists()
    said = (
        "error: ACCELERATE_CONFIG=ddp.yaml does not exist; there are: configs/accelerate/ddp.yaml"
    )
    assert errors.startswith(said) and "configs/accelerate/zero3.yaml" in errors


@pytest.mark.full
def test_signalled_job_saves_requeues_and_resumes(tmp_path: Path, saved_tiny: Path) -> None:
    """Two ranks under accelerate's launcher, which meets at the job's own port."""
    config = make_config(tmp_path, saved_tiny, max_steps=400)
    cpu = tmp_path / "cpu.yaml"
    cpu.write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nmixed_precision: 'no'\n")
    arguments, setting = ["medusa", "--config", str(config)], {"ACCELERATE_CONFIG": str(cpu)}
    process = started(tmp_path, arguments, COMMANDS, PYTHONUNBUFFERED="1", **setting)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGUSR1)
            break
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and "asked to stop: saved step" in errors, errors
    assert (tmp_path / "queued").read_text() == "7\n"
    process = started(tmp_path, [*arguments, "--log-every", "400"], COMMANDS, **setting)
    _, errors = process.communicate(timeout=300)
    done = subprocess.CompletedProcess([], process.returncode, "", errors)
    assert process.returncode == 0 and resumed_at(done) >= 3, errors


@pytest.mark.parametrize(
    ("line", "status", "attempts"),
    [
        ("asked to stop: saved step 4 of 9; the same command continues from there", 143, 1),
        ("error: asked to stop while waiting for the extractor; the same command", 143, 1),
        ("error: data.sources is missing", 2, 1),
        ("error: rank 1 lost another one (closed by peer); the same command", 1, 3),
    ],
)
def test_documented_retry_loop_retries_only_after_lost_ranks(
    line: str, status: int, attempts: int, tmp_path: Path
) -> None:
    """With a launcher that says `line` and fails with status 1, as accelerate's does."""
    (block,) = (b for b in blocks_of(ROOT / "docs" / "running.md") if "for attempt in" in b.text)
    launcher = f"accelerate() {{ echo '{line}' >&2; return 1; }}\n"
    done = subprocess.run(["bash", "-c", launcher + block.text], cwd=tmp_path, check=False)
    assert done.returncode == status
    assert len([*tmp_path.glob("train-*.log")]) == attempts
