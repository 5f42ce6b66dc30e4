"""Every drafter for every engine: written as that engine reads it and read back bit for bit, or
refused with the reason."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.draft_model import DraftModel
from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange import exporter
from draftsmith.heads.exchange.engines import ENGINES, EngineName, recipe_for
from draftsmith.heads.exchange.engines.engine import DrafterFacts
from draftsmith.heads.exchange.exporter import export, files_for, load_without_target
from draftsmith.heads.exchange.foreign import Answers
from draftsmith.heads.exchange.public import read_public
from draftsmith.heads.layout import usual_scale
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.architectures import architecture
from tests.helpers.random_artifacts import (
    TARGET,
    also_read_by,
    block,
    eagle,
    heads,
    order,
    side,
)
from tests.helpers.random_eagles import random_eagle

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


EXPRESSIBLE: list[tuple[EngineName, Callable[[], Artifact]]] = [
    ("vllm", lambda: eagle("eagle1")),
    ("sglang", lambda: eagle("eagle1")),
    ("sglang", lambda: eagle("eagle1", fc_bias=True)),
    *[
        (engine, lambda: eagle("eagle3 draft vocabulary"))
        for engine in ("vllm", "speculators", "sglang", "trtllm", "llamacpp")
    ],
    *[
        (engine, lambda: eagle("eagle3"))
        for engine in ("vllm", "speculators", "sglang", "trtllm", "llamacpp")
    ],
    *[
        (engine, lambda: eagle("eagle3.1"))
        for engine in ("vllm", "speculators", "sglang", "trtllm")
    ],
    *[
        (engine, lambda: eagle(norm_fused_taps=True))
        for engine in ("vllm", "speculators", "sglang", "trtllm")
    ],
    *[
        (engine, lambda: eagle(norm_before_residual=True))
        for engine in ("vllm", "speculators", "llamacpp")
    ],
    *[(engine, lambda: eagle(attention_bias=True)) for engine in ("vllm", "speculators")],
    *[
        (engine, lambda: eagle("eagle3 two layers, q/k norms"))
        for engine in ("vllm", "speculators")
    ],
    ("vllm", lambda: eagle("eagle3 of another width")),
    *[(engine, block) for engine in ("vllm", "speculators", "sglang", "trtllm", "llamacpp")],
    *[
        (engine, lambda: block("dspark"))
        for engine in ("vllm", "speculators", "sglang", "trtllm", "llamacpp")
    ],
    *[(engine, lambda: block(attention_bias=True)) for engine in ("vllm", "speculators", "sglang")],
    *[(engine, lambda: block("dspark", rope=PARTIAL)) for engine in ("vllm", "speculators")],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("engine", "make"), EXPRESSIBLE)
def test_what_is_exported_reads_back_bit_for_bit(
    engine: EngineName, make: Callable[[], Artifact], dtype: torch.dtype, tmp_path: Path
) -> None:
    artifact, out = make(), tmp_path / "drafter"
    export(artifact, order(engine, out, dtype), head=TARGET.head_weight)
    norm_output = json.loads((out / "config.json").read_text()).get("norm_output")
    found = read_public(out, side(TARGET), Answers(norm_output=norm_output))
    assert found.notes == [] and found.dtype == dtype
    assert found.drafter.facts() == artifact.drafter.facts()
    ours, theirs = artifact.drafter.serving_state(), found.drafter.serving_state()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(
            tensor.to(dtype) if tensor.is_floating_point() else tensor, theirs[name]
        ), name


@pytest.mark.parametrize(
    ("engine", "config"), [("vllm", {}), ("tgi", {}), ("tgi", {"shared_head": True})]
)
def test_heads_are_exported_in_the_layout_of_the_artifact(
    engine: EngineName, config: dict[str, Any], tmp_path: Path
) -> None:
    artifact = heads(**config)
    export(artifact, order(engine, tmp_path / "drafter", torch.bfloat16))
    again = Artifact.load(
        tmp_path / "drafter", TARGET.fingerprint(), TARGET.embedding_and_head
    ).drafter
    assert again.facts() == artifact.drafter.facts()
    for name, tensor in artifact.drafter.state_dict().items():
        assert torch.equal(tensor.bfloat16(), again.state_dict()[name]), name


REFUSED: list[tuple[EngineName, Callable[[], Artifact], str]] = [
    (
        "trtllm",
        lambda: eagle("eagle1"),
        "DFlash, DSpark or a draft model, not EAGLE-1; this one can be exported to vllm, sglang",
    ),
    (
        "vllm",
        lambda: eagle("eagle1", fc_bias=True),
        "fc has a bias, which engines drop silently, or do not load",
    ),
    ("sglang", heads, "not Medusa heads; this one can be exported to vllm, tgi"),
    ("sglang", lambda: eagle(norm_before_residual=True), "norm_before_residual is not known there"),
    ("trtllm", lambda: eagle(norm_before_residual=True), "norm_before_residual is not known there"),
    ("llamacpp", lambda: eagle("eagle3.1"), "EAGLE-3.1"),
    ("llamacpp", lambda: eagle(taps=(2, 5)), "fuses 2 taps, and the engine reads exactly three"),
    ("sglang", lambda: eagle("eagle3 two layers, q/k norms"), "2 layers"),
    ("llamacpp", lambda: eagle("eagle3", attention_bias=True), "bias on queries and keys"),
    ("vllm", lambda: eagle(activation="gelu"), "activation gelu, engines have silu"),
    ("tgi", lambda: heads(shared_head=True, num_layers=2), "one layer each only"),
    ("vllm", lambda: heads(shared_head=True), "its heads share the target's output matrix"),
    (
        "tgi",
        block,
        "takes Medusa heads, not DFlash; this one can be exported to vllm, speculators, sglang, "
        "trtllm, llamacpp",
    ),
    ("vllm", lambda: block(activation="gelu"), "activation gelu, engines have silu"),
    ("llamacpp", lambda: block(attention_bias=True), "bias on queries and keys"),
    ("trtllm", lambda: block("dspark", attention_bias=True), "bias on queries and keys"),
    ("trtllm", lambda: block(rope=PARTIAL), "a part of each head only"),
    (
        "llamacpp",
        lambda: block("dspark", rope=LLAMA3),
        "positions are of type llama3, which the engine drops",
    ),
    (
        "sglang",
        lambda: block(rope={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        "dynamic rope",
    ),
]


@pytest.mark.parametrize(("engine", "make", "says"), REFUSED)
def test_what_an_engine_cannot_express_is_refused(
    engine: EngineName, make: Callable[[], Artifact], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        export(make(), order(engine, tmp_path / "drafter"), head=TARGET.head_weight)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("family", "refused"), [("gemma2", True), ("falcon-h1", False)])
def test_an_embedding_that_scales_is_not_for_eagle1(
    family: str, refused: bool, tmp_path: Path
) -> None:
    """A Gemma's embedding multiplies the rows that engines hand over; Falcon-H1 does so later.

    The factor is the target's own, whatever the name of the family, and an artifact keeps it.
    """
    target = architecture(family, dtype=torch.float32)
    drafter = Artifact(random_eagle(target, "eagle1"), target.fingerprint())
    drafter.save(tmp_path / "drafter")
    alone = load_without_target(tmp_path / "drafter")
    assert alone.drafter.embedding_and_head.scale == target.embedding_and_head.scale
    for artifact in (drafter, alone):
        if refused:
            with pytest.raises(UserError, match="embedding multiplies rows by 5.657"):
                recipe_for("vllm", artifact)
        else:
            assert recipe_for("vllm", artifact)
    scale = load_without_target(tmp_path / "drafter").drafter.embedding_and_head.scale
    assert scale == pytest.approx(target.embedding_and_head.scale)
    eagle3 = replace(eagle("eagle3"), fingerprint=drafter.fingerprint)
    assert "vllm" in also_read_by("trtllm", eagle3)


@pytest.mark.parametrize(
    "family", ["gemma2", "gemma3", "granite-hybrid", "falcon-h1", "llama", "cohere"]
)
def test_the_usual_scale_is_the_one_that_is_measured(family: str) -> None:
    target = architecture(family)
    usual = usual_scale(target.config.model_type, target.hidden_size)
    ids = torch.arange(5)
    rows = target.model.get_input_embeddings().weight[ids]
    torch.testing.assert_close(target.embed(ids), usual * rows, rtol=1e-5, atol=1e-6)
    assert usual == pytest.approx(target.embedding_and_head.scale)


def test_sglang_config_numbers_taps_as_states_and_layers(tmp_path: Path) -> None:
    """Hidden states 2, 4, 5 are the outputs of layers 1, 3, 4, counted from 0."""
    export(eagle(), order("sglang", tmp_path / "drafter"))
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert (
        config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        and config["num_aux_hidden_states"] == 3
    )
    assert config["eagle_config"] == {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    }


def test_families_whose_taps_sglang_counts_in_its_own_way_are_refused(tmp_path: Path) -> None:
    """DeepSeek: it counts as elsewhere where the first tap is 2."""
    for taps, family, inside in (
        ((2, 4, 5), "deepseek_v3", [1, 3, 4]),
        ((3, 4, 5), "deepseek_v3", None),
        ((3, 4, 5), "llama", [2, 3, 4]),
    ):
        drafter = eagle(taps=taps)
        drafter.fingerprint = replace(drafter.fingerprint, model_type=family)
        if inside is None:
            with pytest.raises(UserError, match="deepseek_v3 targets .* only where the first one"):
                recipe_for("sglang", drafter)
            continue
        export(drafter, order("sglang", tmp_path / "drafter"))
        config = json.loads((tmp_path / "drafter" / "config.json").read_text())
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == inside


def test_a_shared_head_is_written_for_engines_and_not_for_transformers(tmp_path: Path) -> None:
    shared, rows = eagle("eagle3 shared head"), TARGET.head_weight
    with pytest.raises(UserError, match="vllm wants the target's output matrix .* --target"):
        export(shared, order("vllm", tmp_path / "none"))
    export(shared, order("hf", tmp_path / "hf"))
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    ids, states = shared.drafter.draft_vocab_ids, torch.randn(2, 5, 32)
    engines: tuple[EngineName, ...] = ("vllm", "speculators", "sglang", "trtllm", "llamacpp")
    for engine in engines:
        export(shared, order(engine, tmp_path / engine), head=rows)
        written = load_file(tmp_path / engine / "model.safetensors")
        assert torch.equal(written["lm_head.weight"], rows[ids]) and "lm_head.weight" not in stored
        assert "shared_head" not in (tmp_path / engine / "config.json").read_text()
        served = read_public(tmp_path / engine, side(TARGET), Answers()).drafter
        torch.testing.assert_close(served.logits(states), shared.drafter.logits(states))


@pytest.mark.parametrize("name", sorted(eagle("eagle3 draft vocabulary").drafter.serving_state()))
def test_a_writer_that_drops_or_changes_a_tensor_is_caught(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines would load either without a word. Nothing is left behind."""
    for spoil in (lambda t: t.pop(name), lambda t: t.update({name: t[name].roll(1, 0)})):
        monkeypatch.setattr(
            exporter, "files_for", lambda *a, spoil=spoil: _spoilt(files_for(*a), spoil)
        )
        with pytest.raises(UserError):
            export(eagle("eagle3 draft vocabulary"), order("vllm", tmp_path / "drafter"))
        assert list(tmp_path.iterdir()) == []


