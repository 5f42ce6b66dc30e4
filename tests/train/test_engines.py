"""FSDP2 and DeepSpeed ZeRO on two CPU ranks against one process: curves, artifacts, resume."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

from draftsmith.heads.artifact import Artifact
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.target import load_target
from draftsmith.train.checkpoint import RunFolder
from tests.conftest import PYTHON, ROOT
from tests.helpers.faults import curve, disturb
from tests.helpers.training import METHODS, environment, make_config, resumed_at, train, weights

SCRIPT = ROOT / "scripts" / "bench" / "engine_rank.py"
ENGINES = {"fsdp2": "fsdp2", "zero2": "deepspeed-zero2", "zero3": "deepspeed-zero3"}
FULL = [
    ("eagle", "fsdp2"),
    ("eagle", "zero2"),
    ("eagle", "zero3"),
    ("dflash", "fsdp2"),  # with Muon, which DeepSpeed refuses
    ("dspark", "fsdp2"),
    ("dspark", "zero2"),
    ("dspark", "zero3"),
] + [
    (method, engine)
    for method in ("medusa", "distill", "eagle1", "mtp")
    for engine in ("fsdp2", "zero2", "zero3")
    if (method, engine) != ("medusa", "fsdp2")
]


def engine_config(engine: str, folder: Path, target: Path, method: str, **changes: Any) -> Path:
    """A run as `make_config` writes it, but for Muon, EAGLE's default, which DeepSpeed refuses."""
    if engine.startswith("zero"):
        changes["optim"] = {**METHODS[method].get("optim", {}), "optimizer": "adamw"}
    return make_config(folder, target, method, **changes)


def command(engine: str, method: str, config: Path, python: str = sys.executable) -> list[str]:
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return [*launcher, str(SCRIPT), engine, method.rstrip("1"), "--config", str(config)]


