"""Engines of training: DDP, FSDP2 and DeepSpeed, whose differences the loop does not see.

The loop has one module, one optimiser, and a drafter whose weights are whole. Precision is the same
under each engine, because draftsmith sets it and not the engine: autocast around the forward pass,
fp32 weights, and fp32 sums between ranks.
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
PROCESS_GROUP = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
"""Setting of accelerate for the longest wait in a collective operation. All ranks do the same work,
evaluations and checkpoints included: a rank that is later has failed."""


def make_accelerator(run: RunConfig) -> Accelerator:
    """Return the accelerator of this launch, after starting the process group."""
    try:
        return Accelerator(
            # draftsmith sets the precision itself, see above.
            mixed_precision="no",
            log_with=None if run.tracker == "none" else run.tracker,
            project_dir=run.out,
            kwargs_handlers=[PROCESS_GROUP],
        )
    except ImportError as error:  # the launch asks for an engine, such as DeepSpeed
        raise UserError(
            f"this launch needs a package that cannot be imported: {first_line(error)}"
        ) from error


def engine_of(accelerator: Accelerator) -> str:
    """Return the form of a checkpoint: replicated, fsdp2 or deepspeed-zeroN.

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
    one process. This is not an error, so that a launch for GPUs can be tried on a machine without
    them: the result is the same, only the memory is not shared.
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
                "accelerate was asked for %s and does not use it %s: weights, gradients and "
                "optimiser are whole in every process", asked,
                "on CPUs" if accelerator.device.type == "cpu" else "with one process",
            )  # fmt: skip


_groups: list[Any] = []


def end_training(accelerator: Accelerator) -> None:
    """End trackers and process groups.

    The default group stays referenced from Python. Otherwise DDP's reducer, which outlives this,
    drops the last reference while it holds the GIL, and gloo's destructor waits for a thread that
    waits for the GIL. The Python binding of a group releases the GIL (pytorch/pytorch#154976).
    """
    if torch.distributed.is_initialized():
        _groups.append(torch.distributed.group.WORLD)
    accelerator.end_training()


def disable_zero3_loading(accelerator: Accelerator) -> None:
    """Let transformers load models whole under ZeRO-3.

    accelerate makes it shard every model that is loaded, the frozen target too.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def _deepspeed_config(accelerator: Accelerator) -> dict[str, Any]:
    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    return plugin.deepspeed_config


def whole_copy_of(drafter: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return a module with the drafter's whole weights: itself, or a copy if the engine shards it.

    `gather` updates the copy.
    """
    if engine_of(accelerator) == "replicated":
        return drafter
    return copy.deepcopy(drafter).to(accelerator.device)


def fuses_optimizer(accelerator: Accelerator) -> bool:
    """Return whether AdamW can use a fused kernel."""
    # DeepSpeed gives the optimiser parts of flattened weights, possibly on another device.
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

    DeepSpeed needs the number of packed `rows` in a forward pass, and clips by `clip_norm` itself.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = _deepspeed_config(accelerator)
        # accelerate would read them from a data loader, which draftsmith does not use.
        config["train_micro_batch_size_per_gpu"] = rows
        config["gradient_accumulation_steps"] = accelerator.gradient_accumulation_steps
        config["gradient_clipping"] = clip_norm
    if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is not None:
        # It would rebuild the module without tied weights.
        plugin.cpu_ram_efficient_loading = False
    return accelerator.prepare(module, optimizer)


@torch.no_grad()
def gather(trained: nn.Module, whole_copy: nn.Module) -> None:
    """Copy the trained weights, sharded or not, into `whole_copy` of `whole_copy_of`.

    All ranks call this: gathering the shards of each parameter is a collective operation.
    """
    if trained is whole_copy:
        return
    for source, whole in zip(trained.parameters(), whole_copy.parameters(), strict=True):
        whole.copy_(_whole(source))
    # Engines shard parameters only; each rank has the buffers whole.
    for source, whole in zip(trained.buffers(), whole_copy.buffers(), strict=True):
        whole.copy_(source)


def _whole(parameter: Tensor) -> Tensor:
    """Return a sharded parameter as one tensor; all ranks call this."""
    # FSDP2's DTensors have this method; DeepSpeed's parameters do not.
    if (full := getattr(parameter, "full_tensor", None)) is not None:
        return full()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        # A copy, because the parameter is split again at the end of the `with` block.
        return parameter.data.clone()


def norm_as_number(norm: Any) -> float:
    """Return an engine's global gradient norm as a number.

    Raises `UserError` for a DeepSpeed that does not report it.
    """
    if norm is None:
        raise UserError(
            "this version of DeepSpeed does not report the gradient norm, by which bad steps are "
            "recognised; use a newer one"
        )
    return float(_whole(norm) if hasattr(norm, "full_tensor") else norm)


@contextmanager
def lock_output(folder: str) -> Iterator[None]:
    """Lock `folder` against other launches; all ranks call this.

    Raises `UserError` on every rank if another launch has the lock.
    """
    remedy = "wait until that has ended, or choose another --out"
    with ExitStack() as held:
        on_first(lambda: held.enter_context(only_writer(Path(folder), True, remedy)))
        yield
