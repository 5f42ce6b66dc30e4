"""Every outcome of a round, with its probability."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from draftsmith.inference.rounds import accept as verifiers
from draftsmith.inference.rounds.accept import (
    AcceptancePlan,
)
from draftsmith.inference.rounds.tree import TreeShape


def token_level(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
    """Token-level rejection of a sampled chain: Leviathan et al., Chen et al."""
    probs, chances = p.clone(), torch.ones_like(p[..., 0])
    for i in range(1, shape.nodes):
        x, of_target, of_drafter = tokens[:, i], p[:, i - 1], q[:, i - 1]
        ratio = verifiers.ratio(
            verifiers.gather_probs(of_target, x), verifiers.gather_probs(of_drafter, x)
        )
        chances[:, i] = ratio.clamp(max=1)
        probs[:, i - 1] = verifiers.residual(of_target, of_drafter)
    return AcceptancePlan(chances, probs, partial(verifiers.select_down, shape))
