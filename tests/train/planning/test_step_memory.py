"""Memory of a step without memory: by hand, and beside what autograd really holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig

from draftsmith.inference.targets.target import Target
from draftsmith.train.commands import plan
from draftsmith.train.commands.plan import Options
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.method import AnyMethod, method_named
from draftsmith.train.planning.step_memory import (
    DEVICE,
    KernelShapes,
    Tracker,
    full_batch,
    memory_of_step,
    step_of,
    without_memory,
)
from tests.conftest import tiny_target
from tests.helpers import mtp_models
from tests.helpers.architectures import GEMMA, HEADS
from tests.helpers.plans import run_of
from tests.helpers.training import make_config


def test_tracked_bytes_match_hand_computed_values() -> None:
    """1,000 numbers in fp32, twice them, and their sum; numbers of the host do not count."""
    with without_memory():
        before = torch.zeros(5000, device=DEVICE)
        with Tracker() as tracker:
            x = torch.zeros(1000, device=DEVICE)
            y = x * 2
            before.add_(1)
            assert torch.ones(70).sum().item() == 70, "the host computes"
            assert (tracker.now, tracker.peak) == (8000, 8000)
            del x
            y = y.view(10, 100)[2:]
            assert (tracker.now, tracker.peak) == (4000, 8000), "a view keeps the whole"
            y = y.sum()
            assert (tracker.now, tracker.peak) == (4, 8000)


def test_attention_holds_rows_and_no_scores() -> None:
    """Two heads that share one of keys, 100 rows of 8: 2 x 100 x 8 queries, as many outputs, 2 x
    100 log-sums, and 800 keys and values each. The gradients are like queries, keys and values,
    with a product for each row, and what the output's gradient takes."""
    with without_memory(), Tracker() as tracker:
        queries = torch.zeros(1, 2, 100, 8, device=DEVICE, requires_grad=True)
        keys, values = (torch.zeros(1, 1, 100, 8, device=DEVICE, requires_grad=True) for _ in "kv")
        output, _ = KernelShapes.apply(queries, keys, values)
        assert tracker.now == 4 * (1600 + 800 + 800 + 1600 + 200)
        output.backward(torch.zeros_like(output))
        assert tracker.now == 4 * (1600 + 800 + 800 + 1600 + 200 + 1600 + 800 + 800)


def with_numbers(method: AnyMethod, run: Any) -> tuple[int, int]:
    """Return peak and activations of the same step with numbers, in float32 on the CPU."""
    target = tiny_target()
    drafter = method.outline(run, target).drafter  # type: ignore[arg-type]
    for layer in drafter.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=0.02)
    objective = method.make_objective(run, target, drafter)
    features = LiveTarget(target, objective.taps).features(full_batch(run, 1.0))
    return step_of(objective, drafter, features, False, torch.device("cpu"))[:2]


# Attention has masks on a CPU that FlexAttention needs not; blocks repeat keys, too. At the peak of
# EAGLE, overlaps are computed, whose minima are a whole table on a GPU and sixteen rows on a CPU.
@pytest.mark.parametrize(
    ("method", "within"),
    [("medusa", 0.01), ("eagle", 0.1), ("dflash", 0.3), ("dspark", 0.3), ("distill", 0.05)],
)
def test_simulated_step_memory_matches_a_real_step(
    tmp_path: Path, saved_tiny: Path, method: str, within: float
) -> None:
    config, module, run = run_of(tmp_path, saved_tiny, method)
    found = memory_of_step(module, run)
    parameters = plan.planned(Options(str(config), method=method))[1].drafter_params  # type: ignore[arg-type]
    assert found.drafter == found.gradients == 4 * parameters
    if run.optim.optimizer == "adamw":
        assert found.moments == 8 * parameters
    assert found.target == sum(p.nbytes for p in tiny_target().model.parameters()) / 2
    assert found.peak >= found.resident + found.step + found.features
    peak, activations = with_numbers(module, run)
    assert found.step == pytest.approx(peak, rel=within)
    assert found.activations == pytest.approx(activations, rel=within)


def test_recomputation_and_a_store_take_less(tmp_path: Path, saved_tiny: Path) -> None:
    _, module, run = run_of(tmp_path, saved_tiny, "eagle")
    run.optim.optimizer = "adamw"
    whole = memory_of_step(module, run)
    run.objective.recompute = True
    less = memory_of_step(module, run)
    assert less.activations < 0.7 * whole.activations and less.resident == whole.resident
    run.features.store = "store"
    stored = memory_of_step(module, run)
    assert stored.extraction == 0 < less.extraction and stored.target < less.target
    run.optim.optimizer = "muon"
    drafter = module.outline(run, tiny_target()).drafter  # type: ignore[arg-type]
    layers = ("fc", "qkv", "output", "gate_up", "down")
    matrices = [w for name, w in drafter.named_parameters() if name.split(".")[-2] in layers]
    assert memory_of_step(module, run).moments == stored.moments - 4 * sum(
        matrix.numel() for matrix in matrices
    )


def test_a_target_with_windows_has_masks(tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    config = Gemma3TextConfig(**{**HEADS, **GEMMA}, **sizes, vocab_size=100)
    config.save_pretrained(tmp_path / "target")
    (tmp_path / "run").mkdir()
    _, module, run = run_of(tmp_path / "run", tmp_path / "target", "medusa")
    assert memory_of_step(module, run).extraction > run.batch_rows * run.data.max_length**2 * 2


def test_plan_prints_peak_memory_of_a_step(tmp_path: Path, saved_tiny: Path, capsys: Any) -> None:
    config = str(make_config(tmp_path, saved_tiny, "eagle"))
    plan.run(Options(config, method="eagle", json=str(tmp_path / "plan.json"), reply_share=0.5))
    found = json.loads((tmp_path / "plan.json").read_text())["memory"]
    run, _, _ = plan.planned(Options(config, method="eagle"))
    assert found["peak"] == memory_of_step(method_named("eagle"), run, 0.5).peak
    assert "... at the peak" in " ".join(capsys.readouterr().out.split())


def test_a_target_whose_code_looks_at_numbers_still_has_a_plan(
    tmp_path: Path, saved_tiny: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    plain = Target.forward

    def curious(self: Target, ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        assert ids.max() < self.vocab_size
        return plain(self, ids, *rest, **options)

    monkeypatch.setattr(Target, "forward", curious)
    plan.run(Options(str(make_config(tmp_path, saved_tiny, "eagle")), method="eagle"))
    assert "whose code looks at numbers" in caplog.text
    printed = capsys.readouterr().out
    assert "train the drafter" in printed and "GPU memory" not in printed


@pytest.mark.parametrize("trained", ["all", "norms"])
def test_a_layer_with_experts_has_a_plan(tmp_path: Path, trained: str) -> None:
    """In float32, for which torch knows no shapes of experts' products."""
    mtp_models.make_model("glm").config.save_pretrained(tmp_path / "target")
    changes: Any = {"objective": {"steps": 2, "trained": trained}, "precision": "bf16"}
    _, method, run = run_of(tmp_path, tmp_path / "target", "mtp", **changes)
    run.data.max_length = 64
    found = memory_of_step(method, run)
    assert found.activations > 0
    assert (found.gradients == found.drafter) == (trained == "all")
