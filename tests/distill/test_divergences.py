"""Losses against naive versions, closed forms, autograd and finite differences; chunks against the
whole; memory."""

from __future__ import annotations

import math
import weakref
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftsmith.distill.divergences import (
    BLOCK_ROWS,
    NEEDS_LABELS,
    Divergence,
    best_of,
    divergence,
    forward_kl,
    jensen_shannon,
    lk_alpha,
    log_probs,
    loss_of_logits,
    overlap,
    renormalised,
    sum_in_chunks,
    top_k_kl,
    total_variation,
)

NAMES = get_args(Divergence)
V = 12


def random_case(
    seed: int, rows: int = 6, kept: int = V
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft logits over `kept` tokens, the target's log-probabilities over them (whole only if all
    are kept), labels."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(rows, kept, generator=generator, dtype=torch.float64)
    p = 2 * torch.randn(rows, V, generator=generator, dtype=torch.float64)
    return (
        z,
        torch.log_softmax(p, -1)[:, :kept],
        torch.randint(0, kept, (rows,), generator=generator),
    )


def naive(name: str, z: torch.Tensor, log_p: torch.Tensor, label: int) -> Any:
    """One row, token by token, straight from the formulas of docs/objectives.md#divergences."""
    q = [torch.exp(z[v]) / sum(torch.exp(x) for x in z) for v in range(len(z))]
    p = [torch.exp(x) for x in log_p]
    whole = [x / sum(p) for x in p]

    def kl(a, b):
        return sum(x * torch.log(x / y) for x, y in zip(a, b, strict=True))

    alpha = torch.stack([torch.minimum(x, y) for x, y in zip(p, q, strict=True)]).sum()
    if name == "kl":
        return kl(whole, q)
    if name == "reverse-kl":
        return kl(q, whole)
    if name == "jsd":
        middle = [(x + y) / 2 for x, y in zip(whole, q, strict=True)]
        return (kl(whole, middle) + kl(q, middle)) / 2
    if name == "tv":
        return 1 - alpha
    if name == "lk-alpha":
        return -torch.log(alpha)
    if name == "lk-hybrid":
        share = torch.exp(-3 * alpha.detach())
        return share * kl(whole, q) + (1 - share) * (1 - alpha)
    if name == "ce":
        return -torch.log(q[label])
    if name == "ce-l1":
        return 0.1 * -torch.log(q[label]) + 0.9 * sum(
            torch.abs(x - y) for x, y in zip(p, q, strict=True)
        )
    best = sorted(range(len(p)), key=lambda v: -p[v])[:10]
    ps, qs = [p[v] for v in best], [q[v] for v in best]
    return kl([x / sum(ps) for x in ps], [y / sum(qs) for y in qs])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), kept=st.sampled_from([V, V, 8]))
def test_values_and_gradients_equal_the_naive_formula(
    name: Divergence, seed: int, kept: int
) -> None:
    z, log_p, labels = random_case(seed, kept=kept)
    z.requires_grad_()
    ours = divergence(name, torch.log_softmax(z, -1), log_p, labels)
    theirs = torch.stack([naive(name, z[i], log_p[i], int(labels[i])) for i in range(len(z))])
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-9)
    weight = torch.linspace(0.5, 2, len(z), dtype=torch.float64)
    one, other = (
        torch.autograd.grad((x * weight).sum(), z, retain_graph=True)[0] for x in (ours, theirs)
    )
    torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lk-hybrid"])
def test_gradients_equal_finite_differences(name: Divergence) -> None:
    """fp64. (The hybrid holds a part constant, so its difference quotient is another number; its
    parts are all here.)"""
    z, log_p, labels = random_case(3, rows=2)
    z.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: divergence(name, torch.log_softmax(x, -1), log_p, labels), (z,)
    )


def closed_form(name: str, q: torch.Tensor, p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """d loss / dz as the docstrings have it."""
    onehot = torch.nn.functional.one_hot(labels, V)
    below = (q < p).double()
    tv = -q * (below - (q * below).sum(-1, keepdim=True))
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    share = torch.exp(-3 * alpha)
    m = (p + q) / 2
    return {
        "kl": q - p,
        "ce": q - onehot,
        "reverse-kl": q * ((q / p).log() - (q * (q / p).log()).sum(-1, keepdim=True)),
        "jsd": 0.5 * q * ((q / m).log() - (q * (q / m).log()).sum(-1, keepdim=True)),
        "tv": tv,
        "lk-alpha": tv / alpha,
        "lk-hybrid": share * (q - p) + (1 - share) * tv,
        "ce-l1": 0.1 * (q - onehot) + 0.9 * 2 * tv,
    }[name]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "top-k-kl"])
