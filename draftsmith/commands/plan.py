"""`draftsmith data plan`: prints whether a training run fits, and its GPU-hours, bytes and price.

They follow from the configs alone, by arithmetic on shapes: target and drafter are built without
weights. Assumptions are printed next to the figures.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from ..command_line.parse import config_with
from ..heads.errors import UserError
from ..inference.base.console import OutputConsole, plural
from ..inference.base.output_paths import check_json, output_json
from ..train.config import RunConfig, divided, most_ranks
from ..train.data.config import FeatureOptions
from ..train.estimate import TARGET_BYTES, RunSizes, StepMemory, memory_of_step, run_sizes, size
from ..train.losses.initialization import apply_init_from
from ..train.methods.registry import method_for, method_named
from .plan_options import PlanOptions as Options
from .plan_options import folder_of, name_of
from .plan_verdict import DECODE_SHARE, MFU, Need, plan_for, steps_of, verdict

MOST_GPUS = 8  # that a plan is for if nothing is said
TOO_MUCH = 2e12  # bytes: beyond one ordinary disk


def run(options: Options) -> None:
    """Print the plan, and write it to a file if one is named."""
    check_json(options.json)
    with nullcontext() if options.target_shape is None else folder_of(options.target_shape) as path:
        config, shape, plan = planned(options, path)
    memory = memory_of_step(shape, config, options.gpus)
    ends = TARGET_BYTES * shape.embedding_and_head_params
    need = Need(memory, shape.target_layers, config.features.live, ends)
    line, figures = verdict(need, plan, options, config)
    steps = steps_of(options, config)
    found: dict[str, Any] = {"options": asdict(options), "verdict": figures}
    found |= {"shape": asdict(shape), "plan": plan, "steps": steps}
    found["memory"] = {**asdict(memory), "resident": memory.resident, "peak": memory.peak}
    if output_json(options.json, found):
        return
    OutputConsole().print(line, style="bold", highlight=False)
    show(shape, plan, memory, options, config.features)
    OutputConsole().print(steps_note(steps, options, config), highlight=False)
    if options.reply_share is None:
        OutputConsole().print(
            "All tokens are counted as replies, which is an upper bound; --reply-share 0.5 counts "
            "half of them."
        )


def steps_note(steps: dict[str, int], options: Options, config: RunConfig) -> str:
    """Return a sentence about the steps of the run, and how the GPUs share their rows."""
    division = divided(config, options.gpus)
    return (
        f"A step has {plural(steps['rows'], 'packed row')}, {steps['positions']:,} positions: on "
        f"each GPU {plural(division.passes, 'forward pass')} of {plural(division.rows, 'row')}. "
        f"{plural(steps['steps'], 'step')} ({steps['warmup']:,} of warm-up), "
        f"{plural(steps['evaluations'], 'evaluation')}."
    )


def planned(options: Options, target: str | None = None) -> tuple[Any, RunSizes, dict[str, float]]:
    """Return the run's config, the sizes of its target and drafter, and their `plan_for`.

    `target` is a folder in place of the config's target; `options.gpus` is set if it was not.
    Raises `UserError` for a target without a config, for a config file that is not one, and for
    rows that the GPUs cannot share.
    """
    method = method_named(method_for(options.config, options.method))
    changes = [*options.set]
    if target is not None:
        if any(change.startswith(("target.path=", "target=")) for change in changes):
            raise UserError("--target-shape and --set target.path both name the target; give one")
        changes.append(f"target.path={target}")
    config = config_with(method.run_class, options.config, changes)
    # A plan may be made before the drafter is there that the run begins with.
    if config.init_from is not None and Path(config.init_from).is_dir():
        apply_init_from(config)
    options.gpus = options.gpus or most_ranks(config.rows_per_step, MOST_GPUS)
    divided(config, options.gpus)  # before the seconds that the shapes take
    try:
        shape = run_sizes(method, config)
    except UserError as error:
        if name := name_of(config.target.path):
            raise UserError(f"{error}; its sizes are known: --target-shape {name}") from error
        raise
    return config, shape, plan_for(shape, options, config)


def show(
    shape: RunSizes,
    plan: dict[str, float],
    memory: StepMemory,
    options: Options,
    features: FeatureOptions,
) -> None:
    """Print the plan, and advice where its features do not fit on a disk."""
    states = f"{shape.taps} taps and the last state" if shape.taps else "the last state"
    once = f"forward at {MFU:.0%} of peak"
    times = plan["extractions"]
    if times != 1:
        once += f", {'live' if features.live else 'by the server'}: in each of {times:g} epochs"
    extracting, training = plan["extract_gpu_hours"] * times, plan["train_gpu_hours"]
    drafter = f"{count(shape.drafter_params)}, {shape.passes:.3g} passes a position"
    per_token = f"{states} in bf16: {plan['feature_bytes_per_token']:,.0f} B a token"
    decoding = f"decoding at {DECODE_SHARE:.0%} of peak"
    target = "embedding and head, bf16"
    if features.live:
        sharded = size(plan["target_bytes"] / options.gpus)
        target = f"{count(shape.target_params)}, bf16; sharded {sharded} a GPU"
    table = Table("what", "how much", "of it")
    table.add_row("features, if stored", size(plan["feature_bytes"]), per_token)
    table.add_row("features, if stored in fp8", size(plan["feature_bytes_fp8"]), "")
    table.add_row("regenerate replies, by a server", hours(plan["regenerate_gpu_hours"]), decoding)
    table.add_row("extract features", hours(extracting), once)
    table.add_row("train the drafter", hours(training), drafter)
    state = memory.drafter + memory.moments
    table.add_row("GPU memory: target", size(memory.target), target)
    table.add_row("... drafter", size(state), "fp32 weights and the optimiser's moments")
    table.add_row("... features", size(memory.features), "of one batch")
    table.add_row("... activations", size(memory.activations), "left by the forward pass")
    table.add_row("... step", size(memory.step), "both passes at their peak, with gradients")
    extraction = "before the drafter's step"
    if not features.live:
        extraction = "from a store" if features.store is not None else "from a server"
    table.add_row("... target's forward pass", size(memory.extraction), extraction)
    table.add_row("... at the peak", size(memory.peak), "of all, without CUDA's own")
    total = plan["total_gpu_hours"]
    console = OutputConsole()
    console.print(table)
    console.print(
        f"{options.tokens:,.0f} tokens: {hours(total)} of {options.gpu} in all. "
        "All of it is estimated from the shapes of target and drafter; nothing was run."
    )
    if plan["feature_bytes"] > TOO_MUCH and features.live:
        console.print(
            f"{size(plan['feature_bytes'])} of features are more than an ordinary disk holds: "
            "train live, or keep a bounded ring "
            "next to the training (draftsmith data extract --ring 8)."
        )


def hours(gpu_hours: float) -> str:
    return f"{gpu_hours:,.1f} GPU-hours"


def count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.2f}B parameters"
    return f"{parameters / 1e6:.1f}M parameters"
