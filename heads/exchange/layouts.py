"""Layouts that engines read: native (draftsmith's own), speculators' and SGLang's, made from an
artifact's own `config.json` and tensors.

See docs/checkpoint-formats.md#what-each-engine-reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import UserError
from ..files import JsonObject
from ..fingerprint import Fingerprint
from ..layout import dtype_name, stored_as
from .engine_names import EngineName

BLOCKS = ("dflash", "dspark")
O_BIAS = ("vllm", "speculators", "sglang")
"""Engines whose block drafters have biases on queries, keys, values and the output projection, or
on none."""
SPECULATORS_FORMAT = "0.9.0"  # of the layout that is written
SGLANG_SHIFTS = (  # families whose ids in `eagle_config` SGLang shifts only if the first is 1
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2",
    "kimi_k25", "mistral_large3",
)  # fmt: skip

MEDUSA_WITH_HEAD = "vllm-medusa"
"""Layout of heads that share the target's output matrix: vLLM wants it beside them, and does not
take it from the target."""

Files = tuple[JsonObject, dict[str, Tensor]]
"""`config.json` and the tensors beside it."""


@dataclass(frozen=True)
class ExportRequest:
    """Request for one export, as the user made it."""

    engine: EngineName
    out: str
    """Folder of the export, by the name that the serve command uses."""
    target: str
    """Name of the target in the serve command."""
    drafts: int
    """Drafts of a round in the serve command."""
    dtype: torch.dtype
    """Type in which floating tensors are stored."""


def files_for(
    layout: str, drafter: Any, order: ExportRequest, target: Fingerprint, head: Tensor | None = None
) -> Files:
    """Return `config.json` and the tensors of `drafter` in `layout`.

    `head` `[V, H]` is the target's output matrix, which one layout stores. Raises `UserError` if it
    is needed and not given.
    """
    config = drafter.serving_config(order.target, dtype_name(order.dtype))
    # Copies, since safetensors refuses tensors that share memory, as the views of one matrix do.
    tensors: dict[str, Tensor] = {}
    for key, tensor in drafter.serving_state().items():
        stored = tensor.detach().to("cpu", stored_as(tensor, order.dtype))
        tensors[key] = stored.contiguous().clone()
    biased = O_BIAS if drafter.method in BLOCKS else ("vllm", "speculators")
    shape = getattr(drafter, "shape", None)
    if order.engine in biased and shape is not None and shape.attention_bias:
        # Where attention_bias is set, these engines give the output projection a bias too. If the
        # file had none, it would hold random numbers.
        # The names are listed first, because the loop adds to the table.
        for name in [name for name in tensors if name.endswith("q_proj.bias")]:
            zeros = torch.zeros(shape.hidden_size, dtype=order.dtype)
            tensors[name.replace("q_proj", "o_proj")] = zeros
    if layout == "speculators" and drafter.method in BLOCKS:
        return speculators_block(config, drafter, order.drafts), tensors
    if layout == "speculators":
        return speculators(config, tensors, drafter.shape, order.drafts)
    if layout == MEDUSA_WITH_HEAD:
        if head is None:
            raise UserError(
                "vllm wants the target's output matrix beside heads that share it; name the "
                "target with --target"
            )
        matrix = head.detach().to("cpu", order.dtype).contiguous().clone()
        return config, tensors | {"lm_heads.0.weight": matrix}
    if layout == "sglang-eagle1":
        return sglang_eagle1(config, tensors)
    if order.engine == "sglang" and "eagle_config" in config:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = sglang_taps(
            list(drafter.taps), target.model_type
        )
    return config, tensors


def sglang_taps(taps: list[int], model_type: str) -> list[int]:
    """Return the ids to write inside `eagle_config`, so that SGLang reads `taps` from them.

    It adds 1 to each id, which makes taps of layers counted from 0. For the families of
    `SGLANG_SHIFTS` it does so only if the first id is 1, and takes the ids as taps otherwise.
    """
    # Example: the taps 2, 14, 25 are written as 1, 13, 24; a family of `SGLANG_SHIFTS` adds 1 to
    # these as well, since the first is 1. Taps 3, 14, 25 would be 2, 13, 24, to which it adds
    # nothing, so that the taps themselves are written.
    layers = [tap - 1 for tap in taps]
    return taps if model_type in SGLANG_SHIFTS and layers[0] != 1 else layers


def speculators(config: JsonObject, tensors: dict[str, Tensor], shape: Any, drafts: int) -> Files:
    """Return config and tensors of an EAGLE-3 drafter in the speculators library's layout.

    `config` and `tensors` are those of the native layout, `shape` its `EagleShape`. Every flag is
    written out, because the defaults of the library and of vLLM differ.
    """
    flags = (
        "draft_vocab_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "target_hidden_size",
    )
    library_config = {
        **_speculator("eagle3", "Eagle3DraftModel", config, drafts),
        **{key: config[key] for key in flags if key in config},
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "num_aux_hidden_states": config["num_aux_hidden_states"],
        "transformer_layer_config": {
            "model_type": "qwen3" if shape.qk_norm else "llama",
            **_layer_keys(config),
        },
    }
    # The class that vLLM makes of it sees the layer's config only.
    layer_config = library_config["transformer_layer_config"]
    layer_config["num_aux_hidden_states"] = config["num_aux_hidden_states"]
    # The library numbers its layers, a single one too.
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return library_config, renamed


def speculators_block(config: JsonObject, drafter: Any, drafts: int) -> JsonObject:
    """Return the config of a block drafter in the speculators library's layout.

    `config` is that of the native layout, whose tensors have the same names in both.
    """
    shape, spark = drafter.shape, drafter.method == "dspark"
    architecture = "DSparkDraftModel" if spark else "DFlashDraftModel"
    spark_keys = (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    )
    return {
        **_speculator(drafter.method, architecture, config, drafts),
        **{key: config[key] for key in spark_keys if key in config},
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token,
        "aux_hidden_state_layer_ids": list(shape.taps),
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": shape.hidden_size,
        "sample_from_anchor": spark,
        # The library's default is false, which vLLM takes for causal blocks although no layer
        # slides.
        "sliding_window_non_causal": True,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "layer_types": config["layer_types"],
            **_layer_keys(config),
        },
    }


def _speculator(kind: str, architecture: str, config: JsonObject, drafts: int) -> JsonObject:
    """Return the keys at the top that all kinds of drafters have in the library's layout."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_FORMAT,
        "dtype": config["dtype"],
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": config["base_model_name_or_path"], "architectures": []},
        },
    }


def _layer_keys(config: JsonObject) -> JsonObject:
    """Return the part of a native config that describes the layers."""
    keys = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim",
        "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta",
        "rope_parameters", "rope_scaling",
        "attention_bias", "mlp_bias", "tie_word_embeddings", "partial_rotary_factor",
    )  # fmt: skip
    return {key: config[key] for key in keys if key in config}


def sglang_eagle1(config: JsonObject, tensors: dict[str, Tensor]) -> Files:
    """Return a native EAGLE-1 config and its tensors for SGLang's own class.

    That class has a bias in `fc`, which would hold random numbers if the file had none.
    """
    config = {**config, "architectures": ["LlamaForCausalLMEagle"], "bias": True}
    weight = tensors["fc.weight"]
    return config, {"fc.bias": torch.zeros(len(weight), dtype=weight.dtype), **tensors}