def train_under(
    engine: str, method: str, config: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(engine, method, config, PYTHON), *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize(
    ("method", "engine", "steps"),
    [
        ("medusa", "fsdp2", 20),
        *(pytest.param(*case, 20, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_the_loss_curve_is_that_of_one_process(
    tmp_path: Path, saved_tiny: Path, method: str, engine: str, steps: int
) -> None:
    """Steps with clipping, accumulation and unequal token counts, within 1e-4; the artifact
    loads and weighs the same."""
    for name in ("one", engine):
        (tmp_path / name).mkdir()
        config = engine_config(
            engine, tmp_path / name, saved_tiny, method, rows_per_step=4, max_steps=steps
        )
        if name == "one":
            train(config, method=method)
        else:
            # Ranks then have unequal numbers of chunks, and ZeRO-3 gathers weights for each.
            done = train_under(engine, method, config, "--objective.rows-per-chunk", "32")
            assert done.returncode == 0, done.stderr[-3000:]
    assert RunFolder(str(tmp_path / engine / "run")).state_of(steps).engine == ENGINES[engine], (
        "it ran under another engine"
    )
    assert_shared(tmp_path / engine / "run" / "checkpoints" / f"step-{steps:06d}" / "state")
    one, other = curve(tmp_path / "one"), curve(tmp_path / engine)
    limit = METHODS[method].get("optim", {}).get("clip_norm", 1.0)
    assert max(norm for _, norm in one.values()) > limit, "clipping is at work"
    assert one.keys() == other.keys() == set(range(1, steps + 1))
    for step in one:
        assert one[step] == pytest.approx(other[step], abs=1e-4), step
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    loaded = Artifact.load(
        tmp_path / engine / "run" / "last", target.fingerprint(), target.embedding_and_head
    )
    assert loaded.calibration
    mine, theirs = (
        weights(tmp_path / "one" / "run", steps),
        weights(tmp_path / engine / "run", steps),
    )
    assert mine.keys() == theirs.keys()
    # Muon brings small singular values of a gradient to the size of the large ones, and
    # with them what is only rounding.
    muon = METHODS[method].get("optim", {}).get("optimizer") == "muon"
    for name in mine:
        torch.testing.assert_close(mine[name], theirs[name], atol=1e-3 if muon else 1e-4, rtol=1e-3)


def assert_shared(state: Path) -> None:
    """Both ranks have written optimiser states, about as many."""
    files = [*state.rglob("*zero_pp_rank_*optim_states.pt"), *state.glob("optimizer*/__*_0.distcp")]
    sizes = sorted(path.stat().st_size for path in files)
    assert len(sizes) == 2 and sizes[0] > 0.5 * sizes[1] > 0, [path.name for path in files]


@pytest.mark.full
@pytest.mark.parametrize("engine", ["fsdp2", "zero2"])
def test_bf16_is_autocast_under_engines_too(tmp_path: Path, saved_tiny: Path, engine: str) -> None:
    curves = []
    for name, options in (
        ("bf16", ["--precision", "bf16"]),
        ("fp32", []),
        (engine, ["--precision", "bf16"]),
    ):
        (tmp_path / name).mkdir()
        config = engine_config(engine, tmp_path / name, saved_tiny, "eagle", rows_per_step=4)
        if name == engine:
            assert train_under(engine, "eagle", config, *options).returncode == 0
        else:
            train(config, *options, method="eagle")
        curves.append(curve(tmp_path / name))
    apart = [
        max(abs(curves[0][step][0] - other[step][0]) for step in other) for other in curves[1:]
    ]
    assert apart[1] < 2e-3 < apart[0], apart


@pytest.mark.full
def test_fsdp2_run_resumes_with_another_number_of_ranks(tmp_path: Path, saved_tiny: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        config = make_config(tmp_path / name, saved_tiny, "eagle")
        if name == "parts":
            disturb(command("fsdp2", "eagle", config), 7, signal.SIGTERM, rank=1)
            alone = [part if part != "2" else "1" for part in command("fsdp2", "eagle", config)]
            done = subprocess.run(
                alone, env=environment(), capture_output=True, text=True, timeout=240
            )
            assert done.returncode == 0 and resumed_at(done) >= 7, done.stderr[-2000:]
        else:
            assert train_under("fsdp2", "eagle", config).returncode == 0
    one, other = curve(tmp_path / "whole"), curve(tmp_path / "parts")
    assert all(one[step] == pytest.approx(other[step], abs=1e-4) for step in one)


@pytest.mark.full
@pytest.mark.parametrize("engine", list(ENGINES))
def test_stopped_and_resumed_is_bit_identical(
    tmp_path: Path, saved_tiny: Path, engine: str
) -> None:
    """After SIGTERM to one rank both save the same step; the resumed run equals an uninterrupted
    one."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        config = engine_config(engine, tmp_path / name, saved_tiny, "eagle")
        if name == "parts":
            code, _, errors = disturb(command(engine, "eagle", config), 7, signal.SIGTERM, rank=1)
            assert code == 1 and "asked to stop: saved step" in errors, errors[-2000:]
        done = train_under(engine, "eagle", config)
        assert done.returncode == 0, done.stderr[-3000:]
        assert resumed_at(done) >= (7 if name == "parts" else 0)
    assert RunFolder(str(tmp_path / "parts" / "run")).state_of(20).engine == ENGINES[engine]
    one, other = weights(tmp_path / "whole" / "run", 20), weights(tmp_path / "parts" / "run", 20)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_resume_under_another_engine_is_refused(tmp_path: Path, saved_tiny: Path) -> None:
    config = make_config(tmp_path, saved_tiny, "medusa", max_steps=2, rows_per_step=4)
    train(config)
    done = train_under("fsdp2", "medusa", config)
    assert (
        done.returncode != 0 and "was trained under replicated, this launch is fsdp2" in done.stderr
    )


@pytest.mark.full
@pytest.mark.parametrize("engine", list(ENGINES))
def test_a_step_that_is_not_finite_is_skipped_under_each(
    tmp_path: Path, saved_tiny: Path, engine: str
) -> None:
    """DeepSpeed steps within its backward pass, and has to skip the step itself."""
    script = tmp_path / "poisoned.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "from draftsmith.train.data import features\n"
        "plain = features.LiveTarget.features\n"
        "def poisoned(self, batch):\n"
        "    found = plain(self, batch)\n"
        "    if 24 in batch.numbers:\n"
        "        found.taps[0][:] = float('nan')\n"
        "    return found\n"
        "features.LiveTarget.features = poisoned\n"
        "import engine_rank\n"
        "engine_rank.main()\n"
    )
    config = engine_config(engine, tmp_path, saved_tiny, "eagle", rows_per_step=4)
    poisoned = [
        str(script) if part == str(SCRIPT) else part for part in command(engine, "eagle", config)
    ]
    done = subprocess.run(poisoned, env=environment(), capture_output=True, text=True, timeout=240)
    assert (
        done.returncode == 0
        and "the gradient is not finite at step 7: skipped (1 so far)" in done.stderr
    ), done.stderr[-2000:]
    assert curve(tmp_path).keys() == set(range(1, 21)) - {7}


@pytest.mark.full
def test_deepspeed_refuses_other_ranks_on_resume(tmp_path: Path, saved_tiny: Path) -> None:
    config = engine_config("zero2", tmp_path, saved_tiny, "eagle", max_steps=2)
    assert train_under("zero2", "eagle", config).returncode == 0
    alone = [part if part != "2" else "1" for part in command("zero2", "eagle", config)]
    done = subprocess.run(alone, env=environment(), capture_output=True, text=True, timeout=240)
    assert (
        done.returncode != 0
        and "was trained by 2 ranks, and DeepSpeed's checkpoints cannot be read by 1" in done.stderr
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem
)
def test_accelerate_configs_are_read_by_accelerate(path: Path) -> None:
    config: Any = load_config_from_file(str(path))
    kinds = {"fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    assert str(config.distributed_type).endswith(kinds.get(path.stem, "MULTI_GPU"))
    assert config.num_machines == (2 if path.stem == "multi-node" else 1)
    if path.stem == "fsdp2":
        tried = {
            name.lower().replace("_policy", "_policy"): value
            for name, value in runpy.run_path(str(SCRIPT))["FSDP2"].items()
        }
        # what the tests run under is what users launch with
        for name, value in config.fsdp_config.items():
            assert str(tried.get(name, value)).lower() == str(value).lower(), name
    if path.stem.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
