"""Memory of a step by arithmetic, compared with what autograd holds."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import Gemma3TextConfig

from draftsmith.commands import plan
from draftsmith.commands.plan import PlanOptions as Options
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.estimate import StepMemory, memory_of_step, run_sizes
from draftsmith.train.method import AnyMethod
from draftsmith.train.objectives import TrainingModule
from tests.conftest import tiny_target
from tests.helpers import mtp_models
from tests.helpers.architectures import GEMMA, HEADS
from tests.helpers.plans import full_batch, run_of
from tests.helpers.training import make_config

# Large enough that matrices outweigh masks, ids and weights of rows.
SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_key_value_heads=2
)


class Tracker(TorchDispatchMode):
    """Counts the bytes of tensors that are made within, of those still there and the most."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):  # made before, if it is not known
                self._known.setdefault(tensor.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._known:
                    self._known[storage] = storage.nbytes()
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def found(method: AnyMethod, run: Any) -> StepMemory:
    return memory_of_step(run_sizes(method, run), run)


def counted(method: AnyMethod, run: Any) -> int:
    """Return the most bytes of a step's tensors besides features and weights, on the CPU."""
    target = tiny_target(**SIZES)
    drafter = method.outline(run, target).drafter  # type: ignore[arg-type]
    for layer in drafter.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=0.02)
    objective = method.make_objective(run, target, drafter)
    features = LiveTarget(target, objective.taps).features(full_batch(run, 1.0))
    module = TrainingModule(drafter, objective)
    denominators = objective.weights(features.batch)
    with Tracker() as tracker:
        loss, sums = module(features, denominators)
        loss.backward()
        del loss, sums
    return tracker.peak


@pytest.mark.parametrize(
    ("method", "within"),
    [
        *((name, 0.3) for name in ("medusa", "eagle", "dflash", "dspark", "distill")),
        ("eagle1", 0.45),
    ],
)
def test_estimated_step_memory_is_near_that_of_a_real_step(
    tmp_path: Path, method: str, within: float
) -> None:
    """Attention has masks and copies on a CPU that a GPU needs not."""
    tiny_target(**SIZES).model.config.save_pretrained(tmp_path / "target")
    changes = {"rollouts": {}} if method == "distill" else {}
    _, module, run = run_of(tmp_path, tmp_path / "target", method, **changes)
    run.data.max_length, run.batch_rows, run.rows_per_step = 512, 4, 4
    if method in ("dflash", "dspark"):
        run.objective.anchors = 512
    memory = found(module, run)
    assert memory.peak >= memory.resident + memory.features + memory.step
    assert memory.drafter == memory.gradients
    assert memory.step == pytest.approx(counted(module, run), rel=within)


def test_recomputation_and_a_store_take_less(tmp_path: Path, saved_tiny: Path) -> None:
    _, module, run = run_of(tmp_path, saved_tiny, "eagle")
    run.optim.optimizer = "adamw"
    whole = found(module, run)
    run.objective.recompute = True
    less = found(module, run)
    assert less.activations < 0.7 * whole.activations and less.resident == whole.resident
    run.features.store = "store"
    stored = found(module, run)
    assert stored.extraction == 0 < less.extraction and stored.target < less.target
    run.optim.optimizer = "muon"
    drafter = module.outline(run, tiny_target()).drafter  # type: ignore[arg-type]
    layers = ("fc", "qkv", "output", "gate_up", "down")
    matrices = [w for name, w in drafter.named_parameters() if name.split(".")[-2] in layers]
    assert found(module, run).moments == stored.moments - 4 * sum(
        matrix.numel() for matrix in matrices
    )


def test_a_target_with_windows_has_masks(tmp_path: Path) -> None:
    sizes: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    config = Gemma3TextConfig(**{**HEADS, **GEMMA}, **sizes, vocab_size=100)
    config.save_pretrained(tmp_path / "target")
    (tmp_path / "run").mkdir()
    _, module, run = run_of(tmp_path / "run", tmp_path / "target", "medusa")
    assert found(module, run).extraction > run.batch_rows * run.data.max_length**2 * 2


def test_plan_prints_peak_memory_of_a_step(tmp_path: Path, saved_tiny: Path, capsys: Any) -> None:
    config = str(make_config(tmp_path, saved_tiny, "eagle"))
    plan.run(Options(config, method="eagle", json=str(tmp_path / "plan.json"), reply_share=0.5))
    memory = json.loads((tmp_path / "plan.json").read_text())["memory"]
    options = Options(config, method="eagle")
    run, shape, _ = plan.planned(options)
    assert memory["peak"] == memory_of_step(shape, run, options.gpus).peak
    assert "... at the peak" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("trained", ["all", "norms"])
def test_a_layer_with_experts_has_a_plan(tmp_path: Path, trained: str) -> None:
    mtp_models.make_model("glm").config.save_pretrained(tmp_path / "target")
    changes: Any = {"objective": {"steps": 2, "trained": trained}, "precision": "bf16"}
    _, method, run = run_of(tmp_path, tmp_path / "target", "mtp", **changes)
    run.data.max_length = 64
    memory = found(method, run)
    assert memory.activations > 0
    assert (memory.gradients == memory.drafter) == (trained == "all")
