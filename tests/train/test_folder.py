"""Folder of a run or a store: one launch at a time, what a kill leaves, unfinished files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml

from draftsmith.train.checkpoint import RunFolder
from tests.conftest import PYTHON, QUICKSTART
from tests.helpers.bad_input import expect
from tests.helpers.faults import command_of, disturb
from tests.helpers.rows import write
from tests.helpers.stores import config_for
from tests.helpers.training import environment, make_config, resumed_at

LONG = {"max_steps": 100_000, "evaluation": {"every": 100_000, "limit": 2, "max_new_tokens": 4}}


def lock_of(path: Path) -> Path:
    """Lock in a folder, or next to a file."""
    return path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, saved_tiny: Path) -> tuple[Path, Path]:
    """Config of a finished run of ten steps, and a copy of its folder."""
    folder = tmp_path_factory.mktemp("trained")
    config = make_config(folder, saved_tiny, max_steps=10)
    done = run(command_of(config))
    assert done.returncode == 0, done.stderr[-2000:]
    assert not lock_of(folder / "run").exists(), "nothing of the lock stays"
    shutil.copytree(folder / "run", folder / "sound", symlinks=True)
    return config, folder / "sound"


@pytest.fixture
def ended(trained: tuple[Path, Path]) -> tuple[Path, Path]:
    """Config of `trained`, with its folder restored."""
    config, sound = trained
    shutil.rmtree(config.parent / "run")
    shutil.copytree(sound, config.parent / "run", symlinks=True)
    return config, config.parent / "run"


def started(command: list[str], until: Path) -> subprocess.Popen[str]:
    """A command that runs on, once `until` is there."""
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    since = time.monotonic()
    while not until.exists():
        assert process.poll() is None and time.monotonic() - since < 120, process.communicate()
        time.sleep(0.05)
    return process


def test_a_second_run_in_a_folder_is_one_line_and_a_killed_one_leaves_no_lock(
    tmp_path: Path, saved_tiny: Path
) -> None:
    config = make_config(tmp_path, saved_tiny, **LONG, log_every=1)
    out = tmp_path / "run"
    first = started(command_of(config), out / "config.yaml")
    try:
        before = (out / "config.yaml").read_bytes()
        done = run([*command_of(config), "--log-every", "7"])
        expect(done, f"{out} is being written by process", socket.gethostname(), "another --out")
        assert (out / "config.yaml").read_bytes() == before and first.poll() is None
        (named,) = re.findall(r"process (\d+) on", done.stderr)
        holder = psutil.Process(int(named))
        # The last command resumes from a checkpoint, and would train to its end without one.
        until = time.monotonic() + 120
        while not (out / "last").exists() and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    holder.wait(20)
    assert lock_of(out).exists(), "a file without a process"
    done = run([*command_of(config), "--max-steps", "100001"])
    expect(done, "max_steps was 100000, now it is 100001")


def test_two_ranks_report_a_locked_folder_once(ended: tuple[Path, Path], saved_tiny: Path) -> None:
    config, out = ended
    with lock_of(out).open("w+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("process 123 on elsewhere")
        held.flush()
        done = run(command_of(config, ranks=2))
        errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        assert done.returncode and len(errors) == 1, done.stderr[-2000:]
        assert f"{out} is being written by process 123 on elsewhere; wait until" in errors[0]


def test_extraction_and_regeneration_have_their_output_for_themselves(
    tmp_path: Path, saved_tiny: Path
) -> None:
    config = config_for(tmp_path / "r", saved_tiny, "medusa")
    rows = write(tmp_path / "p.jsonl", [{"prompt": "def f():"}])
    store, replies = tmp_path / "store", tmp_path / "out.jsonl"
    store.mkdir()
    extraction = ["draftsmith.train", "data", "extract", "--config", str(config)]
    regeneration = ["draftsmith.commands.cli", "data", "regenerate", "--data", rows]
    for path, command in (
        (store, [*extraction, "--method", "medusa", "--out", str(store)]),
        (replies, [*regeneration, "--target", str(QUICKSTART), "--out", str(replies)]),
    ):
        lock = lock_of(path)
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if path is store:
                done = run([PYTHON, "-m", *command])
            else:
                code = "import sys; from draftsmith.commands.cli import main; main()"
                done = run([PYTHON, "-c", code, *command[1:]])
            expect(done, f"{path} is being written by another process; wait until")
    assert [path.name for path in store.iterdir()] == [".lock"] and not replies.exists()


def test_last_is_linked_again_where_a_kill_came_before_its_link(
    ended: tuple[Path, Path],
) -> None:
    """For a run that is not finished, and for one that is."""
    config, out = ended
    folder = RunFolder(str(out))
    for newest in (10, 5):
        if newest == 5:
            shutil.rmtree(folder.at(10))
            (out / "best").unlink(missing_ok=True)
        (out / "last").unlink()
        (out / "last").symlink_to("checkpoints/step-000001/drafter")
        if newest == 10:
            done = run(command_of(config))
            assert done.returncode == 0 and resumed_at(done) == 10, done.stderr[-2000:]
        else:
            # Killed before it writes another checkpoint.
            disturb(command_of(config), 6, signal.SIGKILL)
        assert (out / "last").resolve() == (folder.at(newest) / "drafter").resolve()


def test_touched_sources_do_not_refuse_a_resume(ended: tuple[Path, Path]) -> None:
    config, out = ended
    for name in ("train.jsonl", "held.jsonl"):
        os.utime(config.parent / name)
    done = run(command_of(config))
    assert done.returncode == 0 and resumed_at(done) == 10, done.stderr[-2000:]
    held = config.parent / "held.jsonl"
    sound = held.read_text()
    held.write_text(sound.replace("reply", "answer"))
    before = {path: path.read_bytes() for path in (out / "data").iterdir()}
    done = run(command_of(config))
    assert done.returncode == 2 and "whose data has changed" in done.stderr
    assert {path: path.read_bytes() for path in (out / "data").iterdir()} == before
    held.write_text(sound)
    assert resumed_at(run(command_of(config))) == 10, "the old rows are the old data"


def test_half_a_line_of_the_log_is_cut_off_before_the_next_run_writes(
    ended: tuple[Path, Path],
) -> None:
    config, out = ended
    shutil.rmtree(out / "checkpoints" / "step-000010")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "loss": 1.')
    done = run(command_of(config))
    assert done.returncode == 0 and resumed_at(done) == 5, done.stderr[-2000:]
    assert "its last line was not whole and is cut off" in done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [*range(1, 11), *range(6, 11)]


def test_the_config_is_whole_or_absent(ended: tuple[Path, Path]) -> None:
    """A link in its place is replaced by a rename, and what it points to stays as it is."""
    config, out = ended
    before = (out / "config.yaml").read_text()
    (out / "config.yaml").rename(out / "theirs.yaml")
    (out / "config.yaml").symlink_to("theirs.yaml")
    done = run([*command_of(config), "--log-every", "3"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert (out / "theirs.yaml").read_text() == before
    assert yaml.safe_load((out / "config.yaml").read_text())["log_every"] == 3


def test_unfinished_checkpoints_of_a_living_process_are_left_alone(
    ended: tuple[Path, Path],
) -> None:
    config, out = ended
    shutil.rmtree(out / "checkpoints" / "step-000010")
    sleeping = subprocess.Popen(["sleep", "600"])
    host = socket.gethostname().replace(".", "-").replace("_", "-")
    alive = out / "checkpoints" / f".step-000010.{host}.{sleeping.pid}.01234567.partial"
    dead = out / "checkpoints" / f".step-000010.{host}.{2**22 + 1}.01234567.partial"
    elsewhere = out / "checkpoints" / ".step-000010.other-host.7.01234567.partial"
    try:
        for path in (alive, dead, elsewhere):
            path.mkdir()
        done = run(command_of(config))
        assert done.returncode == 0, done.stderr[-2000:]
        # The run holds the folder's lock, so that no other machine writes there.
        assert alive.is_dir() and not elsewhere.exists() and not dead.exists()
    finally:
        sleeping.kill()
        sleeping.wait()
