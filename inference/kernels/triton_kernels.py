"""Triton kernels of decoding: attention of a tree's nodes over a cache, and the rest of a layer.

A few queries read thousands of keys: one program for each head would leave most of a GPU idle. So
the keys of a head are split into parts, and a second kernel merges what the parts give, by the
logarithms of their sums (Flash-Decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
The parts divide what a row has, and not its buffer: slots that are out of use are never read.

The others are a decoder layer without its products. They round where torch's operators round, so
that their numbers are the same but for the order of sums. They work on contiguous tensors. Indices
that grow with a batch or a cache are of 64 bits.
"""

# Constants of a kernel are of type constexpr in its signature, and plain numbers in its calls.
# pyright: reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl

# Numbers that change with the tree: Triton would compile a kernel more for 1 and multiples of 16.
OF_TREES = ["count", "undecided", "visible_row", "depths_row"]


@triton.jit(do_not_specialize=OF_TREES)
def attend(
    queries,
    keys,
    values,
    starts,
    visible,
    depths,
    parts,
    logs,
    count,
    undecided,
    heads,
    kv_heads,
    window,
    visible_row,
    depths_row,
    key_row,
    key_head,
    value_row,
    value_head,
    scale,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attention of `ROWS` queries, which share a key-value head, to one part of its keys.

    A query is a node with an attention head; those of one node are next to one another. What is
    found goes to `parts` `[SPLITS, B, N, G, E]`, and the logarithm of the sum to `logs`: minus
    infinity for a part in which a query sees nothing. `visible` says which of the `undecided` slots
    a node sees. All before them are committed; a `WINDOW` hides those that are `window` or more
    positions before the node's. `visible_row` and `depths_row` are 0 where batch rows share them.
    """
    split, pair, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, kv_head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    shared = heads // kv_heads
    of_head = block * ROWS + tl.arange(0, ROWS)
    real_row = of_head < count * shared
    node = of_head // shared
    # Offsets within a row of the batch fit 32 bits, which take half the registers.
    query = node * heads + pair % kv_heads * shared + of_head % shared
    first_of_row = row * count * heads
    at = tl.arange(0, BLOCK)
    real = real_row[:, None] & (at < SIZE)[None, :]
    numbers = query[:, None] * SIZE + at[None, :]
    asked = tl.load(queries + first_of_row * SIZE + numbers, mask=real, other=0)
    depth = tl.load(depths + row * depths_row + node, mask=real_row, other=0).to(tl.int32)

    start = tl.load(starts + row).to(tl.int32)
    end = start + undecided
    # No node sees a slot before the window of the root, whose depth is the least.
    first = tl.maximum(start - window + 1, 0) if WINDOW else start * 0
    blocks = tl.cdiv(tl.cdiv(end - first, SPLITS), SLOTS)
    low = tl.minimum(first + split * blocks * SLOTS, end)
    high = tl.minimum(low + blocks * SLOTS, end)
    # Blocks of committed slots alone need no look at the tree.
    tree = low + tl.maximum(tl.minimum(high, start) - low, 0) // SLOTS * SLOTS

    key_base = keys + row * key_row + kv_head * key_head
    value_base = values + row * value_row + kv_head * value_head
    see = visible + row * visible_row + node * undecided
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gained = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in range(low, tree, SLOTS):
        largest, total, gained = _over(
            *(begin, high, start, undecided, asked, key_base, value_base, see, real_row, depth),
            *(window, scale, largest, total, gained),
            *(SIZE, WINDOW, False, SLOTS, BLOCK),
        )
    for begin in range(tree, high, SLOTS):
        largest, total, gained = _over(
            *(begin, high, start, undecided, asked, key_base, value_base, see, real_row, depth),
            *(window, scale, largest, total, gained),
            *(SIZE, WINDOW, True, SLOTS, BLOCK),
        )

    # Nothing was seen; a sum that is NaN stays NaN.
    sure = tl.where(total == 0, 1.0, total)
    part = (split * (tl.num_programs(1) // kv_heads) + row) * count * heads
    tl.store(parts + part * SIZE + numbers, gained / sure[:, None], mask=real)
    sums = tl.where(total == 0, float("-inf"), largest + tl.log(sure))
    tl.store(logs + part + query, sums, mask=real_row)


@triton.jit
def _over(
    begin,
    high,
    start,
    undecided,
    asked,
    key_base,
    value_base,
    see,
    real_row,
    depth,
    window,
    scale,
    largest,
    total,
    gained,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest score, the sum and what was gained, with the `SLOTS` slots from `begin` on.

    Without `TREE` all slots are committed.
    """
    slot, at = begin + tl.arange(0, SLOTS), tl.arange(0, BLOCK)
    stored = (slot < high)[:, None] & (at < SIZE)[None, :]
    numbers = slot[:, None] * SIZE + at[None, :]
    key = tl.load(key_base + numbers, mask=stored, other=0)
    scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    seen = (slot < high)[None, :] & real_row[:, None]
    if TREE:
        index = slot - start
        in_tree = (index >= 0)[None, :] & (index < undecided)[None, :] & seen
        marked = tl.load(see[:, None] + index[None, :], mask=in_tree, other=0)
        seen = seen & ((index < 0)[None, :] | (marked != 0))
    if WINDOW:
        near = start + depth[:, None] - slot[None, :] < window
        if TREE:
            near = near | (slot >= start)[None, :]
        seen = seen & near
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(largest, tl.max(scores, 1))
    # With nothing seen so far, the difference of two infinities is NaN.
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - base[:, None])
    shrunk = tl.exp(largest - base)
    value = tl.load(value_base + numbers, mask=stored, other=0)
    gained = gained * shrunk[:, None]
    gained += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return new, total * shrunk + tl.sum(weights, 1), gained


@triton.jit(do_not_specialize=["queries"])
def merge(
    parts,
    logs,
    attended,
    queries,
    SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attention of one query, of `queries`, to all keys, from that to the parts of them."""
    query = tl.program_id(0).to(tl.int64)
    split, at = tl.arange(0, MANY), tl.arange(0, BLOCK)
    real = at < SIZE
    part = split.to(tl.int64) * queries + query
    sums = tl.load(logs + part, mask=split < SPLITS, other=float("-inf"))
    largest = tl.max(sums, 0)
    weights = tl.exp(sums - tl.where(largest == float("-inf"), 0.0, largest))
    found = tl.load(
        parts + part[:, None] * SIZE + at[None, :],
        mask=(weights != 0)[:, None] & real[None, :],
        other=0,
    )
    total = tl.sum(weights, 0)
    joint = tl.sum(found * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(attended + query * SIZE + at, joint.to(attended.dtype.element_ty), mask=real)


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
        # Number i is paired with i + n / 2, as in `elementwise.rotate`.
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
