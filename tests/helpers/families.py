"""Small random models of every family of causal language models that transformers has."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from draftsmith.heads.errors import UserError, first_line
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.ngram import NgramLookup, PlainDecoding
from draftsmith.inference.targets.target import Target, checked
from tests.conftest import make_tokenizer
from tests.helpers.random_eagles import random_eagle

TOKENIZER = make_tokenizer(["<p>", "<e>"], None, eos="<e>", vocab_size=280)
VOCAB = len(TOKENIZER)
POSITIONS = 48
BORDER = 16
"""Window, chunk, and length of the first training: what a text of 30 tokens has passed."""
REPLY = 12

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "model_dim", "embedding_size"), 32),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), 2
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "swa_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("swa_num_attention_heads", "num_global_key_value_heads"), 4),
    **dict.fromkeys(("global_head_dim",), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "d_inner"), 64),
    **dict.fromkeys(("ffn_hidden_size", "dff", "d_ff", "block_ff_dim", "mlp_hidden_size"), 64),
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), BORDER),
    **dict.fromkeys(("floor_scale", "original_max_position_embeddings"), BORDER),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "index_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    "first_k_dense_replace": 1,
    "query_pre_attn_scalar": 8,
    "rotary_dim": 4,
    "initializer_range": 0.3,
    "init_std": 0.3,
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    "eos_token_id": 1,
    "is_decoder": True,
    "_experts_implementation": "eager",
}
"""Values of settings that make a model small, by the names that families give them."""

MORE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    # Their defaults have attention in every fourth layer.
    **{
        kind: {"layer_types": ["linear_attention", "full_attention"]}
        for kind in ("lfm3", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
    },
    "qwen4_exp_text": {"num_hidden_layers": 4},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 8,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 8,
    },
    "longcat_flash": {"head_dim": 4},
    "mamba2": {
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "num_attention_heads": 4,  # of the drafter
    },
    # Only with longrope do its factors change there; `generate` drops the cache in any case.
    "phi3": {"original_max_position_embeddings": POSITIONS},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "whisper": {"max_target_positions": POSITIONS},
    "zamba2": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What single families need besides."""

SINGLE = {"xglm", "xlnet"}
"""Families that know no float64."""

PARTS = {"attn_config", "ffn_config"}
"""Configurations within a configuration that are of no model."""


def small_config(kind: str, more: dict[str, Any]) -> Any:
    """Return the configuration of a small model of the family `kind`."""
    make = CONFIG_MAPPING[kind]
    default = make().to_dict()
    parts = []
    for name, value in default.items():
        if isinstance(value, dict) and "model_type" in value and name not in PARTS:
            parts.append(name)
    if parts:
        raise NotImplementedError(f"composed of {', '.join(parts)}")
    sizes = {name: value for name, value in SIZES.items() if name in default}
    if "kv_lora_rank" in default:  # latent attention, whose heads all have keys of their own
        sizes["num_key_value_heads"] = 4
        sizes.pop("head_dim", None)
    rope = default.get("rope_parameters")
    if isinstance(rope, dict) and "original_max_position_embeddings" in rope:
        sizes["rope_parameters"] = {**rope, "original_max_position_embeddings": BORDER}
    return make(**{**sizes, **MORE.get(kind, {}), **more})


def small_model(kind: str, more: dict[str, Any]) -> Any:
    """Return a small random model, in float64 where its kernels know that."""
    config = small_config(kind, more)
    routed = any("expert" in name and value for name, value in config.to_dict().items())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32 if routed or kind in SINGLE else torch.float64
    )
    model.generation_config.eos_token_id = None  # `generate` takes it where it is given none
    return model.eval()


def drafters(target: Target) -> dict[str, Proposer]:
    """Return the drafters of the sweep: none, a lookup, and a random EAGLE-3."""
    tree = TreeSettings(length=3, width=2, nodes=6)
    return {
        "plain": PlainDecoding(),
        "ngram": NgramLookup(length=4),
        "eagle3": EagleProposer(random_eagle(target), tree),
    }


def prompts(positions: int) -> list[list[int]]:
    """Return three prompts with repetitions: a short one, one whose reply passes the border, and
    one whose reply ends with the last of `positions`."""
    repeated = [5, 9, 14, 9, 14, 31, 5, 9, 40, 31]
    longest = (repeated * positions)[: positions - 5]
    return [longest[:6], longest[: BORDER - 3], longest]


def reference(model: Any, prompt: list[int], length: int) -> list[int]:
    """Return the tokens that `generate` of transformers writes behind a prompt."""
    config = GenerationConfig(max_new_tokens=length, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        found = model.generate(torch.tensor([prompt]), generation_config=config)
    return found[0, len(prompt) :].tolist()


def gap_at(model: Any, text: list[int]) -> float:
    """Return by how much the best token after a text is ahead of the next one."""
    with torch.no_grad():
        best = model(torch.tensor([text]), use_cache=False).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def outcome(kind: str, more: dict[str, Any] | None = None) -> str:
    """Return what comes of a family: equal, refused with the reason, or the differences."""
    try:
        model = small_model(kind, more or {})
    except Exception as error:  # noqa: BLE001 - whatever a family demands that is not given here
        return f"not constructible: {type(error).__name__}: {first_line(error)}"
    try:
        target = checked(Target(model, TOKENIZER, kind, frozen=False), fused=True, move=False)
    except UserError as error:
        return f"refused: {error}"
    wrong = []
    limit = min(target.max_positions, POSITIONS)  # some recurrent families name none
    texts = prompts(limit)
    room = {len(text): min(REPLY, target.max_positions - len(text)) for text in texts}
    wanted = {len(text): reference(model, text, room[len(text)]) for text in texts}
    remark = " (fused)" if target.fused is not None else ""
    for name, proposer in drafters(target).items():
        for batch in (*([text] for text in texts), texts):
            try:
                replies = generate(target, proposer, batch, REPLY, eos_ids=frozenset())
            except UserError as error:
                assert name == "eagle3" and "read" in str(error)
                remark = " (no trained drafters)"
                continue
            for prompt, reply in zip(batch, replies, strict=True):
                expected = wanted[len(prompt)]
                if reply.token_ids == expected:
                    continue
                same = 0
                while reply.token_ids[same : same + 1] == expected[same : same + 1]:
                    same += 1
                gap = gap_at(model, [*prompt, *expected[:same]])
                # Rounding moves logits by less.
                if gap > (1e-9 if model.dtype == torch.float64 else 1e-4):
                    wrong.append(f"{name}, {len(batch)} rows, {len(prompt)}+{same}, gap {gap:.1e}")
    return f"different{remark}: {'; '.join(wrong)}" if wrong else f"equal{remark}"


FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
