"""Loading of a target that is spread over ranks or devices, because one does not hold it.

torch and transformers do the spreading. This module makes the result look like any other target:
embedding and head are whole on every rank, since drafters borrow them. Under `fsdp` and `tensor`
every forward pass is a collective operation of all ranks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ...heads.errors import UserError
from ...heads.fingerprint import weights_hash
from ...heads.pretrained import make_causal_lm, read_causal_lm, read_config
from .ranks import on_first
from .target_files import read_model


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
    if kind == "tensor":
        return _split_within_layers(path, options)
    return _sharded_by_layer(path, device, options)


def _split_within_layers(path: str, options: dict[str, Any]) -> tuple[Any, str | None]:
    """Load a model whose layers are each split between the ranks (tensor parallelism)."""
    config: Any = read_config(path, options["trust_remote_code"]).get_text_config()
    ranks = torch.distributed.get_world_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # Each rank gets whole key-value heads with the attention heads that read them.
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
    # The plan may have split embedding and head too. They become plain modules with whole weights:
    # drafters read them directly, and `Target.head` must give all logits on every rank.
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear or head.bias is not None:
        raise UserError(
            f"target.spread=tensor does not know the embedding or head of {config.model_type}; "
            "use spread=fsdp"
        )
    rows = _whole(embedding.weight)
    model.set_input_embeddings(nn.Embedding.from_pretrained(rows, freeze=True))
    # on the meta device, so that no memory is taken for a weight that is replaced at once
    output = nn.Linear(head.in_features, len(rows), bias=False, device="meta")
    output.weight = nn.Parameter(
        rows if config.tie_word_embeddings else _whole(head.weight), requires_grad=False
    )
    model.set_output_embeddings(output)
    # The hash takes elements of whole tensors, which no rank holds any more: the first rank reads
    # the model once more, into host memory.
    return model, on_first(lambda: weights_hash(read_causal_lm(path, **options)))


def _whole(weight: Any) -> torch.Tensor:
    """Return a weight that may be split between ranks as a whole one. All ranks call this."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


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
