"""The speculators library's layout, which vLLM serves from one folder: it names its target."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from . import limits, vllm
from .engine import (
    EAGLE_TAPS,
    NATIVE,
    ExportRequest,
    FileLayout,
    Files,
    NativeFiles,
    Recipe,
    ServingEngine,
)

if TYPE_CHECKING:
    from ...files import JsonObject

FORMAT = "0.9.0"  # of the layout that is written
LAYER_KEYS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "vocab_size",
    "max_position_embeddings", "rope_theta", "rope_parameters", "rope_scaling", "attention_bias",
    "mlp_bias", "tie_word_embeddings", "partial_rotary_factor",
)  # fmt: skip
EAGLE3_KEYS = (
    "draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "target_hidden_size", EAGLE_TAPS,
)  # fmt: skip
DSPARK_KEYS = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip


def _serve(request: ExportRequest, _: Any) -> str:
    return f"vllm serve {quote(request.out)}"


def _eagle3(native: NativeFiles) -> Files:
    """Return config and tensors of an EAGLE-3 drafter in the library's layout.

    Every flag is written out, because the defaults of the library and of vLLM differ.
    """
    config, tensors = NATIVE.write(native)
    states = {"num_aux_hidden_states": config["num_aux_hidden_states"]}
    library_config = {
        **_outer("eagle3", "Eagle3DraftModel", native),
        **_keys(config, EAGLE3_KEYS),
        **states,
        "transformer_layer_config": {
            "model_type": "qwen3" if native.facts.shape.qk_norm else "llama",
            **_keys(config, LAYER_KEYS),
            **states,  # the class that vLLM makes of it sees the layer's config only
        },
    }
    # The library numbers its layers, a single one too.
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return library_config, renamed


def _block(native: NativeFiles) -> Files:
    """Return the files of a block drafter, whose tensors have the same names in both layouts."""
    config, tensors = NATIVE.write(native)
    shape, spark = native.facts.shape, native.facts.kind == "dspark"
    architecture = "DSparkDraftModel" if spark else "DFlashDraftModel"
    library_config = {
        **_outer(native.facts.kind, architecture, native),
        **_keys(config, DSPARK_KEYS),
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
            **_keys(config, LAYER_KEYS),
        },
    }
    return library_config, tensors


def _outer(kind: str, architecture: str, native: NativeFiles) -> JsonObject:
    """Return the keys at the top that all kinds of drafters have in the library's layout."""
    config = native.config
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": FORMAT,
        "dtype": config["dtype"],
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": native.drafts}],
            "verifier": {"name_or_path": config["base_model_name_or_path"], "architectures": []},
        },
    }


def _keys(config: JsonObject, names: Sequence[str]) -> JsonObject:
    return {name: config[name] for name in names if name in config}


EAGLE3_LAYOUT = FileLayout("speculators", _eagle3, "speculators")
BLOCK_LAYOUT = FileLayout("speculators", _block, "speculators")


ENGINE = ServingEngine(
    name="speculators",
    title="speculators",
    place=1,
    recipes={
        "eagle3": Recipe(
            _serve, vllm.NOTES, (*limits.EAGLE3, *vllm.READS, limits.LONGROPE), EAGLE3_LAYOUT
        ),
        "dflash": Recipe(_serve, (limits.CHAIN, limits.FEWER), vllm.BLOCK, BLOCK_LAYOUT),
        "dspark": Recipe(
            _serve,
            (limits.CHAIN, limits.FEWER, vllm.V2_RUNNER, limits.READ_ONLY),
            (*vllm.BLOCK, limits.TRANSITION),
            BLOCK_LAYOUT,
        ),
    },
)
