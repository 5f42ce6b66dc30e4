"""`draftsmith data plan`: bytes, GPU-hours and GPU memory of a training run, from the configs alone, before anything runs.

Everything is arithmetic on shapes: the target and the drafter are built without numbers. What is assumed is printed beside it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from ...heads.files import check_output, whole_file, write_json
from ...inference.console import Console
from ...inference.evaluation.gains import GPUS
from ..arguments import parse
from ..method import method_for, method_module
from ..options import PlanOptions as Options
from ..outline import ConfigOnly, Outline, config_at, empty

TOO_MUCH = 2e12  # bytes: beyond one ordinary disk
STATE_BYTES = 16  # a trained parameter in fp32: weight, gradient, two moments
DECODE_SHARE = 0.1  # of a GPU's peak while a batch of replies is decoded: memory sets the pace


@dataclass(frozen=True)
class Shape:
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
    laws: int = 1


def run(options: Options) -> None:
    check_output(options.json, "--json")
    _, shape, plan = planned(options)
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(aside, {"options": asdict(options), "shape": asdict(shape), "plan": plan})
    show(shape, plan, options)


def planned(options: Options) -> tuple[Any, Shape, dict[str, float]]:
    """The run, the shape of its target and drafter, and what `plan_for` makes of them."""
    method = method_module(method_for(options.run, options.method))
    changes = [f"--{change}" for change in options.set]
    config, _ = parse(method.Run, ["--config", options.run, *changes], "draftsmith data plan --run")
    shape = shape_of(method, config)
    return config, shape, plan_for(shape, options, config)


def shape_of(method: Any, config: Any) -> Shape:
    """Target and drafter by their shapes. Raises `UserError` where no config is to be had."""
    model_config = config_at(config.target.path, config.target.trust_remote_code)
    target = ConfigOnly(model_config)
    model = empty(model_config)
    total = sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    used, there = (getattr(target.config, key, None) for key in ("num_experts_per_tok", "num_experts"))
    there = there or getattr(target.config, "num_local_experts", None)
    active = total - experts + (experts * used // there if used and there else experts)
    taps, all_last = method.features_of(config, target)
    found = outlined(method, config, target)
    trained = sum(p.numel() for p in found.drafter.parameters())
    return Shape(
        target.config.hidden_size, total, active, target.vocab_size, trained, len(taps), all_last,
        found.passes, found.borrowed_params, found.layers, found.laws,
    )  # fmt: skip


def outlined(method: Any, config: Any, target: ConfigOnly) -> Outline:
    """The run's drafter without numbers, on the meta device, with what training runs through. Raises `UserError`."""
    with torch.device("meta"):
        return method.outline(config, target)


def plan_for(shape: Shape, options: Options, config: Any) -> dict[str, float]:
    """Bytes, GPU-hours and bytes of GPU memory."""
    last = 1.0 if shape.all_last else options.reply_share
    per_token = 2 * shape.hidden * (shape.taps + last)
    hours = 3600 * GPUS[options.gpu].tflops * 1e12
    per_pass = 6 * shape.drafter_params + 4 * shape.borrowed_params  # of what is frozen, no gradient of its weights
    positions = config.batch_rows * config.data.max_length
    chunk = getattr(config.objective, "rows_per_chunk", 1024)
    states = positions * shape.passes * shape.layers
    activations = positions * (shape.taps + 2) * shape.hidden * 2 + states * shape.hidden * 4 * 20
    regenerate = 2 * shape.active_params * options.tokens * options.reply_share / (hours * DECODE_SHARE)
    extract = 2 * shape.active_params * options.tokens / (hours * options.mfu)
    train = per_pass * shape.passes * options.tokens * config.epochs / (hours * options.mfu)
    extractions = config.epochs if config.features.store is None else 1.0  # live, or through a ring: in each epoch anew
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
        "activation_bytes": float(activations + 3 * chunk * shape.laws * shape.vocab * 4),
    }


def show(shape: Shape, plan: dict[str, float], options: Options) -> None:
    """Print the plan, and what to do where it asks for too much."""
    states = f"{shape.taps} taps and the last state" if shape.taps else "the last state"
    target, drafter = plan["target_bytes"], f"{count(shape.drafter_params)}, {shape.passes:.3g} passes a position"
    table = Table("what", "how much", "of it")
    times = plan["extractions"]
    once = f"forward at {options.mfu:.0%} of peak" + (f", live: in each of {times:g} epochs" if times != 1 else "")
    for what, amount, remark in (
        ("stored features", size(plan["feature_bytes"]), f"{states} in bf16: {plan['feature_bytes_per_token']:,.0f} B a token"),
        ("stored in fp8", size(plan["feature_bytes_fp8"]), ""),
        ("regenerate replies", hours(plan["regenerate_gpu_hours"]), f"decoding at {DECODE_SHARE:.0%} of peak"),
        ("extract features", hours(plan["extract_gpu_hours"] * times), once),
        ("train the drafter", hours(plan["train_gpu_hours"]), drafter),
        ("GPU memory: target", size(target), f"{count(shape.target_params)}, bf16; sharded {size(target / options.gpus)} a GPU"),
        ("GPU memory: drafter", size(plan["drafter_bytes"]), "fp32 weights, gradients, AdamW's moments"),
        ("GPU memory: activations", size(plan["activation_bytes"]), "a rough upper bound for one forward pass of a rank"),
    ):
        table.add_row(what, amount, remark)
    total = plan["total_gpu_hours"]
    console = Console()
    console.print(table)
    console.print(
        f"{options.tokens:,.0f} tokens: {hours(total)} of {options.gpu}, {total / options.gpus:,.1f} hours on {options.gpus}. "
        "Estimates from shapes; nothing was run."
    )
    if plan["feature_bytes"] > TOO_MUCH:
        console.print(
            f"{size(plan['feature_bytes'])} of features are more than an ordinary disk holds: train live, or keep a bounded ring "
            "beside the training (draftsmith data extract --ring 8)."
        )


def size(bytes_: float) -> str:
    return f"{bytes_ / 1e12:,.1f} TB" if bytes_ >= 1e12 else f"{bytes_ / 1e9:,.1f} GB"


def hours(gpu_hours: float) -> str:
    return f"{gpu_hours:,.1f} GPU-hours"


def count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B parameters" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M parameters"
