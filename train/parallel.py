"""Differences between DDP, FSDP2 and DeepSpeed, hidden from the training loop.

The loop sees one module, one optimiser, and a drafter whose weights are whole. Precision is the
same under each engine, because draftsmith sets it and not the engine: autocast around the forward
pass, fp32 weights, and fp32 sums between ranks.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import InitProcessGroupKwargs
from torch import Tensor, nn

from ..heads.errors import UserError, first_line
from ..heads.files import only_writer
from ..inference.targets.spread import on_first
from .config import Optim, RunConfig
from .objectives import TrainingModule

log = logging.getLogger(__name__)
T = TypeVar("T")
COLLECTIVES = timedelta(minutes=30)
"""Longest wait in a collective operation. All ranks do the same work, evaluations and checkpoints
included: one that has not come by then has failed."""


def time_limit() -> InitProcessGroupKwargs:
    """Return accelerate's setting for the wait in collective operations."""
    return InitProcessGroupKwargs(timeout=COLLECTIVES)


def make_accelerator(run: RunConfig) -> Accelerator:
    """Return accelerate's view of this launch, which also starts the process group."""
    try:
        return Accelerator(
            # draftsmith sets the precision itself, see above.
            mixed_precision="no",
            log_with=None if run.tracker == "none" else run.tracker,
            project_dir=run.out,
            kwargs_handlers=[time_limit()],
        )
    except ImportError as error:  # of an engine that the launch asks for, such as DeepSpeed
        raise UserError(
            f"this launch needs a package that cannot be imported: {first_line(error)}"
        ) from error


