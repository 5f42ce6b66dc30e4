"""Keys of other people's configurations: used, harmless, named once, or refused by their name."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.commands.importing import target_parts
from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.foreign import Answers, ImportedDrafter, TargetParts
from draftsmith.heads.exchange.public import read_public
from draftsmith.inference.targets.stored import StoredTarget, embedding_and_head_in
from tests.conftest import QUICKSTART, ROOT
from tests.helpers import public_blocks as blocks
from tests.helpers import public_checkpoints as plain
from tests.helpers.public_checkpoints import Tensors, read, store
from tests.helpers.random_artifacts import TARGET, eagle

CASES = ROOT.parent / "shared" / "cases" / "import"
DRAFTERS = ROOT / "scripts" / "quickstart" / "drafters"
SLIDING = {
    "layer_types": ["sliding_attention"], "sliding_window": 64, "use_sliding_window": True,
}  # fmt: skip
QWEN = {
    "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
    "max_window_layers": 36, "sliding_window": None, "use_sliding_window": False,
    "rope_scaling": None, "target_model_type": "qwen3", "mlp_bias": False, "pretraining_tp": 1,
    "_name_or_path": "Qwen/Qwen3-8B", "has_own_embed_tokens": False,
}  # fmt: skip


@cache
def quickstart() -> TargetParts:
    return target_parts(embedding_and_head_in(str(QUICKSTART), StoredTarget))


def case(name: str, tensors: Tensors, tmp_path: Path, **more: Any) -> ImportedDrafter:
    """What is read of a case's configuration with these tensors; `more` are changes of its keys."""
    file = CASES / name / "config.json"
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    config = json.loads(file.read_text()) | more
    folder = store(tmp_path, config, tensors, "model.safetensors")
    return read_public(folder, quickstart(), Answers())


def of(name: str) -> Tensors:
    return load_file(DRAFTERS / name / "model.safetensors")


def five_taps() -> Tensors:
    """The plain EAGLE-3 with five taps and all tokens, in the numbers of its own three."""
    stored = of("eagle3_plain").items()
    tensors = {name: part for name, part in stored if name not in ("d2t", "t2d")}
    fc = tensors["fc.weight"]
    width = fc.shape[1] // 3
    tensors["fc.weight"] = torch.cat([fc, fc[:, : 2 * width]], dim=1)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].repeat(2, 1)
    return tensors


def library_names() -> Tensors:
    """The plain EAGLE-3 under the names of the speculators library."""
    return {
        name.replace("midlayer.", "layers.0."): part for name, part in of("eagle3_plain").items()
    }


@pytest.mark.parametrize(
    ("name", "tensors", "key"),
    [
        ("jetspec", lambda: of("dflash"), "dflash_config.causal_head"),
        ("eagle3-sliding-plain", lambda: of("eagle3_plain"), "layer_types"),
        ("eagle3-sliding-speculators", library_names, "transformer_layer_config.layer_types"),
        ("deepspec-dflash", lambda: of("dflash"), "markov_rank 0"),
    ],
)
def test_a_shared_case_is_refused_by_the_name_of_its_key(
    name: str, tensors: Any, key: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=key) as refused:
        case(name, tensors(), tmp_path)
    assert "engine" not in str(refused.value)


def test_shared_cases_with_layer_numbered_taps_are_read(tmp_path: Path) -> None:
    found = case("deepspec-eagle3", five_taps(), tmp_path / "five")
    assert found.drafter.taps == (2, 3, 4, 5, 7) and found.notes == []
    found = case("eagle3-three-taps", of("eagle3_plain"), tmp_path / "three")
    assert found.drafter.taps == (1, 3, 5) and found.notes == []
    # Without the window's keys the other cases are read.
    full = {"layer_types": ["full_attention"], "use_sliding_window": False}
    found = case("eagle3-sliding-plain", of("eagle3_plain"), tmp_path / "full", **full)
    assert found.drafter.taps == (2, 4, 7) and found.notes == []


