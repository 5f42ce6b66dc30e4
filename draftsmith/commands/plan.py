"""`draftsmith data plan`: prints whether a training run fits, and its GPU-hours, bytes and price.

They follow from the configs alone, by arithmetic on shapes: target and drafter are built without
weights. Assumptions are printed next to the figures. `targets/NAME/config.json` is that of a
well-known target, which needs no hub.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.table import Table

from ..command_line.parse import config_with
from ..heads.errors import UserError
from ..inference.base.console import OutputConsole, plural, size
from ..inference.base.costs import GPUS, TARGET_BYTES, known_gpu
from ..inference.base.output_paths import check_json, output_json
from ..train.config import RunConfig, divided, interval, most_ranks
from ..train.methods.registry import RunFile, method_for, method_named

if TYPE_CHECKING:
    from ..train.data.config import FeatureOptions
    from ..train.estimate import RunSizes, StepMemory

TARGETS = Path(__file__).with_name("targets")
MOST_GPUS = 8  # that a plan is for if nothing is said
TOO_MUCH = 2e12  # bytes: beyond one ordinary disk
MFU = 0.4  # share of a GPU's bf16 peak that a forward or training pass usually reaches
DECODE_SHARE = 0.1  # of a GPU's peak while a server decodes hundreds of replies at once
GATHERED_LAYERS = 2  # of a sharded target, one is used while the next one is gathered


@dataclass
class PlanOptions(RunFile):
    """Estimate the cost of a training run: whether it fits, hours, disk, GPU memory, price.

    Target and drafter are built without weights, and nothing is computed.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith data plan --config configs/eagle/llama-3.1-8b.yaml --tokens 300M --gpu H100"
        " --gpus 8",
        "draftsmith data plan --config configs/eagle/qwen3-32b.yaml --target-shape qwen3-32b"
        " --tokens 300M --price-per-gpu-hour 2.5",
        "draftsmith data plan --config run.yaml --set target.path=FOLDER --set batch_rows=4",
    )

    tokens: float = 1e9
    """Number of tokens of data, prompts included."""
    reply_share: float | None = None
    """Share of the tokens that the target writes; if not given, all of them are counted, which is
    an upper bound."""
    gpu: str = "H100"
    """Kind of GPU, by the name of its data sheet."""
    gpus: int = 0
    """Number of GPUs that share the steps. 0 chooses 8, or the largest smaller number that
    divides the rows of a step evenly."""
    price_per_gpu_hour: float | None = None
    """Price of an hour of one GPU, in any currency."""
    target_shape: str | None = None
    """Known target whose shape replaces the config's target.path; needs no access to the hub:
    qwen3-32b, llama-3.1-8b-instruct and others. An unknown name lists all of them."""
    json: str | None = None
    """File to write the numbers to; `-` prints them in place of the tables."""

    def __post_init__(self) -> None:
        self.gpu = known_gpu(self.gpu)
        if self.tokens <= 0 or self.gpus < 0 or not 0 < self.written_share <= 1:
            raise UserError("tokens must be above 0, gpus at least 1, reply_share in (0, 1]")
        if self.price_per_gpu_hour is not None and self.price_per_gpu_hour < 0:
            raise UserError("--price-per-gpu-hour must be at least 0")

    @property
    def written_share(self) -> float:
        """Share of the tokens that the target writes; 1 if it is not known."""
        return 1.0 if self.reply_share is None else self.reply_share


