"""What a drafter gains, by arithmetic: tokens a round, speed-up, and the time of a pass of the
target on a named GPU.

Symbols: a_k, the chance that the draft of position k is accepted given that those before it were;
K, the length of a chain; c, the time of a draft step over that of a plain step of the target; B
requests at a time. A round yields the accepted drafts and the target's own token after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes seconds to import, and the table of GPUs needs none of it
    import torch

from ...heads.errors import UserError


def chain_tokens(acceptance: float, length: int) -> float:
    """E[tokens] of a round of a chain of `length` drafts: (1 - a^(K+1)) / (1 - a) (arXiv
    2211.17192, eq. 1)."""
    return length + 1.0 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


def profile_tokens(acceptances: Sequence[float]) -> float:
    """The same with an acceptance for each position: 1 + sum_k prod_{j <= k} a_j."""
    return 1 + sum(accumulate(acceptances, mul))


def stretched(acceptances: Sequence[float], length: int) -> list[float]:
    """Acceptances of a chain of `length` positions; those that are not known are taken to be as the
    last one that is."""
    known = list(acceptances[:length])
    return known + [acceptances[-1]] * (length - len(known))


def speedup(tokens: float, length: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Tokens of a round over its time in plain steps: K draft steps and one verification (arXiv
    2211.17192, theorem 3.8)."""
    return tokens / (length * draft_cost + verify_cost)


@dataclass(frozen=True)
class Best:
    """The chain length that pays most."""

    length: int
    """0: no drafting at all does best."""
    speedup: float


def best_length(
    acceptances: Sequence[float],
    draft_cost: float,
    longest: int = 32,
    verify_costs: Sequence[float] = (),
) -> Best:
    """The best chain of at most `longest` drafts; `verify_costs[K]`, if given, is a verification of
    K drafts in plain steps."""
    gains = [1.0]
    for length in range(1, longest + 1):
        cost = verify_costs[length] if verify_costs else 1.0
        gains.append(
            speedup(profile_tokens(stretched(acceptances, length)), length, draft_cost, cost)
        )
    length = max(range(longest + 1), key=lambda k: gains[k])
    return Best(length, gains[length])


def break_even(acceptances: Sequence[float], length: int) -> float:
    """The draft cost at which a chain of this length gains nothing any more: (E[tokens] - 1) /
    K."""
    return (profile_tokens(stretched(acceptances, length)) - 1) / length


def simulated_tokens(
    target: torch.Tensor, drafter: torch.Tensor, length: int, rounds: int, seed: int = 0
) -> float:
    """Mean tokens of `rounds` rounds of accept or reject, one by one: drafts from `drafter` `[V]`,
    kept with chance min(1, p / q) of `target` `[V]`, up to the first that is not. Both
    distributions are the same at every position."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drafts = torch.multinomial(
        drafter, rounds * length, replacement=True, generator=generator
    ).view(rounds, length)
    chance = (target / drafter).clamp(max=1)[drafts]
    kept = (
        (torch.rand(rounds, length, generator=generator, dtype=chance.dtype) < chance)
        .long()
        .cumprod(-1)
        .sum(-1)
    )
    return float(kept.double().mean()) + 1


@dataclass(frozen=True)
class Gpu:
    """Data-sheet peaks; expect half."""

    tflops: float
    """bf16, dense."""
    tb_s: float
    """Memory bandwidth."""


GPUS = {
    "B200": Gpu(2250, 8.0), "H200": Gpu(989, 4.8), "H100 PCIe": Gpu(756, 2.0), "H100 NVL": Gpu(835,
    3.9), "H100": Gpu(989, 3.35),
    "A100": Gpu(312, 2.04), "L40S": Gpu(362, 0.864), "L4": Gpu(121, 0.3), "A10G": Gpu(70, 0.6),
    "A10": Gpu(125, 0.6),
    "RTX 4090": Gpu(165, 1.01), "RTX 3090": Gpu(71, 0.936), "MI300X": Gpu(1307, 5.3),
    "MI250X": Gpu(383, 3.28),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What the roofline needs of a target."""

    params: float
    """Parameters that are read; without the experts, if there are any."""
    weight_bytes: float = 2.0
    kv_bytes: float = 0.0
    """Keys and values of one position, all layers."""
    expert_params: float = 0.0
    """Of all experts together."""
    experts: int = 0
    """In a layer."""
    active: int = 0
    """Experts that one token passes through."""

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
    """Experts of a layer that `tokens` tokens reach under independent routing: E (1 - (1 -
    k/E)^n)."""
    return experts * (1 - (1 - active / experts) ** tokens)


def pass_seconds(model: Model, gpu: Gpu, batch: int, tokens: int, context: int) -> float:
    """Roofline of one forward pass of `tokens` tokens for each of `batch` requests that have
    `context` positions: the longer of reading weights and cache once, and of multiplying."""
    n = batch * tokens
    read, used = model.params, model.params
    if model.experts:
        read += (
            model.expert_params * experts_touched(model.experts, model.active, n) / model.experts
        )
        used += model.expert_params * model.active / model.experts
    reading = (read * model.weight_bytes + batch * context * model.kv_bytes) / (gpu.tb_s * 1e12)
    return max(reading, 2 * used * n / (gpu.tflops * 1e12))


def free_tokens(model: Model, gpu: Gpu) -> float:
    """Tokens in a pass below which weights, not arithmetic, set its time: F w / (2 BW), of a dense
    model and short contexts."""
    return gpu.tflops * model.weight_bytes / (2 * gpu.tb_s)
