"""The target's cache: preallocated, takes a whole draft tree, keeps the accepted path.

Shapes: B batch, G key-value heads, C capacity, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache


class TreeCache(Cache):
    """Keys and values of `length` committed positions, followed by those of the tree now being verified.

    A forward writes its positions after the committed ones; `commit` then keeps the rows of the accepted path. Unlike the
    library's caches it never changes shape or address, and uncommitted rows are simply overwritten by the next forward.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.keys)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, G, N, D]` after the committed rows; return views of the first `length + N` rows."""
        end = self.length + key_states.shape[-2]
        assert end <= self.capacity, f"cache of {self.capacity} rows asked to hold {end}"
        if layer_idx == len(self.keys):
            self.keys.append(self._allocate(key_states))
            self.values.append(self._allocate(value_states))
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def _allocate(self, states: Tensor) -> Tensor:
        batch, heads, _, size = states.shape
        return states.new_zeros(batch, heads, self.capacity, size)

    def commit(self, rows: list[int]) -> None:
        """Keep `rows` of the last forward (ascending node ids of the accepted path) and drop the others."""
        start, count = self.length, len(rows)
        if rows != list(range(count)):  # a chain's path is in place already
            index = torch.tensor(rows, device=self.keys[0].device) + start
            for buffer in (*self.keys, *self.values):
                buffer[:, :, start : start + count] = buffer.index_select(2, index)
        self.length += count

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity
