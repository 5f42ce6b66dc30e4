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
HALVES = "embedding and state exchanged"
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
Found = tuple[list[doctor.Measured], list[str]]


@pytest.fixture(autouse=True)
def short_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MAX_NEW_TOKENS", 16)


def options_for(folder: Path, tmp_path: Path, prompts: int = 10, **more: Any) -> ExamineOptions:
    file = tmp_path / "prompts.jsonl"
    texts = [f"def {name}(self, value):" for name in NAMES[:prompts]]
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = TargetConfig(str(folder), dtype="float32", device="cpu")
    return ExamineOptions(config, str(file), **more)


def examined(folder: Path, tmp_path: Path, **more: Any) -> Found:
    return doctor.examined(options_for(folder, tmp_path, **more))


def exchange_norms(tensors: dict[str, Tensor]) -> None:
    # The two are alike after a training of this length. So the first, which multiplies by 1 + its
    # weight, is made eight times as large, and its columns of fc as much smaller.
    tensors["mtp.pre_fc_norm_embedding.weight"] *= 8
    tensors["mtp.pre_fc_norm_embedding.weight"] += 7
    half = tensors["mtp.fc.weight"].shape[1] // 2
    tensors["mtp.fc.weight"][:, :half] /= 8
    one, other = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def exchange_halves(tensors: dict[str, Tensor]) -> None:
    first, second = tensors["mtp.fc.weight"].chunk(2, 1)
    tensors["mtp.fc.weight"] = torch.cat([second, first], 1)


def read_residual(tensors: dict[str, Tensor]) -> None:
    """A layer that reads the stream before the final norm, which scales it unevenly here: the head
    is divided by as much, so that the target writes the same."""
    scale = torch.randn(192, generator=torch.Generator().manual_seed(0)).exp()
    final, own, read = "model.norm.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"
    factor = {name: 1 + tensors[name].float() for name in (final, own, read)}
    head = tensors["model.embed_tokens.weight"] / scale
    after = {
        final: factor[final] * scale - 1,
        own: factor[own] * scale - 1,
        read: factor[read] * factor[final] - 1,
        "lm_head.weight": head,
    }
    tensors |= {name: tensor.to(torch.bfloat16) for name, tensor in after.items()}


def test_a_layer_that_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_for(HYBRID, tmp_path)
    (served, *others), remarks = doctor.examined(options)
    assert not remarks
    # Its norms are so alike that the other ways earn as much.
    assert len(others) == 4 and served.tau is not None and served.tau > 1.5
    assert next(o.tau for o in others if o.variant == HALVES) < 1.2  # type: ignore[operator]
    doctor.run(options)
    said = capsys.readouterr().out
    assert "ok: alive, and read as it was trained" in said and f"{served.tau:.2f}" in said


@pytest.mark.parametrize(
    ("change", "told", "dead"),
    [
        pytest.param(exchange_norms, "their norms exchanged", False, marks=pytest.mark.full),
        (exchange_halves, HALVES, True),
        pytest.param(
            read_residual, "target's state before its final norm", False, marks=pytest.mark.full
        ),
    ],
)
def test_a_mistake_is_told(tmp_path: Path, change: Change, told: str, dead: bool) -> None:
    findings, remarks = examined(changed(tmp_path / "target", change), tmp_path)
    assert any(told in remark for remark in remarks), remarks
    assert max(findings, key=lambda finding: finding.tau or 0.0).variant == told
    assert doctor.never_accepted(findings[0]) == dead


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


def test_numbers_that_are_not_finite_are_told(tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.norm.weight"][3] = torch.nan

    findings, remarks = examined(changed(tmp_path / "target", damage), tmp_path)
    assert any("not finite" in remark for remark in remarks)
    assert doctor.never_accepted(findings[0])


@pytest.mark.full
def test_a_stale_layer_is_told(tmp_path: Path) -> None:
    def tune(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] += 0.01

    tuned = changed(tmp_path / "tuned", tune)
    _, remarks = examined(tuned, tmp_path, base=str(HYBRID))
    assert any("was not tuned with the target" in remark for remark in remarks)
    copy = changed(tmp_path / "copy", lambda tensors: None)
    (served, *_), (remark,) = examined(copy, tmp_path, base=str(HYBRID), prompts=4)
    assert not doctor.never_accepted(served), "four prompts give no interval"
    assert remark.startswith("too few replies")
    with pytest.raises(UserError, match="is the target"):
        examined(HYBRID, tmp_path, base=str(HYBRID))


def test_a_target_without_a_layer_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no MTP layer.*draftsmith mtp extract --base"):
        examined(QUICKSTART, tmp_path)
    with pytest.raises(UserError, match="has no MTP layer.*leave --base out"):
        examined(HYBRID, tmp_path, base=str(QUICKSTART))
