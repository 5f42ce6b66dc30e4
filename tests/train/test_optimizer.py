"""Muon: which matrices it changes, its step next to AdamW's, and its state in a checkpoint."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import DistributedType
from torch import nn

from draftsmith.heads.eagle import drafter_of
from draftsmith.heads.errors import UserError
from draftsmith.heads.medusa import MedusaHeads, MedusaShape
from draftsmith.train.config import Optim, RunConfig, TargetConfig
from draftsmith.train.data.config import Data, Source
from draftsmith.train.methods.dflash.config import DFlashRun
from draftsmith.train.methods.dspark.config import DSparkRun
from draftsmith.train.methods.eagle.config import EagleConfig, EagleRun
from draftsmith.train.methods.eagle.method import shape_for
from draftsmith.train.optimizer import hidden_matrices, make_optimizer, orthogonal
from draftsmith.train.parallel import check_optimizer
from tests.conftest import tiny_target

OPTIM = Optim(optimizer="muon", lr=0.01, betas=(0.8, 0.9))


def drafter() -> MedusaHeads:
    torch.manual_seed(0)
    return MedusaHeads(MedusaShape(num_heads=2), 6, 10)


def names(module: nn.Module) -> set[str]:
    chosen = {id(matrix) for matrix in hidden_matrices(module)}
    return {name for name, weight in module.named_parameters() if id(weight) in chosen}


def learn(module: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> None:
    """Take steps with gradients that depend on the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("run_class", [EagleRun, DFlashRun, DSparkRun])
def test_drafters_that_were_better_with_muon_have_it_by_default(run_class: type[RunConfig]) -> None:
    run = run_class(out="-", target=TargetConfig(path="-"), data=Data(sources=[Source("-")]))
    assert (run.optim.optimizer, run.optim.schedule, run.optim.decay_share) == ("muon", "wsd", 0.3)


def test_muon_has_the_matrices_between_states_and_nothing_else() -> None:
    target = tiny_target()
    shape = shape_for(EagleConfig(taps=[0, 1]), target.config)
    eagle3 = drafter_of(shape, target.embedding_and_head)
    assert names(drafter()) == {"blocks.0.0.linear.weight", "blocks.1.0.linear.weight"}
    layer = {f"layers.0.{name}.weight" for name in ("qkv", "output", "gate_up", "down")}
    assert names(eagle3) == {"fc.weight"} | layer
    row = nn.Linear(4, 1)
    assert hidden_matrices(row) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_is_torchs_muon_for_the_matrices_and_torchs_adamw_for_the_rest(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit where torch's Muon is made to iterate in float32, else within its rounding."""
    if dtype == "float32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    ours, reference = drafter(), drafter()
    matrices = hidden_matrices(reference)
    chosen = {id(matrix) for matrix in matrices}
    rest = [p for p in reference.parameters() if id(p) not in chosen]
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices, lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=0.01, betas=(0.8, 0.9), weight_decay=0.0),
    ]
    learn(ours, [make_optimizer(OPTIM, ours)], range(5))
    learn(reference, theirs, range(5))
    for mine, other in zip(ours.parameters(), reference.parameters(), strict=True):
        if dtype == "float32":
            assert torch.equal(mine, other)
        else:
            torch.testing.assert_close(mine, other, atol=2e-3, rtol=0)  # of steps of 0.01


@pytest.mark.parametrize("shape", [(7, 7), (5, 40), (40, 5)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    """The coefficients are torch's, for which Jordan et al. give 0.7 to 1.2 after five steps."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    found = u.mT @ orthogonal(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7) @ vh.mT
    values = found.diagonal()
    assert float((found - values.diag()).abs().max()) < 1e-12
    assert float(values.min()) > 0.6 and float(values.max()) < 1.25


def test_saved_optimizer_state_resumes_bit_for_bit() -> None:
    whole = drafter()
    learn(whole, [make_optimizer(OPTIM, whole)], range(6))
    first = drafter()
    optimizer = make_optimizer(OPTIM, first)
    learn(first, [optimizer], range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second = copy.deepcopy(first)
    again = make_optimizer(OPTIM, second)
    again.load_state_dict(torch.load(file))
    for group in again.param_groups:  # as the schedule sets them
        group["lr"] = 0.01
    learn(second, [again], range(3, 6))
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_learning_rate_that_the_schedule_sets_reaches_both() -> None:
    module = drafter()
    optimizer = make_optimizer(OPTIM, module)
    before = copy.deepcopy(module.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    learn(module, [optimizer], range(2))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_muon_without_a_matrix_is_refused() -> None:
    with pytest.raises(UserError, match="use optim.optimizer adamw"):
        make_optimizer(OPTIM, nn.Embedding(4, 3))


def test_deepspeed_is_refused_before_anything_is_made() -> None:
    engine = cast(Any, SimpleNamespace(distributed_type=DistributedType.DEEPSPEED))
    with pytest.raises(UserError, match="use FSDP2"):
        check_optimizer(OPTIM, engine)
    check_optimizer(Optim(), engine)
