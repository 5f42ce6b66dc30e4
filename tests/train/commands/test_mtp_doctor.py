"""`draftsmith mtp doctor` on the hybrid quickstart target, whose layer was trained with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.heads.errors import UserError
from draftsmith.inference.settings import TargetConfig
from draftsmith.train.commands.mtp import doctor
from draftsmith.train.commands.mtp.options import ExamineOptions
from tests.conftest import QUICKSTART

HYBRID = QUICKSTART.parent / "hybrid"
Change = Callable[[dict[str, Tensor]], object]


def changed(folder: Path, change: Change) -> Path:
    shutil.copytree(HYBRID, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if "lm_head.weight" in tensors:
        config = folder / "config.json"
        config.write_text(
            json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False})
        )
    return folder


NAMES = ("__init__", "get", "close", "__eq__", "add", "set_name", "read", "__len__", "pop", "run")


@pytest.fixture(autouse=True)
def short_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MAX_NEW_TOKENS", 16)


def options_for(folder: Path, tmp_path: Path, prompts: int = 10, **more: Any) -> ExamineOptions:
    file = tmp_path / "prompts.jsonl"
    texts = [f"def {name}(self, value):" for name in NAMES[:prompts]]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = TargetConfig(str(folder), dtype="float32", device="cpu")
    return ExamineOptions(config, str(file), **more)


def examined(folder: Path, tmp_path: Path, **more: Any) -> doctor.Examined:
    return doctor.examined(options_for(folder, tmp_path, **more))


def test_correct_layer_is_reported_as_alive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_for(HYBRID, tmp_path)
    found = doctor.examined(options)
    assert not found.remarks and found.tau > 1.5 and found.interval[0] > 1.0
    doctor.run(options)
    said = capsys.readouterr().out
    assert "ok: the layer is alive" in said and f"{found.tau:.2f}" in said


def test_a_layer_that_was_written_wrongly_is_dead(tmp_path: Path) -> None:
    def exchange_halves(tensors: dict[str, Tensor]) -> None:
        first, second = tensors["mtp.fc.weight"].chunk(2, 1)
        tensors["mtp.fc.weight"] = torch.cat([second, first], 1)

    found = examined(changed(tmp_path / "target", exchange_halves), tmp_path)
    assert found.dead and "of no use" in found.remarks[0]


def test_a_dead_layer_ends_with_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def noise(tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name in [name for name in tensors if name.startswith("mtp.layers")]:
            shape = tensors[name].shape
            tensors[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)

    options = options_for(changed(tmp_path / "target", noise), tmp_path)
    with pytest.raises(SystemExit) as end:
        doctor.run(options)
    said = capsys.readouterr().out
    assert end.value.code == 2 and "error: the layer is of no use" in said


def test_non_finite_weights_are_reported_as_dead_layer(tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.norm.weight"][3] = torch.nan

    found = examined(changed(tmp_path / "target", damage), tmp_path)
    assert found.dead and any("not finite" in remark for remark in found.remarks)


@pytest.mark.full
def test_layer_not_tuned_with_target_is_reported_stale(tmp_path: Path) -> None:
    def tune(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] += 0.01

    tuned = changed(tmp_path / "tuned", tune)
    (remark,) = examined(tuned, tmp_path, base=str(HYBRID)).remarks
    assert "was not tuned with the target" in remark
    copy = changed(tmp_path / "copy", lambda tensors: None)
    found = examined(copy, tmp_path, base=str(HYBRID), prompts=4)
    assert not found.dead, "four prompts give no interval"
    assert found.remarks[0].startswith("too few replies") and len(found.remarks) == 1
    with pytest.raises(UserError, match="is the target"):
        examined(HYBRID, tmp_path, base=str(HYBRID))


def test_a_target_without_a_layer_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no MTP layer.*draftsmith mtp extract --base"):
        examined(QUICKSTART, tmp_path)
    with pytest.raises(UserError, match="has no MTP layer.*leave --base out"):
        examined(HYBRID, tmp_path, base=str(QUICKSTART))
