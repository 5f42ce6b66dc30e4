"""`draftsmith mtp`: extract and stitch are the identity on bytes, a lost layer is added, and what
was tampered with is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)

from draftsmith.commands import mtp
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.mtp import joined_experts
from draftsmith.heads.stored_tensors import header
from draftsmith.inference.api import load
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.target import load_target
from tests.conftest import by_default, tiny_target
from tests.helpers import mtp_models


def checkpoint(kind: str, folder: Path, seed: int = 0, layer: bool = True, **save: Any) -> Path:
    """A target with a tokenizer, in bfloat16."""
    model = mtp_models.make_model(kind, seed)
    tensors = mtp_models.layer_tensors(kind, model) if layer else {}
    model.to(torch.bfloat16).save_pretrained(folder, **save)
    files = sorted(folder.glob("*.safetensors"))
    stored = {
        # as published: the bias of experts in float32
        name: (tensor if "e_score" in name else tensor.to(torch.bfloat16)).contiguous()
        for name, tensor in tensors.items()
    }
    if len(files) == 1:
        save_file({**load_file(files[0]), **stored}, files[0], {"format": "pt"})
    else:
        index = folder / "model.safetensors.index.json"
        table = json.loads(index.read_text())
        # in the last file, next to other tensors
        save_file({**load_file(files[-1]), **stored}, files[-1], {"format": "pt"})
        table["weight_map"] |= dict.fromkeys(stored, files[-1].name)
        index.write_text(json.dumps(table))
    tiny_target(vocab_size=96).tokenizer.save_pretrained(folder)
    return folder


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def extracted(folder: Path, out: Path) -> Path:
    mtp.run(mtp.ExtractOptions(str(folder), str(out)))
    return out


def grafted(base: Path, onto: Path, out: Path) -> None:
    """Makes a drafter of the base model's layer."""
    mtp.run(mtp.ExtractOptions(str(onto), str(out), str(base)))


def stitched(drafter: Path, into: Path, out: Path) -> Path:
    mtp.run(mtp.StitchOptions(str(drafter), str(into), str(out)))
    return out


@pytest.mark.parametrize("kind", mtp_models.FAMILIES)
@pytest.mark.parametrize("save", [{}, {"max_shard_size": "40KB"}])
def test_extract_then_stitch_is_the_identity_on_bytes(
    tmp_path: Path, kind: str, save: dict[str, Any]
) -> None:
    before = checkpoint(kind, tmp_path / "before", **save)
    drafter = extracted(before, tmp_path / "drafter")
    after = stitched(drafter, before, tmp_path / "after")
    assert hashes(after) == hashes(before)


@pytest.mark.parametrize("kind", ["glm", "qwen3.5-moe"])
@pytest.mark.parametrize("save", [{}, {"max_shard_size": "40KB"}])
def test_a_lost_layer_is_grafted_and_stitched(
    tmp_path: Path, kind: str, save: dict[str, Any]
) -> None:
    base = checkpoint(kind, tmp_path / "base")
    tuned = checkpoint(kind, tmp_path / "tuned", seed=5, layer=False, **save)
    with pytest.raises(UserError, match="has no MTP layer"):
        extracted(tuned, tmp_path / "none")
    grafted(base, tuned, tmp_path / "drafter")
    out = stitched(tmp_path / "drafter", tuned, tmp_path / "out")
    again = extracted(out, tmp_path / "again")
    one, two = (load_file(f / "model.safetensors") for f in (tmp_path / "drafter", again))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (tuned, out)]
    ids = torch.tensor([[3, 5, 7]])
    assert torch.equal(*(model(ids).logits for model in models))
    stored = [header(file) for file in sorted(out.glob("*.safetensors"))]
    names = [name for table in stored for name in table]
    assert len(names) == len(set(names))
    layer = {n: f for n, f in stored[-1].items() if ".3." in n or n.startswith("mtp.")}
    assert {f.dtype for f in layer.values() if len(f.shape) > 1} == {"BF16"}
    assert any(n.endswith("mlp.experts.3.up_proj.weight") for n in layer), "one by one, as there"
    key = "num_nextn_predict_layers" if kind == "glm" else "mtp_num_hidden_layers"
    assert json.loads((out / "config.json").read_text())[key] == 1


