"""Less memory for more work: what a forward pass keeps for the backward pass, and where.

accelerate and transformers have this too, but by wrapping a module's own layers, for models in
training mode: EAGLE's unrolled steps are no layers, students learn without dropout, and objectives
read weights beside the modules that own them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ..heads.errors import UserError


@dataclass
class Memory:
    """Part of an objective's config."""

    recompute: bool = False
    """Keep only the states between EAGLE's unrolled steps, or the layers of a student or block
    drafter, and compute the rest again in the backward pass: less memory, up to a third more
    time."""
    offload: bool = False
    """With recompute: what is kept waits in host memory."""

    def __post_init__(self) -> None:
        if self.offload and not self.recompute:
            raise UserError(
                "objective.offload is about what objective.recompute keeps; set that too"
            )


def recomputing(function: Callable[..., Any], offload: bool = False) -> Callable[..., Any]:
    """`function`, of which only the arguments are kept and which runs again in the backward pass
    (arXiv 1604.06174).

    `offload`: they wait in pinned host memory, so that a GPU keeps nothing of it.
    """
    again = partial(checkpoint, function, use_reentrant=False)
    if not offload:
        return again

    def call(*arguments: Any, **options: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return again(*arguments, **options)

    return call


@contextmanager
def recomputed(layers: Iterable[nn.Module], offload: bool = False) -> Iterator[None]:
    """Within this, each of the layers is `recomputing`, whatever mode the model is in."""
    layers = list(layers)
    for layer in layers:
        layer.forward = recomputing(layer.forward, offload)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward
