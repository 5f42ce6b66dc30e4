"""`draftsmith data plan`: bytes, GPU-hours and GPU memory of a training run, from the configs
alone, before anything runs.

Everything is arithmetic on shapes: the target and the drafter are built without numbers. What is
assumed is printed beside it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from ...heads.files import check_output, whole_file, write_json
from ...inference.console import Console
from ..arguments import parse
from ..estimate import DECODE_SHARE, RunSizes, plan_for, shape_of, size
from ..method import method_for, method_module
from ..options import PlanOptions as Options

TOO_MUCH = 2e12  # bytes: beyond one ordinary disk


def run(options: Options) -> None:
    check_output(options.json, "--json")
    _, shape, plan = planned(options)
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(aside, {"options": asdict(options), "shape": asdict(shape), "plan": plan})
    show(shape, plan, options)


def planned(options: Options) -> tuple[Any, RunSizes, dict[str, float]]:
    """The run, the shape of its target and drafter, and what `plan_for` makes of them."""
    method = method_module(method_for(options.run, options.method))
    changes = [f"--{change}" for change in options.set]
    config, _ = parse(method.Run, ["--config", options.run, *changes], "draftsmith data plan --run")
    shape = shape_of(method, config)
    return config, shape, plan_for(shape, options, config)


def show(shape: RunSizes, plan: dict[str, float], options: Options) -> None:
    """Print the plan, and what to do where it asks for too much."""
    states = f"{shape.taps} taps and the last state" if shape.taps else "the last state"
    target, drafter = (
        plan["target_bytes"],
        f"{count(shape.drafter_params)}, {shape.passes:.3g} passes a position",
    )
    table = Table("what", "how much", "of it")
    times = plan["extractions"]
    once = f"forward at {options.mfu:.0%} of peak" + (
        f", live: in each of {times:g} epochs" if times != 1 else ""
    )
    for what, amount, remark in (
        (
            "stored features",
            size(plan["feature_bytes"]),
            f"{states} in bf16: {plan['feature_bytes_per_token']:,.0f} B a token",
        ),
        ("stored in fp8", size(plan["feature_bytes_fp8"]), ""),
        (
            "regenerate replies",
            hours(plan["regenerate_gpu_hours"]),
            f"decoding at {DECODE_SHARE:.0%} of peak",
        ),
        ("extract features", hours(plan["extract_gpu_hours"] * times), once),
        ("train the drafter", hours(plan["train_gpu_hours"]), drafter),
        (
            "GPU memory: target",
            size(target),
            f"{count(shape.target_params)}, bf16; sharded {size(target / options.gpus)} a GPU",
        ),
        (
            "GPU memory: drafter",
            size(plan["drafter_bytes"]),
            "fp32 weights, gradients, AdamW's moments",
        ),
        (
            "GPU memory: activations",
            size(plan["activation_bytes"]),
            "a rough upper bound for one forward pass of a rank",
        ),
    ):
        table.add_row(what, amount, remark)
    total = plan["total_gpu_hours"]
    console = Console()
    console.print(table)
    console.print(
        f"{options.tokens:,.0f} tokens: {hours(total)} of {options.gpu}, "
        f"{total / options.gpus:,.1f} hours on {options.gpus}. "
        "Estimates from shapes; nothing was run."
    )
    if plan["feature_bytes"] > TOO_MUCH:
        console.print(
            f"{size(plan['feature_bytes'])} of features are more than an ordinary disk holds: "
            "train live, or keep a bounded ring "
            "beside the training (draftsmith data extract --ring 8)."
        )


def hours(gpu_hours: float) -> str:
    return f"{gpu_hours:,.1f} GPU-hours"


def count(parameters: int) -> str:
    return (
        f"{parameters / 1e9:.2f}B parameters"
        if parameters >= 1e9
        else f"{parameters / 1e6:.1f}M parameters"
    )
