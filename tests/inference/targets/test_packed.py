"""Packed matrices beside those that torch stores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from draftsmith.inference.targets import packed
from draftsmith.inference.targets.causal_model import bytes_of
from draftsmith.inference.targets.packed import (
    PackedLinear,
    PackedPart,
    pack_linears,
    packable,
    pays_to_pack,
)
from draftsmith.inference.targets.target import Target
from tests.conftest import tiny_target
from tests.helpers.architectures import architecture
from tests.helpers.fused_targets import states_of

LEAST_ROWS = packed.min_padded_rows.__wrapped__
IDS = torch.arange(3, 15)[None]


@pytest.fixture(autouse=True)
def every_trial_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack small models too, and extend few rows on any processor."""
    monkeypatch.setattr(packed, "FEWEST_BYTES", 1)
    monkeypatch.setattr(packed, "min_padded_rows", lambda dtype: 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_gives_the_layers_products(bias: bool, dtype: torch.dtype) -> None:
    if not packable(dtype):
        pytest.skip("this processor has no instructions for bfloat16")
    torch.manual_seed(0)
    linear = nn.Linear(48, 80, bias=bias).to(dtype)
    layer = PackedLinear(linear)
    assert not list(layer.parameters()) and torch.equal(layer.weight, linear.weight)
    for rows in (1, 3, 8, 40):
        x = torch.randn(2, rows, 48).to(dtype)
        torch.testing.assert_close(layer(x), linear(x), atol=2e-2 if dtype.itemsize == 2 else 1e-5,
                                   rtol=2e-2)  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 48), (1, 3, 48), (3, 1, 48), (4, 48), (5, 48), (0, 48)])
def test_inputs_of_few_rows_are_extended(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(48, 80)
    layer, x = PackedLinear(linear), torch.randn(shape)
    product = layer(x)
    torch.testing.assert_close(product, linear(x))
    rows = x.reshape(-1, 48)
    if len(rows) == 3:  # as if a fourth row had stood beside them
        four = PackedLinear(linear)(torch.cat([rows, torch.zeros(1, 48)]))
        assert torch.equal(product.reshape(-1, 80), four[:3])


def test_parts_of_a_joint_layer_share_a_product() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 12)
    whole = PackedLinear(linear)
    first, last = PackedPart(whole, 0, 4), PackedPart(whole, 4, 12)
    for _ in range(2):  # another input of the same place in memory is another input
        x = torch.randn(3, 8)
        torch.testing.assert_close(first(x), linear(x)[:, :4])
        torch.testing.assert_close(last(x), linear(x)[:, 4:])
    assert torch.equal(last.weight, linear.weight[4:]) and whole._last is None


def test_layers_with_one_matrix_are_packed_once() -> None:
    """Zamba2's shared blocks are modules of their own with the same parameters."""
    model = nn.Sequential(*(nn.Linear(8, 12) for _ in range(3)))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    pack_linears(model)
    assert model[0] is model[2] and model[0] is not model[1]
    target = architecture(
        "zamba2",
        num_hidden_layers=5,
        num_mem_blocks=1,
        layers_block_type=["hybrid", "mamba"] * 2 + ["hybrid"],
    )
    size = bytes_of(target.model)
    expected = target.forward(IDS).last
    target.pack()
    packed_bytes = sum(
        module._packed.numel() * module._packed.itemsize
        for module in target.decoder.modules()
        if isinstance(module, PackedLinear)
    )
    assert bytes_of(target.model) + target.packed_bytes == size > packed_bytes
    torch.testing.assert_close(target.forward(IDS).last, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "mixtral"])
def test_a_packed_model_gives_the_same_states(kind: str, fused: bool) -> None:
    target = architecture(kind, dtype=torch.float32)
    ids = torch.arange(3, 15)[None]
    if fused:
        target.fuse(move=True)
    expected, alone = states_of(target, ids, [12]), target.forward(ids).last
    logits = target.head(alone)
    fingerprint, size = target.fingerprint(), bytes_of(target.model)
    target.pack()
    packed_layers = [m for m in target.decoder.modules() if isinstance(m, PackedLinear)]
    assert bytes_of(target.model) + target.packed_bytes == size
    assert len(packed_layers) >= 4 and target.fingerprint() == fingerprint
    assert not any(type(m) is nn.Linear for m in target.decoder.modules())
    for own, other in zip(states_of(target, ids, [12]), expected, strict=True):
        torch.testing.assert_close(own.last, other.last, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(target.forward(ids).last, alone, atol=1e-4, rtol=1e-3)
    assert isinstance(target._multiply, PackedLinear)
    torch.testing.assert_close(target.head(alone), logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere"])
def test_a_part_of_the_head_gives_the_logits_of_its_tokens(kind: str) -> None:
    """Capped (Gemma-2) and scaled (Cohere) ones too, before and after packing."""
    target = architecture(kind, dtype=torch.float32)
    states, ids = torch.randn(2, 3, target.hidden_size), torch.tensor([1, 5, 17])
    whole = target.head(states)[..., ids]
    for _ in range(2):
        torch.testing.assert_close(target.head_of(ids)(states), whole)
        coarse = target.head_of(ids, torch.bfloat16)(states)
        assert coarse.dtype == torch.bfloat16
        torch.testing.assert_close(coarse.float(), whole, rtol=0.05, atol=0.05)
        target.pack()


def test_matrices_that_cannot_be_packed_are_left_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    target: Target = tiny_target(dtype=torch.float64)
    target.pack()
    assert not any(isinstance(m, PackedLinear) for m in target.decoder.modules())

    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(packed, "_packed", missing)
    assert not packed.packable(torch.float16)


def test_small_models_stay_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """All matrices count together; few rows are extended on AMD's processors in float32."""
    monkeypatch.setattr(packed, "FEWEST_BYTES", 4 * 100)
    assert not pays_to_pack([nn.Linear(9, 11)]) and not pays_to_pack([])
    assert pays_to_pack([nn.Linear(10, 5), nn.Linear(5, 10)]) == packable(torch.float32)
    assert not pays_to_pack([nn.Linear(10, 10, dtype=torch.float64)])
    assert not pays_to_pack([nn.Linear(10, 10, device="meta")])
    for name, rows in (("AMD EPYC 9B14 AVX512", 4), ("Intel(R) Xeon(R) AVX512", 1)):
        monkeypatch.setattr(packed, "processor", lambda name=name: name)
        assert LEAST_ROWS(torch.float32) == rows and LEAST_ROWS(torch.bfloat16) == 1
