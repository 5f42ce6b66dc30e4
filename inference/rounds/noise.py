"""Random numbers as a pure function of their purpose, independent of batch row, round and tree.

Every number is a hash of (seed, request id, sample index, stream, place, index). Plain sampling
with the same keys writes the same text on any device and in any batch, which makes decoding at
T > 0 testable token for token (docs/verification.md#coupled-noise).

Shapes: B batch, n numbers for one key and place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# Streams: the purposes of random numbers. Two streams are independent of each other.
COUPLED, DRAFT, COIN, FINAL = 1, 2, 3, 4

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits as `value`: torch has no arithmetic on uint64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_FIRST, _SECOND, _STEP = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB), _signed(_GOLDEN)


def mix(x: Tensor) -> Tensor:
    """Return SplitMix64's finaliser of an int64 tensor (Steele et al., OOPSLA 2014)."""
    # The algorithm shifts unsigned numbers. torch's shift repeats the sign bit, and the masks clear
    # those repeated bits. Products overflow in two's complement, which equals unsigned arithmetic.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def row_keys(
    seed: int | Sequence[int], requests: Sequence[tuple[int, int]], device: torch.device
) -> Tensor:
    """Return one int64 key `[B]` for each (request id, sample index) of `requests`.

    `seed` is that of all of them, or there is one for each.
    """
    seeds = seed if isinstance(seed, Sequence) else [seed] * len(requests)
    # Hashed on the host: a batch has few rows, and only once.
    keys = torch.zeros(len(requests), dtype=torch.long)
    # The inner hash spreads small numbers, and chaining makes their order count: (1, 2) and (2, 1)
    # have different keys.
    for column in (seeds, *zip(*requests, strict=True)):
        numbers = torch.tensor([_signed(number) for number in column])
        keys = mix(keys + _STEP + mix(numbers + _STEP))
    return keys.to(device)


def _indices(count: int, device: torch.device) -> Tensor:
    # One step is added because `mix` maps 0 to 0, and index 0 would then be the place's hash
    # itself.
    return mix(torch.arange(count, device=device) * _STEP + _STEP)


_kept_indices = lru_cache(maxsize=8)(_indices)


def uniform(keys: Tensor, stream: int, places: Tensor, count: int) -> Tensor:
    """Return uniform numbers strictly between 0 and 1, float64 `[..., n]` with n = `count`.

    `keys` and `places` (int64) broadcast to `[...]`. Numbers have 52 random bits: with 24, some
    token of a vocabulary of 152k would have the one largest value at 0.9% of the positions.
    """
    # A compiler must not see these products, since they overflow. Inductor writes them in C++,
    # where an overflow of signed integers is undefined, and loops over them never ended.
    if torch.compiler.is_compiling():
        return torch.ops.draftsmith.uniform(keys, places, stream, count)
    return _uniform(keys, places, stream, _kept_indices(count, places.device))


def _uniform(keys: Tensor, places: Tensor, stream: int, indices: Tensor) -> Tensor:
    # Different pairs of place and stream give different numbers: two of them could agree only for
    # places more than 2^59 apart.
    place_hash = mix(keys ^ mix(places * _STEP + stream))
    bits = mix(place_hash[..., None] ^ indices)
    # Half a step is added to the 52 bits, so that neither 0 nor 1 can occur: `gumbel` takes the
    # logarithm of the number and of its negative logarithm.
    return ((bits >> 12) & 0xFFFFFFFFFFFFF).double().mul_(2.0**-52).add_(2.0**-53)


def _uniform_operator(keys: Tensor, places: Tensor, stream: int, count: int) -> Tensor:
    return _uniform(keys, places, stream, _kept_indices(count, places.device))


def _empty_uniform(keys: Tensor, places: Tensor, _stream: int, count: int) -> Tensor:
    """Return a tensor of the shape and dtype of `_uniform_operator`, for a compiler."""
    shape = torch.broadcast_shapes(keys.shape, places.shape)
    return places.new_empty(*shape, count, dtype=torch.float64)


_OPERATORS = torch.library.Library("draftsmith", "FRAGMENT")
_OPERATORS.define("uniform(Tensor keys, Tensor places, int stream, int count) -> Tensor")
for _key in ("CPU", "CUDA"):
    _OPERATORS.impl("uniform", _uniform_operator, _key)
torch.library.register_fake("draftsmith::uniform", _empty_uniform, lib=_OPERATORS)


def gumbel(keys: Tensor, stream: int, places: Tensor, count: int) -> Tensor:
    """Return standard Gumbel noise, float64 `[..., n]`; arguments as in `uniform`."""
    # -log(-log u), in place: the tensor has V numbers of 8 bytes for each place, and the uniform
    # numbers themselves are needed for nothing else.
    return uniform(keys, stream, places, count).log_().neg_().log_().neg_()
