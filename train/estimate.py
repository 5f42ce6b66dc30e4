"""Cost of a training run from its configs alone: bytes, GPU-hours, GPU memory. Absurd costs are
refused before anything is loaded.

Everything is arithmetic on shapes: the target and the drafter are built without numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

from ..heads.errors import UserError
from ..heads.files import check_space
from ..inference.evaluation.gains import GPUS
from ..inference.target import resolve_device
from .options import PlanOptions
from .outline import ConfigOnly, Outline, config_at, empty

STATE_BYTES = 16  # a trained parameter in fp32: weight, gradient, two moments
DECODE_SHARE = 0.1  # of a GPU's peak while a batch of replies is decoded: memory sets the pace
MOST_MEMORY = 2.0  # times what there is; the estimate of activations is an upper bound
# times the target's forward pass over the same token; common recipes stay below 10
MOST_WORK = 100.0
COUNTS = (
    ("heads", "num_heads"),
    ("heads", "block_size"),
    ("heads", "num_layers"),
    ("objective", "steps"),
)


@dataclass(frozen=True)
class RunSizes:
    """What the arithmetic needs of a target and its drafter."""

    hidden: int
    target_params: int
    active_params: int
    """Parameters that one token passes through; fewer than all in a mixture of experts."""
    vocab: int
    drafter_params: int
    taps: int
    all_last: bool
    passes: float
    """This and what follows: see `Outline`."""
    borrowed_params: int = 0
    layers: int = 1
    distributions: int = 1


def shape_of(method: Any, config: Any) -> RunSizes:
    """Target and drafter by their shapes. Raises `UserError` where no config is to be had."""
    model_config = config_at(config.target.path, config.target.trust_remote_code)
    target = ConfigOnly(model_config)
    model = empty(model_config)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    used, there = (
        getattr(target.config, key, None) for key in ("num_experts_per_tok", "num_experts")
    )
    there = there or getattr(target.config, "num_local_experts", None)
    active = total - experts + (experts * used // there if used and there else experts)
    taps, all_last = method.features_of(config, target)
    found = outlined(method, config, target)
    trained = sum(p.numel() for p in found.drafter.parameters())
    return RunSizes(
        target.config.hidden_size, total, active, target.vocab_size, trained, len(taps), all_last,
        found.passes, found.borrowed_params, found.layers, found.distributions,
    )  # fmt: skip


def outlined(method: Any, config: Any, target: ConfigOnly) -> Outline:
    """The run's drafter without numbers, on the meta device, with what training runs through.
    Raises `UserError`."""
    with torch.device("meta"):
        return method.outline(config, target)


def plan_for(shape: RunSizes, options: PlanOptions, config: Any) -> dict[str, float]:
    """Bytes, GPU-hours and bytes of GPU memory."""
    last = 1.0 if shape.all_last else options.reply_share
    per_token = 2 * shape.hidden * (shape.taps + last)
    hours = 3600 * GPUS[options.gpu].tflops * 1e12
    # of what is frozen, no gradient of its weights
    per_pass = 6 * shape.drafter_params + 4 * shape.borrowed_params
    positions = config.batch_rows * config.data.max_length
    chunk = getattr(config.objective, "rows_per_chunk", 1024)
    states = positions * shape.passes * shape.layers
    activations = positions * (shape.taps + 2) * shape.hidden * 2 + states * shape.hidden * 4 * 20
    regenerate = (
        2 * shape.active_params * options.tokens * options.reply_share / (hours * DECODE_SHARE)
    )
    extract = 2 * shape.active_params * options.tokens / (hours * options.mfu)
    train = per_pass * shape.passes * options.tokens * config.epochs / (hours * options.mfu)
    # live, or through a ring: in each epoch anew
    extractions = config.epochs if config.features.store is None else 1.0
    return {
        "feature_bytes_per_token": per_token,
        "feature_bytes": per_token * options.tokens,
        "feature_bytes_fp8": per_token * options.tokens / 2,
        "regenerate_gpu_hours": regenerate,
        "extract_gpu_hours": extract,
        "extractions": extractions,
        "train_gpu_hours": train,
        "total_gpu_hours": regenerate + extract * extractions + train,
        "target_bytes": 2.0 * shape.target_params,
        "drafter_bytes": float(STATE_BYTES * shape.drafter_params),
        "activation_bytes": float(activations + 3 * chunk * shape.distributions * shape.vocab * 4),
    }


def check_affordable(run: Any, method: ModuleType, ranks: int) -> None:
    """Raise `UserError` where a step of `run` asks for far more memory or work than makes sense on
    this machine.

    A run from a feature store is not looked at, since its target may not be here; nor is one that
    begins with a drafter, whose shape is that drafter's.
    """
    if run.features.store is not None or run.init_from is not None:
        return
    for part, name in COUNTS:
        value = getattr(getattr(run, part, None), name, None)
        if value is not None and value > run.data.max_length:
            raise UserError(
                f"{part}.{name} is {value}, more than the {run.data.max_length} tokens of a row; "
                "lower it"
            )
    shape = shape_of(method, run)
    plan = plan_for(shape, PlanOptions(""), run)
    sizes = [f"{part}.{name}" for part, name in COUNTS if hasattr(getattr(run, part, None), name)]
    lower = f"lower {', '.join(sizes) or 'the size of the student'}"
    # of weight, gradient and two moments, the gradient is not kept
    checkpoint = plan["drafter_bytes"] * 3 / 4
    check_space(Path(run.output), checkpoint, "name another --output: one checkpoint takes as much")
    needed, there = (
        plan["drafter_bytes"] / ranks + plan["activation_bytes"],
        memory_of(resolve_device(run.target.device)),
    )
    if needed > MOST_MEMORY * there:
        raise UserError(
            f"training needs about {size(needed)} beside the target, and this machine has "
            f"{size(there)} (see draftsmith data "
            f"plan); {lower} or batch_rows and data.max_length"
        )
    work = plan["train_gpu_hours"] / run.epochs / plan["extract_gpu_hours"]
    if work > MOST_WORK:
        raise UserError(
            f"training on a token would cost {work:,.0f} times the target's own forward pass over "
            f"it, {MOST_WORK:g} at most "
            f"make sense (see draftsmith data plan); {lower}"
        )


def memory_of(device: torch.device) -> float:
    """Bytes of memory of a GPU, or of this machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(psutil.virtual_memory().total)


def size(bytes_: float) -> str:
    return f"{bytes_ / 1e12:,.1f} TB" if bytes_ >= 1e12 else f"{bytes_ / 1e9:,.1f} GB"
