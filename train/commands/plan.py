"""`draftsmith data plan`: prints the bytes, GPU-hours and GPU memory that a training run will take.

They follow from the configs alone, by arithmetic on shapes: target and drafter are built without
weights, and nothing is run. Assumptions are printed beside the figures.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from ...heads.files import check_output, whole_file, write_json
from ...inference.console import Console
from ..arguments import parse
from ..estimate import DECODE_SHARE, RunSizes, plan_for, shape_of, size
from ..method import method_for, method_named
from ..options import PlanOptions as Options

TOO_MUCH = 2e12  # bytes: beyond one ordinary disk


def run(options: Options) -> None:
    """Print the plan, and write it to a file if one is named."""
    check_output(options.json, "--json")
    _, shape, plan = planned(options)
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(aside, {"options": asdict(options), "shape": asdict(shape), "plan": plan})
    show(shape, plan, options)


def planned(options: Options) -> tuple[Any, RunSizes, dict[str, float]]:
    """Return the run's config, the sizes of its target and drafter, and their `plan_for`.

    Raises `UserError` for a target without a config, and exits with status 2 for a config file that
    is not one.
    """
    method = method_named(method_for(options.run, options.method))
    changes = [f"--{change}" for change in options.set]
    config, _ = parse(
        method.run_class, ["--config", options.run, *changes], "draftsmith data plan --run"
    )
    shape = shape_of(method, config)
    return config, shape, plan_for(shape, options, config)


def show(shape: RunSizes, plan: dict[str, float], options: Options) -> None:
    """Print the plan, and advice where its features do not fit on a disk."""
    states = f"{shape.taps} taps and the last state" if shape.taps else "the last state"
    once = f"forward at {options.mfu:.0%} of peak"
    times = plan["extractions"]
    if times != 1:
        once += f", live: in each of {times:g} epochs"
    extracting, training = plan["extract_gpu_hours"] * times, plan["train_gpu_hours"]
    drafter = f"{count(shape.drafter_params)}, {shape.passes:.3g} passes a position"
    per_token = f"{states} in bf16: {plan['feature_bytes_per_token']:,.0f} B a token"
    decoding = f"decoding at {DECODE_SHARE:.0%} of peak"
    sharded = f"bf16; sharded {size(plan['target_bytes'] / options.gpus)} a GPU"
    bound = "a rough upper bound for one forward pass of a rank"
    table = Table("what", "how much", "of it")
    table.add_row("stored features", size(plan["feature_bytes"]), per_token)
    table.add_row("stored in fp8", size(plan["feature_bytes_fp8"]), "")
    table.add_row("regenerate replies", hours(plan["regenerate_gpu_hours"]), decoding)
    table.add_row("extract features", hours(extracting), once)
    table.add_row("train the drafter", hours(training), drafter)
    table.add_row(
        "GPU memory: target",
        size(plan["target_bytes"]),
        f"{count(shape.target_params)}, {sharded}",
    )
    table.add_row(
        "GPU memory: drafter",
        size(plan["drafter_bytes"]),
        "fp32 weights, gradients, AdamW's moments",
    )
    table.add_row("GPU memory: activations", size(plan["activation_bytes"]), bound)
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
    if parameters >= 1e9:
        return f"{parameters / 1e9:.2f}B parameters"
    return f"{parameters / 1e6:.1f}M parameters"
