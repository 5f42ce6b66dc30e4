"""Triton kernels of a decoder layer, without its products and its attention.

They round where torch's operators round, so that their numbers are the same but for the order of
sums. They work on contiguous tensors. Indices that grow with a batch or a cache are of 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm(
    x,
    added,
    weight,
    total,
    normed,
    size,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Root mean square norm of `x + added`, or of `x`, for a row of `size` numbers a program.

    With `ADD` the sum goes to `total`.
    """
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    real = at < size
    kind = normed.dtype.element_ty
    numbers = tl.load(x + row + at, mask=real, other=0).to(tl.float32)
    if ADD:
        numbers += tl.load(added + row + at, mask=real, other=0).to(tl.float32)
        rounded = numbers.to(kind)
        tl.store(total + row + at, rounded, mask=real)
        numbers = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / size + eps)
    scaled = (numbers * scale).to(kind).to(tl.float32)
    weights = tl.load(weight + at, mask=real, other=0).to(tl.float32)
    tl.store(normed + row + at, (scaled * weights).to(kind), mask=real)


@triton.jit
def gate(gate_up, gated, size, BLOCK: tl.constexpr):
    """SiLU of the first half of each row of `2 * size` numbers, times the second half."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < size
    kind = gated.dtype.element_ty
    first = tl.load(gate_up + row * 2 * size + at, mask=real, other=0).to(tl.float32)
    second = tl.load(gate_up + row * 2 * size + size + at, mask=real, other=0).to(tl.float32)
    active = (first / (1 + tl.exp(-first))).to(kind).to(tl.float32)
    tl.store(gated + row * size + at, (active * second).to(kind), mask=real)


@triton.jit(do_not_specialize=["count", "staged", "table_row"])
def rotate(
    qkv,
    cosines,
    sines,
    query_weight,
    key_weight,
    starts,
    queries,
    keys,
    values,
    count,
    staged,
    heads,
    kv_heads,
    eps,
    table_row,
    key_row,
    key_head,
    key_slot,
    value_row,
    value_head,
    value_slot,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one position: its norm, its rotation, and its place.

    Queries go to `queries`, keys and values to the slot `starts[row] + staged + node` of the row.
    `table_row` is the number of angles from one row of the batch to the next: 0 where rows share
    them. Of the `SIZE` numbers of a head the first `ROTATED` are rotated.
    """
    position = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row, node = position // count, position % count
    at = tl.arange(0, BLOCK)
    real = at < SIZE
    kind = queries.dtype.element_ty
    source = qkv + (position * (heads + 2 * kv_heads) + head) * SIZE
    found = tl.load(source + at, mask=real, other=0).to(tl.float32)
    if head < heads + kv_heads:
        # Number i is paired with i + n / 2, as in `rotary.rotate`.
        half: tl.constexpr = ROTATED // 2
        turns = at < ROTATED
        pair = tl.where(at < half, at + half, at - half)
        other = tl.load(source + pair, mask=turns, other=0).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(found * found, 0) / SIZE + eps)
            of_query = at * 0 + head < heads
            weight = tl.load(query_weight + at, mask=real & of_query, other=0).to(tl.float32)
            weight += tl.load(key_weight + at, mask=real & ~of_query, other=0).to(tl.float32)
            paired = tl.load(query_weight + pair, mask=turns & of_query, other=0).to(tl.float32)
            paired += tl.load(key_weight + pair, mask=turns & ~of_query, other=0).to(tl.float32)
            found = ((found * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
            other = ((other * scale).to(kind).to(tl.float32) * paired).to(kind).to(tl.float32)
        angles = row * table_row + node * ROTATED + at
        cosine = tl.load(cosines + angles, mask=turns, other=0).to(kind).to(tl.float32)
        sine = tl.load(sines + angles, mask=turns, other=0).to(kind).to(tl.float32)
        other = tl.where(at < half, -other, other)
        straight = (found * cosine).to(kind).to(tl.float32)
        turned = straight + (other * sine).to(kind).to(tl.float32)
        found = tl.where(turns, turned, found)
    found = found.to(kind)
    if head < heads:
        tl.store(queries + (position * heads + head) * SIZE + at, found, mask=real)
    else:
        slot = tl.load(starts + row) + staged + node
        kv_head = (head - heads) % kv_heads
        if head < heads + kv_heads:
            place = keys + row * key_row + kv_head.to(tl.int64) * key_head + slot * key_slot
        else:
            place = values + row * value_row + kv_head.to(tl.int64) * value_head + slot * value_slot
        tl.store(place + at, found, mask=real)