def five(tmp_path: Path, **keys: Any) -> ImportedDrafter:
    """A tiny EAGLE-3 of five taps with these keys."""
    drafter = eagle("eagle3", taps=(0, 2, 4, 5, 7)).drafter
    config = plain.LLAMA | {"draft_vocab_size": TARGET.vocab_size} | keys
    return read(store(tmp_path, config, drafter.serving_state()))


def test_target_layer_ids_are_read_alongside_other_tap_keys(tmp_path: Path) -> None:
    layers, states = [-1, 1, 3, 4, 6], [0, 2, 4, 5, 7]
    for keys in (
        {"target_layer_ids": layers},
        {"eagle_config": {"target_layer_ids": layers}},
        {"target_layer_ids": layers, "eagle_aux_hidden_state_layer_ids": states},
        {
            "target_layer_ids": layers,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
            "num_aux_hidden_states": 3,
        },
    ):
        found = five(tmp_path / str(len(str(keys))), **keys)
        assert list(found.drafter.taps) == states and found.notes == []
    with pytest.raises(UserError, match="target_layer_ids .* other hidden states.* --set taps"):
        five(tmp_path, target_layer_ids=layers, eagle_aux_hidden_state_layer_ids=layers)
    with pytest.raises(UserError, match="fuses 5 taps"):
        five(tmp_path, target_layer_ids=[1, 2, 3])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sliding_window": 4096}, "sliding_window 4096"),  # Mistral's way
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"layer_types": ["linear_attention"]}, "layer_types"),
    ({"use_sliding_window": True}, "use_sliding_window"),
    ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "use_sliding_window"),
    ({"use_swa": True, "swa_window_size": 128}, "use_swa"),
    ({"swa_window_size": 128}, "swa_window_size"),
    ({"draft_sliding_window": 512}, "draft_sliding_window"),
    ({"attention_chunk_size": 8192}, "attention_chunk_size"),
    ({"attention_sinks": True}, "attention_sinks"),
    ({"attention_sink_bias": True}, "attention_sink_bias"),
    ({"num_sink_tokens": 4}, "num_sink_tokens"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"residual_multiplier": 0.22}, "residual_multiplier"),
    ({"logits_scaling": 8.0}, "logits_scaling"),
    ({"scale_emb": 12}, "scale_emb"),
    ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
    ({"is_neox_style": False}, "is_neox_style"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"rotary_pct": 0.25}, "rotary_pct"),
    ({"no_rope_layers": [0]}, "no_rope_layers"),
    ({"position_embedding_type": "alibi"}, "position_embedding_type"),
    ({"parallel_drafting": True}, "parallel_drafting"),
    ({"mask_embedding": True}, "mask_embedding"),
    ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation"),
    ({"mlp_type": "relu2"}, "mlp_type"),
    ({"norm_type": "layernorm"}, "norm_type"),
    ({"norm_eps": 1e-3}, "norm_eps"),
    ({"clip_qkv": 8.0}, "clip_qkv"),
    ({"parallel_draft_step": 4}, "parallel_draft_step"),
    ({"use_mtp_layernorm": True}, "use_mtp_layernorm"),
    ({"truncated_vocab_size": 17}, "truncated_vocab_size"),
]
"""Keys that change any drafter with layers, and how the refusal names them."""
EAGLE_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ({"is_causal": False}, "is_causal"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"qk_norm": True}, "qk_norm"),
]
BLOCK_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"causal": True}, "causal true.*its blocks are causal"),
    ({"causal_head": True}, "causal_head true.*its blocks are causal"),
    ({"draft_attention": "causal"}, "draft_attention causal"),
    ({"projector_type": "domino"}, "projector_type domino"),
    ({"qk_norm": False}, "qk_norm"),
]


