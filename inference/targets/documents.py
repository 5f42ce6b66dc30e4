"""Attention of packed rows, document by document: no mask of S x S numbers, and no hidden scores.

transformers keeps the documents of a packed row apart by a mask, for which CUDA kernels repeat the
keys of grouped heads in each layer. Here every document is a call with a causal order alone, which
every fast kernel takes, registered as an attention function of transformers.

Shapes: B rows, N positions, G attention heads, Gkv key-value heads, E size of an attention head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "draftsmith_documents"

Spans = list[list[tuple[int, int]]]
"""First position of each document of each row, and the one after its last."""


def spans_of(documents: Tensor) -> Spans:
    """Return the spans of `documents` `[B, N]`, the number of each position's document, on the CPU.

    Example: 0 0 0 1 1 are the spans 0 .. 3 and 3 .. 5. Padding is a document like any other.
    """
    rows = []
    for row in documents:
        ends = [*((row[1:] != row[:-1]).nonzero()[:, 0] + 1).tolist(), len(row)]
        rows.append(list(zip([0, *ends[:-1]], ends, strict=True)))
    return rows


def attend_in_documents(
    _module: Any,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    _mask: None,
    *,
    documents: Spans,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return what the queries `[B, G, N, E]` read, `[B, N, G, E]`, each in its own document.

    `keys` and `values` are `[B, Gkv, N, E]`.
    """
    shared = queries.shape[1] // keys.shape[1]
    # The kernels for float32 on CUDA share no heads, and torch would go to one that holds all
    # scores.
    repeats = shared > 1 and queries.device.type == "cuda" and queries.dtype == torch.float32
    rows = []
    for row, spans in enumerate(documents):
        parts = []
        for start, end in spans:
            there = (slice(row, row + 1), slice(None), slice(start, end))
            own_keys, own_values = keys[there], values[there]
            if repeats:
                own_keys = own_keys.repeat_interleave(shared, 1)
                own_values = own_values.repeat_interleave(shared, 1)
            part = scaled_dot_product_attention(
                queries[there],
                own_keys,
                own_values,
                dropout_p=dropout,
                is_causal=end - start > 1,
                scale=scaling,
                enable_gqa=shared > 1 and not repeats,
            )
            parts.append(part.transpose(1, 2))
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows), None


AttentionInterface.register(NAME, attend_in_documents)


@contextmanager
def in_documents(decoder: Any) -> Iterator[None]:
    """Let a transformers decoder, called with `documents=spans`, attend in documents meanwhile."""
    before = decoder.config._attn_implementation
    decoder.set_attn_implementation(NAME)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)
