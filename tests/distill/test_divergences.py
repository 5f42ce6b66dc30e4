"""Losses against closed forms and autograd; chunks against the whole."""

from __future__ import annotations

import pytest
import torch
from draftsmith.distill.divergences import cross_entropy, forward_kl, log_law, overlap, sum_in_chunks

torch.manual_seed(0)
Z = torch.randn(6, 9, dtype=torch.float64)
P = torch.randn(6, 9, dtype=torch.float64)
LABELS = torch.randint(0, 9, (6,))


def gradient(loss) -> torch.Tensor:
    logits = Z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(torch.log_softmax(logits, -1)).sum(), logits)
    return grad


def test_gradients_have_their_closed_forms() -> None:
    q, p = Z.softmax(-1), P.softmax(-1)
    torch.testing.assert_close(gradient(lambda log_q: forward_kl(log_q, torch.log_softmax(P, -1))), q - p)
    onehot = torch.nn.functional.one_hot(LABELS, 9)
    torch.testing.assert_close(gradient(lambda log_q: cross_entropy(log_q, LABELS)), q - onehot)


def test_kl_is_zero_at_equality_and_overlap_one() -> None:
    law = log_law(Z)
    assert forward_kl(law, law).abs().max() < 1e-6
    torch.testing.assert_close(overlap(law, law), torch.ones(6))


def test_overlap_is_one_minus_total_variation() -> None:
    q, p = Z.softmax(-1), P.softmax(-1)
    expected = 1 - 0.5 * (p - q).abs().sum(-1)
    torch.testing.assert_close(overlap(torch.log_softmax(Z, -1), torch.log_softmax(P, -1)), expected)


def test_finite_where_the_laws_are_one_hot_and_disjoint() -> None:
    sharp = torch.full((2, 4), -60.0)
    sharp[0, 0] = sharp[1, 1] = 60.0
    losses = forward_kl(log_law(sharp), log_law(sharp.flip(0)))
    assert torch.isfinite(losses).all() and overlap(log_law(sharp), log_law(sharp.flip(0))).max() < 1e-6


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 100])
def test_chunks_sum_to_the_whole_with_the_same_gradients(chunk: int) -> None:
    layer = torch.nn.Linear(4, 9).double()
    hidden = torch.randn(6, 4, dtype=torch.float64)

    def function(rows: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (cross_entropy(torch.log_softmax(layer(rows), -1), labels).sum(),)

    (whole,) = function(hidden, LABELS)
    expected = torch.autograd.grad(whole, layer.weight)[0]
    (total,) = sum_in_chunks(function, (hidden, LABELS), chunk)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, layer.weight)[0], expected)


def test_no_rows_still_touch_every_parameter() -> None:
    layer = torch.nn.Linear(4, 9)
    (total,) = sum_in_chunks(lambda rows: (layer(rows).sum(),), (torch.zeros(0, 4),), 8)
    total.backward()
    assert layer.weight.grad is not None and float(layer.weight.grad.abs().sum()) == 0
