"""Attention and passes of an EAGLE drafter that is unrolled over a whole text in training.

Training runs the drafter as decoding would run it from every root of the text at once: the
training-time test of EAGLE-3 (arXiv 2503.01840). Step 0 reads the target's features; step k reads
the drafter's own states of step k - 1 and the text's next token. Row t of step k attends to what a
chain of k drafts from root t + 1 has in its cache: the rows up to t of step 0 in its own document,
and, of the steps 1 .. k, row t itself only.

Example: a document of 4 rows at step 2; x marks what a row of step 2 attends to.

              rows of step 0   of step 1      of step 2
               0  1  2  3      0  1  2  3     0  1  2  3
    row 0      x               x              x
    row 1      x  x               x              x
    row 2      x  x  x               x              x
    row 3      x  x  x  x               x              x

Row 2 has its root at position 3. In decoding, the cache of that root holds features up to position
2 (rows 0 .. 2 of step 0) and the rows of its own earlier drafts, which stand at the positions 3 and
4 (row 2 of the steps 1 and 2). The drafts of other roots are in other rows.

So attention is one causal block and k diagonals, never a matrix of S x (D S) scores.

Shapes: B packed rows, S positions, D unrolled steps, G attention heads, Gkv key-value heads, E head
size, H hidden size, Ht the target's, n steps after step 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ...heads.eagle import EagleDrafter
from ...heads.errors import UserError
from ..data.batches import PADDING, Batch
from ..memory import Memory, recomputing

Backend = Literal["auto", "sdpa", "flex", "plain"]


def check_backend(backend: Backend, device: torch.device) -> None:
    """Raise `UserError` for a backend of attention that has no gradients on this device."""
    if backend == "flex" and device.type == "cpu":
        raise UserError("objective.attention is flex, which has no gradients on a CPU; use auto")


Pair = tuple[Tensor, Tensor]
"""Keys and values of one step, [B, Gkv, S, E] each."""


class UnrolledAttention:
    """Attention over the causal block of step 0 and the diagonals of the steps after it.

    An object serves all steps of one batch of packed rows, for which it makes its masks once.
    Backends: sdpa (auto) runs in query chunks through torch's own attention. flex is FlexAttention
    with a block mask, which needs no mask of S x S numbers; it is compiled on a GPU and has no
    gradients on a CPU. plain holds every score at once; the others are tested against it.
    """

    def __init__(self, batch: Batch, device: torch.device, backend: Backend = "auto") -> None:
        self.backend = "sdpa" if backend == "auto" else backend
        self._batch, self._device = batch, device
        self._chunks: list[_Chunk] | None = None
        self._block_mask: Any = None

    def __call__(self, queries: Tensor, steps: list[Pair]) -> Tensor:
        """Return what the rows of step k read, `[B, G, S, E]`.

        `queries` `[B, G, S, E]` are those of step k, `steps` the keys and values of steps 0 .. k.
        """
        run = {"sdpa": self._sdpa, "flex": self._flex, "plain": self._plain}[self.backend]
        keys, values = (_for_heads(states, queries) for states in steps[0])
        return run(queries, keys, values, steps[1:])

    def _plain(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        """Return the output `[B, G, S, E]` from one table of scores `[B, G, S, S + n]`."""
        scale = queries.shape[-1] ** -0.5
        # Copies for every query head cost memory, which does not matter in the reference.
        later = [(_for_heads(k, queries), _for_heads(v, queries)) for k, v in later]
        scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(
            ~self._visible(0, queries.shape[2])[:, None], -torch.inf
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

    def _visible(self, start: int, end: int, first: int = 0) -> Tensor:
        """Return bools `[B, end - start, end - first]`: which rows of step 0 a query row sees.

        Query rows are `start` .. `end - 1`, rows of step 0 are `first` .. `end - 1`. Padding is a
        document too, so that each of its rows sees itself at least: a softmax over nothing is NaN.
        """
        documents = self._batch.documents
        rows, keys = torch.arange(start, end), torch.arange(first, end)
        # The causal order alone is not enough: an earlier row may belong to another document.
        same_document = documents[:, start:end, None] == documents[:, None, first:end]
        return (same_document & (keys <= rows[:, None])).to(self._device)

    def _sdpa(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        """Return the output `[B, G, S, E]` by torch's own attention, chunk by chunk of queries.

        Torch's attention returns no log-sum of its scores, with which two results could be merged
        afterwards (`_flex` does that). So the diagonals take part as one more key, the sink.
        """
        size, sink = queries.shape[-1], bool(later)
        diagonal_output = None
        if later:
            diagonal_output, mass = _diagonals(queries, later)
            queries, keys, values = _with_sink(queries, keys, values, mass)
        outputs = []
        for chunk in self._query_chunks(queries.shape[2]):
            chunk_output = functional.scaled_dot_product_attention(
                queries[:, :, chunk.start : chunk.end],
                _behind_sink(keys, chunk, sink),
                _behind_sink(values, chunk, sink),
                attn_mask=chunk.mask(sink, queries.dtype),
                # that of the true head size: the sink's columns have widened the queries
                scale=size**-0.5,
            )
            outputs.append(chunk_output)
        output = torch.cat(outputs, dim=2)
        if diagonal_output is None:
            return output
        # Column `size` holds the weight of the sink, that is of all diagonals together.
        return output[..., :size] + output[..., size : size + 1] * diagonal_output

    def _query_chunks(self, length: int) -> list[_Chunk]:
        """Return chunks of query rows that together cover `length`, made at the first call.

        Short chunks save scores that are masked anyway: the half above the diagonal, and what lies
        before the oldest document that a chunk reaches into.
        """
        if self._chunks is None:
            # With eight chunks at most 9/16 of the S x S scores are computed (1 + 2 + .. + 8 of 64
            # parts), where half of them are visible. At least 64 rows keep a short text from many
            # small calls, at most 1024 limit the mask of a chunk.
            width = max(64, min(length // 8, 1024))
            # Where each row's document begins. Two documents of 3 and 2 have the positions
            # 0 1 2 0 1, and 0 1 2 3 4 less these is 0 0 0 3 3.
            document_starts = torch.arange(length) - self._batch.positions
            self._chunks = []
            for start in range(0, length, width):
                end = min(start + width, length)
                # Documents begin in ascending order, so the chunk's first row has the oldest one.
                first = int(document_starts[:, start].min())
                visible = self._visible(start, end, first)
                if bool((self._batch.documents == self._batch.documents[:1]).all()):
                    visible = visible[:1]  # one mask serves all packed rows
                self._chunks.append(_Chunk(start, end, first, visible[:, None]))
        return self._chunks

    def _flex(self, queries: Tensor, keys: Tensor, values: Tensor, later: list[Pair]) -> Tensor:
        """Return the output `[B, G, S, E]` by FlexAttention over step 0, merged with the diagonals.

        With the log-sums l of the scores of step 0 and m of the diagonals, the diagonals have the
        share exp(m) / (exp(l) + exp(m)) of the softmax over both.
        """
        from torch.nn.attention.flex_attention import AuxRequest

        length = queries.shape[2]
        width = bucket(length) if queries.device.type == "cuda" else length
        padded = (functional.pad(x, (0, 0, 0, width - length)) for x in (queries, keys, values))
        causal_output, extra = flex_for(queries.device)(
            *padded, block_mask=self._flex_mask(length, width), return_aux=AuxRequest(lse=True)
        )
        causal_output = causal_output[:, :, :length]
        if not later:
            return causal_output
        diagonal_output, mass = _diagonals(queries, later)
        # exp(l) and exp(m) may overflow; with the log of their sum taken off, both are at most 1.
        total = torch.logaddexp(_wide(extra.lse[:, :, :length]), mass)
        share = torch.exp(mass - total)[..., None]
        output = _wide(causal_output) * (1 - share) + _wide(diagonal_output) * share
        return output.to(causal_output.dtype)

    def _flex_mask(self, length: int, width: int) -> Any:
        """Return the block mask of step 0 for texts padded to `width`, made at the first call."""
        if self._block_mask is None:
            from torch.nn.attention.flex_attention import create_block_mask

            # What is added is padding like that at the end of a packed row: no document sees it,
            # and it sees no document.
            documents = functional.pad(
                self._batch.documents, (0, width - length), value=PADDING
            ).to(self._device)

            def visible(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
                return (key <= row) & (documents[b, row] == documents[b, key])

            make: Any = create_block_mask
            if self._device.type == "cuda":
                # uncompiled, it makes all S x S bools before it looks at them in blocks
                make = torch.compile(create_block_mask)
            self._block_mask = make(
                visible, len(documents), None, width, width, device=str(self._device)
            )
        return self._block_mask


_COMPILED: dict[str, Any] = {}


def bucket(length: int) -> int:
    """Return the next of 128, 192, 256, 384, 512, .. that is at least `length`.

    A batch is as wide as its longest row, and a compiled kernel is made for one width. Rounding up
    to few widths compiles few kernels. Example: 129 .. 192 become 192, 193 .. 256 become 256.
    """
    power = max(128, 1 << (length - 1).bit_length())
    return power * 3 // 4 if length <= power * 3 // 4 and power > 128 else power


def flex_for(device: torch.device) -> Any:
    """Return FlexAttention for a device: as it is on a CPU, else compiled once for the process."""
    from torch.nn.attention.flex_attention import flex_attention

    if device.type == "cpu":
        return flex_attention
    if device.type not in _COMPILED:
        # Compiled for fixed shapes, of which `bucket` leaves few.
        _COMPILED[device.type] = torch.compile(flex_attention, dynamic=False)
    return _COMPILED[device.type]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _for_heads(states: Tensor, queries: Tensor) -> Tensor:
    """Repeat `[B, Gkv, S, E]` for the query heads that share them."""
    return states.repeat_interleave(queries.shape[1] // states.shape[1], dim=1)


def _diagonals(queries: Tensor, later: list[Pair]) -> tuple[Tensor, Tensor]:
    """Return the attention of each row over its own n keys of the steps 1 .. k.

    That is its output `[B, G, S, E]`, as if there were no step 0, and the log of its softmax's
    denominator `[B, G, S]`, the mass with which the row competes with step 0.
    """
    # The heads that share keys get an axis of their own, [B, Gkv, G / Gkv, S, E], so that keys and
    # values need no copies. Products are summed along E: batched matrix products of n x E by E x 1
    # take three times as long on a CPU.
    grouped = _wide(queries).unflatten(1, (later[0][0].shape[1], -1))
    products = [(grouped * _wide(k)[:, :, None]).sum(-1) for k, _ in later]
    scores = torch.stack(products, dim=-1) * queries.shape[-1] ** -0.5
    # Scores and softmax are in float32 at least; only the finished weights are rounded.
    probs = scores.softmax(-1).to(queries.dtype)
    output = sum(probs[..., j, None] * v[:, :, None] for j, (_, v) in enumerate(later))
    assert isinstance(output, Tensor)
    return output.flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def _with_sink(
    queries: Tensor, keys: Tensor, values: Tensor, mass: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with one more key in front, the sink.

    The sink stands for all diagonals of a row: its score is `mass` `[B, G, S]`, the log of the sum
    of their exponentials, and the weight that it gets comes out in a column of its own. So an
    attention that knows nothing of diagonals weighs them, and its gradients are right.

    Example: exp(score) is 1 and 2 for two keys of step 0, and 3 and 4 for two diagonals with the
    values v and w. Their mass is log 7, their output alone (3 v + 4 w) / 7. The sink gets the
    weight 7 / 10, and 7 / 10 of that output is 3/10 v + 4/10 w, as in the softmax over all four.
    """
    size = queries.shape[-1]
    exact = queries.dtype in (torch.float32, torch.float64)
    # The query's new column times the sink's 1 is the score, once attention has multiplied it with
    # its scale E^-1/2. The other keys have 0 in that column.
    score = mass * size**0.5
    high = score.to(queries.dtype)
    # bf16 keeps 8 bits: a mass between 16 and 32 would be off by up to 1/16. A second column adds
    # what rounding took away.
    columns = [high] if exact else [high, (score - high).to(queries.dtype)]
    wide = 1 if exact else 8  # kernels for low precision want multiples of 8
    wider_queries = torch.cat([queries, torch.stack(columns, dim=-1)], dim=-1)
    wider_queries = functional.pad(wider_queries, (0, wide - len(columns)))
    # `pad` counts from the last axis: `wide` columns behind, then one row in front, the sink. It
    # makes new tensors, so the writes below do not change the caller's.
    keys, values = (functional.pad(states, (0, wide, 1, 0)) for states in (keys, values))
    keys[:, :, 0, size : size + len(columns)] = 1
    # The sink's value is 0 in the columns of real values, and 1 in the one that returns its weight.
    values[:, :, 0, size] = 1
    return wider_queries, keys, values


