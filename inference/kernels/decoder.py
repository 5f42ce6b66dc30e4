"""Decoder of Llama's form that runs draft trees by the kernels: 10 of them a layer, not 29."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...heads.elementwise import SILU
from ..rounds.attention import FEW
from ..rounds.cache import TreeCache
from ..targets.fused import FusedDecoder, FusedLayer, FusedNorm
from ..targets.masks import Pass
from . import operators
from .trial import attention_fault


class KernelDecoder(FusedDecoder):
    """`FusedDecoder` whose passes over draft trees are made of larger kernels.

    Whatever is given a mask, or none, is run as `FusedDecoder` does.
    """

    def __init__(
        self, decoder: Any, kinds: Sequence[str], move: bool, windows: Mapping[str, int | None]
    ) -> None:
        """Share a decoder's weights as `FusedDecoder` does; `windows` are those of the `kinds`."""
        super().__init__(decoder, kinds, move)
        self._windows = windows
        self.takes_trees = False
        """True if passes over trees are given as a `Pass`, and run by the kernels."""

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

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Any,
        cache: TreeCache,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not isinstance(mask, Pass):
            return super().__call__(ids, positions, mask, cache, taps)
        states = self._embed(ids)
        cosines, sines = self._rotary(states, positions)
        rotary = cosines[:, :, None], sines[:, :, None]
        seen = {kind: Seen(mask, self._windows[kind], cache) for kind in set(self._kinds)}
        tapped: dict[int, Tensor] = {}
        added: Tensor | None = None
        for index, (norm, layer) in enumerate(self._layers):
            states, normed = _normed(norm, states, added)
            if index in taps:
                tapped[index] = states
            attended = layer.output(_attend(layer, index, normed, rotary, seen[self._kinds[index]]))
            states, normed = _normed(layer.post_attention_norm, states, attended)
            added = layer.down(_gated(layer, normed))
        _, last = _normed(self._norm, states, added)
        tapped[len(self._layers)] = last
        return last, tuple(tapped[tap] for tap in taps)


class Seen:
    """Slots of a cache that the nodes of a tree see; the cache is open for them."""

    def __init__(self, tree: Pass, window: int | None, cache: TreeCache) -> None:
        assert tree.depths is not None
        self.depths, self.window, self.cache = tree.depths, window or 0, cache
        slot_depths = tree.depths if tree.slot_depths is None else tree.slot_depths
        visible = tree.visible
        if visible is None:
            shape = 1, tree.depths.shape[1], slot_depths.shape[1]
            visible = torch.ones(shape, dtype=torch.bool, device=tree.depths.device)
        if window is not None:
            visible = visible & (tree.depths[:, :, None] - slot_depths[:, None] < window)
        self.visible = visible.contiguous()


def _normed(norm: Any, states: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of states and what is `added` to them, and the norm of the sum."""
    if added is None:
        return states, operators.norm(states, norm.weight, norm.eps)
    return operators.add_norm(states, added, norm.weight, norm.eps)


def _attend(
    layer: FusedLayer, index: int, normed: Tensor, rotary: tuple[Tensor, Tensor], seen: Seen
) -> Tensor:
    """Return the attention `[B, N, G * E]` of layer number `index`."""
    cache, state = seen.cache, seen.cache.states[index]
    query_weight, key_weight, eps = None, None, 0.0
    if layer.q_norm is not None and layer.k_norm is not None:
        query_weight, key_weight, eps = layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
    queries = operators.rotate(
        *(layer.qkv(normed), state.keys, state.values, cache.starts(), cache.staged),
        *(*rotary, query_weight, key_weight, eps),
    )
    return operators.attend(
        *(queries, state.keys, state.values, cache.starts()),
        *(seen.visible, seen.depths, seen.window, 0),
    )


def _gated(layer: FusedLayer, normed: Tensor) -> Tensor:
    gate_up = layer.gate_up(normed)
    if isinstance(layer.act, SILU):
        return operators.gate(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return layer.act(gate) * up
