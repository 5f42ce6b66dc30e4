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

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from ...heads.elementwise import SILU
from ...heads.layers import Attend, DecoderLayer
from ..kernels import operators
from ..kernels.operators import attention_fault
from ..rounds.attention import FEW, attention_over
from ..rounds.cache import TreeCache, Window
from ..rounds.outcome import Hidden
from ..rounds.tree import Pass
from .masks import Masks
from .packed import is_plain

# Names of all modules with weights. A model with any other is not of Llama's form.
DECODER = {"embed_tokens", "layers", "norm"}
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
NORMS = {"q_norm", "k_norm"}
"""Norms of queries and keys; a layer has both or none."""


class FusedDecoder:
    """Decoder of Llama's form: embedding, layers with one matrix for each input, final norm.

    Passes over draft trees are made of the kernels where these fit: 10 of them a layer.
    """

    def __init__(
        self, decoder: Any, kinds: Sequence[str], move: bool, windows: Mapping[str, int | None]
    ) -> None:
        """Share the weights of the first layers of a transformers decoder, whose kinds are `kinds`.

        With `move` matrices of one input are moved into a joint one, of which the decoder's own
        parameters become views; otherwise they stay as they are. `windows` are those of the kinds.
        """
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._kinds, self._windows = list(kinds), windows
        layers = decoder.layers[: len(kinds)]
        self.layers = [FusedLayer(layer, move) for layer in layers]
        self._norms = [FusedNorm(layer.input_layernorm) for layer in layers]
        self._norm = FusedNorm(decoder.norm)
        self.takes_trees = False
        """True if passes over trees are run by the kernels."""

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        places: Pass,
        masks: Masks | None,
        window: Window,
        taps: Sequence[int] = (),
    ) -> Hidden:
        """Return the last hidden states and the `taps` of the positions `ids` `[B, N]`.

        Without `masks` each position sees all before it, but for nodes that the kernels take, which
        see what `places` says.
        """
        states = self._embed(ids)
        cosines, sines = self._rotary(states, positions)
        rotary = cosines[:, :, None], sines[:, :, None]
        step: TorchStep | KernelStep
        if places.depths is not None and self.takes(ids):
            seen = {kind: SlotVisibility(places, self._windows[kind]) for kind in set(self._kinds)}
            step = KernelStep(rotary, window.cache, [seen[kind] for kind in self._kinds])
        else:
            attends = {}
            for kind in set(self._kinds):
                mask = masks and (masks.full if self._windows[kind] is None else masks.sliding)
                attends[kind] = attention_over(window, mask, causal=masks is None)
            step = TorchStep(rotary, [attends[kind] for kind in self._kinds])
        tapped: dict[int, Tensor] = {}
        normed = step.first(states, self._norms[0])
        # Each layer's output is normed for the next one, which the kernels do with the sum before.
        for index, (layer, norm) in enumerate(
            zip(self.layers, [*self._norms[1:], self._norm], strict=True)
        ):
            if index in taps:
                tapped[index] = states
            states, normed = step(index, layer, states, normed, norm)
        tapped[len(self.layers)] = normed
        return Hidden(normed, tuple(tapped[tap] for tap in taps))

    def kernels_fit(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return True if the kernels can run these layers."""
        norms = [norm for layer in self.layers for norm in (layer.q_norm, layer.k_norm)]
        equal = len({norm.eps for norm in norms if isinstance(norm, FusedNorm)}) <= 1
        return equal and operators.usable(device, dtype)

    def attention_fault(self, dtype: torch.dtype, device: torch.device) -> str:
        """Return why the kernel of attention is wrong for these layers; empty: it is not."""
        sizes = {(layer.heads, layer.kv_heads, layer.size) for layer in self.layers}
        windows = {self._windows[kind] is not None for kind in self._kinds}
        return attention_fault(sorted(sizes), sorted(windows), dtype, device)

    def takes(self, ids: Tensor) -> bool:
        """Return True if the nodes `ids` `[B, N]` of a tree are run by the kernels.

        A model may have been moved, or been given another type, since its trial.
        """
        if not self.takes_trees or ids.shape[1] > FEW:
            return False
        return operators.usable(ids.device, self._norm.weight.dtype)


class TorchStep:
    """A layer by torch's operators."""

    def __init__(self, rotary: tuple[Tensor, Tensor], attends: Sequence[Attend]) -> None:
        self._rotary, self._attends = rotary, attends

    def first(self, states: Tensor, norm: FusedNorm) -> Tensor:
        """Return the normed embeddings."""
        return norm(states)

    def __call__(
        self, index: int, layer: FusedLayer, states: Tensor, normed: Tensor, norm: FusedNorm
    ) -> tuple[Tensor, Tensor]:
        """Return the output of layer number `index` for `states`, `normed`, and its own `norm`."""
        states = layer(index, states, layer.qkv(normed), self._rotary, self._attends[index])
        return states, norm(states)


class KernelStep:
    """A layer by the kernels, for the nodes of a tree; calls are those of `TorchStep`."""

    def __init__(
        self, rotary: tuple[Tensor, Tensor], cache: TreeCache, seen: Sequence[SlotVisibility]
    ) -> None:
        self._rotary, self._cache, self._seen = rotary, cache, seen

    def first(self, states: Tensor, norm: FusedNorm) -> Tensor:
        return operators.norm(states, norm.weight, norm.eps)

    def __call__(
        self, index: int, layer: FusedLayer, states: Tensor, normed: Tensor, norm: FusedNorm
    ) -> tuple[Tensor, Tensor]:
        attended, own = layer.output(self._attend(index, layer, normed)), layer.post_attention_norm
        states, normed = operators.add_norm(states, attended, own.weight, own.eps)
        gate_up = layer.gate_up(normed)
        if isinstance(layer.act, SILU):
            inner = operators.gate(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            inner = layer.act(gate) * up
        return operators.add_norm(states, layer.down(inner), norm.weight, norm.eps)

    def _attend(self, index: int, layer: FusedLayer, normed: Tensor) -> Tensor:
        """Return the attention `[B, N, G * E]` of layer number `index`."""
        cache, state, seen = self._cache, self._cache.states[index], self._seen[index]
        query_weight, key_weight, eps = None, None, 0.0
        if layer.q_norm is not None and layer.k_norm is not None:
            query_weight, key_weight = layer.q_norm.weight, layer.k_norm.weight
            eps = layer.q_norm.eps
        queries = operators.rotate(
            *(layer.qkv(normed), state.keys, state.values, cache.starts(), cache.staged),
            *(*self._rotary, query_weight, key_weight, eps),
        )
        return operators.attend(
            *(queries, state.keys, state.values, cache.starts()),
            *(seen.visible, seen.depths, seen.window, 0),
        )


class SlotVisibility:
    """Slots that the nodes of a tree see."""

    def __init__(self, tree: Pass, window: int | None) -> None:
        assert tree.depths is not None
        self.depths, self.window = tree.depths, window or 0
        visible = tree.seen
        if window is not None:
            back = tree.depths[:, :, None] - tree.undecided_depths[:, None]
            visible = visible & (back < window)
        self.visible = visible.contiguous()


class ConcatLinear(nn.Module):
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
        return ConcatLinear(parts)
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
