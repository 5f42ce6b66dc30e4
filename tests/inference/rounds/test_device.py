"""Settings of a device."""

from __future__ import annotations

import math

import pytest
import torch

from draftsmith.inference.rounds.device import best_of


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
