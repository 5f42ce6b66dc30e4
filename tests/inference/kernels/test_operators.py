"""The kernels, compared with torch's operators: on a GPU if there is one, or interpreted.

Triton's interpreter has no bfloat16. float16 takes the same roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from draftsmith.heads.elementwise import rotate
from draftsmith.inference.kernels import operators
from draftsmith.inference.kernels.operators import slots_seen

pytest.importorskip("triton")
CUDA = torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3} | ({torch.bfloat16: 3e-2} if CUDA else {})
trials = settings(max_examples=15, deadline=None)
dtypes = st.sampled_from(list(TOLERANCE))


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu() -> Iterator[None]:
    with torch.device("cuda" if CUDA else "cpu"):
        yield


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """The norm as transformers rounds it."""
    return rms_norm(x, weight.shape, None, 1e-5) * weight


def test_kernels_are_usable_on_cuda_only() -> None:
    assert operators.usable(torch.device("cuda"), torch.bfloat16)
    assert not operators.usable(torch.device("cuda"), torch.float64)
    assert not operators.usable(torch.device("cpu"), torch.float32)


@trials
@given(st.integers(1, 3), st.integers(1, 70), dtypes, st.integers(0, 99))
def test_norm_and_gate_kernels_match_torch(
    rows: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x, added = (torch.randn(2, rows, size).to(dtype) for _ in range(2))
    weight, gate_up = torch.randn(size).to(dtype), torch.randn(2, rows, 2 * size).to(dtype)
    same: Any = dict(atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(operators.norm(x, weight, 1e-5), normed(x, weight), **same)
    total, found = operators.add_norm(x, added, weight, 1e-5)
    assert torch.equal(total, x + added)
    torch.testing.assert_close(found, normed(x + added, weight), **same)
    first, second = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(operators.gate(gate_up), silu(first) * second, **same)


@trials
@given(
    st.integers(1, 2),
    st.integers(1, 4),
    st.sampled_from([(4, 2, 8, 8), (3, 1, 12, 6), (2, 2, 16, 4)]),
    st.booleans(),
    dtypes,
    st.integers(0, 99),
)
def test_rotation_writes_keys_and_values_where_they_belong(
    batch: int,
    count: int,
    sizes: tuple[int, int, int, int],
    with_norms: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads, kv_heads, size, rotated = sizes
    qkv = torch.randn(batch, count, (heads + 2 * kv_heads) * size).to(dtype)
    buffers = torch.randn(2, 3, batch, kv_heads, 20, size).to(dtype)
    keys, values = buffers[:, 1]  # of the second of three layers
    before = buffers.clone()
    starts, staged = torch.randint(0, 10, (batch,)), 5
    angles = torch.rand(1 if seed % 2 else batch, count, 1, rotated) * 6
    rotary = angles.cos(), angles.sin()
    weights = [torch.randn(size).to(dtype) for _ in range(2)] if with_norms else [None, None]
    queries = operators.rotate(qkv, keys, values, starts, staged, *rotary, *weights, 1e-5)

    parts = list(qkv.unflatten(-1, (-1, size)).split([heads, kv_heads, kv_heads], dim=2))
    for index, weight in enumerate(weights):
        if weight is not None:
            parts[index] = normed(parts[index], weight)
    same: Any = dict(atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(queries, rotate(parts[0], rotary), **same)
    expected_keys, expected_values = rotate(parts[1], rotary), parts[2]
    for row, start in enumerate((starts + staged).tolist()):
        slots = slice(start, start + count)
        torch.testing.assert_close(
            keys[row, :, slots].mT, expected_keys[row].permute(1, 2, 0), **same
        )
        assert torch.equal(values[row, :, slots], expected_values[row].transpose(0, 1))
        buffers[:, 1, row, :, slots] = before[:, 1, row, :, slots]
    assert torch.equal(buffers, before), "nothing else was written"


def visible_to(
    starts: Tensor, visible: Tensor, depths: Tensor, window: int, capacity: int
) -> Tensor:
    """Which slots each query sees `[B, N, C]`, said slowly."""
    see = torch.zeros(len(starts), visible.shape[1], capacity, dtype=torch.bool)
    for row, start in enumerate(starts.tolist()):
        for node in range(visible.shape[1]):
            position = start + int(depths[0 if len(depths) == 1 else row, node])
            for slot in range(start):
                see[row, node, slot] = not window or position - slot < window
            tree = visible[0 if len(visible) == 1 else row, node]
            see[row, node, start : start + visible.shape[2]] = tree
    return see


@trials
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=2),
    st.integers(1, 9),
    st.integers(0, 5),
    st.sampled_from([(4, 2, 8), (3, 1, 12), (2, 2, 20)]),
    st.sampled_from([0, 1, 7, 100]),
    st.integers(1, 5),
    dtypes,
)
def test_tree_attention_kernel_matches_torch(
    lengths: list[int],
    count: int,
    staged: int,
    sizes: tuple[int, int, int],
    window: int,
    parts: int,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(count)
    heads, kv_heads, size = sizes
    batch, undecided = len(lengths), staged + count
    queries = torch.randn(batch, count, heads, size).to(dtype)
    buffers = torch.randn(2, 2, batch, kv_heads, 180, size).to(dtype)
    keys, values = buffers[:, 1]
    starts = torch.tensor(lengths)
    rows = 1 if count % 2 else batch
    visible = torch.rand(rows, count, undecided) < 0.5
    visible[:, :, staged:] |= torch.eye(count, dtype=torch.bool)  # a node sees itself
    depths = torch.randint(0, 4, (rows, count))
    depths[:, 0] = 0
    see = visible_to(starts, visible, depths, window, 180)
    assert torch.equal(slots_seen(starts, visible, depths, window, 180), see)
    expected = scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=see[:, None], enable_gqa=True
    )
    # What nobody sees is never read.
    unused = ~see.any(1)[None, :, None, :, None].expand_as(buffers[:, 1])
    for row, start in enumerate(lengths):
        unused[:, row, :, : start + undecided] = False
    buffers[:, 1][unused] = float("nan")
    found = operators.attend(queries, keys, values, starts, visible, depths, window, parts)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        found, expected.transpose(1, 2).flatten(2), atol=tolerance, rtol=tolerance
    )


class Reads:
    """Counts the numbers that an interpreted kernel reads of a buffer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, buffer: Tensor) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self.numbers = 0
        low, high = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        load = InterpreterBuilder.create_masked_load

        def counted(builder: Any, places: Any, mask: Any, *others: Any) -> Any:
            inside = (places.data >= low) & (places.data < high)
            self.numbers += int((inside & mask.data).sum())
            return load(builder, places, mask, *others)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)


