"""Attention and passes of an EAGLE drafter that is unrolled over a whole text in training.

Training runs the drafter as decoding would run it from every root of the text at once (EAGLE-3's
training-time test, arXiv 2503.01840). Step 0 reads the target's features; step k reads the
drafter's own states of step k - 1 and the text's next token. Row t of step k attends to what a
chain of k drafts from root t + 1 has in its cache: the rows up to t of step 0 in its own document,
and, of the steps 1 .. k, row t itself only.

Example: a document of 4 rows at step 2; x marks what a row of step 2 attends to.

              rows of step 0   of step 1      of step 2
               0  1  2  3      0  1  2  3     0  1  2  3
    row 0      x               x              x
    row 1      x  x               x              x
    row 2      x  x  x               x              x
    row 3      x  x  x  x               x              x

Row 2 has its root at position 3, whose cache holds features up to position 2 (rows 0 .. 2 of step
0) and the rows of its own earlier drafts (row 2 of the steps 1 and 2).

So attention is one causal block and k diagonals, never a matrix of S x (D S) scores.

Shapes: B packed rows, S positions, D unrolled steps, G attention heads, Gkv key-value heads, E head
size, H hidden size, Ht the target's, n steps after step 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest

from ...heads.layers import RecyclingDrafter
from ...inference.rounds.device import send
from ..config import Memory
from ..data.batches import PADDING, Batch
from .backends import Backend, backend_for, block_mask, bucket, flex_for
from .chunked_attention import (
    Chunk,
    ChunkedAttention,
    by_key_head,
    causal_chunks,
    causal_visible,
    diagonal_scores,
)
from .memory import recomputing

Pair = tuple[Tensor, Tensor]
"""Keys and values of one step, [B, Gkv, S, E] each."""


class UnrolledAttention:
    """Attention over the causal block of step 0 and the diagonals of the steps after it.

    An object serves all steps of one batch of packed rows, for which it makes its masks once.
    Backends (see `backends.py`): sdpa runs in query chunks through torch's own kernels. flex is
    FlexAttention with a block mask. plain holds every score at once; the others are tested against
    it.
    """

    def __init__(self, batch: Batch, device: torch.device, backend: Backend = "auto") -> None:
        self._backend: Backend = backend
        self._batch, self._device = batch, device
        self._chunks: list[Chunk] | None = None
        self._block_mask: Any = None

    def __call__(self, queries: Tensor, steps: list[Pair]) -> Tensor:
        """Return what the rows of step k read, `[B, G, S, E]`.

        `queries` `[B, G, S, E]` are those of step k, `steps` the keys and values of steps 0 .. k.
        """
        backend = backend_for(self._backend, self._device, queries.shape[-1], queries.dtype)
        run = {"sdpa": self._sdpa, "flex": self._flex, "plain": self._plain}[backend]
        return run(queries, *steps[0], steps[1:])

    def _plain(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        """Return the output `[B, G, S, E]` from one table of scores `[B, G, S, S + n]`."""
        scale = queries.shape[-1] ** -0.5
        # Copies for every query head cost memory, which does not matter in the reference.
        keys, values = _for_heads(keys, queries), _for_heads(values, queries)
        later = [(_for_heads(k, queries), _for_heads(v, queries)) for k, v in later]
        documents = send(self._batch.documents, self._device)
        visible = causal_visible(documents, 0, queries.shape[2])
        scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(
            ~visible[:, None], -torch.inf
        )
        # Column S + j is the score of row t with its own row of step 1 + j: one number a row, the
        # diagonal of what would be another S x S table.
        diagonals = [(queries * k).sum(-1, keepdim=True) * scale for k, _ in later]
        probs = torch.cat([scores, *diagonals], dim=-1).softmax(-1)
        # One softmax was taken over both kinds of keys; the values are added up in two parts.
        output = probs[..., : scores.shape[-1]] @ values
        for j, (_, value) in enumerate(later):
            output = output + probs[..., scores.shape[-1] + j, None] * value
        return output

    def _sdpa(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        """Return the output `[B, G, S, E]` by torch's kernels, chunk by chunk of queries."""
        if self._chunks is None:
            self._chunks = causal_chunks(self._batch, self._device, queries.dtype)
        flat = [states for pair in later for states in pair]
        return ChunkedAttention.apply(self._chunks, queries, keys, values, *flat)

    def _flex(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        """Return the output `[B, G, S, E]` by FlexAttention over step 0, merged with the diagonals.

        With the log-sums l of the scores of step 0 and m of the diagonals, the diagonals have the
        share exp(m) / (exp(l) + exp(m)) of the softmax over both.
        """
        length = queries.shape[2]
        width = bucket(length) if queries.device.type == "cuda" else length
        padded = (functional.pad(x, (0, 0, 0, width - length)) for x in (queries, keys, values))
        causal_output, extra = flex_for(queries.device)(
            *padded,
            block_mask=self._flex_mask(length, width),
            # it shares key-value heads itself, without copies
            enable_gqa=queries.shape[1] != keys.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        causal_output = causal_output[:, :, :length]
        if not later:
            return causal_output
        diagonal_output, mass = _diagonals(queries, later)
        # exp(l) and exp(m) may overflow; with the log of their sum taken off, both are at most 1.
        total = torch.logaddexp(extra.lse[:, :, :length].to(mass.dtype), mass)
        share = torch.exp(mass - total)[..., None]
        # The share is in float32 at least, and so is the sum.
        output = causal_output * (1 - share) + diagonal_output * share
        return output.to(causal_output.dtype)

    def _flex_mask(self, length: int, width: int) -> Any:
        """Return the block mask of step 0 for texts padded to `width`, made at the first call."""
        if self._block_mask is None:
            # What is added is padding like that at the end of a packed row: no document sees it,
            # and it sees no document.
            padded = functional.pad(self._batch.documents, (0, width - length), value=PADDING)
            documents = send(padded, self._device)

            def visible(b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
                return (key <= row) & (documents[b, row] == documents[b, key])

            self._block_mask = block_mask(visible, len(documents), width, width, self._device)
        return self._block_mask


def _for_heads(states: Tensor, queries: Tensor) -> Tensor:
    """Repeat `[B, Gkv, S, E]` for the query heads that share them."""
    return states.repeat_interleave(queries.shape[1] // states.shape[1], dim=1)


def _diagonals(queries: Tensor, later: list[Pair]) -> tuple[Tensor, Tensor]:
    """Return the attention of each row over its own n keys of the steps 1 .. k.

    That is its output `[B, G, S, E]`, as if there were no step 0, and the log of its softmax's
    denominator `[B, G, S]`, the mass with which the row competes with step 0.
    """
    grouped = by_key_head(queries, later[0][0].shape[1])
    scores = diagonal_scores(grouped, [keys for keys, _ in later])
    # The softmax is in float32 at least too; only the finished weights are rounded.
    probs = scores.softmax(-1).to(queries.dtype)
    output = sum(probs[..., j, None] * v[:, :, None] for j, (_, v) in enumerate(later))
    assert isinstance(output, Tensor)
    return output.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def unroll(
    drafter: RecyclingDrafter,
    batch: Batch,
    taps: tuple[Tensor, ...],
    last: Tensor,
    steps: int,
    backend: Backend = "auto",
    memory: Memory | None = None,
) -> list[Tensor]:
    """Return the layers' output at each step, D tensors `[B, S, H]`.

    Row t of step k is about the token t + 2 + k. `taps` and `last` `[B, S, Ht]` are the target's
    features. Rows whose tokens leave their document have no meaning, and no row with meaning reads
    them. With `memory.recompute` only the states between the steps are kept for the backward pass.
    """
    device = last.device
    attention = UnrolledAttention(batch, device, backend)
    # What a token adds to the layer is the same at every step; it is only read further along.
    token_parts = ShiftAhead.apply(drafter.token_part(send(batch.ids, device)), steps)
    positions = send(batch.positions, device)
    state = drafter.fuse(taps, last)

    def step(
        token_part: Tensor, state: Tensor, cosines: Tensor, sines: Tensor, *before: Tensor
    ) -> tuple[Tensor, ...]:
        """Return a step's output, then its keys and values, given those of the steps `before`."""
        # Made here and not outside: with recomputation this function runs a second time.
        new: list[Tensor] = []

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # Contiguous, since each later step reads the keys and values again.
            queries, keys, values = (
                states.transpose(1, 2).contiguous() for states in (queries, keys, values)
            )
            # Before they are repeated for the query heads: recomputation keeps less of them.
            new.extend((keys, values))
            # With 2 layers, `before` is k0 v0 k1 v1 of step 0, then k0 v0 k1 v1 of step 1, ..:
            # layer 1 finds its own at 2 and 3, 6 and 7, ..
            own = range(2 * layer, len(before), 2 * len(drafter.layers))
            pairs = [*((before[i], before[i + 1]) for i in own), (keys, values)]
            return attention(queries, pairs).transpose(1, 2).flatten(2)

        return drafter.advance(token_part, state, (cosines, sines), attend), *new

    # Keys and values of earlier steps are arguments, one by one, because arguments are what
    # `recomputing` keeps of a step: gradients go back through all of them.
    run = recomputing(step) if memory and memory.recompute else step
    past: list[Tensor] = []
    outputs = []
    for k in range(steps):
        # Row t reads x[t+1+k], the token of position t + 1 + k, but has rotary position t + k: a
        # row of the drafter is where its feature is, one before its token.
        cosines, sines = drafter.rotary(positions + k)
        output, *new_states = run(token_parts[k], state, cosines, sines, *past)
        past += new_states
        outputs.append(output)
        state = drafter.recycled(output)
    return outputs


class ShiftAhead(torch.autograd.Function):
    """`apply(x, steps)` returns `x` `[B, S, H]` read 1, 2, .. `steps` places further along.

    The rows 0 1 2 3 become 1 2 3 - and 2 3 - -, with zeros past the end. All are views of one
    tensor, and their gradients are added up in one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> tuple[Tensor, ...]:
        padded = functional.pad(x, (0, 0, 0, steps))
        return tuple(padded[:, k : k + x.shape[1]] for k in range(1, 1 + steps))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = functional.pad(gradients[0], (0, 0, 1, len(gradients) - 1))
        length = gradients[0].shape[1]
        for k, gradient in enumerate(gradients[1:], 2):
            total[:, k : k + length] += gradient
        return total[:, :length], None
