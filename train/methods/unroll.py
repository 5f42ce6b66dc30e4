"""The training-time test (EAGLE-3, arXiv 2503.01840): an EAGLE drafter run over a whole text as
decoding would run it from every root.

Step 0 reads the target's features; step k reads the drafter's own states of step k - 1 and the
text's next token. Row t of step k attends to what a chain of k drafts from root t + 1 has in its
cache: the rows up to t of step 0 in its own document, and, of the steps 1 .. k, only row t itself.
So attention is one causal block and k diagonals, never an S x (K S) matrix.

Shapes: B packed rows, S positions, K steps, G heads, D head size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...heads.eagle import EagleDrafter
from ..data.batches import PADDING, Batch
from ..memory import Memory, recomputing

Backend = Literal["auto", "sdpa", "flex", "plain"]
Pair = tuple[Tensor, Tensor]
"""Keys and values of one step, [B, Gkv, S, D] each."""


class UnrolledAttention:
    """Attention over the causal block of step 0 and the diagonals of the steps after it, for one
    batch of packed rows.

    sdpa (auto): in query chunks through torch's own attention. flex: FlexAttention with a block
    mask, which needs no mask of S x S numbers; compiled on a GPU, no gradients on a CPU. plain:
    every score at once, which the others are tested against.
    """

    def __init__(self, batch: Batch, device: torch.device, backend: Backend = "auto") -> None:
        self.backend = "sdpa" if backend == "auto" else backend
        self._batch, self._device = batch, device
        self._chunks: list[_Chunk] | None = None
        self._block_mask: Any = None

    def __call__(self, queries: Tensor, steps: list[Pair]) -> Tensor:
        """`queries` `[B, G, S, D]`, the pairs of steps 0 .. k -> `[B, G, S, D]`."""
        run = {"sdpa": self._sdpa, "flex": self._flex, "plain": self._plain}[self.backend]
        keys, values = (_for_heads(states, queries) for states in steps[0])
        return run(queries, keys, values, steps[1:])

    def _plain(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        scale = queries.shape[-1] ** -0.5
        later = [(_for_heads(k, queries), _for_heads(v, queries)) for k, v in later]
        scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(
            ~self._visible(0, queries.shape[2])[:, None], -torch.inf
        )
        own = [(queries * k).sum(-1, keepdim=True) * scale for k, _ in later]
        probs = torch.cat([scores, *own], dim=-1).softmax(-1)
        found = probs[..., : scores.shape[-1]] @ values
        for j, (_, value) in enumerate(later):
            found = found + probs[..., scores.shape[-1] + j, None] * value
        return found

    def _visible(self, start: int, end: int, first: int = 0) -> Tensor:
        """`[B, end - start, end - first]` bool: which step-0 rows `first` .. the rows `start` ..
        see."""
        documents = self._batch.documents
        rows, keys = torch.arange(start, end), torch.arange(first, end)
        same = documents[:, start:end, None] == documents[:, None, first:end]
        return (same & (keys <= rows[:, None])).to(self._device)

    def _sdpa(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        size, sink = queries.shape[-1], bool(later)
        own, mass = _diagonals(queries, later) if sink else (None, None)
        if mass is not None:
            queries, keys, values = _with_sink(queries, keys, values, mass)
        found = torch.cat(
            [
                functional.scaled_dot_product_attention(
                    queries[:, :, chunk.start : chunk.end],
                    _behind_sink(keys, chunk, sink),
                    _behind_sink(values, chunk, sink),
                    attn_mask=chunk.mask(sink, queries.dtype),
                    scale=size**-0.5,
                )
                for chunk in self._query_chunks(queries.shape[2])
            ],
            dim=2,
        )
        return found if own is None else found[..., :size] + found[..., size : size + 1] * own

    def _query_chunks(self, length: int) -> list[_Chunk]:
        """Short chunks save the half above the diagonal, and what lies before a chunk's oldest
        document."""
        if self._chunks is None:
            width = max(64, min(length // 8, 1024))
            # where each row's document begins
            oldest = torch.arange(length) - self._batch.positions
            self._chunks = []
            for start in range(0, length, width):
                end, first = min(start + width, length), int(oldest[:, start].min())
                visible = self._visible(start, end, first)
                if bool((self._batch.documents == self._batch.documents[:1]).all()):
                    visible = visible[:1]
                self._chunks.append(_Chunk(start, end, first, visible[:, None]))
        return self._chunks

    def _flex(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        from torch.nn.attention.flex_attention import AuxRequest

        length = queries.shape[2]
        width = bucket(length) if queries.device.type == "cuda" else length
        padded = (functional.pad(x, (0, 0, 0, width - length)) for x in (queries, keys, values))
        found, extra = flex_for(queries.device)(
            *padded, block_mask=self._flex_mask(length, width), return_aux=AuxRequest(lse=True)
        )
        found = found[:, :, :length]
        if not later:
            return found
        own, mass = _diagonals(queries, later)
        total = torch.logaddexp(_wide(extra.lse[:, :, :length]), mass)
        share = torch.exp(mass - total)[..., None]
        return (_wide(found) * (1 - share) + _wide(own) * share).to(found.dtype)

    def _flex_mask(self, length: int, width: int) -> Any:
        if self._block_mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            documents = functional.pad(
                self._batch.documents, (0, width - length), value=PADDING
            ).to(self._device)

            def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
                return (key <= row) & (documents[b, row] == documents[b, key])

            make = (
                torch.compile(create_block_mask)
                if self._device.type == "cuda"
                else create_block_mask
            )
            self._block_mask = make(
                visible, len(documents), None, width, width, device=str(self._device)
            )
        return self._block_mask


_COMPILED: dict[str, Any] = {}


def bucket(length: int) -> int:
    """The next of 128, 192, 256, 384, 512, ..: every width is compiled once, and a batch is as wide
    as its longest row."""
    power = max(128, 1 << (length - 1).bit_length())
    return power * 3 // 4 if length <= power * 3 // 4 and power > 128 else power


def flex_for(device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if device.type == "cpu":
        return flex_attention
    if device.type not in _COMPILED:
        _COMPILED[device.type] = torch.compile(flex_attention, dynamic=False)
    return _COMPILED[device.type]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _for_heads(states: Tensor, queries: Tensor) -> Tensor:
    """Repeat `[B, Gkv, S, D]` for the query heads that share them."""
    return states.repeat_interleave(queries.shape[1] // states.shape[1], dim=1)


def _diagonals(queries: Tensor, later: list[Pair]) -> tuple[Tensor, Tensor]:
    """Attention of each row over its own keys of steps 1 .. k: `[B, G, S, D]`, and the log of its
    softmax's denominator.

    Products and sums along D: batched matrix products of k x D by D x 1 take three times as long on
    a CPU.
    """
    # [B, Gkv, queries of a key, S, D]
    grouped = _wide(queries).unflatten(1, (later[0][0].shape[1], -1))
    scores = (
        torch.stack([(grouped * _wide(k)[:, :, None]).sum(-1) for k, _ in later], dim=-1)
        * queries.shape[-1] ** -0.5
    )
    probs = scores.softmax(-1).to(queries.dtype)
    own = sum(probs[..., j, None] * v[:, :, None] for j, (_, v) in enumerate(later))
    assert isinstance(own, Tensor)
    return own.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def _with_sink(
    queries: Tensor, keys: Tensor, values: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One more key that stands for a row's diagonals: its score is the log of their mass, and what
    it is given comes out in a column of its own. So any attention that knows nothing of diagonals
    weighs them, and its gradients are right."""
    size = queries.shape[-1]
    exact = queries.dtype in (torch.float32, torch.float64)
    score = mass * size**0.5
    high = score.to(queries.dtype)
    # bf16 alone would round the score
    columns = [high] if exact else [high, (score - high).to(queries.dtype)]
    wide = 1 if exact else 8  # kernels for low precision want multiples of 8
    grown = functional.pad(
        torch.cat([queries, torch.stack(columns, dim=-1)], dim=-1), (0, wide - len(columns))
    )
    keys, values = (functional.pad(states, (0, wide, 1, 0)) for states in (keys, values))
    keys[:, :, 0, size : size + len(columns)] = 1
    values[:, :, 0, size] = 1
    return grown, keys, values


