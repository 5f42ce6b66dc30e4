"""Cost model: GPUs by their data sheets, the time of a pass, the tokens of a round.

Default trees, `tune`'s candidates, `simulate` and `data plan` all use it. Nothing here imports
torch.

Symbols in formulas: a_k is the probability that the draft of position k is accepted, given that
those before it were; K is the number of drafts in a chain; c is the time of a draft step over that
of a plain step of the target. A round emits the accepted drafts and the bonus token after them.
docs/metrics.md#speed defines the figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from ...heads.errors import UserError
from .settings import choice_named
from .tree_settings import Ranks

TARGET_BYTES = 2  # of a weight or state of a target in bfloat16
CPU_BALANCE = 28.0
"""Tokens of a pass at which a CPU multiplies as long as it reads the weights.

It is a core's FLOP/s * bytes of a weight / (2 * bytes/s): about 100 GFLOP/s and 7 GB/s on server
processors with all cores busy, in float32. Half or twice the value moves the best tree by a few
nodes."""


@dataclass(frozen=True)
class Gpu:
    """Peak figures of a GPU by its data sheet; programs reach a share of them."""

    tflops: float
    """Dense bf16 TFLOP/s."""
    tb_s: float
    """Memory bandwidth in TB/s."""
    gb: float
    """Memory in GB."""

    def hours_to_compute(self, operations: float, share: float) -> float:
        """Return the hours of `operations` at a share of the peak."""
        return operations / (3600 * self.tflops * 1e12 * share)

    def seconds_to_read(self, bytes_: float, share: float) -> float:
        """Return the seconds of reading `bytes_` of memory at a share of the bandwidth."""
        return bytes_ / (self.tb_s * 1e12 * share)


# A name that is a prefix of another comes after it: `gpu_named` takes the first name that occurs in
# a device's name.
GPUS = {
    "B200": Gpu(2250, 8.0, 180), "H200": Gpu(989, 4.8, 141), "H100 PCIe": Gpu(756, 2.0, 80),
    "H100 NVL": Gpu(835, 3.9, 94), "H100": Gpu(989, 3.35, 80),
    "A100 40GB": Gpu(312, 1.56, 40), "A100": Gpu(312, 2.04, 80),
    "L40S": Gpu(362, 0.864, 48), "L4": Gpu(121, 0.3, 24), "A10G": Gpu(70, 0.6, 24),
    "A10": Gpu(125, 0.6, 24), "RTX 4090": Gpu(165, 1.01, 24), "RTX 3090": Gpu(71, 0.936, 24),
    "MI300X": Gpu(1307, 5.3, 192), "MI250X": Gpu(383, 3.28, 128),
}  # fmt: skip


def known_gpu(name: str) -> str:
    """Return the key of `GPUS` that a user means. Raises `UserError` for an unknown GPU."""
    name = choice_named(name, GPUS)
    if name not in GPUS:
        raise UserError(f"unknown GPU {name!r}; there are: {', '.join(GPUS)}")
    return name


def gpu_named(device: str) -> Gpu | None:
    """Return the GPU that a driver calls `device`, such as "NVIDIA H100 80GB HBM3", or None."""
    return next((gpu for name, gpu in GPUS.items() if re.search(rf"\b{name}\b", device)), None)


@dataclass(frozen=True)
class Roofline:
    """Dense target on a GPU that reaches a share of its peak compute and bandwidth."""

    gpu: Gpu
    params: float
    kv_bytes: float
    """Bytes of the keys and values of one position, all layers together."""
    compute_share: float = 1.0
    bandwidth_share: float = 1.0

    def pass_seconds(self, batch: int, tokens: int, context: int) -> float:
        """Return the seconds of a forward pass with `tokens` tokens for each of `batch` requests.

        Each request has `context` positions before it. Products with weights take the longer of two
        times: reading the weights once, and multiplying (2 FLOP for each parameter and token).
        Attention comes after them, layer by layer, and reads the cache once.
        """
        reading = self.gpu.seconds_to_read(TARGET_BYTES * self.params, self.bandwidth_share)
        operations = 2 * self.params * batch * tokens
        multiplying = 3600 * self.gpu.hours_to_compute(operations, self.compute_share)
        cache = self.gpu.seconds_to_read(batch * context * self.kv_bytes, self.bandwidth_share)
        return max(reading, multiplying) + cache

    @property
    def free_tokens(self) -> float:
        """Tokens of a pass below which reading weights, not arithmetic, sets its time.

        It is FLOP/s * bytes of a weight / (2 * bytes/s), which neglects the cache.
        """
        flops = self.gpu.tflops * self.compute_share
        return flops * TARGET_BYTES / (2 * self.gpu.tb_s * self.bandwidth_share)


def pass_cost(tokens: float, gpu: Gpu | None = None) -> float:
    """Return the time of a forward pass over `tokens` tokens, divided by that over one token.

    A GPU reads and multiplies at the same time, so the longer of both counts. On a CPU (no `gpu`)
    they add up: a core waits for the weights that it multiplies.
    """
    if gpu is None:
        return 1 + (tokens - 1) / CPU_BALANCE
    return max(1.0, tokens / Roofline(gpu, 1.0, 0.0).free_tokens)


def chain_tokens(acceptances: Sequence[float]) -> float:
    """Return the expected tokens of a round with a chain: 1 + sum_k prod_{j <= k} a_j."""
    return 1 + sum(accumulate(acceptances, mul))


def tree_tokens(accuracies: Sequence[Sequence[float]], nodes: Sequence[Ranks]) -> float:
    """Return the expected tokens of a round with the tree `nodes`.

    `accuracies[d][r]` is the probability that the candidate of rank r at depth d + 1 is right if
    those before it are. A node's probability is the product along its path.
    """
    expected = 1.0
    for ranks in nodes:
        expected += math.prod(accuracies[depth][rank] for depth, rank in enumerate(ranks))
    return expected


def extend_acceptances(acceptances: Sequence[float], length: int) -> list[float]:
    """Return acceptances of `length` positions; the last known one is repeated."""
    known = list(acceptances[:length])
    return known + [acceptances[-1]] * (length - len(known))


def speedup(tokens: float, drafting: float, verify_cost: float = 1.0) -> float:
    """Return the speed-up over plain decoding of rounds that emit `tokens`.

    `drafting` and `verify_cost` are the times of both parts of a round in plain steps (arXiv
    2211.17192, theorem 3.8).
    """
    return tokens / (drafting + verify_cost)


@dataclass(frozen=True)
class BestLength:
    """Chain length with the highest speed-up."""

    length: int
    """Number of drafts; 0 if plain decoding is fastest."""
    speedup: float
    """Speed-up of a chain of that length."""


def best_length(
    acceptances: Sequence[float],
    draft_cost: float,
    longest: int,
    verify_costs: Sequence[float] = (),
) -> BestLength:
    """Return the chain of at most `longest` drafts with the highest speed-up.

    `verify_costs[K]` is the time of verifying K drafts in plain steps; without it every
    verification takes one plain step.
    """
    gains = [1.0]  # of plain decoding
    for length in range(1, longest + 1):
        cost = verify_costs[length] if verify_costs else 1.0
        tokens = chain_tokens(extend_acceptances(acceptances, length))
        gains.append(speedup(tokens, length * draft_cost, cost))
    # `max` takes the first of equals, which is the shorter chain
    length = max(range(longest + 1), key=lambda k: gains[k])
    return BestLength(length, gains[length])


def break_even(acceptances: Sequence[float], length: int) -> float:
    """Return the draft cost, in plain steps, at which a chain of `length` drafts gains nothing.

    This is (E[tokens] - 1) / K, where `speedup` with a verification of one plain step is 1.
    """
    return (chain_tokens(extend_acceptances(acceptances, length)) - 1) / length
