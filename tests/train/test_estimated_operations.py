"""Operations of a training step: the estimate beside what torch counts in the step itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from draftsmith.train.data.features import LiveTarget
from draftsmith.train.estimate import run_sizes
from draftsmith.train.method import AnyMethod
from draftsmith.train.objectives import TrainingModule
from tests.conftest import tiny_target
from tests.helpers.plans import full_batch, run_of

# Wide, with short rows: attention, which the estimate leaves out, is small beside the matrices.
SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_key_value_heads=2
)
BLOCKS = {"taps": [1, 2], "num_layers": 2, "block_size": 4, "mask_token": 2}
CASES = [
    ("medusa", {"heads": {"num_heads": 3, "num_layers": 2}}),
    ("medusa", {"heads": {"num_heads": 3, "shared_head": True}}),
    ("medusa", {"heads": {"num_heads": 3, "draft_vocab_size": 60}}),
    ("eagle", {"heads": {"taps": [0, 1, 2]}, "objective": {"steps": 3}}),
    (
        "eagle",
        {
            "heads": {"taps": [0, 1], "norm_taps": True, "num_layers": 2},
            "objective": {"steps": 2, "freeze_head": True},
        },
    ),
    ("eagle", {"heads": {"taps": [0, 1], "shared_head": True}}),
    ("eagle1", {"heads": {"version": 1}}),
    ("dflash", {"heads": BLOCKS, "objective": {"anchors": 16}}),
    ("dspark", {"heads": {**BLOCKS, "markov_rank": 64}, "objective": {"anchors": 16}}),
    ("distill", {"draft_model": {"layers": 2}, "objective": {}}),
]


class Counter(TorchDispatchMode):
    """Counts operations as torch's `FlopCounterMode` does, by its own formulas. That class also
    follows modules, by hooks that fail where gradients are computed within a forward pass."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def counted(method: AnyMethod, run: Any, reply_share: float) -> float:
    """Return the operations of the drafter in a step, for each position, as torch counts them.

    The target's own logits are taken off, since a plan counts them with the target.
    """
    target = tiny_target(**SIZES)
    drafter = method.outline(run, target).drafter  # type: ignore[arg-type]
    of_the_target = 0
    head = target.head

    def target_head(states: torch.Tensor) -> torch.Tensor:
        nonlocal of_the_target
        with Counter() as counter:
            logits = head(states)
        of_the_target += counter.total
        return logits

    target.head = target_head  # type: ignore[method-assign]
    objective = method.make_objective(run, target, drafter)
    batch = full_batch(run, reply_share)
    features = LiveTarget(target, objective.taps).features(batch)
    module = TrainingModule(drafter, objective)
    with Counter() as counter:
        loss, _ = module(features, objective.weights(batch), False)
        loss.backward()
    return (counter.total - of_the_target) / batch.ids.numel()


@pytest.mark.parametrize("reply_share", [1.0, 0.5])
@pytest.mark.parametrize(
    ("method", "changes"), CASES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
)
def test_estimated_operations_match_counted_ones_within_ten_percent(
    tmp_path: Path, method: str, changes: dict[str, Any], reply_share: float
) -> None:
    tiny_target(**SIZES).model.config.save_pretrained(tmp_path / "target")
    changes = {"rollouts": {}} | changes if method == "distill" else changes
    _, module, run = run_of(tmp_path, tmp_path / "target", method, **changes)
    run.data.max_length = 64
    found = run_sizes(module, run).training_operations(reply_share)
    assert found == pytest.approx(counted(module, run, reply_share), rel=0.1)
