"""Faults of a run: signals, dead ranks, damaged files, a full disk, another number of ranks, and
numbers that are not finite."""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.command_line.parse import parse
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import CHECKSUMS, write_checksums
from draftsmith.train.checkpoint import RunFolder, find_resume
from draftsmith.train.methods.medusa.method import MedusaRun
from tests.conftest import PYTHON
from tests.helpers.faults import command_of, curve, disturb, flip
from tests.helpers.training import (
    environment,
    launch,
    logged,
    make_config,
    resumed_at,
    train,
    weights,
)


def undisturbed(
    folder: Path, target: Path, ranks: int = 1, **changes: Any
) -> dict[str, torch.Tensor]:
    folder.mkdir()
    train(make_config(folder, target, **changes), ranks=ranks)
    return weights(folder / "run", 20)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
def test_sigterm_saves_and_the_resumed_run_is_bit_identical(
    tmp_path: Path, saved_tiny: Path, ranks: int
) -> None:
    whole = undisturbed(tmp_path / "whole", saved_tiny, ranks)
    config = make_config(tmp_path, saved_tiny)
    code, out, errors = disturb(
        command_of(config, ranks=ranks), 7, signal.SIGTERM, rank=None if ranks == 1 else 1
    )
    assert (
        code == (143 if ranks == 1 else 1)
        and "Traceback" not in errors.split("ChildFailedError")[0].rpartition("Traceback")[0]
    )
    assert "best drafter" not in out
    saved = RunFolder(str(tmp_path / "run")).steps()[-1]
    said = f"asked to stop: saved step {saved} of 20"
    assert 7 <= saved < 20 and errors.count(said) == 1  # by one of the ranks
    assert resumed_at(train(config, ranks=ranks)) == saved
    found = weights(tmp_path / "run", 20)
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def test_a_killed_rank_ends_the_job_with_a_clear_line(tmp_path: Path, saved_tiny: Path) -> None:
    whole = undisturbed(tmp_path / "whole", saved_tiny, 2)
    config = make_config(tmp_path, saved_tiny)
    started = time.monotonic()
    code, _, errors = disturb(command_of(config, ranks=2), 7, signal.SIGKILL, rank=1)
    assert code != 0 and time.monotonic() - started < 100
    assert (
        "error: rank 0 lost another one" in errors
        and "continues from the last checkpoint" in errors
    )
    assert resumed_at(train(config, ranks=2)) >= 5
    found = weights(tmp_path / "run", 20)
    assert all(torch.equal(whole[name], found[name]) for name in whole)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_stop_gives_an_evaluation_up_and_the_next_start_makes_up_for_it(
    tmp_path: Path, saved_tiny: Path, ranks: int
) -> None:
    """Evaluations after every step. The line of a step is printed before its evaluation, so the
    stop meets that of step 4; of two ranks only the second one is asked. In the end each evaluation
    is there once, the last one too."""
    evaluation = {"every": 1, "limit": 8, "max_new_tokens": 40, "tree_nodes": 4}
    config = make_config(tmp_path, saved_tiny, evaluation=evaluation, max_steps=6)

    def evaluated() -> list[int]:
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [row["step"] for row in map(json.loads, lines) if "tau_measured" in row]

    asked = None if ranks == 1 else 1
    code, _, errors = disturb(command_of(config, ranks=ranks), 4, signal.SIGTERM, rank=asked)
    assert code == (143 if ranks == 1 else 1) and "asked to stop: saved step 4 of 6" in errors
    assert evaluated() == [1, 2, 3]
    assert resumed_at(train(config, ranks=ranks)) == 4
    assert evaluated() == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_run_killed_twenty_times_ends_bit_identically(tmp_path: Path, saved_tiny: Path) -> None:
    """It is killed while it starts, evaluates or writes, too; the weights are those of an
    uninterrupted run."""
    whole = undisturbed(tmp_path / "whole", saved_tiny)
    config = make_config(tmp_path, saved_tiny, checkpoints={"every": 2})
    started = time.monotonic()
    train(
        make_config(
            tmp_path / "whole", saved_tiny, out=str(tmp_path / "timed"), checkpoints={"every": 2}
        )
    )
    length = time.monotonic() - started
    moments, killed, finished = random.Random(0), 0, 0
    while killed < 20:
        process = subprocess.Popen(
            command_of(config),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(moments.uniform(0.3, 1.0) * length)
            shutil.rmtree(tmp_path / "run")  # it was not killed: begin again
            # the machine was busier during the timed run
            finished, length = finished + 1, 0.9 * length
            assert finished < 20
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
    train(config)
    found = weights(tmp_path / "run", 20)
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


CORRUPTIONS: dict[str, Callable[[Path], Any]] = {
    "a bit in the weights": lambda c: flip(c / "state" / "model.safetensors"),
    "a bit in the optimiser": lambda c: flip(c / "state" / "optimizer.bin"),
    "weights cut short": lambda c: truncate(c / "state" / "model.safetensors"),
    "optimiser cut short": lambda c: truncate(c / "state" / "optimizer.bin"),
    "no random state": lambda c: (c / "state" / "random_states_0.pkl").unlink(),
    "an empty trainer.json": lambda c: (c / "trainer.json").write_text(""),
    "another step in trainer.json": lambda c: (c / "trainer.json").write_text(
        (c / "trainer.json").read_text().replace('"step": 10', '"step": 11')
    ),
    "a bit in the drafter": lambda c: flip(next((c / "drafter").glob("*.safetensors"))),
    "no config": lambda c: (c / "config.yaml").unlink(),
    "a garbled table of checksums": lambda c: flip(c / "checksums.json"),
    "no table of checksums": lambda c: (c / "checksums.json").unlink(),
    "a file that does not belong there": lambda c: (
        c / "state" / "model-2.safetensors"
    ).write_bytes(b"0"),
}


def test_every_corruption_is_found_and_the_checkpoint_before_is_used(
    tmp_path: Path, saved_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path, saved_tiny, max_steps=10)
    train(config)
    run, sound = tmp_path / "run", tmp_path / "sound"
    # What a user writes next to the drafter, such as a report, does it no harm.
    Path(run, "last", "report.json").write_text("{}")
    resolved = parse(MedusaRun, ["--config", str(run / "config.yaml")], "x")
    shutil.copytree(run / "checkpoints", sound)
    assert find_resume(RunFolder(str(run)), resolved) == 10
    for name, corrupt in CORRUPTIONS.items():
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(sound, run / "checkpoints")
        corrupt(run / "checkpoints" / "step-000010")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert find_resume(RunFolder(str(run)), resolved) == 5, name
        assert "step-000010 is damaged" in caplog.text, name
    flip(run / "checkpoints" / "step-000005" / "state" / "model.safetensors")
    with pytest.raises(UserError, match="holds no sound checkpoint"):
        find_resume(RunFolder(str(run)), resolved)


def test_checkpoint_older_than_an_option_resumes_with_default(
    tmp_path: Path, saved_tiny: Path
) -> None:
    config = make_config(tmp_path, saved_tiny, max_steps=5)
    train(config)
    now = parse(MedusaRun, ["--config", str(config)], "x")
    at = tmp_path / "run" / "checkpoints" / "step-000005"
    older = yaml.safe_load(now.as_yaml())
    del older["optim"]["betas"], older["data"]["chat_template_kwargs"]
    (at / "config.yaml").write_text(yaml.safe_dump(older))
    (at / CHECKSUMS).unlink()
    write_checksums(at)
    folder = RunFolder(str(tmp_path / "run"))
    assert find_resume(folder, now) == 5
    moved = replace(now.target, path=str(tmp_path / "elsewhere"))
    assert find_resume(folder, replace(now, target=moved)) == 5, "weights are compared, not paths"
    with pytest.raises(UserError, match="optim.clip_norm was .*, now it is 0.5"):
        find_resume(folder, replace(now, optim=replace(now.optim, clip_norm=0.5)))


@pytest.mark.full
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(
    tmp_path: Path, saved_tiny: Path
) -> None:
    whole = undisturbed(tmp_path / "whole", saved_tiny)
    config = make_config(tmp_path, saved_tiny)
    disturb(command_of(config), 12, signal.SIGKILL)
    flip(tmp_path / "run" / "checkpoints" / "step-000010" / "state" / "optimizer.bin")
    done = train(config)
    assert (
        "step-000010 is damaged: state/optimizer.bin has changed" in done.stderr
        and "continuing from step 5" in done.stderr
    )
    (aside,) = (tmp_path / "run" / "checkpoints").glob("damaged-step-000010-*")
    assert (aside / "drafter").is_dir(), "a damaged checkpoint is put out of the way, not deleted"
    found = weights(tmp_path / "run", 20)
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def test_missing_best_checkpoint_is_reported_and_replaced_by_next(
    tmp_path: Path, saved_tiny: Path
) -> None:
    config = make_config(tmp_path, saved_tiny, max_steps=10)
    train(config)
    at = tmp_path / "run" / "checkpoints" / "step-000005"
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000010")
    facts = json.loads((at / "trainer.json").read_text())
    (at / "trainer.json").write_text(json.dumps(facts | {"best_step": 3, "best_tau": 99.0}))
    (at / CHECKSUMS).unlink()
    write_checksums(at)
    done = train(config)
    assert "the best checkpoint so far, step 3, was deleted" in done.stderr
    assert (tmp_path / "run" / "best").resolve().parent.name == "step-000010"


@pytest.mark.full
def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path: Path, saved_tiny: Path) -> None:
    """A limit on file sizes simulates the disk: only the optimiser's file is too large."""
    whole = undisturbed(tmp_path / "whole", saved_tiny)
    config = make_config(tmp_path, saved_tiny)
    disturb(command_of(config), 7, signal.SIGKILL)
    size = (
        (tmp_path / "run" / "checkpoints" / "step-000005" / "state" / "optimizer.bin")
        .stat()
        .st_size
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, size - 1000))

    cold = [sys.executable, *command_of(config)[1:]]  # the limit is this process's own
    done = subprocess.run(cold, env=environment(), capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].startswith(
        "error: cannot write"
    ), done.stderr[-2000:]
    folder = RunFolder(str(tmp_path / "run"))
    assert (
        folder.steps() == [5]
        and find_resume(
            folder, parse(MedusaRun, ["--config", str(folder.path / "config.yaml")], "x")
        )
        == 5
    )
    assert resumed_at(train(config)) == 5
    found = weights(tmp_path / "run", 20)
    assert all(torch.equal(whole[name], found[name]) for name in whole)


