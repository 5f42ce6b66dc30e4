"""Attention on CPUs over a causal block and n diagonals, chunk by chunk of queries.

Torch's attention gives no gradient through the log-sum of its scores, with which the block and the
diagonals are merged. But its flash kernel takes output and log-sum as arguments of the backward
pass: with those of the merged softmax the gradients are those of the merged attention, as in ring
attention (arXiv 2310.01889). So both directions call the kernel directly.

Shapes: B packed rows, S positions, G attention heads, Gkv key-value heads, r = G / Gkv, E head
size, n steps after step 0. C query rows of a chunk, N keys that it may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...distill.divergences import wide_dtype
from ...inference.rounds.attention import aligned
from ...inference.rounds.device import send
from ..data.batches import Batch

SHORTEST, LONGEST = 128, 1024  # query rows of a chunk
# Output `[Gkv, r, C, E]` and log-sums of the scores `[Gkv, r, C]`; gradients of queries, keys and
# values, in their shapes.
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Chunk:
    """Query rows `start` .. `end - 1` of packed row `row`, which see keys `first` .. `end - 1`.

    `mask` `[1, 1, C, N]` is added to the scores.
    """

    row: int
    start: int
    end: int
    first: int
    mask: Tensor


def causal_chunks(batch: Batch, device: torch.device, dtype: torch.dtype) -> list[Chunk]:
    """Return chunks of query rows that together cover all packed rows.

    They save scores that are masked anyway: most of those above the diagonal, and what lies before
    the oldest document that a chunk reaches into.
    """
    length = batch.ids.shape[1]
    # With eight chunks 9/16 of the S x S scores are computed at most (1 + 2 + .. + 8 of 64 parts),
    # where half of them are visible. Many small calls would cost more than they save.
    width = max(SHORTEST, min(length // 8, LONGEST))
    # Where each row's document begins. Two documents of 3 and 2 have the positions 0 1 2 0 1, and
    # 0 1 2 3 4 less these is 0 0 0 3 3.
    document_starts = torch.arange(length) - batch.positions
    documents_there = send(batch.documents, device)
    chunks: list[Chunk] = []
    per_row = -(-length // width)
    for row, documents in enumerate(batch.documents):
        same = row > 0 and torch.equal(documents, batch.documents[row - 1])
        for i, start in enumerate(range(0, length, width)):
            end = min(start + width, length)
            # Documents begin in ascending order, so the chunk's first row has the oldest one.
            first = int(document_starts[row, start])
            if same:  # as every row of one document
                mask = chunks[(row - 1) * per_row + i].mask
            else:
                visible = causal_visible(documents_there[row : row + 1], start, end, first)
                mask = aligned(visible, dtype)[None]
            chunks.append(Chunk(row, start, end, first, mask))
    return chunks


def causal_visible(documents: Tensor, start: int, end: int, first: int = 0) -> Tensor:
    """Return bools `[B, end - start, end - first]`: which rows of step 0 a query row sees.

    Query rows are `start` .. `end - 1`, rows of step 0 `first` .. `end - 1`; `documents` `[B, S]`
    are their documents. Padding is a document too: a softmax over nothing is NaN.
    """
    keys = torch.arange(first, end, device=documents.device)
    rows = keys[start - first :]
    same_document = documents[:, start:end, None] == documents[:, None, first:end]
    return same_document & (keys <= rows[:, None])


class ChunkedAttention(torch.autograd.Function):
    """`apply(chunks, queries, keys, values, *later)` returns what the query rows read.

    That is `[B, G, S, E]`, as are `queries`; `keys`, `values` and each of `later` (the keys of
    step 1, its values, the keys of step 2, ..) are `[B, Gkv, S, E]`.
    """

    @staticmethod
    def forward(
        ctx: Any, chunks: list[Chunk], queries: Tensor, keys: Tensor, values: Tensor, *later: Tensor
    ) -> Tensor:
        grouped = by_key_head(queries, keys.shape[1])
        output = torch.empty(grouped.shape, dtype=queries.dtype, device=queries.device)
        log_sums = torch.empty(
            grouped.shape[:-1], dtype=wide_dtype(queries.dtype), device=queries.device
        )
        for chunk in chunks:
            part, log_sum = FORWARD(*_operands(chunk, grouped, keys, values), attn_mask=chunk.mask)
            output[chunk.row, :, :, chunk.start : chunk.end] = part
            log_sums[chunk.row, :, :, chunk.start : chunk.end] = log_sum
        weights = None
        if later:
            output, log_sums, weights = _merge(grouped, output, log_sums, later)
        ctx.chunks = chunks
        ctx.save_for_backward(queries, keys, values, output, log_sums, weights, *later)
        return output.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        queries, keys, values, output, log_sums, weights, *later = ctx.saved_tensors
        grouped = by_key_head(queries, keys.shape[1])
        gradient = by_key_head(gradient, keys.shape[1])
        grouped_grad = torch.empty_like(log_sums[..., None].expand(output.shape))
        # Sums over chunks and heads are made in float32 at least.
        keys_grad, values_grad = (
            torch.zeros(keys.shape, dtype=log_sums.dtype, device=keys.device) for _ in range(2)
        )
        for chunk in ctx.chunks:
            rows = (chunk.row, slice(None), slice(None), slice(chunk.start, chunk.end))
            # The log-sums are those of the softmax over block and diagonals.
            grads = BACKWARD(
                gradient[rows], *_operands(chunk, grouped, keys, values), output[rows],
                log_sums[rows], 0.0, False, attn_mask=chunk.mask,
            )  # fmt: skip
            grouped_grad[rows] = grads[0]
            seen = (chunk.row, slice(None), slice(chunk.first, chunk.end))
            keys_grad[seen] += grads[1].sum(1)
            values_grad[seen] += grads[2].sum(1)
        later_grads = []
        if later:
            later_grads = _diagonal_grads(gradient, grouped, output, weights, later, grouped_grad)
        grads = (grouped_grad.flatten(1, 2), keys_grad, values_grad, *later_grads)
        return None, *(grad.to(queries.dtype) for grad in grads)


def by_key_head(states: Tensor, key_heads: int) -> Tensor:
    """Return `[B, G, S, E]` as `[B, Gkv, r, S, E]`, for which keys and values need no copies."""
    return states.unflatten(1, (key_heads, -1))


def diagonal_scores(grouped: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Return the scores `[B, Gkv, r, S, n]` of each row with its own keys of n later steps.

    `grouped` is `[B, Gkv, r, S, E]`, each of `keys` `[B, Gkv, S, E]`; scores are in float32 at
    least.
    """
    grouped = grouped.to(wide_dtype(grouped.dtype))
    # Products are summed along E: batched matrix products of n x E by E x 1 take three times as
    # long on a CPU.
    products = [(grouped * k[:, :, None]).sum(-1) for k in keys]
    return torch.stack(products, dim=-1).mul_(grouped.shape[-1] ** -0.5)


