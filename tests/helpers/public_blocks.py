"""Block drafters as other projects store them."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.public_checkpoints import EMBEDDING, Tensors
from tests.helpers.random_artifacts import TAPS, TARGET, block

HEAD = TARGET.head_weight.detach().clone()

BACKBONE: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16",
    "head_dim": 8,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 64,
    "layer_types": ["full_attention"] * 2, "max_position_embeddings": 256, "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "num_target_layers": 8, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True,
    "transformers_version": "4.57.1", "use_sliding_window": False, "vocab_size": TARGET.vocab_size,
}  # fmt: skip

MASK = TARGET.vocab_size - 1

LAYERS = [tap - 1 for tap in TAPS]


def z_lab(**more: Any) -> dict[str, Any]:
    """Two keys inside, the block's size at the top."""
    inner = {"mask_token_id": MASK, "target_layer_ids": LAYERS}
    own = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 5,
    }
    return {**BACKBONE, **own, "dflash_config": inner, **more}


def deepspec(**more: Any) -> dict[str, Any]:
    """All keys at the top, an embedding and a head beside the tensors."""
    own = {
        "architectures": ["Qwen3DSparkModel"], "block_size": 4, "confidence_head_with_markov": True,
        "enable_confidence_head": True, "markov_head_type": "vanilla", "markov_rank": 6,
        "mask_token_id": MASK,
        "num_anchors": 512, "target_layer_ids": LAYERS,
    }  # fmt: skip
    return {**BACKBONE, **own, **more}


def specforge(**more: Any) -> dict[str, Any]:
    """All keys inside, under a name for the kind."""
    keys = (
        "confidence_head_with_markov",
        "markov_head_type",
        "markov_rank",
        "mask_token_id",
        "target_layer_ids",
    )
    inner = {
        "projector_type": "dspark",
        "shift_label": True,
        **{key: deepspec()[key] for key in keys},
        **more,
    }
    return {
        **BACKBONE,
        "architectures": ["DSparkDraftModel"],
        "block_size": 4,
        "dflash_config": inner,
    }


def library(kind: str, **more: Any) -> dict[str, Any]:
    """The speculators library's, with its defaults and a null."""
    config = deepspec() if kind == "dspark" else z_lab()
    outer = {
        key: config[key]
        for key in ("block_size", "markov_rank", "markov_head_type")
        if key in config
    }
    if kind == "dspark":
        outer |= {"confidence_head_with_markov": True, "enable_confidence_head": True}
    return {
        "architectures": ["DFlashDraftModel"], "aux_hidden_state_layer_ids": TAPS,
        "draft_vocab_size": TARGET.vocab_size,
        "mask_token_id": MASK, "max_anchors": 3072, "sample_from_anchor": kind == "dspark",
        "speculators_model_type": kind,
        "speculators_version": "0.9.0", "target_hidden_size": None,
        "transformer_layer_config": BACKBONE, **outer, **more,
    }  # fmt: skip


def stored(kind: str) -> tuple[Any, Tensors]:
    drafter = block(kind).drafter
    return drafter, {name: tensor.clone() for name, tensor in drafter.serving_state().items()}


ENDS = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}

READ: dict[str, tuple[str, dict[str, Any], Tensors, str]] = {
    "z-lab": ("dflash", z_lab(), {}, "dflash"),
    "z-lab, one key twice": (
        "dflash",
        z_lab(target_layer_ids=LAYERS, is_causal=False, final_logit_softcapping=30.0),
        {},
        "dflash",
    ),
    "deepspec": ("dspark", deepspec(), ENDS, "dspark"),
    "specforge": ("dspark", specforge(), {}, "dspark"),
    "speculators dflash": (
        "dflash",
        library("dflash"),
        {"embed_tokens.weight": EMBEDDING},
        "speculators dflash",
    ),
    "speculators dspark": (
        "dspark",
        library("dspark", target_hidden_size=32),
        ENDS,
        "speculators dspark",
    ),
    "maps of all tokens": (
        "dflash",
        library("dflash", sliding_window_non_causal=True),
        {"d2t": torch.zeros(TARGET.vocab_size).long(), "t2d": torch.ones(TARGET.vocab_size).bool()},
        "speculators dflash",
    ),
}