def run(options: PlanOptions) -> None:
    """Print the plan, and write it to a file if one is named."""
    from ..train.estimate import memory_of_step

    check_json(options.json)
    config, shape, plan = planned(options)
    memory, ends = (
        memory_of_step(shape, config, options.gpus),
        TARGET_BYTES * shape.embedding_and_head_params,
    )
    need = MemoryNeed(memory, shape.target_layers, config.features.live, ends)
    line, figures = verdict(need, plan, options, config)
    steps = steps_of(options, config)
    found: dict[str, Any] = {"options": asdict(options), "verdict": figures}
    found |= {"shape": asdict(shape), "plan": plan, "steps": steps}
    found["memory"] = {**asdict(memory), "resident": memory.resident, "peak": memory.peak}
    if output_json(options.json, found):
        return
    OutputConsole().print(line, style="bold", highlight=False)
    show(shape, plan, memory, options, config.features)
    division = divided(config, options.gpus)
    OutputConsole().print(
        f"A step has {plural(steps['rows'], 'packed row')}, {steps['positions']:,} positions: on "
        f"each GPU {plural(division.passes, 'forward pass')} of {plural(division.rows, 'row')}. "
        f"{plural(steps['steps'], 'step')} ({steps['warmup']:,} of warm-up), "
        f"{plural(steps['evaluations'], 'evaluation')}.",
        highlight=False,
    )
    if options.reply_share is None:
        OutputConsole().print(
            "All tokens are counted as replies, which is an upper bound; --reply-share 0.5 counts "
            "half of them."
        )


def planned(options: PlanOptions) -> tuple[Any, RunSizes, dict[str, float]]:
    """Return the run's config, the sizes of its target and drafter, and their `plan_for`.

    `options.gpus` is set if it was not. Raises `UserError` for a target without a config, for a
    config file that is not one, and for rows that the GPUs cannot share.
    """
    from ..train.estimate import run_sizes
    from ..train.losses.initialization import apply_init_from

    changes = [*options.set]
    if options.target_shape is not None:
        target = folder_of(options.target_shape)
        if any(change.startswith(("target.path=", "target=")) for change in changes):
            raise UserError("--target-shape and --set target.path both name the target; give one")
        changes.append(f"target.path={target}")
    method = method_named(method_for(options.config, options.method))
    config = config_with(method.run_class, options.config, changes)
    # A plan may be made before the drafter is there that the run begins with.
    if config.init_from is not None and Path(config.init_from).is_dir():
        apply_init_from(config)
    options.gpus = options.gpus or most_ranks(config.rows_per_step, MOST_GPUS)
    divided(config, options.gpus)  # before the seconds that the shapes take
    try:
        shape = run_sizes(method, config)
    except UserError as error:
        if name := known_target(config.target.path):
            raise UserError(f"{error}; its sizes are known: --target-shape {name}") from error
        raise
    return config, shape, plan_for(shape, options, config)


def show(
    shape: RunSizes,
    plan: dict[str, float],
    memory: StepMemory,
    options: PlanOptions,
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


def plan_for(shape: RunSizes, options: PlanOptions, config: RunConfig) -> dict[str, float]:
    """Return bytes of features, GPU-hours of each stage and bytes of GPU memory, by name.

    Operations are 2 for each parameter in a forward pass of the target, and those of `Outline` for
    the drafter.
    """
    from ..train.estimate import memory_of_step

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
class MemoryNeed:
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
        own = memory.drafter + memory.moments + memory.features + memory.step
        return float(own + self.ends)


def fit(need: MemoryNeed, spread: str, gpus: int, gb: float) -> str:
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
    need: MemoryNeed, plan: dict[str, float], options: PlanOptions, config: RunConfig
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


def known_targets() -> list[str]:
    """Return the names of the targets whose configs are here, such as qwen3-32b."""
    return sorted(path.name for path in TARGETS.iterdir())


def known_target(target: str) -> str | None:
    """Return the name here of a target by its name on the hub; None if it is not here."""
    name = target.rpartition("/")[2].lower()
    return name if name in known_targets() else None


def folder_of(name: str) -> Path:
    """Return the folder that holds the config.json of a target, and nothing else.

    Upper case and the owner on the hub may be given. Raises `UserError` with the nearest names and
    all names for an unknown target.
    """
    if (found := known_target(name)) is None:
        wanted = name.rpartition("/")[2].lower()
        near = difflib.get_close_matches(wanted, known_targets(), n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        known = ", ".join(known_targets())
        raise UserError(f"unknown target shape {name!r}; {hint}there are: {known}")
    return TARGETS / found