def engine_of(accelerator: Accelerator) -> str:
    """Return how weights and optimiser lie in a checkpoint: replicated, fsdp2 or deepspeed-zeroN.

    Raises `UserError` for FSDP1.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        if not accelerator.is_fsdp2:
            raise UserError(
                "accelerate's config asks for FSDP version 1; set fsdp_version: 2, see "
                "configs/accelerate/fsdp2.yaml"
            )
        return "fsdp2"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"deepspeed-zero{_deepspeed_config(accelerator)['zero_optimization']['stage']}"
    return "replicated"


def log_engine(accelerator: Accelerator) -> None:
    """Log the engine and the processes of this launch, the first line of a run.

    Warns if accelerate was asked for an engine that it does not use, as on CPUs and, for FSDP, with
    one process. It is no error: what is trained is the same, only the memory is not shared, so that
    a launch for GPUs can be tried on a machine without them.
    """
    if not accelerator.is_main_process:
        return
    engine, ranks = engine_of(accelerator), accelerator.num_processes
    shared = engine != "replicated"
    if not shared:
        engine = "DDP" if ranks > 1 else "none"
    log.info(
        "engine: %s, %d process%s on %s",
        engine, ranks, "es" if ranks > 1 else "", accelerator.device.type,
    )  # fmt: skip
    for asked in ("FSDP", "DEEPSPEED"):
        if not shared and os.environ.get(f"ACCELERATE_USE_{asked}", "false").lower() == "true":
            log.warning(
                "accelerate was asked for %s and does not use it here (%s): weights, gradients and "
                "optimiser are whole in every process", asked,
                "on CPUs it has none" if accelerator.device.type == "cpu" else "one process",
            )  # fmt: skip


_groups: list[Any] = []


def end_training(accelerator: Accelerator) -> None:
    """End trackers and process groups, when there is nothing left to wait for.

    The default group stays referenced from Python. DDP's reducer, which outlives this, would
    otherwise drop the last reference while it holds the GIL, and gloo's destructor then waits for a
    thread that waits for the GIL. The Python binding of a group releases the GIL first
    (pytorch/pytorch#154976).
    """
    if torch.distributed.is_initialized():
        _groups.append(torch.distributed.group.WORLD)
    accelerator.end_training()


def load_models_whole(accelerator: Accelerator) -> None:
    """Stop transformers from splitting the models that are loaded from here on.

    accelerate sets it up to do so for ZeRO-3, and it would split the frozen target too.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def _deepspeed_config(accelerator: Accelerator) -> dict[str, Any]:
    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    return plugin.deepspeed_config


def twin_of(drafter: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return a module from which the drafter's weights can be read whole.

    It is the drafter itself, or, if the engine is about to shard it, a copy for `gather` to fill.
    """
    if engine_of(accelerator) == "replicated":
        return drafter
    return copy.deepcopy(drafter).to(accelerator.device)


def fuses_optimizer(accelerator: Accelerator) -> bool:
    """Return whether AdamW's step should be one kernel, which CUDA and CPUs have."""
    # DeepSpeed gives the optimiser parts of flattened weights, maybe on another device.
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return accelerator.device.type in ("cuda", "cpu") and not deepspeed


def check_optimizer(optim: Optim, accelerator: Accelerator) -> None:
    """Raise `UserError` for Muon under DeepSpeed."""
    if optim.optimizer == "muon" and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UserError(
            "optim.optimizer muon needs whole matrices, and DeepSpeed flattens and splits them; "
            "use FSDP2 (configs/accelerate/fsdp2.yaml) or optim.optimizer adamw"
        )


def prepare(
    accelerator: Accelerator,
    module: TrainingModule,
    optimizer: torch.optim.Optimizer,
    rows: int,
    clip_norm: float,
) -> tuple[Any, Any]:
    """Return module and optimiser as wrapped by the launcher's engine.

    DeepSpeed needs the packed `rows` of a forward pass of a rank, and clips by `clip_norm` itself.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = _deepspeed_config(accelerator)
        # accelerate would take them from a data loader, and there is none here.
        config["train_micro_batch_size_per_gpu"] = rows
        config["gradient_accumulation_steps"] = accelerator.gradient_accumulation_steps
        config["gradient_clipping"] = clip_norm
    if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is not None:
        # It would rebuild the module from nothing, and tied weights would come out untied.
        plugin.cpu_ram_efficient_loading = False
    return accelerator.prepare(module, optimizer)


@torch.no_grad()
def gather(trained: nn.Module, twin: nn.Module) -> None:
    """Copy the weights that the engine trains, sharded or not, into `twin` of `twin_of`.

    All ranks call this: gathering the shards of each parameter is a collective operation.
    """
    if trained is twin:
        return
    # The twin is a copy, so its parameters are in the same order.
    for source, whole in zip(trained.parameters(), twin.parameters(), strict=True):
        whole.copy_(_whole(source))
    # Engines shard parameters only; each rank has the buffers whole.
    for source, whole in zip(trained.buffers(), twin.buffers(), strict=True):
        whole.copy_(source)


def _whole(parameter: Tensor) -> Tensor:
    """Return a sharded parameter as one tensor; all ranks call this."""
    # FSDP2 has DTensors, which have this method; else it is DeepSpeed.
    if (full := getattr(parameter, "full_tensor", None)) is not None:
        return full()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        # A copy, because the parameter is split again where the `with` ends.
        return parameter.data.clone()


def norm_of(found: Any) -> float:
    """Return as a number what an engine gives as the global gradient norm.

    Raises `UserError` if it gives none.
    """
    if found is None:
        raise UserError(
            "this DeepSpeed tells no gradient norm, by which bad steps are known; use a newer one"
        )
    if (full := getattr(found, "full_tensor", None)) is not None:
        found = full()
    return float(found)


@contextmanager
def only_launch(folder: str) -> Iterator[None]:
    """Keep other launches from writing `folder`; all ranks call this, the first locks it.

    Raises `UserError` on every rank if another launch has it.
    """
    remedy = "wait until that has ended, or choose another --out"
    with ExitStack() as held:
        on_first(lambda: held.enter_context(only_writer(Path(folder), True, remedy)))
        yield
