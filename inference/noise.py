"""Random numbers as a pure function of what they are for, so that they depend on no batch row,
round, tree or device.

Every number is a hash of (seed, request id, sample index, stream, place, index). Plain sampling
with the same keys writes the same text, which makes decoding at T > 0 testable token for token
(verification-and-trees 4.3). Shapes: B batch, P places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# What a number is for; two streams are independent of each other.
COUPLED, DRAFT, COIN, FINAL = 1, 2, 3, 4

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch stores."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_FIRST, _SECOND, _STEP = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB), _signed(_GOLDEN)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors (Steele et al., OOPSLA 2014): every output bit
    depends on every input bit."""
    # torch shifts keep the sign; the masks make them logical
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def mix_int(x: int) -> int:
    """`mix` of one Python integer, as an unsigned 64-bit number."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def row_keys(seed: int, requests: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """One key `[B]` for each (request id, sample index)."""
    keys = []
    for request, sample in requests:
        key = 0
        for part in (seed, request, sample):
            key = mix_int(key + _GOLDEN + mix_int(part + _GOLDEN))
        keys.append(_signed(key))
    return torch.tensor(keys, dtype=torch.long, device=device)


@lru_cache(maxsize=8)
def _indices(count: int, device: torch.device) -> Tensor:
    return mix(torch.arange(count, device=device) * _STEP + _STEP)


def uniform(keys: Tensor, stream: int, places: Tensor, count: int) -> Tensor:
    """Uniforms strictly between 0 and 1, float64 `[..., count]`; `keys` and `places` (int64)
    broadcast to `[...]`.

    52 bits: with 24, a vocabulary of 152k would put some candidate into the one largest quantum at
    0.9% of the positions.
    """
    at = mix(keys ^ mix(places * _STEP + stream))
    bits = mix(at[..., None] ^ _indices(count, at.device))
    return ((bits >> 12) & 0xFFFFFFFFFFFFF).double().mul_(2.0**-52).add_(2.0**-53)


def gumbel(keys: Tensor, stream: int, places: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise, float64 `[..., count]`, keyed as `uniform`."""
    return uniform(keys, stream, places, count).log_().neg_().log_().neg_()
