"""Loading targets: adapters, settings that decoding here does not apply, broken folders."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from draftsmith.heads.errors import UserError
from draftsmith.inference.target import TargetConfig, load_target
from peft import LoraConfig, get_peft_model

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.mark.parametrize("named", ["adapter option", "adapter folder as target"])
@torch.no_grad()
def test_a_lora_adapter_is_merged_on_load(tmp_path: Path, saved_tiny: Path, named: str) -> None:
    base = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    torch.manual_seed(0)
    adapted = get_peft_model(base.model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    expected = adapted(IDS).logits
    adapted.peft_config["default"].base_model_name_or_path = str(saved_tiny)
    adapted.save_pretrained(str(tmp_path))
    if named == "adapter option":
        loaded = load_target(TargetConfig(str(saved_tiny), adapter=str(tmp_path), device="cpu"))
    else:
        loaded = load_target(TargetConfig(str(tmp_path), device="cpu"))
    torch.testing.assert_close(loaded.head(loaded.forward(IDS).last), expected, atol=1e-4, rtol=1e-4)
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())
    assert (
        loaded.fingerprint().weights_hash != load_target(TargetConfig(str(saved_tiny), device="cpu")).fingerprint().weights_hash
    )


def test_what_generate_would_apply_and_decoding_here_does_not_is_said(
    tmp_path: Path, saved_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load_target(TargetConfig(str(saved_tiny), device="cpu"))
    assert target.processors == {}
    target.model.generation_config.repetition_penalty = 1.3
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        load_target(TargetConfig(str(tmp_path), device="cpu"))
    assert "repetition_penalty=1.3" in caplog.text


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1"])
def test_weights_that_are_not_weights_are_a_clear_error(tmp_path: Path, saved_tiny: Path, content: str) -> None:
    folder = tmp_path / "t"
    shutil.copytree(saved_tiny, folder)
    (folder / "model.safetensors").write_text(content)
    with pytest.raises(UserError, match="cannot load target"):
        load_target(TargetConfig(str(folder), device="cpu"))
