"""Learning rate as a function of the step, and the parameter groups of the optimiser."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import Optim


def rate_at(optim: Optim, step: int, total: int) -> float:
    """Return the learning rate of `step`, counted from 0, in a run of `total` steps.

    It rises linearly to its peak, then follows the schedule that `optim` names.
    """
    warmup = round(optim.warmup_share * total)
    if step < warmup:
        # Step 0 has a rate above 0, and the last step of the warm-up has the peak.
        # With 4 steps of warm-up: 1/4, 2/4, 3/4 and 4/4 of the peak.
        return optim.lr * (step + 1) / warmup
    low = optim.lr * optim.min_lr_share
    if optim.schedule == "cosine":
        progress = (step - warmup) / max(total - warmup, 1)
        return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
    if optim.schedule == "wsd":
        decay = round(optim.decay_share * total)
        left = total - step  # this step included
        # The first step of the decay is below the peak already, the last one above the lowest rate.
        # With 4 steps of decay: 4/5, 3/5, 2/5 and 1/5 of the way from the lowest rate to the peak.
        return optim.lr if left > decay else low + (optim.lr - low) * left / (decay + 1)
    return optim.lr


def make_optimizer(optim: Optim, module: nn.Module, fused: bool = False) -> torch.optim.AdamW:
    """Return AdamW over all trainable parameters; vectors (biases, norms) have no weight decay.

    With `fused` one kernel does a step for many parameters.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=fused or None)
