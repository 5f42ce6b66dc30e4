"""Memory that a forward pass keeps for the backward pass; gradients do not depend on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from draftsmith.distill.draft_models import DraftModelConfig, make_draft_model
from draftsmith.train.data.features import Features, LiveTarget, check_packing
from draftsmith.train.losses.memory import recomputed, recomputing
from draftsmith.train.losses.unrolled import UnrolledObjective
from draftsmith.train.methods.distill.config import DistillLoss
from draftsmith.train.methods.distill.loss import DistillObjective
from draftsmith.train.methods.distill.method import runner_of
from draftsmith.train.methods.eagle.config import EagleLoss
from tests.conftest import tiny_target
from tests.helpers.alignment import batch_of
from tests.helpers.random_eagles import random_eagle

Maker = Callable[..., tuple[nn.Module, Callable[[], Tensor]]]
TARGET = tiny_target(seed=4, num_hidden_layers=4)


def bytes_kept(forward: Callable[[], Tensor], owners: nn.Module) -> int:
    """Of the distinct storages that autograd saves while `forward` runs, without the
    parameters'."""
    known = {p.untyped_storage().data_ptr() for p in owners.parameters()}
    kept: dict[int, Tensor] = {}  # holding on to them, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def distilling(**options: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    draft_model = make_draft_model(
        DraftModelConfig(layers=4), TARGET, lambda: [torch.arange(3, 20)]
    ).requires_grad_(True)
    runner = runner_of(draft_model)
    check_packing(runner, "draft model")
    assert runner.attends_in_documents
    aim = DistillObjective(DistillLoss(**options), runner, TARGET)  # type: ignore[arg-type]
    batch = batch_of((60, [(4, 60)]), (60, [(4, 60)]))
    return draft_model, lambda: aim.forward(
        draft_model, LiveTarget(TARGET).features(batch), aim.weights(batch)
    )[0]


def unrolling(**options: bool) -> tuple[nn.Module, Callable[[], Tensor]]:
    drafter = random_eagle(TARGET, "eagle3").requires_grad_(True)
    aim = UnrolledObjective(EagleLoss(steps=4, **options).resolved(3), drafter, TARGET.head)  # type: ignore[arg-type]
    batch = batch_of((120, [(4, 120)]))
    features: Features = LiveTarget(TARGET, drafter.taps).features(batch)
    return drafter, lambda: aim.forward(drafter, features, aim.weights(batch))[0]


@pytest.mark.parametrize("make", [distilling, unrolling])
def test_recomputing_keeps_a_fraction_and_changes_no_gradient(make: Maker) -> None:
    kept, gradients = [], []
    for options in ({}, {"recompute": True}):
        drafter, forward = make(**options)
        kept.append(bytes_kept(forward, drafter))
        gradients.append(
            torch.autograd.grad(forward(), [p for p in drafter.parameters() if p.requires_grad])
        )
    assert kept[1] < 0.65 * kept[0], kept
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_recomputing_keeps_only_arguments_and_restores_the_layers() -> None:
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)
    )
    x = torch.randn(5, 8, requires_grad=True)

    def forward() -> Tensor:
        y = x
        for layer in layers:
            y = layer(y)
        return y

    with recomputed(layers):
        assert bytes_kept(forward, layers) == 3 * 5 * 8 * 4
    assert all("forward" not in layer.__dict__ for layer in layers)
    assert bytes_kept(lambda: recomputing(forward)(), layers) == 0
    with pytest.raises(ZeroDivisionError), recomputed(layers):
        _ = 1 / 0
    assert all("forward" not in layer.__dict__ for layer in layers)
