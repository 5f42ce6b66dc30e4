"""Loading of a target that is spread over ranks or devices, because one does not hold it.

torch and transformers do the spreading. This module makes the result look like any other target:
embedding and head are whole on every rank, since drafters borrow them. Under `fsdp` every forward
pass is a collective operation of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import nn

from ...heads.errors import UserError
from ...heads.fingerprint import weights_hash
from ...heads.pretrained import make_causal_lm, read_causal_lm
from .target_files import read_model

T = TypeVar("T")
PREPARING = timedelta(hours=6)
"""Longest wait for what the first rank does alone, such as preparing the data (`on_first`)."""
_patient: list[Any] = []  # the default group, and one of the same ranks that waits for longer


def load_spread(
    kind: str, path: str, device: torch.device, options: dict[str, Any]
) -> tuple[Any, str | None]:
    """Load the model at `path`, spread as `kind` (`TargetConfig.spread`) says.

    Returns the model and the hash of its whole weights (`weights_hash`), None where they are still
    whole in this process. `options` are those of `from_pretrained`. Raises `UserError`.
    """
    if kind == "devices":
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise UserError(
                "target.spread=devices takes all GPUs for one process; start one, or use "
                "spread=fsdp"
            )
        return read_causal_lm(path, device_map="auto", **options), None
    if not torch.distributed.is_initialized():
        raise UserError(
            f"target.spread={kind} shares the target between ranks; start it with accelerate "
            "launch or torchrun"
        )
    return _sharded_by_layer(path, device, options)


def _sharded_by_layer(
    path: str, device: torch.device, options: dict[str, Any]
) -> tuple[Any, str | None]:
    """Load a model whose decoder layers are each sharded over the ranks (FSDP2).

    The first rank reads the weights into host memory and sends each rank its shards; no other rank
    ever holds the whole.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    first = torch.distributed.get_rank() == 0
    source: Any = None

    def read() -> tuple[Any, torch.dtype, str]:
        nonlocal source
        source = read_model(path, options)
        return source.config, source.dtype, weights_hash(source)

    config, dtype, digest = on_first(read)
    # Shapes without memory: no rank holds the whole model, but the first its `source` on the host.
    with torch.device("meta"):
        model: Any = make_causal_lm(config, options["trust_remote_code"], dtype=dtype)
    model.requires_grad_(False)
    decoder = model.get_decoder()
    _, layers = decoder_layers(decoder, config.get_text_config().num_hidden_layers)
    # Only the layers are sharded, not the decoder around them: sharding changes a module's class,
    # and transformers recognises by the class which module's hidden states it has to record.
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True)
    # Only here is memory taken, for this rank's shards and what is not sharded.
    model.to_empty(device=device)
    # All ranks make the calls below that communicate in the same order: the state dict, a broadcast
    # for each buffer, the generation config. The other ranks bring nothing and receive everything.
    state = dict(source.state_dict()) if first else {}
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    # `to_empty` gave a tied head memory of its own, so it is tied to the embedding once more.
    model.tie_weights()
    buffers = dict(source.named_buffers()) if first else {}
    # buffers that no state dict holds, such as rotary frequencies
    for name, buffer in model.named_buffers():
        if first:
            buffer.copy_(buffers[name])
        torch.distributed.broadcast(buffer, 0)
    if first:
        model.generation_config = source.generation_config
    model.generation_config = on_first(lambda: model.generation_config)
    return model, digest


def decoder_layers(decoder: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a decoder's `count` layers. Raises `UserError`."""
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise UserError(
        f"cannot find the {count} layers of {type(decoder).__name__}, whose form is not known here"
    )


def on_first(work: Callable[[], T]) -> T:
    """Run `work` on the first rank and return its result on every rank; all ranks call this.

    Its `UserError` is raised on every rank too. Otherwise the others would wait for the first,
    which has ended.
    """
    if not torch.distributed.is_initialized():
        return work()
    outcome: list[Any] = [None, None]  # result, error message
    if torch.distributed.get_rank() == 0:
        try:
            outcome[0] = work()
        except UserError as error:
            outcome[1] = str(error)
    # A collective operation, which every rank has to reach: hence the `try` above.
    torch.distributed.broadcast_object_list(outcome, 0, _patient_group())
    if outcome[1] is not None:
        raise UserError(outcome[1])
    return outcome[0]


def _patient_group() -> Any:
    """Return the group of all ranks that waits as long as `PREPARING`; all ranks call this.

    It is of gloo, which notices at once if a process has ended, and lets no GPU wait.
    """
    world = torch.distributed.group.WORLD
    if not _patient or _patient[0] is not world:
        _patient[:] = world, torch.distributed.new_group(backend="gloo", timeout=PREPARING)
    return _patient[1]