def test_gradients_have_the_closed_forms_of_the_reference(name: Divergence) -> None:
    z, log_p, labels = random_case(5)
    z.requires_grad_()
    (grad,) = torch.autograd.grad(
        divergence(name, torch.log_softmax(z, -1), log_p, labels).sum(), z
    )
    torch.testing.assert_close(grad, closed_form(name, z.detach().softmax(-1), log_p.exp(), labels))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS_LABELS])
def test_equal_distributions_lose_nothing_and_learn_nothing(name: Divergence) -> None:
    z, _, labels = random_case(1)
    z.requires_grad_()
    loss = divergence(name, torch.log_softmax(z, -1), torch.log_softmax(z.detach(), -1), labels)
    assert float(loss.detach().abs().max()) < 1e-9
    if name not in ("tv", "lk-alpha", "lk-hybrid"):  # these have a corner there
        assert float(torch.autograd.grad(loss.sum(), z)[0].abs().max()) < 1e-9


def test_divergences_respect_known_bounds_and_identities() -> None:
    """JSD is at most log 2 and symmetric; TV is one minus the overlap; -log alpha is cross-entropy
    for a point mass."""
    z, log_p, labels = random_case(2)
    log_q = torch.log_softmax(z, -1)
    assert float(jensen_shannon(log_q, log_p).max()) < torch.tensor(2.0).log()
    torch.testing.assert_close(jensen_shannon(log_q, log_p), jensen_shannon(log_p, log_q))
    torch.testing.assert_close(
        total_variation(log_q, log_p), 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1)
    )
    point = torch.full_like(log_p, -torch.inf).scatter(-1, labels[:, None], 0.0)
    torch.testing.assert_close(lk_alpha(log_q, point), divergence("ce", log_q, log_p, labels))


def test_a_draft_vocabulary_is_paid_by_what_decoding_accepts() -> None:
    """The overlap with a part of the distribution is at most that part's mass; KL looks at the part
    made whole."""
    z, log_p, _ = random_case(4, kept=7)
    log_q = torch.log_softmax(z, -1)
    assert (overlap(log_q, log_p) <= log_p.exp().sum(-1) + 1e-12).all()
    torch.testing.assert_close(
        renormalised(log_p).exp().sum(-1), torch.ones(6, dtype=torch.float64)
    )
    assert float(forward_kl(renormalised(log_p), log_p).abs().max()) < 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_finite_where_the_distributions_are_sharp_and_disjoint(name: Divergence) -> None:
    sharp = torch.full((2, 12), -60.0)
    sharp[0, 0] = sharp[1, 1] = 60.0
    z = sharp.clone().requires_grad_()
    loss = divergence(name, log_probs(z), log_probs(sharp.flip(0)), torch.tensor([1, 0]))
    assert (
        torch.isfinite(loss).all() and torch.isfinite(torch.autograd.grad(loss.sum(), z)[0]).all()
    )


def test_one_teacher_of_several_drafts_equals_its_copies() -> None:
    log_q = torch.log_softmax(torch.randn(5, 3, V, dtype=torch.float64), -1)
    log_p = torch.log_softmax(torch.randn(5, 1, V, dtype=torch.float64), -1)
    labels = torch.randint(0, V, (5, 3))
    for name in NAMES:
        copied = divergence(name, log_q, log_p.expand(-1, 3, -1).contiguous(), labels)
        torch.testing.assert_close(divergence(name, log_q, log_p, labels), copied)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "drafts"), [(5, 1), (5, 3), (BLOCK_ROWS + 1, 2)])
def test_losses_of_logits_have_the_values_and_gradients_of_divergences(
    name: Divergence, rows: int, drafts: int
) -> None:
    z = (3 * torch.randn(rows, drafts, V, dtype=torch.float64)).requires_grad_()
    log_p = torch.log_softmax(torch.randn(rows, 1, V, dtype=torch.float64), -1)
    labels = torch.randint(0, V, (rows, drafts))
    weights = torch.randn(rows, drafts, dtype=torch.float64)
    p = 0.9 * log_p.exp()  # a draft vocabulary without a tenth of the mass
    losses, log_sums, best, overlaps = loss_of_logits(name, z, log_p, labels, p)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), z)
    expected = divergence(name, log_probs(z), log_p, labels)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradient, *torch.autograd.grad((expected * weights).sum(), z))
    torch.testing.assert_close(log_sums, z.detach().logsumexp(-1))
    assert torch.equal(best, z.argmax(-1))
    assert overlaps is not None and not overlaps.requires_grad
    torch.testing.assert_close(overlaps, overlap(log_probs(z.detach()), p.log()))
    assert loss_of_logits(name, z, log_p, labels).overlaps is None


