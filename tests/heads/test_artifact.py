"""What is written is what is read, and everything else is an error that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import whole_directory, whole_file
from draftsmith.heads.medusa import WEIGHTS_FILE
from safetensors.torch import load_file, save_file

from tests.conftest import random_heads, tiny_target

TARGET = tiny_target()
CALIBRATION = {"rank_accuracy": [[0.5, 0.1]] * 4, "tree_nodes": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Artifact(random_heads(TARGET), TARGET.fingerprint(), CALIBRATION).save(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_a_saved_drafter_loads_bit_for_bit(folder: Path) -> None:
    loaded = Artifact.load(folder, TARGET.fingerprint())
    for name, tensor in random_heads(TARGET).serving_state().items():
        assert torch.equal(tensor, loaded.drafter.serving_state()[name])
    assert loaded.calibration == CALIBRATION
    assert not any(p.requires_grad for p in loaded.drafter.parameters())


def change_tensors(folder: Path, change: Callable[[dict], None]) -> None:
    tensors = load_file(folder / WEIGHTS_FILE)
    change(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "1.0.linear.bias is missing"),
        (lambda t: t.update({"extra": torch.zeros(2)}), "extra is not part"),
        (lambda t: t.update({"0.1.weight": torch.zeros(3, 3)}), r"0.1.weight has shape \[3, 3\]"),
        (lambda t: t.update({"0.1.weight": t["0.1.weight"].bfloat16()}), "0.1.weight is torch.bfloat16"),
    ],
)
def test_a_missing_surplus_misshapen_or_miscast_tensor_is_named(folder: Path, change: Callable, says: str) -> None:
    change_tensors(folder, change)
    with pytest.raises(UserError, match=says):
        Artifact.load(folder, TARGET.fingerprint())


def test_heads_of_another_target_are_refused(folder: Path) -> None:
    other = tiny_target(hidden_size=64)
    with pytest.raises(UserError, match="another target.*hidden_size is 32 in the drafter and 64 in the target"):
        Artifact.load(folder, other.fingerprint())


def test_a_fine_tune_is_told_from_its_base(folder: Path) -> None:
    tuned = tiny_target()
    with torch.no_grad():
        tuned.head_weight.add_(0.5)
    tuned.name = "tuned"
    told: list[str] = []
    Artifact.load(folder, tuned.fingerprint(), warn=told.append)
    assert len(told) == 1 and "'tiny'" in told[0] and "'tuned'" in told[0] and "weights" in told[0]


def test_the_fingerprint_does_not_depend_on_the_dtype_loaded_in() -> None:
    half = tiny_target()
    half.model.to(torch.bfloat16)
    assert half.fingerprint() == TARGET.fingerprint()


@pytest.mark.parametrize("broken", ["draftsmith.json", "config.json", WEIGHTS_FILE])
def test_a_broken_or_missing_file_is_a_clear_error(folder: Path, broken: str) -> None:
    (folder / broken).write_text("{")
    with pytest.raises(UserError, match=broken):
        Artifact.load(folder, TARGET.fingerprint())
    (folder / broken).unlink()
    with pytest.raises(UserError, match=broken):
        Artifact.load(folder, TARGET.fingerprint())


def test_an_unknown_method_is_refused(folder: Path) -> None:
    own = json.loads((folder / "draftsmith.json").read_text())
    (folder / "draftsmith.json").write_text(json.dumps({**own, "method": "../x"}))
    with pytest.raises(UserError, match="unknown drafting method"):
        Artifact.load(folder, TARGET.fingerprint())


def test_a_directory_is_whole_or_absent(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_directory(tmp_path / "x") as aside:
        (aside / "half").write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    for content in ("one", "two"):
        with whole_directory(tmp_path / "x") as aside:
            (aside / "file").write_text(content)
    assert (tmp_path / "x" / "file").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(RuntimeError), whole_file(tmp_path / "f") as aside:
        aside.write_text("half")
        raise RuntimeError
    assert (tmp_path / "f").read_text() == "old" and len(list(tmp_path.iterdir())) == 1
