"""Forward pass of a model of Llama's form with fewer operators, over the model's own weights.

transformers' forward pass of a layer has about 42 small operators, each of which costs a kernel
launch on a GPU or a call on a CPU. The drafters' `DecoderLayer` computes the same with about 19:
matrices that share an input are one matrix, a norm is one operator, and attention heads that share
keys read them without copies. `CausalModel.fuse` compares both on a trial and keeps transformers'
where they differ by more than rounding.

Shapes: B rows of a batch, N positions of one forward pass, H hidden size, E size of an attention
head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ...heads.layers import DecoderLayer
from ..rounds.attention import attention_over
from ..rounds.cache import TreeCache
from .packed import is_plain

# Names of all modules with weights. A model with any other is not of Llama's form.
DECODER = {"embed_tokens", "layers", "norm"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
NORMS = {"q_norm", "k_norm"}
"""Norms of queries and keys; a layer has both or none."""


class FusedDecoder:
    """Decoder of Llama's form: embedding, layers with one matrix for each input, final norm."""

    def __init__(self, decoder: Any, kinds: Sequence[str], move: bool) -> None:
        """Share the weights of the first layers of a transformers decoder, whose kinds are `kinds`.

        With `move` matrices of one input are moved into a joint one, of which the decoder's own
        parameters become views; otherwise they stay as they are.
        """
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._norm = FusedNorm(decoder.norm)
        self._layers: list[tuple[nn.Module, DecoderLayer]] = []
        self._kinds = list(kinds)
        for layer in decoder.layers[: len(kinds)]:
            self._layers.append((FusedNorm(layer.input_layernorm), FusedLayer(layer, move)))

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Any,
        cache: TreeCache,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the last hidden state `[B, N, H]` and the `taps` of the positions `ids` `[B, N]`.

        `mask` is that of `CausalModel.forward`; None: each position sees all before it. `cache` is
        open for N positions.
        """
        states = self._embed(ids)
        cosines, sines = self._rotary(states, positions)
        rotary = cosines[:, :, None], sines[:, :, None]
        attends = {}
        for kind in set(self._kinds):
            of_kind = mask[kind] if isinstance(mask, dict) else mask
            attends[kind] = attention_over(cache, of_kind, causal=mask is None)
        tapped: dict[int, Tensor] = {}
        for index, (norm, layer) in enumerate(self._layers):
            if index in taps:
                tapped[index] = states
            attend = attends[self._kinds[index]]
            states = layer(index, states, layer.qkv(norm(states)), rotary, attend)
        last = self._norm(states)
        tapped[len(self._layers)] = last
        return last, tuple(tapped[tap] for tap in taps)

    @property
    def layers(self) -> list[DecoderLayer]:
        return [layer for _, layer in self._layers]

    def first(self, count: int) -> FusedDecoder:
        """Return the decoder of the first `count` layers, with the same weights."""
        shallow = copy.copy(self)
        shallow._layers = self._layers[:count]
        shallow._kinds = self._kinds[:count]
        return shallow


class Joined(nn.Module):
    """Linear layers of one input that keep their own matrices: their outputs, end to end."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self._parts = list(parts)  # a list, so that they stay modules of their model alone

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self._parts], dim=-1)


def of_llama_form(decoder: Any, count: int) -> bool:
    """Return True if the first `count` layers of a decoder have the modules of Llama's form.

    That says nothing of what the modules compute: some models multiply states by constants.
    """
    if not _only(decoder, DECODER) or getattr(decoder, "rotary_emb", None) is None:
        return False
    # A norm whose constant has another name: one of the wrong size would pass the trial.
    if not hasattr(decoder.norm, "variance_epsilon"):
        return False
    layers = list(decoder.layers)
    return 0 < count <= len(layers) and all(map(_layer_of_form, layers[:count]))


def _layer_of_form(layer: Any) -> bool:
    if not _only(layer, LAYER) or not _only(layer.mlp, MLP):
        return False
    attention = layer.self_attn
    if not _only(attention, ATTENTION) and not _only(attention, ATTENTION | NORMS):
        return False
    size = getattr(attention, "head_dim", None)
    if size is None or not hasattr(layer.mlp, "act_fn"):
        return False
    # OLMo's norms of queries and keys go over all heads together.
    if hasattr(attention, "q_norm") and attention.q_norm.weight.shape != (size,):
        return False
    # A quantised layer is a class of its own, and has no matrix that could be joined.
    projections = [getattr(attention, name) for name in ATTENTION]
    projections += [getattr(layer.mlp, name) for name in MLP]
    if any(not is_plain(projection) for projection in projections):
        return False
    # By default torch's attention divides by the root of a head's size.
    return abs(attention.scaling * size**0.5 - 1) < 1e-6


def _only(module: nn.Module, names: set[str]) -> bool:
    """Return True if `names` are the parts of a module that have parameters, and it has no other.

    A parameter of its own, such as GPT-OSS's attention sinks, counts as a part.
    """
    parts = {name.split(".")[0] for name, _ in module.named_parameters()}
    return parts == names


class FusedNorm(nn.Module):
    """A transformers norm with one operator, or two, and the same weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self.eps = float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        # transformers rounds before it multiplies by the weight. With the same two roundings the
        # states are the same to the last bit.
        return rms_norm(x, self.weight.shape, None, self.eps) * self.weight


class FusedLayer(DecoderLayer):
    """A transformers layer with the modules of a `DecoderLayer` and the same weights."""

    def __init__(self, layer: Any, move: bool) -> None:
        nn.Module.__init__(self)  # not `DecoderLayer`'s, which makes weights
        attention, mlp, fused = layer.self_attn, layer.mlp, cast(Any, self)
        self.size = attention.head_dim
        self.heads = attention.q_proj.out_features // self.size
        self.kv_heads = attention.k_proj.out_features // self.size
        # In the order of `DecoderLayer`, in which packing tries matrices.
        fused.qkv = join([attention.q_proj, attention.k_proj, attention.v_proj], move)
        self.output = attention.o_proj
        fused.gate_up = join([mlp.gate_proj, mlp.up_proj], move)
        self.down, self.act = mlp.down_proj, mlp.act_fn
        fused.post_attention_norm = FusedNorm(layer.post_attention_layernorm)
        normed = hasattr(attention, "q_norm")
        fused.q_norm = FusedNorm(attention.q_norm) if normed else None
        fused.k_norm = FusedNorm(attention.k_norm) if normed else None
        self.eval()


def join(parts: list[nn.Linear], move: bool) -> nn.Module:
    """Return linear layers of one input as one whose output is theirs, end to end.

    With `move` their matrices become views of the joint one, so that no second copy is kept.
    """
    biases = [part.bias is not None for part in parts]
    if not move or any(biases) != all(biases):
        return Joined(parts)
    with torch.device("meta"):
        rows = sum(part.out_features for part in parts)
        joint = nn.Linear(parts[0].in_features, rows, bias=all(biases))
    joint.weight = _joint([part.weight for part in parts])
    if all(biases):
        joint.bias = _joint([part.bias for part in parts])
    return joint


@torch.no_grad()
def _joint(parameters: list[Any]) -> nn.Parameter:
    """Return parameters end to end, of which they become views."""
    joint = nn.Parameter(torch.cat(parameters), requires_grad=False)
    start = 0
    for parameter in parameters:
        end = start + parameter.shape[0]
        parameter.data = joint.data[start:end]
        start = end
    return joint
