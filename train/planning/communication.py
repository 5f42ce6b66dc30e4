"""Bytes that GPUs send each other in a training step, and the time of the step with them.

Arithmetic of ring collectives on the run's own sizes: a reduce-scatter or an all-gather of b bytes
over N GPUs sends b (N - 1) / N bytes from each, and an all-reduce is one of both. Latency is left
out, which is milliseconds for hundreds of GPUs, and so is what overlaps with computing: a step lies
between the larger of both times and their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...inference.evaluation.gains import GPUS
from ..config import RunConfig
from ..division import divided
from ..estimate import RunSizes
from .options import PlanOptions

GPUS_OF_A_NODE = 8
COUNTS = (8, 64, 512)  # GPUs
WEIGHT_BYTES = 4  # of the drafter, whose weights and gradients are in float32
TARGET_BYTES = 2  # of a weight or state of the target


@dataclass(frozen=True)
class Step:
    """Work of one GPU in a step, whatever the number of GPUs."""

    drafter_params: int
    trained_params: int
    """Those of the drafter that have gradients."""
    target_params: int
    target_layers: int
    hidden: int
    positions: int
    """Positions of one micro-batch of one GPU."""
    passes: int
    """Micro-batches of a step."""
    rows: int
    """Packed rows of a step of all GPUs."""
    seconds: float
    """Time that a GPU computes in a step."""
    live: bool = True
    """False where no process of the training has the target."""


@dataclass(frozen=True)
class Network:
    """Rates in GB/s of 1e9 bytes, in one direction."""

    link: float
    """Rate at which a GPU sends to the others of its node."""
    node: float
    """Rate at which a node sends to others, through all its network cards."""

    def rate(self, gpus: int) -> float:
        """Return the bytes a second that each GPU of a ring sends.

        A ring leaves each node once, so its GPUs share nothing but the way out: as many rings as
        there are cards run in parallel.
        """
        return 1e9 * (self.link if gpus <= GPUS_OF_A_NODE else min(self.link, self.node))


def step_for(shape: RunSizes, options: PlanOptions, config: RunConfig) -> Step:
    """Return a GPU's step: its sizes, and the time to compute it, target included if it is live."""
    division = divided(config, options.gpus)
    positions = division.rows * config.data.max_length
    operations = shape.training_operations(options.written_share)
    if config.features.live:
        operations += 2 * shape.active_params
    speed = GPUS[options.gpu].tflops * 1e12 * options.mfu
    return Step(
        shape.drafter_params, shape.drafter_params - shape.frozen_params, shape.target_params,
        shape.target_layers, shape.hidden, positions, division.passes, config.rows_per_step,
        operations * positions * division.passes / speed, config.features.live,
    )  # fmt: skip


def sent(step: Step, gpus: int) -> dict[str, float]:
    """Return the bytes that each GPU sends in a step, by engine, and by way to split the target.

    DDP adds up gradients once a step. FSDP2 has the drafter as one unit, gathered for the forward
    and the backward pass of each micro-batch, and spreads the sum of the gradients once. ZeRO-2
    does that for each micro-batch, and gathers new weights once a step. ZeRO-3 gathers like FSDP2
    and spreads like ZeRO-2; what it gathers again for every chunk of a loss is not counted. Of a
    target with `spread=fsdp` every layer is gathered in each micro-batch; with `spread=tensor` all
    GPUs run every GPU's micro-batch, and add up the states twice in each layer. Both are left out
    where the target is not live.

    Example: two GPUs, a drafter of 1,000 parameters, one micro-batch. DDP: 2 x 4,000 / 2 bytes.
    """
    share = (gpus - 1) / gpus
    weights = WEIGHT_BYTES * step.drafter_params * share
    gradients = WEIGHT_BYTES * step.trained_params * share
    micro = step.passes
    states = TARGET_BYTES * step.positions * step.hidden * gpus
    engines = {
        "DDP": 2 * gradients,
        "FSDP2": 2 * weights * micro + gradients,
        "ZeRO-2": gradients * micro + gradients,
        "ZeRO-3": (2 * weights + gradients) * micro,
    }
    if not step.live:
        return engines
    return engines | {
        "target.spread fsdp": TARGET_BYTES * step.target_params * share * micro,
        "target.spread tensor": 2 * step.target_layers * 2 * states * share * micro,
    }


def seconds(step: Step, network: Network, gpus: int) -> dict[str, float]:
    """Return the seconds of communication in a step of `gpus` GPUs, by the names of `sent`."""
    rate = network.rate(gpus)
    return {name: bytes_ / rate for name, bytes_ in sent(step, gpus).items()}


def limits(step: Step, network: Network) -> list[str]:
    """Return a sentence for each thing that stops growing with the number of GPUs."""
    found = [
        "The table keeps the work of a GPU, so that on more GPUs a step has more rows. The "
        f"{step.rows} rows of this one can be shared between as many GPUs at most; more rows are "
        "fewer steps, and another optim.lr."
    ]
    for name in sent(step, COUNTS[0]):
        slow = [n for n in COUNTS if seconds(step, network, n)[name] > step.seconds]
        if slow:
            found.append(
                f"{name} sends for longer than a GPU computes, from {slow[0]} GPUs on: it does not "
                "scale at these rates."
            )
    return found