def _spoilt(files: Any, spoil: Callable[[Any], Any]) -> Any:
    spoil(files[1])
    return files


@pytest.mark.parametrize(
    "change",
    [
        {"norm_before_residual": True}, {"norm_output": True}, {"norm_before_fc": True},
        {"fc_norm": True}, {"rope_theta": 5e5},
        {"rms_norm_eps": 1e-3}, {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        {"head_dim": 16},
        {"num_key_value_heads": 4}, {"vocab_size": 7}, {"draft_vocab_size": 50},
        {"hidden_act": "gelu"},
        {"max_position_embeddings": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_writer_that_garbles_the_config_is_caught(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        exporter, "files_for", lambda *a: ((files := files_for(*a))[0] | change, files[1])
    )
    with pytest.raises(UserError):
        export(eagle("eagle3 draft vocabulary"), order("vllm", tmp_path / "drafter"))
    assert list(tmp_path.iterdir()) == []


def test_configs_hold_what_loaders_trip_over(tmp_path: Path) -> None:
    """Rope in both spellings, no nulls, every flag said, no embedding, no bias, maps only where
    tokens are left out."""
    export(eagle("eagle3 draft vocabulary"), order("vllm", tmp_path / "reduced", torch.bfloat16))
    config = json.loads((tmp_path / "reduced" / "config.json").read_text())
    assert (
        config["rope_theta"] == config["rope_parameters"]["rope_theta"]
        and None not in config.values()
    )
    assert {
        config[key]
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "bias")
    } == {False}
    assert (config["tie_word_embeddings"], config["dtype"], config["vocab_size"]) == (
        False,
        "bfloat16",
        TARGET.vocab_size,
    )
    tensors = load_file(tmp_path / "reduced" / "model.safetensors")
    assert (
        tensors["d2t"].dtype == torch.int64
        and tensors["t2d"].dtype == torch.bool
        and "embed_tokens.weight" not in tensors
    )
    export(eagle("eagle3"), order("vllm", tmp_path / "full"))
    with safe_open(tmp_path / "full" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names.isdisjoint({"d2t", "t2d"}) and not [name for name in names if "bias" in name]
    export(heads(), order("tgi", tmp_path / "medusa"))
    config = json.loads((tmp_path / "medusa" / "config.json").read_text())
    assert "architectures" not in config and config["medusa_fc_bias"] is True
    assert config["base_model_name_or_path"] == "the/target", "where TGI looks for the target"


def test_a_draft_model_is_an_ordinary_one(tmp_path: Path) -> None:
    artifact = load_without_target(ROOT / "scripts/quickstart/drafters/distill")
    assert artifact.drafter.kind == "draft_model"
    export(artifact, order("vllm", tmp_path / "draft", torch.float32))
    again = load_without_target(tmp_path / "draft")
    assert all(
        torch.equal(a.float(), b)
        for a, b in zip(artifact.drafter.parameters(), again.drafter.parameters(), strict=True)
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [2112, 2048 + 3, 2048 - 5])
def test_a_draft_model_of_another_vocabulary_gets_the_targets(
    size: int, tied: bool, tmp_path: Path
) -> None:
    """Rows that are no tokens are cut off; missing ones are never the most probable."""
    artifact = load_without_target(ROOT / "scripts/quickstart/drafters/distill")
    # A target of `size` rows whose tokenizer has fewer tokens than either.
    own = artifact.drafter
    tokens = {token: i for token, i in own.tokenizer.get_vocab().items() if i < 2000}
    tokenizer = type("Tokens", (), {"get_vocab": lambda _: tokens})()
    config = copy.deepcopy(own.model.config)
    config.tie_word_embeddings = tied
    model = type(own.model)(config)
    draft = DraftModel(model, tokenizer, size)
    changed = draft.for_export(size).model
    assert changed.config.vocab_size == size and model.config.vocab_size == 2048
    ids = torch.randint(0, 2000, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = model(ids).logits, changed(ids).logits
    kept = min(size, 2048)
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    assert after.shape[-1] == size and (after.argmax(-1) < kept).all()
    (note,) = [n for n in notes_of("vllm", draft, size) if "engines compare the two" in n]
    assert f"2,048 rows, the target one of {size:,}" in note


def notes_of(engine: str, drafter: Any, size: int) -> list[str]:
    facts = DrafterFacts(drafter, "llama", size, {})
    return ENGINES[engine].recipes["draft_model"].notes_for(facts)


def test_a_tokenizer_with_more_tokens_than_the_target_has_rows_is_refused() -> None:
    artifact = load_without_target(ROOT / "scripts/quickstart/drafters/distill")
    with pytest.raises(UserError, match="ids up to 2047, and the target has rows for 1000"):
        artifact.drafter.for_export(1000)


def test_a_drafter_without_its_target_is_the_same(tmp_path: Path) -> None:
    artifact = eagle("eagle3.1")
    artifact.save(tmp_path / "drafter")
    alone = load_without_target(tmp_path / "drafter")
    assert all(
        torch.equal(t, alone.drafter.state_dict()[name])
        for name, t in artifact.drafter.state_dict().items()
    )
    for folder, says in ((QUICKSTART, "was not made here"), (tmp_path, "is not a drafter")):
        with pytest.raises(UserError, match=says):
            load_without_target(folder)


def test_nan_or_float16_overflow_in_weights_is_refused(tmp_path: Path) -> None:
    artifact = eagle()
    artifact.drafter.fc.weight[0, 0] = 1e5
    with pytest.raises(
        UserError, match="fc.weight does not fit into float16; use --dtype bfloat16"
    ):
        export(artifact, order("vllm", tmp_path / "drafter", torch.float16))
    artifact.drafter.fc.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match="fc.weight of the drafter holds NaN"):
        export(artifact, order("vllm", tmp_path / "drafter"))
    assert list(tmp_path.iterdir()) == []


def test_sglang_specific_restrictions_are_applied(tmp_path: Path) -> None:
    """It takes a tap as wide as the state for the state; some families' files are its own; partial
    rotary stands elsewhere."""
    with pytest.raises(UserError, match="taken for one and fc is left out"):
        recipe_for("sglang", eagle(taps=(4,)))
    deep = eagle(taps=(3, 4, 5))
    assert "sglang" in also_read_by("vllm", deep)
    deep.fingerprint = replace(deep.fingerprint, model_type="deepseek_v3")
    assert "sglang" not in also_read_by("vllm", deep)
    partial = eagle(
        rope={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    )
    export(partial, order("sglang", tmp_path / "drafter"))
    assert (
        json.loads((tmp_path / "drafter" / "config.json").read_text())["partial_rotary_factor"]
        == 0.5
    )
    with pytest.raises(UserError, match="dynamic rope is scaled there"):
        recipe_for(
            "sglang", eagle(rope={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
        )