@pytest.mark.parametrize(("keys", "named"), REFUSED + EAGLE_ONLY, ids=str)
def test_a_key_that_changes_an_eagle_is_refused(
    keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    _, tensors = plain.eagle3()
    for name, config in {
        "top": plain.specforge(**keys),
        "inner": plain.specforge(eagle_config=plain.specforge()["eagle_config"] | keys),
    }.items():
        with pytest.raises(UserError, match=f"says (eagle_config.)?{named}"):
            read(store(tmp_path / name, config, tensors))
    drafter, tensors = plain.eagle1()
    if "softcap" not in named or "attn" in named:  # the target's own head is capped as it is
        with pytest.raises(UserError, match=f"says {named}"):
            read(store(tmp_path / "one", plain.LLAMA | keys, tensors))
    config = plain.speculators_config(drafter)
    layer = config["transformer_layer_config"] | keys
    with pytest.raises(UserError, match=f"transformer_layer_config.{named}"):
        config |= {"transformer_layer_config": layer}
        read(store(tmp_path / "s", config, plain.eagle3()[1], "model.safetensors"))


@pytest.mark.parametrize(("keys", "named"), REFUSED + BLOCK_ONLY, ids=str)
def test_a_key_that_changes_a_block_is_refused(
    keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    _, tensors = blocks.stored("dflash")
    inner = blocks.z_lab()
    del inner["layer_types"], inner["use_sliding_window"]
    top = inner | keys
    inner["dflash_config"] = inner["dflash_config"] | keys
    layer = {key: value for key, value in top.items() if key in blocks.BACKBONE} | keys
    for name, config in {
        "top": top,
        "inner": inner,
        "library": blocks.library("dflash", transformer_layer_config=layer),
    }.items():
        with pytest.raises(UserError, match=f"says (\\w+_config.)?{named}"):
            read(store(tmp_path / name, config, tensors, "model.safetensors"))


HARMLESS: list[dict[str, Any]] = [
    QWEN,
    {"sliding_window": 4096, "use_sliding_window": False},
    {"sliding_window": 4096, "layer_types": ["full_attention"]},
    {"sliding_window": None, "swa_window_size": 128, "use_swa": False},
    {"attention_sinks": False, "attn_logit_softcapping": None, "clip_qkv": None},
    {"logits_scaling": 1.0, "residual_multiplier": 1, "query_pre_attn_scalar": 8, "head_dim": 8},
    {"is_neox_style": True, "rotary_pct": 1.0, "position_embedding_type": "rope"},
    {"hidden_activation": "silu", "norm_type": "rmsnorm", "layer_norm_eps": 1e-6},
    {"mlp_type": "swiglu", "parallel_drafting": False, "mask_embedding": None},
    {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
     "norm_topk_prob": True, "router_aux_loss_coef": 0.001, "decoder_sparse_step": 1,
     "mlp_only_layers": [], "routed_scaling_factor": 2.5, "kv_lora_rank": 512},
    {"ttt_length": 7, "num_anchors": 512, "loss_type": "kl", "learning_rate": 1e-4, "seed": 1},
    {"modelopt_version": "0.40", "quantization_config": None, "attention_bias": False, "tags": []},
    {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
     "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
     "parallel_draft_heads_num_layers": 1, "head_dim": 8},
    {"num_nextn_predict_layers": 0, "num_lookahead_tokens": 3, "max_model_len": None},
]  # fmt: skip
"""Keys as they stand in published configurations, which need no word."""


@pytest.mark.parametrize("keys", HARMLESS, ids=lambda keys: next(iter(keys)))
def test_harmless_keys_are_not_named(keys: dict[str, Any], tmp_path: Path) -> None:
    _, tensors = plain.eagle3()
    assert read(store(tmp_path / "e", plain.specforge(**keys), tensors)).notes == []
    _, tensors = plain.eagle1(fc_bias=True)
    assert read(store(tmp_path / "one", plain.LLAMA | keys, tensors)).notes == []
    _, tensors = blocks.stored("dflash")
    keys = keys | ({"layer_types": ["full_attention"] * 2} if "layer_types" in keys else {})
    found = read(store(tmp_path / "b", blocks.z_lab(**keys), tensors, "model.safetensors"))
    assert found.notes == []


def test_keys_that_nobody_knows_are_named_once(tmp_path: Path) -> None:
    _, tensors = plain.eagle3()
    inner = plain.specforge()["eagle_config"] | {"warp": [1, 2]}
    config = plain.specforge(eagle_config=inner, flux_depth=3, nothing=None)
    (note,) = read(store(tmp_path / "e", config, tensors)).notes
    assert note.endswith("(not read: flux_depth, eagle_config.warp)")
    _, tensors = blocks.stored("dspark")
    config = blocks.library("dspark", flux_depth=3)
    config["transformer_layer_config"] = config["transformer_layer_config"] | {"warp": "x"}
    (note,) = read(store(tmp_path / "b", config, tensors, "model.safetensors")).notes
    assert note.endswith("(not read: flux_depth, transformer_layer_config.warp)")


ROPE: list[tuple[dict[str, Any], str]] = [
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "says rope_theta 10000.0 "),
    (
        {"rope_theta": 1e4, "rope_scaling": {"rope_theta": 1e6}},
        "and 1000000.0 .rope_scaling.r",
    ),
    (
        {
            "rope_theta": None,
            "rope_parameters": {"rope_theta": 1e4},
            "rope_scaling": {"rope_theta": 1e6},
        },
        "says rope_theta 10000.0 .rope_parameters.rope_theta. and 1000000.0 .rope_scaling",
    ),
    ({"rotary_emb_base": 5e5}, "rotary_emb_base"),
    (
        {
            "rope_parameters": {"rope_type": "default"},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        "says rope_type default .rope_parameters.rope_type. and linear .rope_scaling.rope_type",
    ),
    (
        {
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        "says factor 4.0",
    ),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, "says rope_type"),
    ({"rope_scaling": {"factor": 2.0}}, "says factor .rope_scaling.factor. for positions"),
    (
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 1.0}},
        "says partial_rotary_factor 0.5",
    ),
]


