"""The decoder layer that feature-level drafters are made of, and what of its layout is the target's
own.

What the rows attend to is the caller's: training and decoding run the same code below with
different `attend`.

Shapes: B batch, N rows, H hidden size, G heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .rotary import rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, N, G, D], keys, values [B, N, Gkv, D]) -> [B, N, G * D]."""


class LayerShape(Protocol):
    """The sizes of a layer."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def activation(self) -> str: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def attention_bias(self) -> bool: ...


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@torch.no_grad()
def begin_unsure(norm: RMSNorm, logits: Tensor, spread: float = 1.0) -> None:
    """Scale an untrained drafter's final norm down, if need be, until its `logits` `[..., V]` have
    a standard deviation of `spread`.

    The target's norm belongs to states that the target made. Behind it the first states of a
    drafter make logits as large as the target's, and wrong: with SmolLM2 the loss began at 36, far
    above log V, and the first hundred steps had to unlearn that.
    """
    size = logits.float().std(-1).square().mean().sqrt()
    norm.weight.mul_((spread / size).clamp(max=1.0).to(norm.weight))


class DecoderLayer(nn.Module):
    """A Llama layer without its first norm and projection. Matrices that share an input are kept as
    one."""

    def __init__(self, shape: LayerShape, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.qkv = nn.Linear(
            inputs, (self.heads + 2 * self.kv_heads) * self.size, bias=shape.attention_bias
        )
        self.output = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.post_attention_norm = RMSNorm(hidden, shape.norm_eps)
        self.act = ACT2FN[shape.activation]
        self.q_norm = RMSNorm(self.size, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(self.size, shape.norm_eps) if shape.qk_norm else None

    def forward(
        self,
        index: int,
        residual: Tensor,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """`residual` `[B, N, H]` and projected `qkv` -> the layer's output `[B, N, H]`, not
        normed."""
        parts = qkv.unflatten(-1, (-1, self.size))
        turning, values = parts.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = turning.split([self.heads, self.kv_heads], dim=2)
            # autocast norms in fp32
            turning = torch.cat([self.q_norm(queries), self.k_norm(keys)], dim=2).to(values.dtype)
        queries, keys = rotate(turning, rotary).split([self.heads, self.kv_heads], dim=2)
        middle = residual + self.output(attend(index, queries, keys, values))
        gate, up = self.gate_up(self.post_attention_norm(middle)).chunk(2, dim=-1)
        return middle + self.down(self.act(gate) * up)

    def keys_values(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, N, Gkv, D]` of `states` `[B, N, inputs]`, for rows that are attended
        to and ask nothing."""
        first = self.heads * self.size
        bias = None if self.qkv.bias is None else self.qkv.bias[first:]
        parts = functional.linear(states, self.qkv.weight[first:], bias).unflatten(
            -1, (-1, self.size)
        )
        keys, values = parts.chunk(2, dim=2)
        return rotate(
            keys if self.k_norm is None else self.k_norm(keys).to(values.dtype), rotary
        ), values

    def matrices(self) -> dict[str, Tensor]:
        """Views of the weights under their names on disk."""
        parts = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        queries, keys, values = self.qkv.weight.split(parts)
        gate, up = self.gate_up.weight.chunk(2)
        named = {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": self.output.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": self.down.weight,
            "post_attention_layernorm": self.post_attention_norm.weight,
        }
        if self.q_norm is not None and self.k_norm is not None:
            named |= {
                "self_attn.q_norm": self.q_norm.weight,
                "self_attn.k_norm": self.k_norm.weight,
            }
        named = {f"{name}.weight": weight for name, weight in named.items()}
        if self.qkv.bias is not None:
            names = (f"self_attn.{letter}_proj.bias" for letter in "qkv")
            named |= dict(zip(names, self.qkv.bias.split(parts), strict=True))
        return named


def layout_of(target: Any) -> dict[str, Any]:
    """The sizes that a drafter takes over from a target's transformers config, by the names of
    `LayerShape`."""
    hidden, heads = target.hidden_size, target.num_attention_heads
    return {
        "num_heads": heads,
        "num_kv_heads": first_of(target, "num_key_value_heads") or heads,
        "head_dim": first_of(target, "head_dim") or hidden // heads,
        "vocab_size": target.vocab_size,
        "max_positions": first_of(target, "max_position_embeddings") or 1 << 20,
        "norm_eps": first_of(target, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
        or 1e-6,
        "rope": rope_of(target),
    }


def inner_size(target: Any) -> int:
    """Width of the target's MLP."""
    return first_of(target, "intermediate_size", "n_inner") or 4 * target.hidden_size


def rope_of(target: Any) -> dict[str, Any]:
    """A target's rotary parameters; those of its full-attention layers where they differ, base
    10000 where it has none."""
    found = getattr(target, "rope_parameters", None) or {}
    found = found.get("full_attention") or found
    return {"rope_type": "default", "rope_theta": 10000.0} | {
        k: v for k, v in found.items() if v is not None
    }


def first_of(config: Any, *names: str) -> Any:
    return next(
        (value for name in names if (value := getattr(config, name, None)) is not None), None
    )