def test_mtp_layer_of_multimodal_checkpoint_is_extracted_and_stitched(tmp_path: Path) -> None:
    """Qwen3.5 is published so: other names for the language model, and its config in a part."""
    folder = checkpoint("qwen3.5", tmp_path / "target")
    plain = extracted(folder, tmp_path / "plain")
    file, config = folder / "model.safetensors", folder / "config.json"
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t
        for name, t in load_file(file).items()
    }
    save_file(renamed, file, {"format": "pt"})
    values = json.loads(config.read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    config.write_text(json.dumps({**whole, "text_config": values}))
    again = extracted(folder, tmp_path / "again")
    assert hashes(again)["model.safetensors"] == hashes(plain)["model.safetensors"]
    assert hashes(stitched(again, folder, tmp_path / "out")) == hashes(folder)


PUBLISHED = {
    "qwen3.5": Qwen3_5ForConditionalGeneration, "qwen3.5-moe": Qwen3_5MoeForConditionalGeneration
}  # fmt: skip
VISION = dict(
    depth=2, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=32, patch_size=4,
    spatial_merge_size=2, num_position_embeddings=16,
)  # fmt: skip


@pytest.mark.parametrize("kind", by_default(PUBLISHED, "qwen3.5"))
def test_the_published_form_decodes_and_gives_its_layer(tmp_path: Path, kind: str) -> None:
    """With the vision tower: loaded as the text model, decoded with its layer, stitched."""
    text = mtp_models.make_model(kind, vocab_size=300)  # as many as the tokenizer has
    config = PUBLISHED[kind].config_class(text_config=text.config.to_dict(), vision_config=VISION)
    whole = PUBLISHED[kind](config).to(torch.float32)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    folder = tmp_path / "target"
    mtp_models.save(whole, mtp_models.layer_tensors(kind, text), folder, tiny_target().tokenizer)
    stored = header(folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == [PUBLISHED[kind].__name__]
    assert any(name.startswith("model.visual.") for name in stored)
    drafter = extracted(folder, tmp_path / "drafter")
    plain = load(folder, device="cpu", dtype="float32")
    drafted = load(folder, drafter, device="cpu", dtype="float32")
    ids = torch.tensor([[3, 5, 7]])
    assert torch.equal(plain.target.model(ids).logits, text(ids).logits)
    replies = [one.generate("hello there", 16) for one in (plain, drafted)]
    assert replies[0].token_ids == replies[1].token_ids
    assert any(one.drafted for one in replies[1].rounds)
    assert hashes(stitched(drafter, folder, tmp_path / "out")) == hashes(folder)


def test_what_cannot_get_a_layer_is_refused(tmp_path: Path) -> None:
    base = checkpoint("qwen3.5", tmp_path / "base")
    tuned = checkpoint("qwen3.5", tmp_path / "tuned", seed=5, layer=False)
    grafted(base, tuned, tmp_path / "drafter")
    with pytest.raises(UserError, match="lies in"):
        stitched(tmp_path / "drafter", tuned, tuned / "out")
    config = tuned / "config.json"
    values = json.loads(config.read_text())
    file = tuned / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight_scale": torch.ones(1)}, file, {"format": "pt"})
    with pytest.raises(UserError, match="is quantised"):
        stitched(tmp_path / "drafter", tuned, tmp_path / "out")
    config.write_text(json.dumps({**values, "model_type": "nonesuch"}))
    with pytest.raises(UserError, match="nonesuch"):
        grafted(base, tuned, tmp_path / "other")
    wide = checkpoint("glm", tmp_path / "wide")
    with pytest.raises(UserError, match="has model_type qwen3_5_text, the target has glm4_moe"):
        grafted(base, wide, tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        extracted(tmp_path / "empty", tmp_path / "other")
    assert not (tmp_path / "out").exists() and not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["deepseek", "glm", "qwen3.5", "qwen3.5-moe"])
def test_an_extracted_layer_is_its_targets_own(tmp_path: Path, kind: str) -> None:
    """Experts are stored one by one, so that a hash of the files is not that of the target."""
    folder = checkpoint(kind, tmp_path / "target")
    drafter, said = extracted(folder, tmp_path / "drafter"), list[str]()
    target = load_target(TargetConfig(str(folder), device="cpu"))
    Artifact.load(drafter, target.fingerprint(), target.embedding_and_head, said.append)
    assert not said
    other = load_target(
        TargetConfig(str(checkpoint(kind, tmp_path / "other", seed=5)), device="cpu")
    )
    Artifact.load(drafter, other.fingerprint(), other.embedding_and_head, said.append)
    assert bool(said) == (kind == "qwen3.5"), "a part of the weights cannot be compared"


def test_experts_of_the_layer_may_be_stored_otherwise_than_the_targets(tmp_path: Path) -> None:
    folder = checkpoint("qwen3.5-moe", tmp_path / "target")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    assert "model.layers.0.mlp.experts.0.up_proj.weight" in tensors
    layer = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    save_file(tensors | joined_experts(layer), file, {"format": "pt"})
    drafter = extracted(folder, tmp_path / "drafter")
    assert hashes(stitched(drafter, folder, tmp_path / "out")) == hashes(folder)


def test_a_fine_tune_with_more_tokens_gets_the_layer_of_its_base(tmp_path: Path) -> None:
    base = checkpoint("qwen3.5", tmp_path / "base")
    tuned = checkpoint("qwen3.5", tmp_path / "tuned", layer=False)
    model = AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.bfloat16)
    model.resize_token_embeddings(104)
    model.save_pretrained(tuned)
    grafted(base, tuned, tmp_path / "drafter")
    again = extracted(stitched(tmp_path / "drafter", tuned, tmp_path / "out"), tmp_path / "again")
    one, two = (load_file(f / "model.safetensors") for f in (tmp_path / "drafter", again))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


Change = Callable[[dict[str, Tensor]], object]


def under(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


TAMPERED: dict[str, tuple[str, Change, str]] = {
    "missing": (
        "glm",
        lambda t: t.pop("model.layers.3.hnorm.weight"),
        r"model\.layers\.3\.hnorm\.weight is missing",
    ),
    "missing in the layer": (
        "qwen3.5",
        lambda t: t.pop("mtp.layers.0.self_attn.q_norm.weight"),
        r"mtp\.layers\.0\.self_attn\.q_norm\.weight is missing",
    ),
    "surplus": (
        "qwen3.5",
        lambda t: t.update({"mtp.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        r"q_proj\.bias is not part of this drafter",
    ),
    "shape": (
        "deepseek",
        lambda t: t.update({"model.layers.3.enorm.weight": torch.ones(31)}),
        r"enorm\.weight has shape \[31\], expected \[32\]",
    ),
    "half of fc": (
        "qwen3.5",
        lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"][:, :32].contiguous()}),
        r"mtp\.fc\.weight has shape \[32, 32\], expected \[32, 64\]",
    ),
    "number too large": (
        "glm",
        lambda t: under(t, "model.layers.3.", "model.layers.4."),
        r"no tensor begins with model\.layers\.3\.; it has model\.layers\.4\.",
    ),
    "another family's names": (
        "qwen3.5",
        lambda t: under(t, "mtp.", "model.layers.3."),
        "no tensor begins with mtp",
    ),
    "two layers": (
        "qwen3.5",
        lambda t: t.update({"mtp.layers.1.input_layernorm.weight": torch.ones(32)}),
        "has several MTP layers",
    ),
    "one expert lost": (
        "qwen3.5-moe",
        lambda t: t.pop("mtp.layers.0.mlp.experts.2.up_proj.weight"),
        "experts.*is missing",
    ),
    "quantised": (
        "deepseek",
        lambda t: t.update({"model.layers.3.eh_proj.weight_scale_inv": torch.ones(1)}),
        "quantised MTP layer",
    ),
    "whole numbers": (
        "glm",
        lambda t: t.update(
            {"model.layers.3.eh_proj.weight": t["model.layers.3.eh_proj.weight"].to(torch.int8)}
        ),
        r"another type .model.*eh_proj\.weight is torch\.int8",
    ),
    "DSpark of DeepSeek-V4": (
        "deepseek",
        lambda t: (
            under(t, "model.layers.3.", "mtp.0."),
            t.update({"mtp.0.markov_head.weight": torch.ones(4)}),
        ),
        "has a DSpark block",
    ),
    "DSpark": (
        "qwen3.5",
        lambda t: t.update({"mtp.0.markov_head.weight": torch.ones(4)}),
        "has a DSpark block",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_mtp_layers_are_refused(tmp_path: Path, name: str) -> None:
    kind, change, message = TAMPERED[name]
    folder = checkpoint(kind, tmp_path / "target")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match=message):
        extracted(folder, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_layer_with_numbers_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    folder = checkpoint("qwen3.5", tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="not finite"):
        extracted(folder, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize("same", [True, False])
def test_a_layer_that_was_not_tuned_with_its_target_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], same: bool
) -> None:
    base = checkpoint("qwen3.5", tmp_path / "base")
    tuned = checkpoint("qwen3.5", tmp_path / "tuned")
    file = tuned / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight" if same else "mtp.norm.weight"] += 0.5
    save_file(tensors, file, {"format": "pt"})
    grafted(base, tuned, tmp_path / "drafter")
    assert ("has the same layer, which was not tuned" in capsys.readouterr().out) == same


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = checkpoint("qwen3.5", tmp_path / "target", max_shard_size="40KB")
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=file.name):
        extracted(folder, tmp_path / "drafter")


def test_stitch_refuses_parts_other_targets_and_other_drafters(tmp_path: Path) -> None:
    folder = checkpoint("glm", tmp_path / "target")
    drafter = extracted(folder, tmp_path / "drafter")
    file = folder / "model.safetensors"
    whole = load_file(file)
    some = {n: t for n, t in whole.items() if n != "model.layers.3.enorm.weight"}
    save_file(some, file, {"format": "pt"})
    with pytest.raises(UserError, match="a part of an MTP layer"):
        stitched(drafter, folder, tmp_path / "out")
    other = checkpoint("qwen3.5", tmp_path / "other")
    with pytest.raises(UserError, match="model_type glm4_moe, and .* has qwen3_5_text; name the"):
        stitched(drafter, other, tmp_path / "out")
    # Without a layer there are no tensors whose shapes would show it.
    plain = tmp_path / "plain"
    small = tiny_target(vocab_size=96, num_hidden_layers=3, hidden_size=32)
    small.model.save_pretrained(plain)
    small.tokenizer.save_pretrained(plain)
    with pytest.raises(UserError, match="model_type glm4_moe, and .* has llama"):
        stitched(drafter, plain, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_of_other_sizes_is_refused() -> None:
    layer = {"model_type": "glm4_moe", "hidden_size": 32, "n_routed_experts": 4, "pad_token_id": 0}
    given = mtp.StitchOptions("drafter", "target", "out")
    mtp.check_fits(layer, {**layer, "pad_token_id": 1, "rms_norm_eps": 1e-5}, given)
    with pytest.raises(UserError, match="n_routed_experts 4, and target has 8"):
        mtp.check_fits(layer, {**layer, "n_routed_experts": 8}, given)
