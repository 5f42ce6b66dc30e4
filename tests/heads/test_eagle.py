"""The EAGLE module: its layer against transformers' own, its files, and what it takes from a
target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Mamba2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.eagle import Eagle3Drafter, default_taps, drafter_of
from draftsmith.heads.errors import UserError
from draftsmith.inference.targets.target import Target
from draftsmith.train.methods.eagle.config import EagleConfig
from draftsmith.train.methods.eagle.method import first_weights, shape_for
from tests.conftest import tiny_target
from tests.helpers.architectures import ARCHITECTURES, architecture
from tests.helpers.random_eagles import KINDS, random_eagle
from tests.helpers.sealed import seal

TARGET = tiny_target(num_hidden_layers=3)


def causal(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
    found = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    return found.transpose(1, 2).flatten(2)


def test_drafter_for_attention_free_target_uses_head_size_64() -> None:
    config = Mamba2Config(hidden_size=192, num_heads=12, head_dim=32, num_hidden_layers=4)
    shape = shape_for(EagleConfig(taps=[0, 1, 3]), config)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (3, 3, 64)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 777.0},
        {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0,
        "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_an_upper_layer_is_transformers_llama_layer(rope: dict[str, Any]) -> None:
    """Head layout, rotary scaling and norm epsilon of the target: the same weights give the same
    outputs."""
    target = tiny_target(rope_parameters=rope, rms_norm_eps=1e-3, hidden_act="gelu", head_dim=16)
    assert shape_for(EagleConfig(taps=[0, 1]), target.config).activation == "silu", (
        "engines load no other, whatever the target has"
    )
    shape = shape_for(EagleConfig(taps=[0, 1], num_layers=2), target.config)
    shape = replace(shape, activation="gelu")
    drafter = drafter_of(shape, target.embedding_and_head)
    theirs = LlamaDecoderLayer(target.config, 0)
    names = {
        name: tensor
        for name, tensor in drafter.serving_state().items()
        if name.startswith("layers.1.")
    }
    theirs.load_state_dict(
        {name.removeprefix("layers.1."): tensor for name, tensor in names.items()}
    )
    x, positions = torch.randn(1, 7, 32), torch.arange(7)[None] + 20
    tables = LlamaRotaryEmbedding(target.config)(x, positions)
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    expected = theirs(x, attention_mask=mask, position_ids=positions, position_embeddings=tables)
    layer: Any = drafter.layers[1]
    ours = layer(1, x, layer.qkv(drafter.input_norms["1"](x)), drafter.rotary(positions), causal)
    torch.testing.assert_close(
        ours, expected[0] if isinstance(expected, tuple) else expected, atol=1e-5, rtol=1e-4
    )


def test_the_first_layer_of_eagle3_is_the_formula() -> None:
    """m = u + O Attn([N_e(e); N_u(u)]), s = m + MLP(N_p(m)), logits U N_f(s), at one position,
    where attention is its value."""
    drafter = random_eagle(TARGET, "eagle3")
    state = drafter.serving_state()

    def w(name):
        return state["midlayer." + name + ".weight"]

    def norm(x, weight):
        return x / (x.square().mean() + drafter.shape.norm_eps).sqrt() * weight

    u, token = torch.randn(32), torch.tensor([[9]])
    e = TARGET.embed(token)[0, 0]
    both = torch.cat([norm(e, w("input_layernorm")), norm(u, w("hidden_norm"))])
    value = (w("self_attn.v_proj") @ both).view(2, 8).repeat_interleave(2, 0).flatten()
    m = u + w("self_attn.o_proj") @ value
    x = norm(m, w("post_attention_layernorm"))
    s = m + w("mlp.down_proj") @ (
        torch.nn.functional.silu(w("mlp.gate_proj") @ x) * (w("mlp.up_proj") @ x)
    )
    expected = state["lm_head.weight"] @ norm(s, state["norm.weight"])
    output = drafter.advance(
        drafter.token_part(token), u[None, None], drafter.rotary(torch.tensor([[3]])), causal
    )
    torch.testing.assert_close(drafter.recycled(output)[0, 0], s, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(drafter.logits(output)[0, 0], expected, atol=1e-4, rtol=1e-4)


def test_eagle1_fuses_embedding_and_feature_without_norms_and_uses_the_targets_head() -> None:
    drafter = random_eagle(TARGET, "eagle1")
    state = drafter.serving_state()
    assert set(state) == {
        "fc.weight",
        *(f"layers.0.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        "layers.0.post_attention_layernorm.weight",
    }
    h, token = torch.randn(32), torch.tensor([[9]])
    g = state["fc.weight"] @ torch.cat([TARGET.embed(token)[0, 0], h])
    value = (
        (state["layers.0.self_attn.v_proj.weight"] @ g).view(2, 8).repeat_interleave(2, 0).flatten()
    )
    m = g + state["layers.0.self_attn.o_proj.weight"] @ value
    x = (
        m
        / (m.square().mean() + drafter.shape.norm_eps).sqrt()
        * state["layers.0.post_attention_layernorm.weight"]
    )
    gate, up, down = (state[f"layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    expected = m + down @ (torch.nn.functional.silu(gate @ x) * (up @ x))
    output = drafter.advance(
        drafter.token_part(token), h[None, None], drafter.rotary(torch.tensor([[3]])), causal
    )
    torch.testing.assert_close(output[0, 0], expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(drafter.logits(output), TARGET.head(output))


def test_names_on_disk_are_those_that_engines_read() -> None:
    drafter = random_eagle(TARGET, "eagle3 draft vocabulary")
    shapes = {name: (list(t.shape), t.dtype) for name, t in drafter.serving_state().items()}
    f32 = torch.float32
    assert shapes == {
        "fc.weight": ([32, 96], f32),
        "midlayer.input_layernorm.weight": ([32], f32),
        "midlayer.hidden_norm.weight": ([32], f32),
        "midlayer.self_attn.q_proj.weight": ([32, 64], f32),
        "midlayer.self_attn.k_proj.weight": ([16, 64], f32),
        "midlayer.self_attn.v_proj.weight": ([16, 64], f32),
        "midlayer.self_attn.o_proj.weight": ([32, 32], f32),
        "midlayer.post_attention_layernorm.weight": ([32], f32),
        "midlayer.mlp.gate_proj.weight": ([64, 32], f32),
        "midlayer.mlp.up_proj.weight": ([64, 32], f32),
        "midlayer.mlp.down_proj.weight": ([32, 64], f32),
        "norm.weight": ([32], f32),
        "lm_head.weight": ([60, 32], f32),
        "d2t": ([60], torch.int64),
        "t2d": ([TARGET.vocab_size], torch.bool),
    }
    config = drafter.serving_config("base", "bfloat16")
    assert (
        config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    )
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1], (
        "SGLang counts from the first layer"
    )
    assert (
        None not in config.values()
        and config["vocab_size"] == TARGET.vocab_size
        and config["draft_vocab_size"] == 60
    )
    assert "d2t" not in random_eagle(TARGET, "eagle3").serving_state(), (
        "vLLM refuses a map of a full vocabulary"
    )
    assert {"fc_norm.0.weight", "fc_norm.2.weight"} <= set(
        random_eagle(TARGET, "eagle3.1").serving_state()
    )
    assert "embed_tokens.weight" in random_eagle(TARGET, "eagle3 of another width").serving_state()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_drafter_loads_bit_for_bit_and_drafts_the_same(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    drafter = random_eagle(TARGET, kind)
    Artifact(drafter, TARGET.fingerprint()).save(tmp_path / "d", dtype)
    loaded = Artifact.load(tmp_path / "d", TARGET.fingerprint(), TARGET.embedding_and_head).drafter
    assert loaded.shape == drafter.shape
    for name, tensor in drafter.serving_state().items():
        stored = tensor.to(dtype) if tensor.is_floating_point() else tensor
        assert torch.equal(stored.to(tensor.dtype), loaded.serving_state()[name]), name
    ids, h = torch.randint(0, 50, (1, 6)), torch.randn(1, 6, 32)
    rotary = drafter.rotary(torch.arange(6)[None])
    outputs = []
    for d in (drafter, loaded) if dtype == torch.float32 else (loaded, loaded):
        outputs.append(
            d.logits(d.advance(d.token_part(ids), d.fuse((h,) * len(d.taps), h), rotary, causal))
        )
    assert torch.equal(*outputs)


def test_casting_a_drafter_keeps_its_angles_and_its_map() -> None:
    drafter = random_eagle(TARGET, "eagle3 draft vocabulary")
    before, kept = drafter.rotary(torch.tensor([[200]])), drafter.draft_vocab_ids
    drafter.to(torch.bfloat16)
    for one, other in zip(before, drafter.rotary(torch.tensor([[200]])), strict=True):
        assert torch.equal(one, other)
    assert (
        kept is not None
        and drafter.draft_vocab_ids is not None
        and torch.equal(kept, drafter.draft_vocab_ids)
    )


def test_a_broken_map_is_refused_on_loading(tmp_path: Path) -> None:
    Artifact(random_eagle(TARGET, "eagle3 draft vocabulary"), TARGET.fingerprint()).save(
        tmp_path / "d"
    )
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    tensors["d2t"][5] = tensors["d2t"][4] - 1
    save_file(tensors, tmp_path / "d" / "model.safetensors")
    seal(tmp_path / "d")
    with pytest.raises(UserError, match="names tokens twice"):
        Artifact.load(tmp_path / "d", TARGET.fingerprint(), TARGET.embedding_and_head)


def test_default_taps_are_those_that_engines_assume() -> None:
    assert (
        default_taps(32) == (2, 16, 29)
        and default_taps(8) == (2, 4, 5)
        and default_taps(7) == (2, 3, 4)
    )
    with pytest.raises(UserError, match=r"5 layers, too few for default taps; give heads.taps"):
        default_taps(5)


@pytest.mark.parametrize("taps", [[2, 1, 0], [0, 0, 1], [0, 1, 3], [-1, 0]])
def test_taps_out_of_order_double_or_beyond_the_last_layer_are_refused(taps: list[int]) -> None:
    with pytest.raises(UserError, match="ascending, distinct"):
        shape_for(EagleConfig(taps=taps), TARGET.config)


@pytest.mark.parametrize(
    "option", ["taps", "draft_vocab_size", "norm_taps", "norm_output", "hidden_size"]
)
def test_options_of_version_3_are_refused_for_version_1(option: str) -> None:
    value: Any = [0, 1] if option == "taps" else True if option.startswith("norm") else 32
    with pytest.raises(UserError, match=f"heads.{option} is for version 3"):
        EagleConfig(version=1, **{option: value})


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_has_a_layout(kind: str) -> None:
    target: Target = architecture(kind)
    shape = shape_for(EagleConfig(taps=[0, 1]), target.config)
    assert (
        shape.num_heads == target.config.num_attention_heads
        and shape.num_heads % shape.num_kv_heads == 0
    )
    drafter = drafter_of(shape, target.embedding_and_head)
    cosines, _ = drafter.rotary(torch.arange(3)[None])
    assert cosines.shape[-1] <= shape.head_dim and cosines.dtype == torch.float32
    if kind == "phi3":
        assert cosines.shape[-1] == shape.head_dim // 2, "half of each head turns"


def test_the_head_and_final_norm_start_as_the_targets() -> None:
    target = tiny_target()
    with torch.no_grad():
        target.decoder.norm.weight.uniform_(0.5, 1.5)
    drafter = Eagle3Drafter(
        shape_for(EagleConfig(taps=[0, 1], draft_vocab_size=20), target.config),
        target.embedding_and_head,
    )
    ids = torch.arange(0, 40, 2)
    first_weights(drafter, target.head_weight, target.final_norm_weight(), ids)
    head = drafter.lm_head
    assert head is not None and torch.equal(head.weight, target.head_weight[ids])
    assert torch.equal(drafter.norm.weight, target.decoder.norm.weight)
    gemma = architecture("gemma2")
    factor = gemma.final_norm_weight()
    assert factor is not None and torch.equal(factor, 1 + gemma.decoder.norm.weight.float())


def test_a_shared_head_is_the_targets_and_is_not_stored(tmp_path: Path) -> None:
    """The logits are those of a drafter with a copy of the target's rows, before saving and after
    loading."""
    own = random_eagle(TARGET, "eagle3 draft vocabulary")
    shared = drafter_of(replace(own.shape, shared_head=True), TARGET.embedding_and_head)
    state = own.state_dict()
    assert torch.equal(state.pop("lm_head.weight"), TARGET.head_weight[own.draft_vocab_ids])
    shared.load_state_dict(state)
    artifact = Artifact(shared.eval().requires_grad_(False), TARGET.fingerprint())
    artifact.save(tmp_path / "drafter")
    stored = load_file(tmp_path / "drafter" / "model.safetensors")
    assert stored.keys() == own.serving_state().keys() - {"lm_head.weight"}
    loaded = Artifact.load(
        tmp_path / "drafter", TARGET.fingerprint(), TARGET.embedding_and_head, pytest.fail
    ).drafter
    states = torch.randn(2, 3, 32)
    for drafter in (shared, loaded):
        assert drafter.borrows_head and torch.equal(drafter.logits(states), own.logits(states))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"hidden_size": 64},
            "whose rows have its width 32; leave out heads.hidden_size or shared",
        ),
        ({"version": 1, "taps": None}, "heads.shared_head is for version 3"),
    ],
)
def test_impossible_head_sharing_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        shape_for(EagleConfig(**{"taps": [0, 1], "shared_head": True, **options}), TARGET.config)


def test_version_3_has_the_norms_of_3_1_if_nothing_else_is_asked_for() -> None:
    shapes = [
        shape_for(config, TARGET.config)
        for config in (
            EagleConfig(taps=[0, 1]),
            EagleConfig(taps=[0, 1], norm_taps=False),
            EagleConfig(version=1),
        )
    ]
    norms = [(shape.norm_taps, shape.norm_output) for shape in shapes]
    assert norms == [(True, True), (False, True), (False, False)]
