"""Optimiser, its learning rate as a function of the step, and Muon in float32 on CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.errors import UserError
from .config import Optim

MOMENTUM, MUON_WEIGHT_DECAY = 0.95, 0.1  # of Muon, as in arXiv 2502.16982


def rate_at(optim: Optim, step: int, total: int) -> float:
    """Return the learning rate of `step`, counted from 0, in a run of `total` steps."""
    warmup = round(optim.warmup_share * total)
    if step < warmup:
        # With 4 steps of warm-up: 1/4, 2/4, 3/4 and 4/4 of the peak.
        return optim.lr * (step + 1) / warmup
    low = optim.lr * optim.min_lr_share
    if optim.schedule == "cosine":
        progress = (step - warmup) / max(total - warmup, 1)
        return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
    if optim.schedule == "wsd":
        decay = round(optim.decay_share * total)
        left = total - step  # this step included
        # With 4 steps of decay: 4/5, 3/5, 2/5 and 1/5 of the way from the lowest rate to the peak.
        return optim.lr if left > decay else low + (optim.lr - low) * left / (decay + 1)
    return optim.lr


def make_optimizer(optim: Optim, module: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimiser of all trainable parameters; AdamW's vectors have no weight decay.

    With `fused` one kernel does AdamW's step for many parameters. Raises `UserError` for Muon
    without a matrix that it can train.
    """
    orthogonal = hidden_matrices(module) if optim.optimizer == "muon" else []
    if optim.optimizer == "muon" and not orthogonal:
        raise UserError(
            "optim.optimizer muon trains the weights of linear layers, and this drafter has no "
            "trained ones; use optim.optimizer adamw"
        )
    chosen = {id(matrix) for matrix in orthogonal}
    rest = [p for p in module.parameters() if p.requires_grad and id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=fused or None)
    if not orthogonal:
        return adamw
    muon = Muon(
        orthogonal, lr=optim.lr, momentum=MOMENTUM, weight_decay=MUON_WEIGHT_DECAY,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    return TwoOptimizers(muon, adamw)


VOCABULARY_MATRICES = ("lm_head", "outputs", "transition_out")
"""Parts of the names of linear layers whose outputs are tokens."""


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices that map states to states, which Muon is for.

    Each row of an embedding or output matrix belongs to one token, so orthogonalised updates do not
    suit them (Jordan et al. 2024, Muon). A matrix of one row or column is a vector.
    """
    found = []
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) or set(name.split(".")) & set(VOCABULARY_MATRICES):
            continue
        if layer.weight.requires_grad and min(layer.weight.shape) > 1:
            found.append(layer.weight)
    return found


class TwoOptimizers(torch.optim.Optimizer):
    """Two optimisers of different parameters, as one for engines, schedule and checkpoints."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self.parts = (first, second)
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts use the groups and the state of the whole."""
        start = 0
        for part in self.parts:
            end = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:end], self.state
            start = end

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Muon(torch.optim.Muon):
    """torch's Muon, which orthogonalises in float32 instead of bfloat16 on a CPU.

    A processor without instructions for bfloat16 is thirty times slower with it. The options are
    torch's, with Nesterov's momentum and the rate adjusted by `match_rms_adamw` (arXiv 2502.16982).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Do one step for the parameters with gradients; `closure` is not called on a CPU."""
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
                    p.grad.lerp(average, momentum), group["ns_coefficients"], group["ns_steps"],
                    group["eps"],
                )  # fmt: skip
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(update, alpha=-0.2 * rate * max(p.shape) ** 0.5)


def orthogonal(
    matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Return `matrix` with singular values near 1, by Newton and Schulz's iteration in its dtype.

    Each of `steps` maps the singular values x, which are at most 1 at the start, to
    a x + b x^3 + c x^5, with the `coefficients` (a, b, c) (Jordan et al. 2024, Muon).
    """
    a, b, c = coefficients
    # The products have the size of the first side, which should be the smaller one.
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if matrix.shape[0] <= matrix.shape[1] else x.mT
