"""Targets that are named wrongly, or whose files are not what they should be: one clear line
each."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.target import load_target
from draftsmith.inference.targets.target_files import loaded_bytes
from tests.conftest import QUICKSTART


def config(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, {"format": "pt"})


def claims(folder: Path, elements: int) -> None:
    """A file whose header tells of more than the file holds."""
    header = json.dumps(
        {"w": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda t: (t / "config.json").unlink(), "holds no config.json"),
    "a broken config": (
        lambda t: (t / "config.json").write_text('{"model_type": "llama",'),
        "not valid JSON",
    ),
    "a config that contradicts itself": (
        lambda t: config(t, hidden_size=33),
        "config.json contradicts itself",
    ),
    "an unknown model type": (lambda t: config(t, model_type="wizard"), "model type `wizard`"),
    "an encoder and decoder": (lambda t: config(t, model_type="t5"), "not a causal language model"),
    "more layers than the files": (
        lambda t: config(t, num_hidden_layers=3),
        "files lack 9 of the tensors",
    ),
    "a missing tensor": (
        lambda t: tensors(t, lambda state: state.pop("model.layers.0.self_attn.q_proj.weight")),
        "files lack 1 of the tensors .* such as model.layers.0.self_attn.q_proj.weight",
    ),
    "tensors of another shape": (
        lambda t: config(t, intermediate_size=60),
        "tensors of other shapes",
    ),
    "a weight that is no number": (
        lambda t: tensors(t, lambda state: state["model.norm.weight"].fill_(float("nan"))),
        "logits that are not finite",
    ),
    "no tokenizer": (
        without_tokenizer,
        "tokenizer of target .* it has no tokenizer that can be read; copy",
    ),
    "code of its own": (
        lambda t: config(t, model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "code of its own, which is not run; for a target that you trust, give "
        "--target.trust-remote-code",
    ),
    "a pointer of Git LFS": (
        lambda t: (t / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1"
        ),
        "a pointer of Git LFS is in its place",
    ),
    "more than the machine holds": (
        lambda t: claims(t, 10**13),
        "GB in float32, of .* GB that there are",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_target_with_a_fault_is_refused_in_one_line(
    tmp_path: Path, saved_tiny: Path, fault: str
) -> None:
    spoil, message = FAULTS[fault]
    shutil.copytree(saved_tiny, tmp_path / "t")
    spoil(tmp_path / "t")
    with pytest.raises(UserError, match=message) as raised:
        load_target(TargetConfig(str(tmp_path / "t"), device="cpu"))
    assert "\n" not in str(raised.value)


def test_paths_that_are_not_targets_are_refused_by_kind(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for name, message in (
        (str(QUICKSTART.parent / "drafters" / "eagle3"), r"is a drafter \(eagle\), not a target"),
        (str(QUICKSTART / "config.json"), "is a file; name the folder of a Hugging Face model"),
        (str(tmp_path / "m.gguf"), "of a GGUF file: the published model that it was made of"),
        (str(tmp_path), "holds no config.json; .*of a GGUF file: the published model"),
        (
            "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main",
            "give the model's name, Qwen/Qwen3-0.6B",
        ),
        (str(tmp_path / "none"), "does not exist"),
        ("", "name a target"),
    ):
        with pytest.raises(UserError, match=message):
            load_target(TargetConfig(name, device="cpu"))


def test_mismatched_vocabulary_sizes_are_warned_about(
    tmp_path: Path, saved_tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(saved_tiny, tmp_path / "t")
    tensors(
        tmp_path / "t",
        lambda state: state.update({k: v[:280].clone() for k, v in state.items() if len(v) == 291}),
    )
    config(tmp_path / "t", vocab_size=280)
    (tmp_path / "t" / "generation_config.json").write_text('{"eos_token_id": [1, 290]}')
    load_target(TargetConfig(str(tmp_path / "t"), device="cpu"))
    assert "its tokenizer has 291 tokens, its embedding 280 rows" in caplog.text
    assert "its end token 290 is none of its 280 tokens" in caplog.text


def test_the_loaded_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    save_file(
        {"a": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros(7, dtype=torch.uint8)},
        tmp_path / "1.safetensors",
    )
    save_file({"c": torch.zeros(2)}, tmp_path / "2.safetensors")
    assert loaded_bytes(tmp_path, torch.float32) == 4 * 17 + 7
    assert loaded_bytes(tmp_path, torch.bfloat16) == 2 * 17 + 7
    assert loaded_bytes(tmp_path / "none", torch.float32) == 0
