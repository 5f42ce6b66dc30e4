"""Keyed noise: a pure function, checked against big integers, with the distribution that it
claims."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.inference.rounds import noise

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
CPU = torch.device("cpu")


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def mix_int(x: int) -> int:
    """SplitMix64's finaliser of one Python integer, as an unsigned 64-bit number."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(st.integers(0, MASK))
def test_mixing_tensors_is_mixing_integers(value: int) -> None:
    assert int(noise.mix(torch.tensor([signed(value)]))[0]) & MASK == mix_int(value)


def by_hand(key: int, stream: int, place: int, index: int) -> float:
    at = mix_int(key ^ mix_int(place * GOLDEN + stream))
    bits = mix_int(at ^ mix_int(index * GOLDEN + GOLDEN))
    return (bits >> 12) * 2.0**-52 + 2.0**-53


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 30),
    st.integers(0, 50),
    st.integers(0, 1 << 20),
    st.integers(0, 99),
)
def test_uniforms_are_what_the_definition_says(
    seed: int, request: int, sample: int, place: int, index: int
) -> None:
    key = noise.row_keys(seed, [(request, sample)], CPU)
    expected = 0
    for number in (seed, request, sample):
        expected = mix_int(expected + GOLDEN + mix_int(number + GOLDEN))
    assert int(key[0]) & MASK == expected
    found = noise.uniform(key, noise.COIN, torch.tensor([place]), 100)[0, index]
    assert float(found) == by_hand(int(key[0]) & MASK, noise.COIN, place, index)
    gumbel = noise.gumbel(key, noise.COIN, torch.tensor([place]), 100)[0, index]
    assert math.isclose(
        float(gumbel), -math.log(-math.log(float(found))), rel_tol=1e-9, abs_tol=1e-9
    )


@pytest.mark.full
def test_compiled_noise_has_the_same_bits() -> None:
    keys = noise.row_keys(0, [(r, 0) for r in range(2)], CPU)[:, None]
    roots = torch.tensor([[5], [9]])

    def function(keys: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        places = roots + torch.arange(8)
        return noise.gumbel(keys, noise.COUPLED, places, 1000).float().argmax(-1)

    compiled = torch.compile(function, fullgraph=True)
    assert torch.equal(compiled(keys, roots), function(keys, roots))


def test_uniforms_are_uniform_and_uncorrelated_between_keys_places_streams_and_ids() -> None:
    keys = noise.row_keys(0, [(r, s) for r in range(4) for s in range(3)], CPU)
    assert len(set(keys.tolist())) == 12
    everything = torch.stack(
        [noise.uniform(keys[:, None], s, torch.arange(50)[None], 400) for s in (1, 2, 3, 4)]
    )  # [4, 12, 50, 400]
    flat = everything.flatten()
    assert flat.min() > 0 and flat.max() < 1
    counts = torch.histc(flat, 100, 0, 1)
    statistic = float(((counts - len(flat) / 100) ** 2 / (len(flat) / 100)).sum())
    assert statistic < 99 + 5 * math.sqrt(2 * 99)
    centred = everything - 0.5
    for dim in range(4):
        moved = centred.roll(1, dim)
        correlation = float((centred * moved).mean()) * 12
        assert abs(correlation) < 5 / math.sqrt(len(flat))


def test_the_key_is_seed_request_and_sample_not_their_sum() -> None:
    keys = [
        int(noise.row_keys(seed, [(request, sample)], CPU))
        for seed, request, sample in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0))
    ]
    assert len(set(keys)) == 4
    assert noise.row_keys(3, [(1, 2), (7, 8)], CPU)[1] == noise.row_keys(3, [(7, 8)], CPU)[0]
