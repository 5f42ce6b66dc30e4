"""Norm, gate and rotation against torch's own operators, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from draftsmith.heads import elementwise
from draftsmith.heads.elementwise import gated_activation, rotate_pairs

EPS = 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    module = elementwise.RMSNorm(x.shape[-1], EPS).to(x.dtype)
    # Not as a parameter of its own, so that the gradient reaches this tensor.
    return torch.func.functional_call(module, {"weight": weight}, (x,))


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, EPS)


def plain_gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def plainly_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


ANGLES = torch.randn(2, 5, 1, 4, dtype=torch.float64).repeat(1, 1, 1, 2)
CASES = {
    "norm": (norm, plain_norm, [(2, 5, 8), (8,)]),
    "gate": (lambda x: gated_activation(x, nn.SiLU()), plain_gated, [(2, 5, 8)]),
    "turn": (
        lambda x: rotate_pairs(x, ANGLES.cos(), ANGLES.sin()),
        lambda x: plainly_turned(x, ANGLES.cos(), ANGLES.sin()),
        [(2, 5, 3, 8)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    ours, plain, shapes = CASES[name]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    expected, found = plain(*inputs), ours(*inputs)
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, gradient),
        torch.autograd.grad(expected, inputs, gradient),
    )
    assert torch.autograd.gradcheck(ours, inputs)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), expected)


@pytest.mark.parametrize("name", CASES)
def test_a_slice_of_a_wider_table_has_the_same_gradients(name: str) -> None:
    ours, plain, shapes = CASES[name]
    # As the queries and keys of a joint projection: rows have gaps between them.
    wide = torch.randn(*shapes[0][:-1], shapes[0][-1] + 3, dtype=torch.float64, requires_grad=True)
    others = [torch.randn(shape, dtype=torch.float64) for shape in shapes[1:]]

    def gradient_of(function: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(function(wide[..., 1:-2], *others).square().sum(), wide)[0]

    torch.testing.assert_close(gradient_of(ours), gradient_of(plain))


def test_rms_norm_matches_hand_computed_values() -> None:
    # The mean square of 3 and 4 is 12.5, and with an eps of 3.5 the root is 4.
    x, weight = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([1.0, 2.0])
    module = elementwise.RMSNorm(2, 3.5)
    module.weight = nn.Parameter(weight)
    assert module(x).tolist() == [[0.75, 2.0]]


def test_rotation_and_gradient_match_hand_computed_values() -> None:
    # A quarter turn takes the pairs (1, 3) and (2, 4) to (-3, 1) and (-4, 2).
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    found = rotate_pairs(x, torch.zeros(4), torch.ones(4))
    assert found.tolist() == [-3.0, -4.0, 1.0, 2.0]
    found.backward(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert x.grad is not None and x.grad.tolist() == [0.0, 0.0, -1.0, 0.0]


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_norm_matches_reference_for_small_and_large_states(size: float) -> None:
    x = (size * torch.randn(3, 64)).requires_grad_()
    found, expected = elementwise.RMSNorm(64, EPS)(x), plain_norm(x, torch.ones(64))
    torch.testing.assert_close(found, expected)
    weights = torch.randn(3, 64)  # with equal ones most of the gradient would cancel out
    (gradient,) = torch.autograd.grad((weights * found).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad((weights * expected).sum(), x)[0])


def test_a_norms_gradient_is_not_rounded_under_autocast() -> None:
    """A gradient along the state cancels but for a small rest, in which a rounded mean shows."""
    x = torch.randn(3, 512, requires_grad=True)
    gradient = x.detach() + 0.01 * torch.randn(3, 512)
    expected = plain_norm(x, torch.ones(512))
    (expected,) = torch.autograd.grad(expected, x, gradient)
    with torch.autocast("cpu", torch.bfloat16):
        found = elementwise.RMSNorm(512, EPS)(x)
        (found,) = torch.autograd.grad(found, x, gradient)
    # 1.6e-5 measured; with a product that is rounded to bfloat16, 0.17.
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def test_gate_applies_non_silu_activations() -> None:
    gate_up = torch.tensor([2.0, -1.0, 3.0, 5.0], requires_grad=True)
    assert gated_activation(gate_up, nn.ReLU()).tolist() == [6.0, 0.0]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_bfloat16_norm_equals_torch_rms_norm() -> None:
    module = elementwise.RMSNorm(4, 1e-6)
    x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    torch.testing.assert_close(module(x), nn.RMSNorm(4, 1e-6)(x))