@pytest.mark.skipif(CUDA, reason="the interpreter counts")
@pytest.mark.parametrize("capacity", [256, 1024])
@pytest.mark.parametrize(("window", "first"), [(0, 0), (50, 100 - 50 + 1)])
def test_attention_reads_only_visible_cache_slots(
    capacity: int, window: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 committed slots and 6 of a tree, for 2 key-value heads of 16 numbers."""
    queries, keys = torch.randn(1, 6, 8, 16), torch.randn(1, 2, capacity, 16)
    visible = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    depths, starts = torch.arange(6)[None], torch.tensor([100])
    reads = Reads(monkeypatch, keys)
    operators.attend(queries, keys, torch.randn_like(keys), starts, visible, depths, window, 2)
    # 4 heads for each key-value head: 24 queries, of which one program takes 16.
    assert reads.numbers == 2 * (106 - first) * 2 * 16


def test_key_split_count_fits_processors_and_length() -> None:
    """Plain decoding of 8 key-value heads on 132 processors, and a tree of 60 nodes."""
    assert operators.parts_of(4096, 8, 132) == 32  # no fewer than 128 slots each
    assert operators.parts_of(1 << 15, 8, 132) == 32
    assert operators.parts_of(1 << 15, 8 * 4, 132) == 8
    assert operators.parts_of(64, 8, 132) == 1
    assert operators.parts_of(1 << 20, 1, 132) == 64
    assert operators.parts_of(1 << 15, 8 * 64, 132) == 1


@pytest.mark.parametrize("parts", [1, 2])
def test_nan_survives_attention_kernel(parts: int) -> None:
    """Keys may overflow, and plausible text would be worse."""
    queries, keys = torch.randn(1, 1, 2, 16), torch.randn(1, 2, 256, 16)
    keys[0, 0, 70, 3] = float("nan")
    some = torch.ones(1, 1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
    starts = torch.tensor([200])
    found = operators.attend(queries, keys, torch.randn_like(keys), starts, *some, 0, parts)
    assert found[0, 0, :16].isnan().all() and found[0, 0, 16:].isfinite().all()


def test_a_head_beyond_32_bits_is_refused() -> None:
    keys, some = torch.empty(1, 1, 1 << 25, 64, device="meta"), torch.zeros(1)
    with pytest.raises(AssertionError, match="32 bits"):
        operators._attend(torch.empty(1, 1, 1, 64), keys, keys, some, some, some, 0, 1)
