"""What DDP, FSDP2 and DeepSpeed want differently. The loop sees one module, one optimiser, and a
drafter that is whole.

Precision is our own business (autocast around the forward pass, fp32 weights and sums between
ranks) and so the same under each.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from ..heads.errors import UserError
from .objectives import TrainingModule

log = logging.getLogger(__name__)
T = TypeVar("T")


def engine_of(accelerator: Accelerator) -> str:
    """How weights and optimiser lie in a checkpoint: replicated, fsdp2 or deepspeed-zeroN. Raises
    `UserError` for FSDP1."""
    if accelerator.distributed_type == DistributedType.FSDP:
        if not accelerator.is_fsdp2:
            raise UserError(
                "accelerate's config asks for FSDP version 1; set fsdp_version: 2, see "
                "configs/accelerate/fsdp2.yaml"
            )
        return "fsdp2"
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"deepspeed-zero{_zero_stage(accelerator)}"
    return "replicated"


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
    """Keep transformers from splitting all that is loaded from here on, the frozen target too, once
    accelerate has set it up for ZeRO-3."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def _zero_stage(accelerator: Accelerator) -> int:
    return _deepspeed_config(accelerator)["zero_optimization"]["stage"]


def _deepspeed_config(accelerator: Accelerator) -> dict[str, Any]:
    plugin = accelerator.state.deepspeed_plugin
    assert plugin is not None
    return plugin.deepspeed_config


def twin_of(drafter: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Where the drafter can be read whole: itself, or, if the engine is about to take it apart, a
    copy for `gather` to fill."""
    return (
        drafter
        if engine_of(accelerator) == "replicated"
        else copy.deepcopy(drafter).to(accelerator.device)
    )


def prepare(
    accelerator: Accelerator,
    module: TrainingModule,
    optimizer: torch.optim.Optimizer,
    rows: int,
    clip_norm: float,
) -> tuple[Any, Any]:
    """Hand module and optimiser to the launcher's engine."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        config = _deepspeed_config(accelerator)
        config["train_micro_batch_size_per_gpu"] = rows
        config["gradient_accumulation_steps"] = accelerator.gradient_accumulation_steps
        config["gradient_clipping"] = clip_norm
    if (plugin := getattr(accelerator.state, "fsdp_plugin", None)) is not None:
        plugin.cpu_ram_efficient_loading = (
            # it would rebuild the module from nothing, and tied weights would come out untied
            False
        )
    return accelerator.prepare(module, optimizer)


@torch.no_grad()
def gather(trained: nn.Module, twin: nn.Module) -> None:
    """Bring `twin` up to date with the weights that the engine keeps in its own form. All ranks
    call this."""
    if trained is twin:
        return
    for mine, whole in zip(trained.parameters(), twin.parameters(), strict=True):
        whole.copy_(_whole(mine))
    # engines share parameters out only
    for mine, whole in zip(trained.buffers(), twin.buffers(), strict=True):
        whole.copy_(mine)


def _whole(parameter: Tensor) -> Tensor:
    if (full := getattr(parameter, "full_tensor", None)) is not None:
        return full()
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.data.clone()


def norm_of(found: Any) -> float:
    """What an engine gives as the global gradient norm, as a number."""
    if found is None:
        raise UserError(
            "this DeepSpeed tells no gradient norm, by which bad steps are known; use a newer one"
        )
    if (full := getattr(found, "full_tensor", None)) is not None:
        found = full()
    return float(found)


def on_main(accelerator: Accelerator, work: Callable[[], T]) -> T:
    """`work`'s result of the main process on every rank; so is its `UserError`, since nobody may
    wait for one that has left."""
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            found[0] = work()
        except UserError as error:
            found[1] = str(error)
    found = broadcast_object_list(found)
    if found[1] is not None:
        raise UserError(found[1])
    return found[0]