@pytest.mark.parametrize(("keys", "says"), ROPE, ids=lambda each: str(each)[:60])
def test_contradictory_rope_keys_are_refused(
    keys: dict[str, Any], says: str, tmp_path: Path
) -> None:
    configs = {
        "eagle3": (plain.specforge(**keys), plain.eagle3()[1]),
        "eagle1": (plain.LLAMA | keys, plain.eagle1(fc_bias=True)[1]),
        "z-lab": (blocks.z_lab(**keys), blocks.stored("dflash")[1]),
        "library": (
            blocks.library("dflash", transformer_layer_config=blocks.BACKBONE | keys),
            blocks.stored("dflash")[1],
        ),
    }
    for name, (config, tensors) in configs.items():
        with pytest.raises(UserError, match=says):
            read(store(tmp_path / name, config, tensors, "model.safetensors"))


def test_rope_theta_is_found_wherever_it_is_stored(tmp_path: Path) -> None:
    _, tensors = plain.eagle3()
    for number, keys in enumerate(
        [
            {"rope_theta": 1e6},
            {"rope_parameters": {"rope_theta": 1e6}},
            {"rope_scaling": {"rope_theta": 1e6}},
            {"rope_theta": 1000000, "rope_scaling": {"type": "default", "rope_theta": 1e6}},
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
        ]
    ):
        config = plain.specforge(**{"rope_theta": None, **keys})
        found = read(store(tmp_path / str(number), config, tensors))
        assert found.drafter.shape.rope == {"rope_type": "default", "rope_theta": 1e6}
        assert found.notes == []


def test_contradictory_sizes_in_two_places_are_refused(tmp_path: Path) -> None:
    config = blocks.library("dflash", intermediate_size=65)
    with pytest.raises(UserError, match="intermediate_size 65 and transformer_layer_config.int"):
        read(store(tmp_path / "d", config, blocks.stored("dflash")[1], "model.safetensors"))
