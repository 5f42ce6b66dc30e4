"""Norm, gate and rotary positions of a drafter's layer.

Their gradients need fewer passes over memory than torch's own, which took some 8% of a small
drafter's step on a CPU, since autograd makes a table for every operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .files import JsonObject

SILU = (nn.SiLU, SiLUActivation)


class RMSNorm(nn.RMSNorm):
    """torch's norm; on a CPU, where torch has no kernel for it, with a gradient of its own."""

    def forward(self, x: Tensor) -> Tensor:
        alike = x.dtype == self.weight.dtype and x.dtype in (torch.float32, torch.float64)
        if needs_grad(x, self.weight) and x.device.type == "cpu" and alike and self.eps is not None:
            return _Norm.apply(x, self.weight, self.eps)
        return super().forward(x)


def needs_grad(*tensors: Tensor) -> bool:
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


def gated_activation(gate_up: Tensor, act: nn.Module) -> Tensor:
    """Return act(gate) * up `[..., I]` of both next to each other, `[..., 2 I]`."""
    if needs_grad(gate_up) and isinstance(act, SILU):
        return _Gate.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate) * up


class _Gate(Function):
    """`gated_activation` by silu; its gradients are written into one table."""

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


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` `[..., n]` with the pairs of numbers i and i + n/2 rotated by an angle each.

    `cos` and `sin` broadcast to `x`; both halves of each are alike.
    """
    if needs_grad(x):
        return _Rotation.apply(x, cos, sin)
    # As transformers rounds it: a target's layers are run by this too.
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class _Rotation(Function):
    """`rotate_pairs`, whose gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, -1), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Return `rotate_pairs`, with the angles taken times `sign`, 1 or -1."""
    half = x.shape[-1] // 2
    # Of the numbers a, b, c, d the pairs are (a, c) and (b, d): a cos - c sin and c cos + a sin.
    result = x * cos
    result[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    result[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return result


class Rotary:
    """Cosines and sines of positions, for every rotary scaling that transformers knows.

    Angles are computed in float32, for a drafter of any dtype. `parameters` are transformers'
    `rope_parameters`; with a `partial_rotary_factor` only the first part of each attention head,
    `size` numbers, is rotated, or the first part of its frequencies if they are of type
    proportional. The frequencies do not depend on the length of the text, as those of dynamic and
    long rope do in transformers: cached keys and the documents of a packed row would disagree.

    This is not a module, because casting a drafter to bfloat16 must not cast its frequencies.
    """

    def __init__(self, head_dim: int, max_positions: int, parameters: JsonObject) -> None:
        # Some scalings of transformers would apply the partial factor once more, to a size that
        # already contains it.
        scaling = dict(parameters)
        scaling.pop("partial_rotary_factor", None)
        share = parameters.get("partial_rotary_factor", 1.0)
        # Proportional positions rotate all of a head, in which the last frequencies are 0.
        if proportional := parameters["rope_type"] == "proportional":
            scaling["partial_rotary_factor"] = share
        self.size = head_dim if proportional else int(head_dim * share)
        config = LlamaConfig(
            head_dim=self.size, max_position_embeddings=max_positions, rope_parameters=scaling
        )
        # Llama's class serves every target: it computes all scalings from the parameters alone.
        table = LlamaRotaryEmbedding(config)
        self._frequencies = table.inv_freq.detach().float().clone()
        self._scale = float(table.attention_scaling)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 cosines and sines `[B, N, 1, n]` of positions `[B, N]`; n is `size`."""
        # Moved with the first positions, since `module.to` does not reach an object that is not a
        # module. Later calls find it in place.
        self._frequencies = self._frequencies.to(positions.device)
        # Both halves of a head have the same angles: frequencies f0, f1 become f0, f1, f0, f1. The
        # new axis is for the attention heads, which all have the same positions.
        angles = (positions[..., None].float() * self._frequencies).repeat(1, 1, 2)[:, :, None]
        return angles.cos() * self._scale, angles.sin() * self._scale


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Return `x` `[B, N, G, E]` with the first n numbers of each head rotated by its position.

    `rotary` holds cosines and sines `[B, N, 1, n]`. Number i of a head is paired with number
    i + n/2, as in Llama (RoFormer, arXiv 2104.09864, pairs neighbours).
    """
    # The angles were exact; a rounding of their cosines does not grow with the position.
    cos, sin = (table.to(x.dtype) for table in rotary)
    size = cos.shape[-1]
    rotated, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    rotated = rotate_pairs(rotated, cos, sin)
    return rotated if rest is None else torch.cat([rotated, rest], dim=-1)
