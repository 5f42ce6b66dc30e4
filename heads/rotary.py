"""Rotary positions with the target's parameters.

Angles are computed in float32 whatever the drafter's own dtype is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .elementwise import turned
from .files import JsonObject


class Rotary:
    """Cosines and sines of positions, for every rotary scaling that transformers knows.

    `parameters` are transformers' `rope_parameters`; with a `partial_rotary_factor` only the first
    part of each attention head, `size` numbers, is rotated, or the first part of its frequencies
    if they are of type proportional. The frequencies do not depend on the
    length of the text, as those of dynamic and long rope do in transformers: cached keys and the
    documents of a packed row would disagree.

    This is not a module, because casting a drafter to bfloat16 must not cast its frequencies.
    """

    def __init__(self, head_dim: int, max_positions: int, parameters: JsonObject) -> None:
        # Some scalings of transformers would apply the partial factor once more, to a size that
        # already contains it.
        scaling = dict(parameters)
        scaling.pop("partial_rotary_factor", None)
        share = parameters.get("partial_rotary_factor", 1.0)
        # Proportional positions turn all of a head, in which the last frequencies are 0.
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
        # Moved with the first positions, since `module.to` does not reach an object that is no
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
    rotated = turned(rotated, cos, sin)
    return rotated if rest is None else torch.cat([rotated, rest], dim=-1)
