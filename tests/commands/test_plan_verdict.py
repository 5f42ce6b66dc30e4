"""The first line of a plan by hand: fits or not, GPUs, hours, disk, price; known targets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftsmith.commands import plan
from draftsmith.commands.plan import MemoryNeed, PlanOptions, fit, verdict
from draftsmith.heads.errors import UserError
from draftsmith.train import estimate
from draftsmith.train.data.config import FeatureOptions
from draftsmith.train.estimate import StepMemory
from tests.conftest import ROOT

GB = 10**9
# 60 GB of target in 60 layers; 10 GB beside it: 3 of drafter and moments, 1 of features, 6 of step
MEMORY = StepMemory(60 * GB, 1 * GB, 2 * GB, 1 * GB, 1 * GB, 2 * GB, 4 * GB, 6 * GB)
NEED = MemoryNeed(MEMORY, 60, live=True, ends=GB)
ELSEWHERE = (
    "share the target between more GPUs (target.spread fsdp), or keep it elsewhere, 11.0 GB on each"
    " GPU then: on a server (features.server), or run before the training (data extract, "
    "features.store)."
)
CONFIG: Any = SimpleNamespace(
    features=FeatureOptions(),
    checkpoints=SimpleNamespace(keep=2),
    target=SimpleNamespace(spread="whole"),
)
PLAN = {
    "total_gpu_hours": 40.0, "checkpoint_bytes": 3e9, "feature_bytes": 5e12, "extractions": 2.0,
    "regenerate_gpu_hours": 16.0, "extract_gpu_hours": 4.0, "train_gpu_hours": 16.0,
}  # fmt: skip


def test_memory_per_gpu_with_shared_target_matches_hand_count() -> None:
    """Two layers of 1 GB are gathered beside the share."""
    assert NEED.each(1) == 70 * GB
    assert NEED.each(2) == (10 + 30 + 2) * GB and NEED.each(8) == (10 + 7.5 + 2) * GB
    stored = MemoryNeed(MEMORY, 60, live=False)
    assert stored.each(8) == stored.each(1) == 70 * GB


@pytest.mark.parametrize(
    ("gpus", "gb", "spread", "says"),
    [
        (1, 80, "whole", "fits 80 GB: 70.0 GB on each GPU at the peak of a step."),
        (
            1,
            48,
            "whole",
            "does not fit 48 GB (70.0 GB on each GPU at the peak of a step); set "
            f"objective.recompute, lower batch_rows or data.max_length, {ELSEWHERE}",
        ),
        (8, 48, "fsdp", "fits 8 GPUs of 48 GB (target.spread fsdp): 19.5 GB"),
        (2, 30, "fsdp", "does not fit 2 GPUs of 30 GB (42.0 GB on each GPU at the peak"),
    ],
)
def test_verdict_states_fit_or_required_gpu_count(
    gpus: int, gb: float, spread: str, says: str
) -> None:
    assert says in fit(NEED, spread, gpus, gb)


def test_oversized_step_without_target_suggests_smaller_batches() -> None:
    memory = StepMemory(0, 0, 0, 0, 0, 0, 0, 900 * GB)
    said = fit(MemoryNeed(memory, 1, live=False), "whole", 1, 80)
    assert said.endswith("; set objective.recompute, lower batch_rows or data.max_length.")


def test_what_a_layer_needs_without_its_huge_target_is_stated() -> None:
    """Half a layer beside two gathered layers of 671B parameters."""
    memory = StepMemory(1342 * GB, 46 * GB, 0, 0, 0, 3 * GB, 18 * GB, 47 * GB)
    need = MemoryNeed(memory, 61, live=True, ends=4 * GB)
    said = fit(need, "fsdp", 64, 80)
    assert "keep it elsewhere, 97.0 GB on each GPU then" in said


def test_verdict_line_contains_hours_disk_and_price() -> None:
    """Three checkpoints of 3 GB; 40 GPU-hours at 2.5."""
    options = PlanOptions("x", gpus=8, price_per_gpu_hour=2.5)
    line, figures = verdict(NEED, PLAN, options, CONFIG)
    assert "training 24.0 GPU-hours, 3.0 hours on 8 x H100; replies 16.0 more, before it." in line
    assert "Disk: 9.0 GB (checkpoints; live features take none)." in line
    assert line.endswith("Price of all: 100.00 at 2.5 a GPU-hour.")
    assert figures["fits"] and figures["price"] == 100
    config: Any = SimpleNamespace(**{**vars(CONFIG), "features": FeatureOptions("s")})
    line, figures = verdict(NEED, PLAN, PlanOptions("x", gpus=8), config)
    assert "Disk: 5.0 TB (checkpoints and stored features)" in line and "Price" not in line
    assert figures["price"] is None and figures["disk_bytes"] == 9e9 + 5e12
    assert "training 16.0 GPU-hours, 2.0 hours on 8 x H100; replies 16.0 and features 8.0" in line


def test_a_target_on_a_server_is_not_spread() -> None:
    """Neither are its hours those of the training, nor its features on this disk."""
    config: Any = SimpleNamespace(
        **{
            **vars(CONFIG),
            "features": FeatureOptions(server="http://node1:8000/v1"),
            "target": SimpleNamespace(spread="fsdp"),
        }
    )
    line, _ = verdict(MemoryNeed(MEMORY, 60, live=False), PLAN, PlanOptions("x", gpus=8), config)
    assert line.startswith("fits 80 GB: 70.0 GB on each GPU at the peak of a step. ")
    assert "replies 16.0 more, before it; features 8.0 more, on their server." in line
    assert "Disk: 9.0 GB (checkpoints; features from a server take none)." in line


@pytest.mark.full
def test_a_known_target_needs_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Extraction of a live target counts in each of three epochs: 55.2 + 41.4 + 18.9."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = str(ROOT / "configs" / "eagle" / "qwen3-32b.yaml")
    plan.run(
        PlanOptions(
            config, tokens=3e8, target_shape="Qwen/Qwen3-32B", json=str(tmp_path / "plan.json")
        )
    )
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("fits 8 GPUs of 80 GB (target.spread fsdp): ")
    found = json.loads((tmp_path / "plan.json").read_text())
    hours = {
        name: found["plan"][f"{name}_gpu_hours"] for name in ("regenerate", "extract", "train")
    }
    assert found["plan"]["extractions"] == 3
    total = hours["regenerate"] + 3 * hours["extract"] + hours["train"]
    assert (
        found["plan"]["total_gpu_hours"] == pytest.approx(total) == pytest.approx(115.5, abs=0.05)
    )
    assert found["verdict"]["hours"] == pytest.approx((total - hours["regenerate"]) / 8)


def test_an_unknown_target_is_answered_with_the_nearest_and_the_list() -> None:
    with pytest.raises(UserError) as error:
        plan.run(PlanOptions("x", target_shape="qwen3-33b"))
    assert "did you mean qwen3-32b or" in str(error.value) and "gemma-3-1b-it" in str(error.value)
    assert all(name in str(error.value) for name in plan.known_targets())


def test_where_the_hub_fails_a_known_name_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*given: Any) -> Any:
        raise UserError("the hub cannot give it")

    monkeypatch.setattr(estimate, "run_sizes", nothing)
    with pytest.raises(UserError, match=r"--target-shape qwen3-32b"):
        plan.run(PlanOptions(str(ROOT / "configs" / "eagle" / "qwen3-32b.yaml")))
