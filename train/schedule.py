"""Learning rate as a plain function of the step, and the optimiser's groups."""

from __future__ import annotations

import math

import torch
from torch import nn

from .config import Optim


def rate_at(optim: Optim, step: int, total: int) -> float:
    """Learning rate of 0-based `step` in a run of `total` steps."""
    warmup = round(optim.warmup_share * total)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    low = optim.lr * optim.min_lr_share
    if optim.schedule == "cosine":
        progress = (step - warmup) / max(total - warmup, 1)
        return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * progress))
    if optim.schedule == "wsd":
        decay = round(optim.decay_share * total)
        left = total - step
        return optim.lr if left > decay else low + (optim.lr - low) * left / (decay + 1)
    return optim.lr


def make_optimizer(optim: Optim, module: nn.Module) -> torch.optim.AdamW:
    """AdamW over everything trainable; vectors (biases, norms) are not decayed."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=optim.lr, betas=optim.betas)