def _behind_sink(states: Tensor, chunk: _Chunk, sink: bool) -> Tensor:
    """Return the rows of step 0 that a chunk may see, behind the sink if there is one.

    With a sink at index 0, row t of step 0 is at index t + 1.
    """
    if not sink:
        return states[:, :, chunk.first : chunk.end]
    if chunk.first == 0:
        return states[:, :, : chunk.end + 1]  # a view, where `cat` would copy
    return torch.cat([states[:, :, :1], states[:, :, chunk.first + 1 : chunk.end + 1]], dim=2)


@dataclass
class _Chunk:
    """Query rows `start` .. `end - 1`, which see nothing before row `first` of step 0."""

    start: int
    end: int
    first: int
    visible: Tensor
    """[B or 1, 1, end - start, end - first] bool, without the sink."""
    _mask: Tensor | None = None

    def mask(self, sink: bool, dtype: torch.dtype) -> Tensor:
        """Return the mask that is added to scores, 0 or -inf, with a column for a sink if wanted.

        Torch would make such a mask of bools at every call; it is made once for all steps. The
        masks of all chunks hold about half of S x S numbers for a packed row.
        """
        if self._mask is None:
            visible = functional.pad(self.visible, (1, 0), value=True)  # every row sees the sink
            self._mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)
        # Step 0 has no diagonals and so no sink; all later steps have one.
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
    """Return the layers' output at each step, D tensors `[B, S, H]`.

    Row t of step k is about the token t + 2 + k. `taps` and `last` `[B, S, Ht]` are the target's
    features. Rows whose tokens leave their document hold nothing of meaning, and no row with
    meaning reads them. With `memory.recompute` only the states between the steps are kept for the
    backward pass.
    """
    device = last.device
    attention = UnrolledAttention(batch, device, backend)
    # What a token adds to the layer is the same at every step; it is only read further along.
    token_parts = drafter.token_part(batch.ids.to(device, non_blocking=True))
    positions = batch.positions.to(device, non_blocking=True)
    state = drafter.fuse(taps, last)
    layers = len(drafter.layers)

    def step(
        token_part: Tensor, state: Tensor, cosines: Tensor, sines: Tensor, *before: Tensor
    ) -> tuple[Tensor, ...]:
        """Return a step's output, then its keys and values, given those of the steps `before`."""
        # Made here and not outside: with recomputation this function runs a second time.
        new: list[Tensor] = []

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            queries, keys, values = (states.transpose(1, 2) for states in (queries, keys, values))
            # Before they are repeated for the query heads: recomputation keeps G / Gkv times less
            # of them.
            new.extend((keys, values))
            # With 2 layers, `before` is k0 v0 k1 v1 of step 0, then k0 v0 k1 v1 of step 1, ..:
            # layer 1 finds its own at 2 and 3, 6 and 7, ..
            pairs: list[Pair] = []
            for i in range(2 * layer, len(before), 2 * layers):
                pairs.append((before[i], before[i + 1]))
            pairs.append((keys, values))
            return attention(queries, pairs).transpose(1, 2).flatten(2)

        return drafter.advance(token_part, state, (cosines, sines), attend), *new

    # Keys and values of earlier steps are arguments, one by one, because arguments are what
    # `recomputing` keeps of a step: gradients go back through all of them.
    run = recomputing(step, memory.offload) if memory and memory.recompute else step
    past: list[Tensor] = []
    outputs = []
    for k in range(steps):
        # Row t reads x[t+1+k], the token of position t + 1 + k, but has rotary position t + k: a
        # row of the drafter stands where its feature does, one before its token.
        cosines, sines = drafter.rotary(positions + k)
        output, *new_states = run(_ahead(token_parts, 1 + k), state, cosines, sines, *past)
        past += new_states
        outputs.append(output)
        state = drafter.recycled(output)
    return outputs


def _ahead(x: Tensor, places: int) -> Tensor:
    """Return `x` with what stands at t + `places` in row t, zeros past the end."""
    # Rows 0 1 2 3 with `places` 1 become 1 2 3 -. A text shorter than `places` has nothing left and
    # gets as many rows of zeros as it had rows.
    return functional.pad(x[:, places:], (0, 0, 0, min(places, x.shape[1])))
