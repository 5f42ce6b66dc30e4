"""Loading targets: adapters, settings that decoding here does not apply, broken folders."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, JambaConfig, MambaConfig, MptConfig, RwkvConfig

from draftsmith.heads.errors import UserError
from draftsmith.heads.layers import layout_of
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.decode import generate_one
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.targets import causal_model
from draftsmith.inference.targets.target import Target, load_target, target_of
from draftsmith.inference.targets.target_files import not_applied
from tests.conftest import tiny_target
from tests.helpers.architectures import HYBRIDS, architecture

IDS = torch.tensor([[5, 6, 7, 8, 9]])
EPS = ("norm_eps", "norm_epsilon")


@pytest.mark.parametrize("named", ["adapter option", "adapter folder as target"])
@torch.no_grad()
def test_a_lora_adapter_is_merged_on_load(tmp_path: Path, saved_tiny: Path, named: str) -> None:
    base = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    torch.manual_seed(0)
    adapted = get_peft_model(
        base.model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    expected = adapted(IDS).logits
    adapted.peft_config["default"].base_model_name_or_path = str(saved_tiny)
    adapted.save_pretrained(str(tmp_path))
    if named == "adapter option":
        loaded = load_target(TargetConfig(str(saved_tiny), adapter=str(tmp_path), device="cpu"))
    else:
        loaded = load_target(TargetConfig(str(tmp_path), device="cpu"))
    torch.testing.assert_close(
        loaded.head(loaded.forward(IDS).last), expected, atol=1e-4, rtol=1e-4
    )
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())
    assert (
        loaded.fingerprint().weights_hash
        != load_target(TargetConfig(str(saved_tiny), device="cpu")).fingerprint().weights_hash
    )


def test_loading_warns_about_no_repeat_ngram_size(
    tmp_path: Path, saved_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    assert not_applied(target.model.generation_config) == {}
    target.model.generation_config.no_repeat_ngram_size = 3
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        load_target(TargetConfig(str(tmp_path), device="cpu"))
    assert "no_repeat_ngram_size=3" in caplog.text


def test_the_targets_own_repetition_penalty_is_applied_as_generate_does() -> None:
    target = architecture("llama")
    without = generate_one(target, PlainDecoding(), [5, 6, 7], 24).token_ids
    target.model.generation_config.repetition_penalty = 1.5
    ids = torch.tensor([[5, 6, 7]])
    options = {
        "do_sample": False,
        "max_new_tokens": 24,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    expected = target.model.generate(ids, **options)[0, 3:].tolist()
    assert generate_one(target, PlainDecoding(), [5, 6, 7], 24).token_ids == expected != without
    assert (
        generate_one(
            target, PlainDecoding(), [5, 6, 7], 24, sampling=Sampling(repetition_penalty=1.0)
        ).token_ids
        == without
    )


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1"])
def test_invalid_safetensors_file_is_a_clear_error(
    tmp_path: Path, saved_tiny: Path, content: str
) -> None:
    folder = tmp_path / "t"
    shutil.copytree(saved_tiny, folder)
    (folder / "model.safetensors").write_text(content)
    with pytest.raises(
        UserError, match="cannot load .*model.safetensors: it is not a safetensors file"
    ):
        load_target(TargetConfig(str(folder), device="cpu"))


REFUSED = {
    "mamba": lambda: MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4),
    "jamba": lambda: JambaConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=64,
        attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, num_experts=2,
        mamba_d_state=4,
    ),
    "rwkv": lambda: RwkvConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2,
    attention_hidden_size=32),
    "mpt": lambda: MptConfig(vocab_size=100, d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
}  # fmt: skip


@pytest.mark.parametrize("kind", list(REFUSED))
def test_targets_that_cannot_be_rolled_back_or_verified_as_trees_are_refused_by_name(
    kind: str,
) -> None:
    """Recurrent state, hybrids, and position biases that ignore positions: found by trying, not
    from a list."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(REFUSED[kind](), dtype=torch.float32)
    with pytest.raises(UserError, match=rf"target x \({kind}\)"):
        Target(model, None, "x").check_tree()
    if "mamba" in kind or kind == "jamba":
        with pytest.raises(
            UserError, match="is a layer of Mamba-1, which transformers starts from"
        ):
            Target(model, None, "x")


def test_layers_of_an_unknown_kind_are_refused() -> None:
    target = tiny_target()
    target.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match=r"hybrid \(llama\) .* its 1 recurrent layers have"):
        Target(target.model, target.tokenizer, "hybrid")


@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_final_norm_of_a_hybrid_is_found(kind: str) -> None:
    """Drafters begin with it, and a server's states go through it."""
    target = architecture(kind)
    weight = target.final_norm_weight()
    assert weight is not None and weight.shape == (target.hidden_size,)
    eps = [value for name, value in target.config.to_dict().items() if name.endswith(EPS)]
    assert layout_of(target.config)["norm_eps"] in eps


def test_a_hybrid_over_several_devices_is_refused() -> None:
    target = architecture("lfm2")
    target.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(UserError, match="lies on several devices"):
        target_of(target.model, tiny_target().tokenizer)


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ChunkGatedDeltaRuleFunction does not support float32. Please use bfloat16.", "bfloat16"),
        ("Expected x.is_cuda() to be true, but got false.", "causal-conv1d"),
    ],
)
def test_kernels_that_cannot_run_here_are_named(
    monkeypatch: pytest.MonkeyPatch, said: str, remedy: str
) -> None:
    target = architecture("qwen3.5")

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(target.mixers[0].module, "forward", refuse)
    with pytest.raises(UserError, match=remedy):
        target.check_head()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trees_are_checked_in_every_attention_and_precision(
    attention: str, dtype: torch.dtype
) -> None:
    for kind in ("llama", "gemma3", "gpt2"):
        target = architecture(kind, dtype=dtype)
        target.model.set_attn_implementation(attention)
        target.check_tree()


def test_a_mask_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    monkeypatch.setattr(causal_model, "tree_masks", lambda *_: None)
    with pytest.raises(UserError, match="nodes differ from their own paths"):
        target.check_tree()
