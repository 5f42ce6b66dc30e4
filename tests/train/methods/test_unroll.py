"""The unrolled attention: three ways of computing it against each other, what it may see, and
memory."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.train.config import Memory
from draftsmith.train.data.batches import Batch, collate
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.losses.backends import Backend
from draftsmith.train.losses.unroll import UnrolledAttention, unroll
from tests.conftest import tiny_target
from tests.helpers.alignment import cut
from tests.helpers.random_eagles import KINDS, random_eagle

CPU = torch.device("cpu")


def packed(rows: list[list[int]]) -> Batch:
    """Rows of documents of these lengths, all of it reply."""
    return collate(
        [[(np.arange(n) % 40 + 5 + i, np.ones(n, bool)) for i, n in enumerate(row)] for row in rows]
    )


def states(
    batch: Batch, steps: int, seed: int, heads: int, shared: int, dtype: torch.dtype
) -> tuple:
    generator = torch.Generator().manual_seed(seed)

    def make(h):
        return torch.randn(*batch.ids.shape, h, 8, generator=generator, dtype=dtype).transpose(1, 2)

    return make(heads), [
        (make(shared).requires_grad_(), make(shared).requires_grad_()) for _ in range(steps)
    ]


def check_against_plain(
    rows: list[list[int]], steps: int, seed: int, dtype: torch.dtype, tolerance: float
) -> None:
    batch = packed(rows)
    queries, pairs = states(batch, steps, seed, 4, 2, dtype)
    queries.requires_grad_()
    leaves = [queries, *(t for pair in pairs for t in pair)]
    found = []
    for backend in ("plain", "sdpa"):
        out = UnrolledAttention(batch, CPU, backend)(queries, pairs)  # type: ignore[arg-type]
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view(out.shape)
        found.append((out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
    detached = [(k.detach(), v.detach()) for k, v in pairs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow without a compiler
        flex = UnrolledAttention(batch, CPU, "flex")(queries.detach(), detached)
    torch.testing.assert_close(flex, found[0][0], atol=tolerance, rtol=tolerance)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1, max_size=3),
    steps=st.integers(1, 5),
    seed=st.integers(0, 10**6),
)
def test_sdpa_and_flex_equal_the_plain_reference_on_any_packing(
    rows: list[list[int]], steps: int, seed: int
) -> None:
    """Outputs, and for sdpa gradients, to 1e-5 in fp32 and 1e-9 in fp64."""
    check_against_plain(rows, steps, seed, torch.float32, 1e-5)
    check_against_plain(rows, steps, seed, torch.float64, 1e-9)


def test_query_chunks_of_a_long_row_equal_the_plain_reference() -> None:
    check_against_plain([[300, 260, 90], [650]], 3, 0, torch.float32, 1e-5)


def test_low_precision_keeps_the_mass_of_the_diagonals() -> None:
    """Scores of tens, where one bf16 number for their log-sum would be off by a sixteenth."""
    batch = packed([[70]])
    queries, pairs = states(batch, 4, 0, 2, 2, torch.float32)
    queries, pairs = queries * 4, [((4 * k).detach(), v.detach()) for k, v in pairs]
    plain = UnrolledAttention(batch, CPU, "plain")(
        queries.bfloat16().float(), [(k.bfloat16().float(), v) for k, v in pairs]
    )
    low = UnrolledAttention(batch, CPU, "sdpa")(
        queries.bfloat16(), [(k.bfloat16(), v.bfloat16()) for k, v in pairs]
    )
    assert float((plain - low.float()).abs().mean()) < 0.005


@pytest.mark.parametrize("backend", ["plain", "sdpa", "flex"])
def test_a_row_sees_its_causal_block_and_its_own_later_steps_only(backend: Backend) -> None:
    """Six rows in two documents, three steps: every forbidden key and value is disturbed, and no
    output may change in any bit."""
    batch = packed([[4, 2]])
    queries, pairs = states(batch, 3, 1, 2, 2, torch.float32)
    pairs = [(k.detach(), v.detach()) for k, v in pairs]
    allowed = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 1, 2, 3], 4: [4], 5: [4, 5]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def run(p):
            return UnrolledAttention(batch, CPU, backend)(queries, p)

        before = run(pairs)
        for row, seen in allowed.items():
            disturbed = []
            for step, (k, v) in enumerate(pairs):
                hidden = [t for t in range(6) if (t not in seen if step == 0 else t != row)]
                k, v = k.clone(), v.clone()
                k[:, :, hidden] += 3.0
                v[:, :, hidden] -= 5.0
                disturbed.append((k, v))
            assert torch.equal(run(disturbed)[:, :, row], before[:, :, row])
            for step in range(3):  # and what it may see, it does
                k, v = pairs[step]
                changed = [*pairs[:step], (k, v + 1.0), *pairs[step + 1 :]]
                assert not torch.equal(run(changed)[:, :, row], before[:, :, row])


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_learn_nothing_of_each_other_at_any_step(kind: str) -> None:
    """Outputs of a packed row equal those of its documents alone, and have no gradient to another
    document's features."""
    target = tiny_target(seed=3, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_eagle(target, kind)
    batch = packed([[9, 6, 8]])
    features = LiveTarget(target, drafter.taps).features(batch)
    taps, last = tuple(t.requires_grad_() for t in features.taps), features.last.requires_grad_()
    whole = unroll(drafter, batch, taps, last, 3)
    for start, end in ((0, 9), (9, 15), (15, 23)):
        part = cut(batch, start, end)
        alone = unroll(drafter, part, tuple(t[:, start:end] for t in taps), last[:, start:end], 3)
        for k in range(3):
            inside = slice(start, end - 1 - k)  # rows whose tokens stay within the document
            torch.testing.assert_close(
                whole[k][:, inside], alone[k][:, : end - start - 1 - k], atol=1e-9, rtol=1e-9
            )
            sources = (*taps, last) if kind.startswith("eagle1") else taps
            grads = torch.autograd.grad(
                whole[k][:, inside].sum(), sources, retain_graph=True, allow_unused=True
            )
            for grad in grads:
                if grad is not None:
                    outside = torch.cat([grad[:, :start], grad[:, end:]], dim=1)
                    assert float(outside.abs().sum()) == 0


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 two layers, q/k norms"])
def test_recomputing_the_steps_gives_the_same_gradients(kind: str) -> None:
    target = tiny_target(seed=3, dtype=torch.float64, num_hidden_layers=3)
    drafter = random_eagle(target, kind).requires_grad_(True)
    batch = packed([[9, 6], [15]])
    features = LiveTarget(target, drafter.taps).features(batch)
    found = []
    for recompute in (False, True):
        outputs = unroll(drafter, batch, features.taps, features.last, 4, memory=Memory(recompute))
        total = torch.stack(
            [(k + 1) * drafter.logits(x).square().sum() for k, x in enumerate(outputs)]
        ).sum()
        found.append(torch.autograd.grad(total, list(drafter.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_on_a_gpu_has_the_gradients_of_the_plain_reference(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    batch = packed([[200, 100, 84], [384]])
    generator = torch.Generator().manual_seed(0)

    def make(h):
        return torch.randn(2, h, 384, 64, generator=generator).to(device).requires_grad_()

    queries, pairs = make(4), [(make(2), make(2)) for _ in range(3)]
    leaves = [queries, *(t for pair in pairs for t in pair)]
    found = []
    for backend, kind in (("plain", torch.float32), ("flex", dtype)):
        out = UnrolledAttention(batch, device, backend)(  # type: ignore[arg-type]
            queries.to(kind), [(k.to(kind), v.to(kind)) for k, v in pairs]
        )
        found.append((out.detach().float(), *torch.autograd.grad((out.float() ** 2).sum(), leaves)))
    limit = 1e-4 if dtype == torch.float32 else 3e-2
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert float((one - two).norm() / one.norm()) < limit
