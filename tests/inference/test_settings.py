"""Sampling parameters that come from Python: types, and values at their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import LARGEST_PENALTY, LEAST_TEMPERATURE, Sampling
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.ngram import NgramLookup
from draftsmith.inference.targets.target import Target


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"temperature": 2}, {"temperature": 2.0}),
        ({"temperature": np.float32(0.5)}, {"temperature": 0.5}),
        ({"temperature": 1, "top_k": np.int64(5)}, {"temperature": 1.0, "top_k": 5}),
        ({"temperature": 1, "top_p": 1, "min_p": 0}, {"temperature": 1.0}),
        ({"repetition_penalty": 2}, {"repetition_penalty": 2.0}),
        ({"temperature": np.float64(0.7), "seed": np.uint8(3)}, {"temperature": 0.7, "seed": 3}),
    ],
)
def test_integer_and_numpy_values_equal_plain_floats(
    tiny: Target, given: dict[str, Any], plain: dict[str, Any]
) -> None:
    assert Sampling(**given) == Sampling(**plain)
    drafter = NgramLookup(length=3)
    texts = [
        generate(tiny, drafter, [[5, 6, 7, 5, 6]], 8, Sampling(**values))[0].token_ids
        for values in (given, plain)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", True),
        ("top_k", True),
        ("seed", False),
        ("top_p", np.bool_(True)),
        ("repetition_penalty", True),
        ("temperature", float("inf")),
        ("temperature", float("nan")),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", float("nan")),
        ("repetition_penalty", 1e-300),
        ("min_p", float("nan")),
        ("temperature", 10**400),
    ],
)
def test_bools_infinities_and_what_is_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=name):
        Sampling(**{"temperature": 1.0, name: value})


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=LEAST_TEMPERATURE),
        Sampling(temperature=LEAST_TEMPERATURE, rule="rejection"),
        Sampling(temperature=1e30),
        Sampling(repetition_penalty=LARGEST_PENALTY),
        Sampling(repetition_penalty=1 / LARGEST_PENALTY),
        Sampling(temperature=1.0, top_p=1e-30),
    ],
)
def test_the_limits_of_the_ranges_are_decoded(tiny: Target, sampling: Sampling) -> None:
    from draftsmith.inference.proposers.ngram import PlainDecoding

    prompts = [[5, 6, 7, 5, 6], [9, 8]]
    found = generate(tiny, NgramLookup(length=3), prompts, 12, sampling)
    plain = generate(tiny, PlainDecoding(), prompts, 12, sampling)
    assert [g.token_ids for g in found] == [g.token_ids for g in plain]


def test_at_the_lowest_temperature_the_text_is_the_greedy_one(tiny: Target) -> None:
    from draftsmith.inference.proposers.ngram import PlainDecoding

    cold = generate(tiny, PlainDecoding(), [[5, 6, 7]], 12, Sampling(temperature=LEAST_TEMPERATURE))
    greedy = generate(tiny, PlainDecoding(), [[5, 6, 7]], 12)
    assert cold[0].token_ids == greedy[0].token_ids
    assert torch.isfinite(
        Sampling(temperature=LEAST_TEMPERATURE).warpers(None, torch.tensor([[3e33]]))
    ).all()
