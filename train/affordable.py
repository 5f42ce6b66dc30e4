"""Options whose cost nobody means are refused before anything is loaded, with the estimate of `draftsmith data plan`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

from ..heads.errors import UserError
from ..heads.files import check_space
from ..inference.target import resolve_device
from .commands.plan import plan_for, shape_of, size
from .options import PlanOptions

MOST_MEMORY = 2.0  # times what there is; the estimate of activations is an upper bound
MOST_WORK = 100.0  # times the target's forward pass over the same token; common recipes stay below 10
COUNTS = (("heads", "num_heads"), ("heads", "block_size"), ("heads", "num_layers"), ("objective", "steps"))


def check_affordable(run: Any, method: ModuleType, ranks: int) -> None:
    """Raise `UserError` where a step of `run` asks for far more memory or work than makes sense on this machine.

    A run from a feature store is not looked at, since its target may not be here; nor is one that begins with a drafter, whose
    shape is that drafter's.
    """
    if run.features.store is not None or run.init_from is not None:
        return
    for part, name in COUNTS:
        value = getattr(getattr(run, part, None), name, None)
        if value is not None and value > run.data.max_length:
            raise UserError(f"{part}.{name} is {value}, more than the {run.data.max_length} tokens of a row; lower it")
    shape = shape_of(method, run)
    plan = plan_for(shape, PlanOptions(""), run)
    sizes = [f"{part}.{name}" for part, name in COUNTS if hasattr(getattr(run, part, None), name)]
    lower = f"lower {', '.join(sizes) or 'the size of the student'}"
    checkpoint = plan["drafter_bytes"] * 3 / 4  # of weight, gradient and two moments, the gradient is not kept
    check_space(Path(run.output), checkpoint, "name another --output: one checkpoint takes as much")
    needed, there = plan["drafter_bytes"] / ranks + plan["activation_bytes"], memory_of(resolve_device(run.target.device))
    if needed > MOST_MEMORY * there:
        raise UserError(
            f"training needs about {size(needed)} beside the target, and this machine has {size(there)} (see draftsmith data "
            f"plan); {lower} or batch_rows and data.max_length"
        )
    work = plan["train_gpu_hours"] / run.epochs / plan["extract_gpu_hours"]
    if work > MOST_WORK:
        raise UserError(
            f"training on a token would cost {work:,.0f} times the target's own forward pass over it, {MOST_WORK:g} at most "
            f"make sense (see draftsmith data plan); {lower}"
        )


def memory_of(device: torch.device) -> float:
    """Bytes of memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)
