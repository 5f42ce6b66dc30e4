"""Bytes and GPU-hours of the stages of a training run, from the shapes of its models."""

from __future__ import annotations

import math

from ...inference.costs import GPUS
from ..config import RunConfig
from ..division import interval
from ..estimate import RunSizes, step_bytes
from .options import PlanOptions

MFU = 0.4  # share of a GPU's bf16 peak that a forward or training pass usually reaches
DECODE_SHARE = 0.1  # of a GPU's peak while a server decodes hundreds of replies at once
ROWS_HERE = 32  # replies that are decoded at once in this process (`data regenerate --batch-size`)
READ_SHARE = 0.5  # of a GPU's bandwidth at which this process reads the weights for each step


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
    # Here each step reads all weights for a few rows, and their time is all that counts.
    step = gpu.seconds_to_read(2 * shape.target_params, READ_SHARE)
    here = tokens * reply_share / ROWS_HERE * step / 3600
    extract = gpu.hours_to_compute(passed, MFU)
    operations = shape.training_operations(reply_share) * tokens * config.epochs
    train = gpu.hours_to_compute(operations, MFU)
    # Without a store, features are made again in each epoch. So they are through a ring, but a
    # config does not say whether its store is one.
    extractions = config.epochs if config.features.store is None else 1.0
    return {
        "feature_bytes_per_token": per_token,
        "feature_bytes": per_token * tokens,
        "feature_bytes_fp8": per_token * tokens / 2,
        "regenerate_gpu_hours": regenerate,
        "regenerate_here_gpu_hours": here,
        "extract_gpu_hours": extract,
        "extractions": extractions,
        "train_gpu_hours": train,
        "total_gpu_hours": regenerate + extract * extractions + train,
        "target_bytes": 2.0 * shape.target_params,
        "drafter_bytes": shape.drafter_bytes,
        "activation_bytes": step_bytes(shape, config, options.gpus),
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