def test_top_k_looks_at_the_targets_best_tokens_only() -> None:
    log_p = torch.log_softmax(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), -1)
    log_q = torch.log_softmax(torch.tensor([[3.0, 2.0, -9.0, 9.0]]), -1)
    assert float(top_k_kl(log_q, log_p, k=2)) == pytest.approx(0, abs=1e-6)


# Chunks.


def head_loss(layer: torch.nn.Linear):
    def function(hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        losses = divergence("ce", log_probs(layer(hidden)), torch.zeros(()), labels)
        return losses.sum(), losses

    return function


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 100])
def test_chunks_sum_to_the_whole_with_the_same_gradients(chunk: int) -> None:
    layer, labels = torch.nn.Linear(4, 9).double(), torch.randint(0, 9, (6,))
    hidden = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    wanted = (hidden, layer.weight, layer.bias)
    whole, table = head_loss(layer)(hidden, labels)
    expected = torch.autograd.grad(whole * 3, wanted)
    total, joined = sum_in_chunks(
        head_loss(layer), hidden, (labels,), list(layer.parameters()), chunk
    )
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(joined, table.detach())
    assert not joined.requires_grad
    for one, other in zip(torch.autograd.grad(total * 3, wanted), expected, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(
            sum_in_chunks(head_loss(layer), hidden, (labels,), [], chunk)[1], table.detach()
        )


def test_no_rows_still_touch_every_parameter() -> None:
    layer = torch.nn.Linear(4, 9)
    empty = torch.zeros(0, dtype=torch.long)
    total, table = sum_in_chunks(
        head_loss(layer), torch.zeros(0, 4), (empty,), list(layer.parameters()), 8
    )
    total.backward()
    assert (
        layer.weight.grad is not None
        and float(layer.weight.grad.abs().sum()) == 0
        and len(table) == 0
    )


class PeakMemory(TorchDispatchMode):
    """Most bytes of tensors alive at one time, and the largest tensor, among those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._known:
                    self._known.add(key)
                    self.alive += storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())
                    weakref.finalize(storage, self._forget, key, storage.nbytes())
        self.peak = max(self.peak, self.alive)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


@pytest.mark.parametrize("name", NAMES)
def test_memory_never_holds_a_full_table_of_logits(name: Divergence) -> None:
    """512 rows over 8,192 tokens would be 16.8 MB in fp32; in chunks of 16 rows (0.5 MB) the peak,
    gradients included, stays below, for every loss, forward and backward."""
    rows, vocab, size, chunk = 512, 8192, 8, 16
    layer = torch.nn.Linear(size, vocab, bias=False)
    hidden, teacher = torch.randn(rows, size, requires_grad=True), torch.randn(rows, size)
    weight = torch.randn(vocab, size)

    def function(
        hidden: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        losses = divergence(name, log_probs(layer(hidden)), log_probs(teacher @ weight.T), labels)
        return (losses.sum(),)

    with PeakMemory() as memory:
        labels = torch.randint(0, vocab, (rows,))
        (loss,) = sum_in_chunks(
            function, hidden, (teacher, labels), list(layer.parameters()), chunk
        )
        loss.backward()
    assert memory.largest < rows * vocab * 4 / 16
    assert memory.peak < rows * vocab * 4 * 0.75
    with PeakMemory() as memory:
        (loss,) = sum_in_chunks(function, hidden, (teacher, labels), list(layer.parameters()), rows)
        loss.backward()
    assert memory.peak > rows * vocab * 4, "a measurement that sees nothing proves nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 5, 33), (0, 4), (2, 0, 4)])
def test_the_best_is_the_first_of_the_largest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    scores = torch.randn(shape, dtype=dtype, requires_grad=True)
    assert torch.equal(best_of(scores), scores.argmax(-1))
    turned = torch.randn(33, 5, 3, dtype=dtype).transpose(0, -1)
    assert torch.equal(best_of(turned), turned.argmax(-1))


def test_best_of_handles_ties_infinities_and_nan() -> None:
    inf = math.inf
    rows = [
        [1.0, 3.0, 3.0, 2.0],
        [-inf, -inf, -inf, -inf],
        [0.0, inf, 1.0, inf],
        [1.0, math.nan, inf, 2.0],
    ]
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scores = torch.tensor(rows, dtype=dtype)
        assert best_of(scores).tolist() == scores.argmax(-1).tolist() == [1, 0, 1, 1]
