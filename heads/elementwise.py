"""Norm, gate and rotation of a drafter's layer, with gradients that need fewer passes over memory.

On a CPU torch's own took some 8% of a small drafter's step, since autograd makes a table for every
operator of theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import SiLUActivation

SILU = (nn.SiLU, SiLUActivation)


class RMSNorm(nn.RMSNorm):
    """torch's norm; on a CPU, where torch has no kernel for it, with a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        alike = x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64)
        if learns(x, self.weight) and x.device.type == "cpu" and alike and self.eps is not None:
            return _Norm.apply(x, self.weight, self.eps)
        return super().forward(x)


def learns(*tensors: Tensor) -> bool:
    """Return whether an operator on these tensors is recorded for a backward pass."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class _Norm(Function):
    """y = n w with n = x r and r = 1 / sqrt(mean(x^2) + eps), all along the last axis of H numbers.

    With the gradient g of y, that of w is sum(g n) over the rows, and that of x is
    r (g w - n mean(g n w)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # A vector's norm needs no table of squares.
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        product = gradient * normed
        # A loss in chunks makes its gradients within autocast, which would round this product.
        with torch.autocast(gradient.device.type, enabled=False):
            means = (product @ weight)[..., None].div_(normed.shape[-1])
        x_grad = (gradient * weight).addcmul_(normed, means, value=-1).mul_(scale)
        return x_grad, product.reshape(-1, len(weight)).sum(0), None


def gated(gate_up: Tensor, act: nn.Module) -> Tensor:
    """Return act(gate) * up `[..., I]` of both next to each other, `[..., 2 I]`."""
    if learns(gate_up) and isinstance(act, SILU):
        return _Gate.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate) * up


class _Gate(Function):
    """`gated` by silu; its gradients are written into one table and need not be joined."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = functional.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        joint_grad = torch.empty_like(gate_up)
        gate_grad, up_grad = joint_grad.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=up_grad)
        torch.mul(gradient, up, out=gate_grad)
        torch.ops.aten.silu_backward.grad_input(gate_grad, gate, grad_input=gate_grad)
        return joint_grad


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` `[..., n]` with the pairs of numbers i and i + n/2 turned by an angle each.

    `cos` and `sin` broadcast to `x`; both halves of each are alike.
    """
    if learns(x):
        return _Rotation.apply(x, cos, sin)
    # As transformers rounds it: a target's layers are run by this too.
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class _Rotation(Function):
    """`turned`, whose gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _turn(gradient, *ctx.saved_tensors, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return `turned`, with the angles taken times `sign`, 1 or -1."""
    half = x.shape[-1] // 2
    # Of the numbers a, b, c, d the pairs are (a, c) and (b, d): a cos - c sin and c cos + a sin.
    result = x * cos
    result[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    result[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return result