def _behind_sink(states: Tensor, chunk: _Chunk, sink: bool) -> Tensor:
    """The step-0 rows that a chunk may see, behind the sink if there is one."""
    if not sink:
        return states[:, :, chunk.first : chunk.end]
    if chunk.first == 0:
        return states[:, :, : chunk.end + 1]
    return torch.cat([states[:, :, :1], states[:, :, chunk.first + 1 : chunk.end + 1]], dim=2)


@dataclass
class _Chunk:
    """Query rows `start` .. `end`, which see nothing before `first`."""

    start: int
    end: int
    first: int
    visible: Tensor
    _mask: Tensor | None = None

    def mask(self, sink: bool, dtype: torch.dtype) -> Tensor:
        """Additive, made once for all steps: half of S x S numbers for a whole row."""
        if self._mask is None:
            visible = functional.pad(self.visible, (1, 0), value=True)
            self._mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)
        return self._mask if sink else self._mask[..., 1:]


def unroll(
    drafter: EagleDrafter,
    batch: Batch,
    taps: tuple[Tensor, ...],
    last: Tensor,
    steps: int,
    backend: Backend = "auto",
    memory: Memory | None = None,
) -> list[Tensor]:
    """The layers' output at each step, K tensors `[B, S, H]`: row t of step k is about the token t
    + 2 + k.

    `taps` and `last` `[B, S, Ht]` are the target's features. Rows whose tokens leave their document
    hold nothing of meaning. `memory`: whether only the states between the steps are kept for the
    backward pass.
    """
    device = last.device
    attention = UnrolledAttention(batch, device, backend)
    parts = drafter.token_part(batch.ids.to(device, non_blocking=True))
    positions = batch.positions.to(device, non_blocking=True)
    state = drafter.fuse(taps, last)
    layers = len(drafter.layers)
    past: list[tuple[Tensor, ...]] = []  # of each step: keys and values of every layer, in turn
    outputs = []

    def step(
        part: Tensor, state: Tensor, cosines: Tensor, sines: Tensor, *before: Tensor
    ) -> tuple[Tensor, ...]:
        new: list[Tensor] = []

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            queries, keys, values = (states.transpose(1, 2) for states in (queries, keys, values))
            new.extend((keys, values))
            earlier = [
                before[i + 2 * layer : i + 2 * layer + 2] for i in range(0, len(before), 2 * layers)
            ]
            found = attention(queries, [*((k, v) for k, v in earlier), (keys, values)])
            return found.transpose(1, 2).flatten(2)

        return drafter.advance(part, state, (cosines, sines), attend), *new

    run = recomputing(step, memory.offload) if memory and memory.recompute else step
    for k in range(steps):
        arguments = (
            _ahead(parts, 1 + k),
            state,
            *drafter.rotary(positions + k),
            *(t for pairs in past for t in pairs),
        )
        made = run(*arguments)
        past.append(made[1:])
        outputs.append(made[0])
        state = drafter.recycled(made[0])
    return outputs


def _ahead(x: Tensor, places: int) -> Tensor:
    """Row t gets what stands at t + places, zeros past the end."""
    return functional.pad(x[:, places:], (0, 0, 0, min(places, x.shape[1])))
