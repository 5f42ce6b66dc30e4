"""Muon with its arithmetic in float32 on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch's Muon, whose matrices on a CPU are made orthogonal in float32 instead of bfloat16.

    A processor without instructions for bfloat16 multiplies in it thirty times as slowly. The
    options are torch's, with Nesterov's momentum and the rate adjusted by `match_rms_adamw`
    (arXiv 2502.16982).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Do one step by the gradients that are there; `closure` is not called on a CPU."""
        if any(p.device.type != "cpu" for group in self.param_groups for p in group["params"]):
            super().step(closure)
            return
        for group in self.param_groups:
            rate, momentum = float(group["lr"]), group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                average = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = orthogonal(
                    p.grad.lerp(average, momentum),
                    group["ns_coefficients"],
                    group["ns_steps"],
                    group["eps"],
                )
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(update, alpha=-0.2 * rate * max(p.shape) ** 0.5)


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return `matrix` with singular values near 1, by Newton and Schulz's iteration in its dtype.

    Each of `steps` applies a x + b x^3 + c x^5, with the `coefficients` (a, b, c), to the singular
    values, which are at most 1 at the start (Jordan et al. 2024, Muon).
    """
    a, b, c = coefficients
    # The smaller side first: the products are of its size.
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.mT
