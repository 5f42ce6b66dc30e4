"""The launched loop: two ranks and one, kill and resume, warm start, bf16, trackers."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from draftsmith.command_line.parse import config_with
from draftsmith.commands.threads import stored_threads
from draftsmith.heads.errors import UserError
from draftsmith.train.data.config import Evaluation
from draftsmith.train.loop import check_before_loading
from draftsmith.train.methods.registry import METHODS as TRAINED
from draftsmith.train.methods.registry import method_named
from tests.conftest import PYTHON, ROOT, edit_config, tiny_target
from tests.helpers.rows import chat, write
from tests.helpers.training import (
    LAUNCH,
    METHODS,
    environment,
    launch,
    logged,
    make_config,
    resumed_at,
    train,
    weights,
)

RANKS_SCRIPT = Path(__file__).with_name("ranks_script.py")


def test_every_method_goes_through_the_tests_of_the_loop() -> None:
    assert {name.rstrip("1") for name in METHODS} == set(TRAINED)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "blank"),
    [
        *((method, []) for method in METHODS),
        ("medusa", [1]),
        ("eagle", [1]),
        ("dspark", [1]),
        pytest.param("distill", [1], marks=pytest.mark.full),
    ],
)
def test_gradients_of_two_ranks_equal_those_of_one(
    tmp_path: Path, saved_tiny: Path, method: str, blank: list[int]
) -> None:
    """One step, unequal token counts, gradients within 1e-6 relative; EAGLE-1's noise included.
    With `blank` the second rank has no replies in its first forward pass, and the other does not
    wait for it."""
    config = make_config(tmp_path, saved_tiny, method)
    results = []
    for ranks in (1, 2):
        out = tmp_path / f"gradients-{ranks}.safetensors"
        done = launch(RANKS_SCRIPT, method.rstrip("1"), config, out, *blank, ranks=ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(load_file(out))
    one, two = results
    assert float(one.pop("tokens")) == float(two.pop("tokens")) > 0
    for name in one:
        difference = (one[name] - two[name]).norm() / one[name].norm()
        assert float(difference) < 1e-6, f"{name}: {difference}"


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    ["eagle", *(pytest.param(m, marks=pytest.mark.full) for m in METHODS if m != "eagle")],
)
def test_a_step_is_the_same_however_it_is_divided(
    tmp_path: Path, saved_tiny: Path, method: str
) -> None:
    """Four rows a step: four passes, one pass, two ranks with two passes each, and one rank after
    ten steps of two; losses of 20 steps within 1e-5."""
    curves = []
    for ranks, rows in ((1, 1), (1, 4), (2, 1)):
        folder = tmp_path / f"{ranks}-{rows}"
        folder.mkdir()
        config = make_config(folder, saved_tiny, method, rows_per_step=4, batch_rows=rows)
        done = train(config, ranks=ranks, method=method)
        curves.append(losses(folder / "run"))
        assert logged(done.stdout, "tau_measured").keys() == {10, 20}
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000020")
    done = train(config, method=method)
    assert "continuing with 1 ranks instead of 2" in done.stderr
    curves.append(losses(folder / "run"))
    first, *others = curves
    for other in others:
        assert first.keys() == other.keys() == set(range(1, 21))
        for step in first:
            assert other[step] == pytest.approx(first[step], rel=1e-5, abs=1e-5), step


def losses(run: Path) -> dict[int, float]:
    """Return the loss of every step of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def kill_at(config: Path, step: int, ranks: int, method: str, timeout: float = 120) -> None:
    """Start a run and `kill -9` all its processes as soon as the line of `step` is printed."""
    command = [PYTHON, "-m", "draftsmith.train", method.rstrip("1"), "--config", str(config)]
    if ranks > 1:  # the launcher is a process of its own, so that its family can be found
        many = ["--multi_gpu", "--num_processes", str(ranks)]
        command[:2] = [sys.executable, "-m", "accelerate.commands.launch", *LAUNCH, *many, "-m"]
    process = subprocess.Popen(
        command,
        env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    started = time.monotonic()
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            family = [
                *psutil.Process(process.pid).children(recursive=True),
                psutil.Process(process.pid),
            ]
            for member in family:  # a launcher's ranks have sessions of their own
                member.kill()
            psutil.wait_procs(family[:-1], 20)
            break
        assert time.monotonic() - started < timeout
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("steps", "ranks", "method"),
    [
        ([7], 1, "medusa"),
        pytest.param([3, 9, 12, 17], 1, "medusa", marks=pytest.mark.full),
        pytest.param([7], 2, "medusa", marks=pytest.mark.full),
        pytest.param([7], 1, "eagle", marks=pytest.mark.full),
        pytest.param([7, 13], 2, "eagle1", marks=pytest.mark.full),
        pytest.param([7, 13], 1, "mtp", marks=pytest.mark.full),
        pytest.param([7], 2, "mtp", marks=pytest.mark.full),
        pytest.param([7], 1, "dspark", marks=pytest.mark.full),
        pytest.param([7], 2, "dflash", marks=pytest.mark.full),
        pytest.param([7], 1, "distill", marks=pytest.mark.full),
        pytest.param([4, 13], 2, "distill", marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed_weights_are_bit_identical(
    tmp_path: Path, saved_tiny: Path, steps: list[int], ranks: int, method: str
) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    train(make_config(whole, saved_tiny, method), ranks=ranks, method=method)
    broken = tmp_path / "broken"
    broken.mkdir()
    config = make_config(broken, saved_tiny, method)
    for step in steps:
        kill_at(config, step, ranks, method)
    done = train(config, ranks=ranks, method=method)
    assert resumed_at(done) >= steps[-1] // 5 * 5 > 0 or steps == [4]
    one, other = weights(whole / "run", 20), weights(broken / "run", 20)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert (broken / "run" / "best").resolve().is_dir()
    assert not list((broken / "run" / "checkpoints").glob(".*partial"))


def test_a_resume_under_another_config_is_refused_and_nothing_is_touched(
    tmp_path: Path, saved_tiny: Path
) -> None:
    config = make_config(tmp_path, saved_tiny, max_steps=5)
    train(config)
    before = sorted(p.name for p in (tmp_path / "run").rglob("*"))
    done = launch("-m", "draftsmith.train", "medusa", "--config", config, "--optim.lr", "0.5")
    assert done.returncode != 0 and "optim.lr was 0.001, now it is 0.5" in done.stderr
    assert sorted(p.name for p in (tmp_path / "run").rglob("*")) == before


def test_a_resume_with_another_target_or_other_data_at_the_same_path_is_refused(
    tmp_path: Path, saved_tiny: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(saved_tiny, target)
    config = make_config(tmp_path, target, max_steps=5)
    train(config)
    # The same weights under another path are the same target.
    shutil.copytree(target, tmp_path / "copy")
    train(config, "--target", tmp_path / "copy")
    write(tmp_path / "held.jsonl", [chat("new", "rows of another kind here")])
    done = launch("-m", "draftsmith.train", "medusa", "--config", config)
    assert done.returncode != 0 and "whose data has changed" in done.stderr
    shutil.copyfile(target / "config.json", tmp_path / "config.json")
    edit_config(target)
    done = launch("-m", "draftsmith.train", "medusa", "--config", config)
    said = [line for line in done.stderr.splitlines() if "configuration has changed" in line]
    assert done.returncode != 0 and len(said) == 1
    assert said[0].endswith(
        "whose target's configuration has changed since (rms_norm_eps was 1e-06, is 0.01; "
        "rope_parameters.rope_theta was 10000.0, is 500000.0); change it back, or choose another "
        "output"
    )
    shutil.copyfile(tmp_path / "config.json", target / "config.json")
    other = tiny_target(seed=9)
    other.model.save_pretrained(target)
    done = launch("-m", "draftsmith.train", "medusa", "--config", config)
    assert done.returncode != 0 and "whose target has other weights" in done.stderr


def test_a_run_names_its_engine_first_and_warns_of_one_that_it_does_not_have(
    tmp_path: Path, saved_tiny: Path
) -> None:
    """Two ranks on CPUs, with a config of accelerate's that asks for DeepSpeed: DDP, as ever."""
    config = make_config(tmp_path, saved_tiny, max_steps=1)
    asked = ROOT / "configs" / "accelerate" / "zero3.yaml"
    options = ["--config_file", str(asked), "--num_processes", "2", "--main_process_port", "0"]
    done = subprocess.run(
        [
            *(PYTHON, "-m", "accelerate.commands.launch", *options),
            *("-m", "draftsmith.train", "medusa", "--config", str(config)),
        ],
        env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stderr.splitlines() if "engine" in line or "asked for" in line]
    assert said[0] == "engine: DDP, 2 processes on cpu"
    assert [line for line in said if "accelerate was asked for DEEPSPEED" in line] == [said[1]]
    assert done.stderr.index(said[0]) < done.stderr.index("data: ")


def test_a_run_without_any_round_has_a_best_drafter_and_ends(
    tmp_path: Path, saved_tiny: Path
) -> None:
    """Every token ends a reply, so that no reply has a round: tau is NaN at every evaluation."""
    target = tmp_path / "target"
    shutil.copytree(saved_tiny, target)
    file = target / "generation_config.json"
    every_token = list(range(tiny_target().vocab_size))
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": every_token}))
    evaluation = {"every": 1, "limit": 2, "max_new_tokens": 4, "tree_nodes": 4}
    config = make_config(tmp_path, target, max_steps=2, evaluation=evaluation)
    for name in ("train", "held"):  # of messages, no more than the first token would be learned
        write(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i} with words"} for i in range(8)])
    done = train(config)
    assert "step 1/2  tau nan on held-out prompts  best so far" in done.stdout
    assert "step 2/2  tau nan on held-out prompts  best 0.00 at step 1" in done.stdout
    assert (tmp_path / "run" / "best" / "draftsmith.json").is_file()
    with pytest.raises(UserError, match="evaluation.max_new_tokens must be at least 2"):
        Evaluation(max_new_tokens=1)
    *_, advice, command = done.stdout.splitlines()
    assert "quote tau from other prompts" in advice
    assert command.startswith(f"next: draftsmith evaluate --target {target} --drafter")


def test_plain_text_is_enough_to_train_on(tmp_path: Path, saved_tiny: Path) -> None:
    config = make_config(tmp_path, saved_tiny, max_steps=2)
    write(
        tmp_path / "train.jsonl",
        [{"text": f"the the then {i} hello there, how are you " * 2} for i in range(40)],
    )
    write(
        tmp_path / "held.jsonl",
        [{"text": f"you are fine {i}, thank you, I am too " * 2} for i in range(4)],
    )
    assert logged(train(config).stdout, "tau_measured")[2] >= 1


@pytest.mark.full
@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle1", "dspark", "distill"])
def test_warm_start_continues_at_the_measured_tau_of_its_artifact(
    tmp_path: Path, saved_tiny: Path, method: str
) -> None:
    """An EAGLE drafter brings its taps and vocabulary along, a block drafter its shape, a draft
    model its size: the second config names none of them."""
    first = train(make_config(tmp_path, saved_tiny, method, max_steps=20), method=method)
    best = (tmp_path / "run" / "best").resolve()
    tau = logged(first.stdout, "tau_measured")[int(best.parent.name.removeprefix("step-"))]
    none: dict[str, Any] = {"heads": {}}
    kept = {"eagle": none, "eagle1": none, "dspark": none, "distill": {"draft_model": {}}}.get(
        method, {}
    )
    config = make_config(
        tmp_path,
        saved_tiny,
        method,
        out=str(tmp_path / "second"),
        max_steps=1,
        init_from=str(best),
        **kept,
    )
    second = train(config, "--optim.lr", "1e-9", method=method)
    assert logged(second.stdout, "tau_measured")[1] == pytest.approx(tau)
    (before,), (after,) = (
        list(folder.glob("*.safetensors")) for folder in (best, tmp_path / "second" / "best")
    )
    one, other = load_file(before), load_file(after)
    for name in one:  # on the tiny target tau hardly rises above 1, so the weights have to say it
        torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=1e-6)


@pytest.mark.full
def test_a_warm_start_says_what_it_will_not_change_and_what_has_changed(
    tmp_path: Path, saved_tiny: Path
) -> None:
    train(make_config(tmp_path, saved_tiny, "eagle", max_steps=3), method="eagle")
    best = str(tmp_path / "run" / "best")
    noted = json.loads(Path(best, "draftsmith.json").read_text())["provenance"]["data"]
    assert 0 < noted["vocabulary_coverage"] <= 1, "it drafts 80 of the target's tokens"
    more = {"out": str(tmp_path / "second"), "max_steps": 2, "init_from": best}
    config = make_config(tmp_path, saved_tiny, "eagle", **more)
    done = launch("-m", "draftsmith.train", "eagle", "--config", config, "--heads.taps", "[1]")
    remedy = "has taps [0, 1], heads.taps says [1]; set heads.taps to null, which takes"
    assert done.returncode != 0 and remedy in done.stderr
    medusa = method_named("medusa")
    run = config_with(
        medusa.run_class, str(make_config(tmp_path, saved_tiny, "medusa", **more)), []
    )
    with pytest.raises(UserError, match="is a drafter of method eagle; this run trains medusa"):
        check_before_loading(run, medusa)

    tuned = tmp_path / "tuned"
    other = tiny_target(seed=9)
    other.model.save_pretrained(tuned)
    other.tokenizer.save_pretrained(tuned)
    config = make_config(tmp_path, tuned, "eagle", **more)
    done = launch("-m", "draftsmith.train", "eagle", "--config", config)
    assert (
        done.returncode != 0 and "differs in weights" in done.stderr and "--retarget" in done.stderr
    )
    done = train(config, "--retarget", "true", method="eagle")
    assert "differs in weights; training it for this target" in done.stderr
    wide = tmp_path / "wide"
    another = tiny_target(hidden_size=64)
    another.model.save_pretrained(wide)
    another.tokenizer.save_pretrained(wide)
    config = make_config(tmp_path, wide, "eagle", **(more | {"out": str(tmp_path / "third")}))
    done = launch("-m", "draftsmith.train", "eagle", "--config", config, "--retarget", "true")
    assert (
        done.returncode != 0
        and "hidden_size is 32 in the drafter and 64 in the target" in done.stderr
    )


def test_only_the_newest_and_the_best_checkpoints_are_kept(
    tmp_path: Path, saved_tiny: Path
) -> None:
    train(make_config(tmp_path, saved_tiny, checkpoints={"every": 2, "keep": 2}))
    kept = sorted(
        int(p.name.removeprefix("step-")) for p in (tmp_path / "run" / "checkpoints").iterdir()
    )
    best = json.loads(
        (tmp_path / "run" / "checkpoints" / "step-000020" / "trainer.json").read_text()
    )["best_step"]
    assert kept == sorted({18, 20, best})
    files = {p.name for p in (tmp_path / "run" / "checkpoints" / "step-000020").iterdir()}
    assert files == {
        "state",
        "drafter",
        "trainer.json",
        "config.yaml",
        "provenance.json",
        "checksums.json",
    }
    # the number that a resumed run takes
    assert stored_threads(SimpleNamespace(out=str(tmp_path / "run"))) == 1


@pytest.mark.parametrize("method", ["medusa", pytest.param("eagle", marks=pytest.mark.full)])
def test_bf16_keeps_fp32_masters(tmp_path: Path, saved_tiny: Path, method: str) -> None:
    done = train(
        make_config(tmp_path, saved_tiny, method, precision="bf16"),
        "--optim.lr",
        "3e-3",
        method=method,
    )
    state = load_file(
        tmp_path / "run" / "checkpoints" / "step-000020" / "state" / "model.safetensors"
    )
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float32}
    # an update below half a bf16 ulp at 1.0 would freeze every norm
    for name, weight in state.items():
        assert "norm" not in name or not torch.equal(weight, torch.ones_like(weight)), name
    losses = list(logged(done.stdout, "loss").values())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    exact = train(
        make_config(tmp_path, saved_tiny, method, out=str(tmp_path / "exact")),
        "--optim.lr",
        "3e-3",
        method=method,
    )
    differences = [
        abs(a - b) for a, b in zip(losses, logged(exact.stdout, "loss").values(), strict=True)
    ]
    assert 1e-4 < max(differences) < 0.1, "autocast shows in the losses"


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_target_in_bf16_teaches_heads_in_fp32(
    tmp_path: Path, saved_tiny: Path, precision: str, shared: bool
) -> None:
    config = make_config(
        tmp_path,
        saved_tiny,
        precision=precision,
        max_steps=3,
        heads={"num_heads": 3, "shared_head": shared},
    )
    done = train(config, "--target.dtype", "bfloat16")
    assert logged(done.stdout, "tau_measured")[3] >= 1


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_trackers_work_offline(tmp_path: Path, saved_tiny: Path, tracker: str) -> None:
    more: dict[str, Any] = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
    }
    train(make_config(tmp_path, saved_tiny, tracker=tracker, max_steps=2), **more)
    pattern = "**/offline-run-*" if tracker == "wandb" else "**/events.out.tfevents*"
    assert list(tmp_path.glob(pattern))


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, saved_tiny: Path) -> None:
    config = make_config(tmp_path, saved_tiny, optim={"lr": 1e30, "clip_norm": 1e30})
    done = launch("-m", "draftsmith.train", "medusa", "--config", config)
    assert done.returncode != 0 and "the gradient is not finite at step" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "method",
    ["eagle", *(pytest.param(name, marks=pytest.mark.full) for name in ("medusa", "distill"))],
)
def test_an_evaluation_like_an_engines_is_estimated_as_it_is_measured(
    method: str, tmp_path: Path, saved_tiny: Path
) -> None:
    """Chains on replies at a temperature: replay counts the rounds of decoding, and the replies are
    other ones than the greedy."""
    said = {}
    for name, temperature in (("greedy", 0.0), ("sampled", 0.9)):
        evaluation = {
            "every": 10, "limit": 8, "max_new_tokens": 16, "tree_nodes": 0,
            "temperature": temperature,
        }  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        config = make_config(folder, saved_tiny, method, evaluation=evaluation, max_steps=10)
        output = train(config, method=method).stderr
        assert "differ by more than chance" not in output and "differ from" not in output
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        (row,) = [row for row in map(json.loads, lines) if "tau_measured" in row]
        assert row["tau_estimated"] == row["tau_measured"] >= 1
        said[name] = row
    if method != "eagle":  # which has learned nothing yet
        assert said["greedy"] != said["sampled"]
