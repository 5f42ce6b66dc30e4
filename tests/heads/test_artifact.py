"""What is written is what is read, and everything else is an error that names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.heads.artifact import OWN_FILE, Artifact
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import read_json, whole_directory, whole_file, write_json
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.target import load_target
from tests.conftest import edit_config, random_heads, tiny_target
from tests.helpers.sealed import seal

TARGET = tiny_target()
WEIGHTS_FILE = "medusa_lm_head.safetensors"
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
    seal(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("1.0.linear.bias"), "1.0.linear.bias is missing"),
        (lambda t: t.update({"extra": torch.zeros(2)}), "extra is not part"),
        (lambda t: t.update({"0.1.weight": torch.zeros(3, 3)}), r"0.1.weight has shape \[3, 3\]"),
        (
            lambda t: t.update({"0.1.weight": t["0.1.weight"].bfloat16()}),
            "0.1.weight is torch.bfloat16",
        ),
    ],
)
def test_a_missing_surplus_misshapen_or_miscast_tensor_is_named(
    folder: Path, change: Callable, says: str
) -> None:
    change_tensors(folder, change)
    with pytest.raises(UserError, match=says):
        Artifact.load(folder, TARGET.fingerprint())


def test_heads_of_another_target_are_refused(folder: Path) -> None:
    other = tiny_target(hidden_size=64)
    with pytest.raises(
        UserError, match="another target.*hidden_size is 32 in the drafter and 64 in the target"
    ):
        Artifact.load(folder, other.fingerprint())


def test_loading_for_a_fine_tuned_target_warns_about_weights(folder: Path) -> None:
    tuned = tiny_target()
    with torch.no_grad():
        tuned.head_weight.add_(0.5)
    tuned.name = "tuned"
    warnings: list[str] = []
    Artifact.load(folder, tuned.fingerprint(), warn=warnings.append)
    assert (
        len(warnings) == 1
        and "'tiny'" in warnings[0]
        and "'tuned'" in warnings[0]
        and "weights" in warnings[0]
    )


def test_edited_target_config_warning_names_old_and_new_values(
    folder: Path, saved_tiny: Path, tmp_path: Path
) -> None:
    """The edit that model cards ask for, for long texts; the weights stay the same."""
    edited = tmp_path / "edited"
    shutil.copytree(saved_tiny, edited)
    edit_config(edited)
    target = load_target(TargetConfig(str(edited), device="cpu"))
    assert target.fingerprint().weights_hash == TARGET.fingerprint().weights_hash
    warnings: list[str] = []
    Artifact.load(folder, target.fingerprint(), warn=warnings.append)
    assert warnings == [
        f"drafter was trained for 'tiny'; '{edited}' differs in its configuration (rms_norm_eps "
        "was 1e-06, is 0.01; rope_parameters.rope_theta was 10000.0, is 500000.0)"
    ]


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


@pytest.mark.parametrize("method", ["../x", "files", "exchange"])
def test_an_unknown_method_is_refused(folder: Path, method: str) -> None:
    """A path, and names of modules that are no drafter's."""
    own = json.loads((folder / "draftsmith.json").read_text())
    (folder / "draftsmith.json").write_text(json.dumps({**own, "method": method}))
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


def test_one_flipped_bit_is_noticed_and_named(folder: Path) -> None:
    weights = folder / WEIGHTS_FILE
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        UserError, match=f"{WEIGHTS_FILE} has changed since it was written .its SHA-256 differs."
    ):
        Artifact.load(folder, TARGET.fingerprint())


def test_a_drafter_without_checksums_is_refused(folder: Path) -> None:
    own = read_json(folder / OWN_FILE)
    del own["files"]
    write_json(folder / OWN_FILE, own)
    with pytest.raises(UserError, match=r"draftsmith\.json has no checksums"):
        Artifact.load(folder, TARGET.fingerprint())


@pytest.mark.parametrize("name", ["config.json", WEIGHTS_FILE])
def test_a_drafter_without_one_of_the_checksums_is_refused(folder: Path, name: str) -> None:
    own = read_json(folder / OWN_FILE)
    del own["files"][name]
    write_json(folder / OWN_FILE, own)
    with pytest.raises(UserError, match=f"{name} is not among the files that were written"):
        Artifact.load(folder, TARGET.fingerprint())


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("method", 3, "method: Expected str, got int"),
        ("dtype", "float8", "dtype: Invalid enum value 'float8'"),
        ("schema", 3, "written by a newer draftsmith .schema 3"),
        ("schema", 0, "schema: Expected int >= 1"),
        ("calibration", {"rank_accuracy": [[1.5]]}, "Expected float <= 1"),
        ("calibration", {"rank_accuracy": [[]]}, "Expected array of length >= 1"),
        ("calibration", {"tree_nodes": 10**9}, "Expected int <= 65536"),
        ("calibration", {"trees": {"cpu": {"length": 3, "width": 2}}}, "missing required .*nodes"),
        (
            "calibration",
            {"trees": {"cpu": {"length": 3, "width": 2, "nodes": 2}}},
            "nodes of a tree are fewer than its length",
        ),
        ("target", {"name": "x"}, "target: Object missing required field model_type"),
        (
            "files",
            {"../x": {"bytes": 1, "sha256": "0" * 64}},
            "names '../x', which is not a file within its folder",
        ),
    ],
)
def test_a_wrong_value_in_draftsmith_json_is_named(
    folder: Path, key: str, value: object, says: str
) -> None:
    write_json(folder / OWN_FILE, {**read_json(folder / OWN_FILE), key: value})
    with pytest.raises(UserError, match=says):
        Artifact.load(folder, TARGET.fingerprint())


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": NaN}', '{"a": ' + "9" * 6000 + "}", "", "\xff", "[1]", "null"]
)
def test_draftsmith_json_that_is_not_an_object_is_refused(folder: Path, text: str) -> None:
    (folder / OWN_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=OWN_FILE):
        Artifact.load(folder, TARGET.fingerprint())


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("medusa_num_heads", 10**9, "Expected int <= 256"),
        ("hidden_size", 10**6, r"has shape \[32, 32\], expected"),
        ("vocab_size", True, "got bool"),
    ],
)
def test_an_absurd_size_is_refused_before_memory_is_taken(
    folder: Path, key: str, value: object, says: str
) -> None:
    write_json(folder / "config.json", {**read_json(folder / "config.json"), key: value})
    seal(folder)
    with pytest.raises(UserError, match=says):
        Artifact.load(folder, TARGET.fingerprint())
