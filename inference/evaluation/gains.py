"""Gains of a drafter by arithmetic: tokens per round, speed-up, and time of a target pass on a GPU.

Symbols in formulas: a_k is the probability that the draft of position k is accepted, given that
those before it were; K is the number of drafts in a chain; c is the time of a draft step over that
of a plain step of the target. A round emits the accepted drafts and the bonus token after them.
docs/metrics.md#speed defines the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from ...heads.errors import UserError


def profile_tokens(acceptances: Sequence[float]) -> float:
    """Return the expected tokens of a round with a chain: 1 + sum_k prod_{j <= k} a_j."""
    return 1 + sum(accumulate(acceptances, mul))


def stretched(acceptances: Sequence[float], length: int) -> list[float]:
    """Return acceptances of `length` positions; those past the known ones are as the last one."""
    known = list(acceptances[:length])
    return known + [acceptances[-1]] * (length - len(known))


def speedup(tokens: float, length: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Return the speed-up of rounds that emit `tokens`, over plain decoding.

    It is the tokens over the time of a round in plain steps: `length` draft steps and one
    verification, whose costs are given in plain steps (arXiv 2211.17192, theorem 3.8).
    """
    return tokens / (length * draft_cost + verify_cost)


@dataclass(frozen=True)
class Best:
    """Chain length with the highest speed-up."""

    length: int
    """Number of drafts; 0 if plain decoding is fastest."""
    speedup: float
    """Speed-up of a chain of that length."""


def best_length(
    acceptances: Sequence[float],
    draft_cost: float,
    longest: int = 32,
    verify_costs: Sequence[float] = (),
) -> Best:
    """Return the chain of at most `longest` drafts with the highest speed-up.

    `verify_costs[K]` is the time of verifying K drafts in plain steps; without it every
    verification takes one plain step.
    """
    gains = [1.0]  # of plain decoding
    for length in range(1, longest + 1):
        cost = verify_costs[length] if verify_costs else 1.0
        tokens = profile_tokens(stretched(acceptances, length))
        gains.append(speedup(tokens, length, draft_cost, cost))
    # `max` takes the first of equals, which is the shorter chain
    length = max(range(longest + 1), key=lambda k: gains[k])
    return Best(length, gains[length])


def break_even(acceptances: Sequence[float], length: int) -> float:
    """Return the draft cost, in plain steps, at which a chain of `length` drafts gains nothing.

    This is (E[tokens] - 1) / K, where `speedup` with a verification of one plain step is 1.
    """
    return (profile_tokens(stretched(acceptances, length)) - 1) / length


@dataclass(frozen=True)
class Gpu:
    """Peaks of a GPU by its data sheet, of which programs reach a part."""

    tflops: float
    """Dense bf16 TFLOP/s."""
    tb_s: float
    """Memory bandwidth in TB/s."""
    gb: float
    """Memory in GB."""

    def reached(self, compute_share: float, bandwidth_share: float) -> Gpu:
        """Return what a program reaches that has these shares of the peaks."""
        return Gpu(self.tflops * compute_share, self.tb_s * bandwidth_share, self.gb)


# A name that is the beginning of another comes after it: `train/pace.py` takes the first name that
# a device's own name contains.
GPUS = {
    "B200": Gpu(2250, 8.0, 180), "H200": Gpu(989, 4.8, 141), "H100 PCIe": Gpu(756, 2.0, 80),
    "H100 NVL": Gpu(835, 3.9, 94), "H100": Gpu(989, 3.35, 80), "A100": Gpu(312, 2.04, 80),
    "L40S": Gpu(362, 0.864, 48), "L4": Gpu(121, 0.3, 24), "A10G": Gpu(70, 0.6, 24),
    "A10": Gpu(125, 0.6, 24), "RTX 4090": Gpu(165, 1.01, 24), "RTX 3090": Gpu(71, 0.936, 24),
    "MI300X": Gpu(1307, 5.3, 192), "MI250X": Gpu(383, 3.28, 128),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Sizes of a target that the roofline needs. Raises `UserError` for those that cannot be."""

    params: float
    """Parameters that every pass reads: all of them but the experts."""
    weight_bytes: float = 2.0
    """Bytes of a parameter."""
    kv_bytes: float = 0.0
    """Bytes of the keys and values of one position, all layers together."""
    expert_params: float = 0.0
    """Parameters of all experts together."""
    experts: int = 0
    """Experts of a layer."""
    active: int = 0
    """Experts that one token passes through in a layer."""

    def __post_init__(self) -> None:
        if self.params <= 0 or self.weight_bytes <= 0 or min(self.kv_bytes, self.expert_params) < 0:
            raise UserError(
                "a model's params and weight_bytes must be above 0, kv_bytes and expert_params at "
                "least 0"
            )
        if (self.expert_params > 0) != (self.experts > 0) or not 0 <= self.active <= self.experts:
            raise UserError(
                "expert_params and experts go together, and active must be at most experts"
            )


def experts_touched(experts: int, active: int, tokens: float) -> float:
    """Return the expected number of a layer's experts that `tokens` tokens reach.

    Each token is routed independently to `active` of the experts, so that an expert is missed by
    all with probability (1 - active / experts)^tokens.
    """
    return experts * (1 - (1 - active / experts) ** tokens)


def pass_seconds(model: Model, gpu: Gpu, batch: int, tokens: int, context: int) -> float:
    """Return the roofline time, in seconds, of one forward pass of the target.

    The pass has `tokens` tokens for each of `batch` requests, and each request has `context`
    positions before it. Products with weights take the longer of two times: reading the weights
    once, and multiplying (2 FLOP for each parameter and token). Attention comes after them, layer
    by layer, and reads the cache once.
    """
    pass_tokens = batch * tokens
    params_read = params_used = model.params
    if model.experts:
        touched = experts_touched(model.experts, model.active, pass_tokens)
        params_read += model.expert_params * touched / model.experts
        params_used += model.expert_params * model.active / model.experts
    reading = params_read * model.weight_bytes / (gpu.tb_s * 1e12)
    products = max(reading, 2 * params_used * pass_tokens / (gpu.tflops * 1e12))
    return products + batch * context * model.kv_bytes / (gpu.tb_s * 1e12)


def free_tokens(model: Model, gpu: Gpu) -> float:
    """Return the tokens of a pass below which reading weights, not arithmetic, sets its time.

    It is FLOP/s * `weight_bytes` / (2 * bytes/s), for a dense model and contexts so short that the
    cache does not count.
    """
    return gpu.tflops * model.weight_bytes / (2 * gpu.tb_s)