def _operands(
    chunk: Chunk, grouped: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries `[Gkv, r, C, E]`, keys and values `[Gkv, r, N, E]` of a chunk, as views."""
    queries = grouped[chunk.row, :, :, chunk.start : chunk.end]
    shared = queries.shape[1]
    keys, values = (
        states[chunk.row, :, None, chunk.first : chunk.end].expand(-1, shared, -1, -1)
        for states in (keys, values)
    )
    return queries, keys, values


def _merge(
    grouped: Tensor, output: Tensor, log_sums: Tensor, later: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and log-sums over the block and the diagonals, and the diagonals' weights.

    `output` `[B, Gkv, r, S, E]` and `log_sums` `[B, Gkv, r, S]` are those of the block alone. The
    weights `[B, Gkv, r, S, n]` are the share of each row's own later keys in its softmax.

    Example: exp(score) is 1 and 2 for two keys of step 0, and 3 and 4 for two diagonals. The
    block's log-sum is log 3, that of all is log 10. Its output gets the weight 3/10, and the
    diagonals' values 3/10 and 4/10.
    """
    scores = diagonal_scores(grouped, later[::2])
    total = torch.logaddexp(log_sums, scores.logsumexp(-1))
    weights = scores.sub_(total[..., None]).exp_()
    merged = output * (log_sums - total).exp_()[..., None]
    for j, values in enumerate(later[1::2]):
        merged.addcmul_(weights[..., j, None], values[:, :, None].to(merged.dtype))
    return merged.to(output.dtype), total, weights


def _diagonal_grads(
    gradient: Tensor,
    grouped: Tensor,
    output: Tensor,
    weights: Tensor,
    later: list[Tensor],
    grouped_grad: Tensor,
) -> list[Tensor]:
    """Return the gradients of `later`, and add those of the queries to `grouped_grad`.

    With the weight w of a key k with value v, and the gradient g of the output o, the score's
    gradient is w (g v - g o), and the value's is w g.
    """
    gradient, exact = gradient.to(weights.dtype), grouped.to(weights.dtype)
    offset = (gradient * output).sum(-1)
    grads = []
    for j, (keys, values) in enumerate(zip(later[::2], later[1::2], strict=True)):
        weight = weights[..., j]
        score_grad = (gradient * values[:, :, None]).sum(-1).sub_(offset).mul_(weight)
        score_grad = score_grad.mul_(grouped.shape[-1] ** -0.5)[..., None]
        grouped_grad.addcmul_(score_grad, keys[:, :, None].to(weights.dtype))
        grads += [(score_grad * exact).sum(2), (weight[..., None] * gradient).sum(2)]
    return grads
