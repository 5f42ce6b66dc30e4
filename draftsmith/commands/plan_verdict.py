"""Plan of a run: bytes and GPU-hours of its stages, whether it fits its GPUs, disk and price."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..inference.base.costs import GPUS
from ..train.config import RunConfig, interval
from ..train.estimate import RunSizes, StepMemory, memory_of_step, size
from .plan_options import PlanOptions

MFU = 0.4  # share of a GPU's bf16 peak that a forward or training pass usually reaches
DECODE_SHARE = 0.1  # of a GPU's peak while a server decodes hundreds of replies at once
GATHERED_LAYERS = 2  # of a sharded target, one is used while the next one is gathered


def plan_for(shape: RunSizes, options: PlanOptions, config: RunConfig) -> dict[str, float]:
    """Return bytes of features, GPU-hours of each stage and bytes of GPU memory, by name.

    Operations are 2 for each parameter in a forward pass of the target, and those of `Outline` for
    the drafter.
    """
    gpu, tokens, reply_share = GPUS[options.gpu], options.tokens, options.written_share
    # Features in bfloat16: all taps of every token, and the last state of all or of the replies.
    last = 1.0 if shape.all_last else reply_share
    per_token = 2 * shape.hidden * (shape.taps + last)
    passed = 2.0 * shape.active_params * tokens  # operations of the target over all tokens
    regenerate = gpu.hours_to_compute(passed * reply_share, DECODE_SHARE)
    extract = gpu.hours_to_compute(passed, MFU)
    operations = shape.training_operations(reply_share) * tokens * config.epochs
    train = gpu.hours_to_compute(operations, MFU)
    # Without a store, features are made again in each epoch. So they are through a ring, but a
    # config does not say whether its store is one.
    extractions = config.epochs if config.features.store is None else 1.0
    memory = memory_of_step(shape, config, options.gpus)
    return {
        "feature_bytes_per_token": per_token,
        "feature_bytes": per_token * tokens,
        "feature_bytes_fp8": per_token * tokens / 2,
        "regenerate_gpu_hours": regenerate,
        "extract_gpu_hours": extract,
        "extractions": extractions,
        "train_gpu_hours": train,
        "total_gpu_hours": regenerate + extract * extractions + train,
        "target_bytes": 2.0 * shape.target_params,
        "drafter_bytes": memory.state,
        "activation_bytes": memory.transient,
        "checkpoint_bytes": shape.checkpoint_bytes,
    }


def steps_of(options: PlanOptions, config: RunConfig) -> dict[str, int]:
    """Return rows and positions of a step, the steps of the run, its warm-up and evaluations."""
    positions = config.rows_per_step * config.data.max_length
    steps = config.max_steps or max(1, math.ceil(options.tokens * config.epochs / positions))
    return {
        "rows": config.rows_per_step,
        "positions": positions,
        "steps": steps,
        "warmup": round(config.optim.warmup_share * steps),
        # There is always one at the end.
        "evaluations": math.ceil(steps / interval(config.evaluation.every, steps)),
    }


@dataclass(frozen=True)
class Need:
    """Bytes that a step needs on each GPU, by the number of GPUs."""

    memory: StepMemory
    layers: int
    """Layers of the target."""
    live: bool
    """False for a run from a feature store or a server, which has no target to shard."""
    ends: int = 0
    """Bytes of the target's embedding and head, which are there without the rest of it too."""

    def each(self, gpus: int) -> float:
        """Return the bytes on each of `gpus` that share the target, `target.spread` being fsdp.

        A single GPU holds all of it. The drafter is whole on each, as under DDP.
        """
        whole = float(self.memory.peak)
        if gpus == 1 or not self.live:
            return whole
        target = self.memory.target
        shared = target / gpus + GATHERED_LAYERS * target / max(self.layers, 1)
        return whole - target + min(shared, target)

    def without_target(self) -> float:
        """Return the bytes on each GPU where another process runs the target."""
        memory = self.memory
        beside = memory.drafter + memory.moments + memory.features + memory.step
        return float(beside + self.ends)


def fit(need: Need, spread: str, gpus: int, gb: float) -> str:
    """Return whether a step fits `gpus` GPUs of `gb` GB, and if not, what would."""
    if not need.live:
        spread = "whole"  # what there is of the target is not spread
    # The other GPUs of a run whose target is whole have a copy of it each.
    gpus = 1 if spread == "whole" else gpus
    each = f"{size(need.each(gpus))} on each GPU at the peak of a step"
    where = f"{gb:g} GB" if gpus == 1 else f"{gpus} GPUs of {gb:g} GB"
    if need.each(gpus) <= gb * 1e9:
        spreading = "" if gpus == 1 else f" (target.spread {spread})"
        return f"fits {where}{spreading}: {each}."
    remedies = "set objective.recompute, lower batch_rows or data.max_length"
    if need.live:
        alone = f"{size(need.without_target())} on each GPU then"
        remedies += (
            f", share the target between more GPUs (target.spread fsdp), or keep it elsewhere, "
            f"{alone}: on a server (features.server), or run before the training (data extract, "
            "features.store)"
        )
    return f"does not fit {where} ({each}); {remedies}."


def hours_of(plan: dict[str, float], config: RunConfig) -> tuple[float, str]:
    """Return the GPU-hours of the training itself, and what is said of those spent elsewhere."""
    training, replies = plan["train_gpu_hours"], plan["regenerate_gpu_hours"]
    features = plan["extract_gpu_hours"] * plan["extractions"]
    if config.features.live:
        return training + features, f"replies {replies:,.1f} more, before it"
    if config.features.store is not None:
        return training, f"replies {replies:,.1f} and features {features:,.1f} more, before it"
    return training, (
        f"replies {replies:,.1f} more, before it; features {features:,.1f} more, on their server"
    )


def verdict(
    need: Need, plan: dict[str, float], options: PlanOptions, config: RunConfig
) -> tuple[str, dict[str, Any]]:
    """Return the first line of a plan, and its figures by name as JSON can hold them."""
    training, more = hours_of(plan, config)
    wall = training / options.gpus
    # The checkpoints with the best one, and the features of a store in bfloat16.
    disk = (config.checkpoints.keep + 1) * plan["checkpoint_bytes"]
    source = "live features" if need.live else "features from a server"
    what = f"checkpoints; {source} take none"
    if config.features.store is not None:
        disk += plan["feature_bytes"]
        what = "checkpoints and stored features"
    spread, gb = config.target.spread, GPUS[options.gpu].gb
    parts = [
        fit(need, spread, options.gpus, gb),
        f"training {training:,.1f} GPU-hours, {wall:,.1f} hours on {options.gpus} x "
        f"{options.gpu}; {more}.",
        f"Disk: {size(disk)} ({what}).",
    ]
    price = None
    if options.price_per_gpu_hour is not None:
        price = plan["total_gpu_hours"] * options.price_per_gpu_hour
        parts.append(f"Price of all: {price:,.2f} at {options.price_per_gpu_hour:g} a GPU-hour.")
    bytes_ = need.each(1 if spread == "whole" else options.gpus)
    figures = {
        "gpu_memory_gb": gb,
        "needed_bytes": bytes_,
        "fits": bytes_ <= gb * 1e9,
        "hours": wall,
        "disk_bytes": disk,
        "price": price,
    }
    return " ".join(parts), figures
