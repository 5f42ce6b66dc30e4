"""Rotary positions as the target has them; angles are computed in fp32 whatever the drafter's own
dtype is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class Rotary:
    """Cosines and sines of any scaling that transformers knows. Not a module: casting a drafter
    must not cast its frequencies.

    `parameters` are transformers' `rope_parameters`; a `partial_rotary_factor` turns the first part
    of each head only. The frequencies never change with the text's length (as those of dynamic and
    long rope do in transformers), or cached keys and packed rows would disagree.
    """

    def __init__(self, head_dim: int, max_positions: int, parameters: dict[str, Any]) -> None:
        rest = {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}
        self.size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        config = LlamaConfig(
            head_dim=self.size, max_position_embeddings=max_positions, rope_parameters=rest
        )
        table = LlamaRotaryEmbedding(config)
        self._frequencies, self._scale = (
            table.inv_freq.detach().float().clone(),
            float(table.attention_scaling),
        )

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `[B, N]` -> cosines and sines `[B, N, 1, R]`, fp32."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = (positions[..., None].float() * self._frequencies).repeat(1, 1, 2)[:, :, None]
        return angles.cos() * self._scale, angles.sin() * self._scale


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first R of each head `[B, N, G, D]` by the angles of its position (RoFormer, arXiv
    2104.09864; halves paired)."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    size = cos.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return turned if rest is None else torch.cat([turned, rest], dim=-1)