@pytest.mark.full
def test_the_number_of_ranks_may_change_on_resume(tmp_path: Path, saved_tiny: Path) -> None:
    """Two ranks with two passes each, then one with four: equal curves but for rounding."""
    undisturbed(tmp_path / "whole", saved_tiny, 2, rows_per_step=4)
    config = make_config(tmp_path, saved_tiny, rows_per_step=4)
    disturb(command_of(config, ranks=2), 7, signal.SIGTERM, rank=0)
    done = train(config)
    assert "continuing with 1 ranks instead of 2" in done.stderr and resumed_at(done) >= 7
    one, other = curve(tmp_path / "whole"), curve(tmp_path)
    assert one.keys() == other.keys() == set(range(1, 21))
    for step in one:
        assert one[step] == pytest.approx(other[step], abs=1e-5), step


def test_the_rows_of_a_step_may_not_change_on_resume(tmp_path: Path, saved_tiny: Path) -> None:
    config = make_config(tmp_path, saved_tiny, rows_per_step=4, max_steps=2)
    train(config)
    done = launch("-m", "draftsmith.train", "medusa", "--config", config, "--rows-per-step", "6")
    assert done.returncode != 0 and "rows_per_step was 4, now it is 6" in done.stderr


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path, saved_tiny: Path) -> None:
    """One batch of the run has it: only its step is skipped."""
    script = tmp_path / "poisoned.py"
    script.write_text(
        "import sys\n"
        "from draftsmith.train.data import features\n"
        "plain = features.LiveTarget.features\n"
        "def poisoned(self, batch):\n"
        "    found = plain(self, batch)\n"
        "    if 24 in batch.numbers:\n"
        "        found.last[:] = float('nan')\n"
        "    return found\n"
        "features.LiveTarget.features = poisoned\n"
        "from draftsmith.commands.cli import train_main\n"
        "train_main(sys.argv[1:])\n"
    )
    config = make_config(tmp_path, saved_tiny)
    command = [PYTHON, str(script), "medusa", "--config", str(config)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (
        done.returncode == 0
        and "the gradient is not finite at step 13: skipped (1 so far)" in done.stderr
    ), done.stderr[-2000:]
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "loss" in row] == [
        step for step in range(1, 21) if step != 13
    ]
    assert rows[-2]["skipped"] == 1 and logged(done.stdout, "tau_measured")[20] >= 1
    strict = "from draftsmith.train import loop\nloop.MAX_SKIPPED = 0\n"
    script.write_text(strict + script.read_text())
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "strict")],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2 and "the gradient is not finite at step 13, 1 in a row" in done.stderr
    )
