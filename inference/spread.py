"""A target that one device should not or cannot hold: sharded by decoder layer, split within
layers, or laid over devices.

All of it is torch's and transformers' own; what is here makes the result look like any other
target: embedding and head whole on every rank, since drafters borrow them. Under `fsdp` and
`tensor` the ranks work together: every forward is one of all of them.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import nn

from ..heads.errors import UserError
from ..heads.fingerprint import weights_hash
from ..heads.pretrained import make_causal_lm, read_causal_lm, read_config
from .target_files import read_model


def load_spread(
    kind: str, path: str, device: torch.device, options: dict[str, Any]
) -> tuple[Any, str | None]:
    """The model as `kind` says, and the hash of its whole weights where they are not to be had any
    more."""
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
    if kind == "tensor":
        return _split_within_layers(path, device, options)
    return _sharded_by_layer(path, device, options)


def _split_within_layers(
    path: str, device: torch.device, options: dict[str, Any]
) -> tuple[Any, str | None]:
    config: Any = read_config(path, options["trust_remote_code"]).get_text_config()
    ranks = torch.distributed.get_world_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if heads % ranks:
        raise UserError(
            f"target.spread=tensor cannot share {heads} key-value heads between {ranks} ranks; "
            "use spread=fsdp"
        )
    plan: dict[str, Any] = {"tp_plan": "auto"}
    try:
        from transformers.distributed import DistributedConfig

        plan = {"distributed_config": DistributedConfig(**plan)}
    except (ImportError, TypeError):
        pass  # before transformers 5.18
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model: Any = read_causal_lm(path, **plan, **options)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or head.bias is not None:
        raise UserError(
            f"target.spread=tensor does not know the embedding or head of {config.model_type}; "
            "use spread=fsdp"
        )
    whole = _whole(embedding.weight)
    model.set_input_embeddings(nn.Embedding.from_pretrained(whole, freeze=True))
    output = nn.Linear(head.in_features, len(whole), bias=False, device="meta")
    output.weight = nn.Parameter(
        whole if config.tie_word_embeddings else _whole(head.weight), requires_grad=False
    )
    model.set_output_embeddings(output)
    return model, _on_first(lambda: weights_hash(read_causal_lm(path, **options)))


def _whole(weight: Any) -> torch.Tensor:
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _sharded_by_layer(
    path: str, device: torch.device, options: dict[str, Any]
) -> tuple[Any, str | None]:
    """The first rank reads the weights into host memory and sends each rank its part; no other ever
    holds the whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    first = torch.distributed.get_rank() == 0
    source: Any = read_model(path, options) if first else None
    config, dtype, digest = _on_first(lambda: (source.config, source.dtype, weights_hash(source)))
    with torch.device("meta"):
        model: Any = make_causal_lm(config, options["trust_remote_code"], dtype=dtype)
    model.requires_grad_(False)
    decoder = model.get_decoder()
    _, layers = decoder_layers(decoder, config.get_text_config().num_hidden_layers)
    # not the decoder: sharding changes a module's class, by which transformers knows whose states
    # to record
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True)
    model.to_empty(device=device)
    full = dict(source.state_dict()) if first else {}
    set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    model.tie_weights()
    buffers = dict(source.named_buffers()) if first else {}
    for name, buffer in model.named_buffers():  # rotary frequencies are in no state dict
        if first:
            buffer.copy_(buffers[name])
        torch.distributed.broadcast(buffer, 0)
    if first:
        model.generation_config = source.generation_config
    model.generation_config = _on_first(lambda: model.generation_config)
    return model, digest


def decoder_layers(decoder: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The list of a decoder's `count` layers, and its name within the decoder. Raises
    `UserError`."""
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise UserError(
        f"cannot find the {count} layers of {type(decoder).__name__}, whose form is not known here"
    )


def _on_first(work: Any) -> Any:
    """`work`'s result of the first rank, on all of them."""
    found = [work() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(found, 0)
    return cast(Any, found[0])
