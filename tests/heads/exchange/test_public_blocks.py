"""Block drafters in other people's layouts, and in ours for engines: read to the same numbers, or
refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange import exporter
from draftsmith.heads.exchange.engines import recipe_for
from draftsmith.heads.exchange.exporter import export, files_for
from draftsmith.heads.exchange.foreign import Answers
from tests.helpers.public_blocks import (
    BACKBONE,
    HEAD,
    LAYERS,
    MASK,
    READ,
    deepspec,
    library,
    specforge,
    stored,
    z_lab,
)
from tests.helpers.public_checkpoints import EMBEDDING, Tensors, read, same, store
from tests.helpers.random_artifacts import TAPS, also_read_by, block, order


@pytest.mark.parametrize("name", READ)
def test_public_block_layouts_are_read_without_notes(name: str, tmp_path: Path) -> None:
    kind, config, more, layout = READ[name]
    drafter, tensors = stored(kind)
    found = read(store(tmp_path / "d", config, tensors | more, "model.safetensors"))
    same(found, drafter)
    assert (found.layout, found.notes) == (layout, [])


def test_assumed_block_defaults_are_noted(tmp_path: Path) -> None:
    drafter, tensors = stored("dflash")
    config = {key: value for key, value in z_lab().items() if key != "block_size"}
    found = read(store(tmp_path / "d", config, tensors))
    assert (
        found.drafter.shape == replace(drafter.shape, block_size=16)
        and "using 16" in found.notes[0]
    )
    found = read(store(tmp_path / "s", library("dflash", sliding_window_non_causal=False), tensors))
    same(found, drafter)
    assert "vLLM takes them as causal" in found.notes[0]


def at_top(**keys: Any) -> Callable[[dict[str, Any], Tensors], Any]:
    return lambda config, tensors: config.update(keys)


def inside(**keys: Any) -> Callable[[dict[str, Any], Tensors], Any]:
    return lambda config, tensors: config["dflash_config"].update(keys)


def without(name: str) -> Callable[[dict[str, Any], Tensors], Any]:
    return lambda config, tensors: (
        config.pop(name, None),
        config.get("dflash_config", {}).pop(name, None),
        tensors.pop(name, None),
    )


REFUSED: list[
    tuple[Callable[..., dict[str, Any]], str, Callable[[dict[str, Any], Tensors], Any], str]
] = [
    (z_lab, "dflash", without("fc.weight"), "fc.weight is missing"),
    (z_lab, "dflash", without("hidden_norm.weight"), "hidden_norm.weight is missing"),
    (
        z_lab,
        "dflash",
        without("layers.1.self_attn.k_norm.weight"),
        "layers.1.self_attn.k_norm.weight is missing",
    ),
    (
        z_lab,
        "dflash",
        lambda c, t: t.update(mask_hidden=torch.ones(32)),
        "mask_hidden is not part of this drafter",
    ),
    (
        z_lab,
        "dflash",
        lambda c, t: t.update({"layers.0.self_attn.o_proj.bias": torch.ones(32)}),
        "o_proj.bias is not part",
    ),
    (
        z_lab,
        "dflash",
        without("target_layer_ids"),
        "lacks target_layer_ids; name the .* with --set taps",
    ),
    (z_lab, "dflash", without("mask_token_id"), "lacks mask_token_id"),
    (
        z_lab,
        "dflash",
        without("rope_theta"),
        "lacks rope_theta, for which engines take different ones",
    ),
    (z_lab, "dflash", without("num_key_value_heads"), "lacks num_key_value_heads"),
    (
        z_lab,
        "dflash",
        inside(target_layer_ids=[1, 3, 8]),
        r"taps \[2, 4, 9\] must be ascending, distinct and between 1 and 7",
    ),
    (
        z_lab,
        "dflash",
        inside(target_layer_ids=[1, 3]),
        "fuses 3 taps of width 32, the config names",
    ),
    (
        z_lab,
        "dflash",
        at_top(target_layer_ids=TAPS),
        r"target_layer_ids \[2, 4, 5\] and dflash_config.target_layer_ids \[1, 3, 4\]",
    ),
    (z_lab, "dflash", at_top(eagle_aux_hidden_state_layer_ids=LAYERS), "other hidden states"),
    (z_lab, "dflash", at_top(block_size=1), "block_size is 1, not a whole number of at least 2"),
    (z_lab, "dflash", inside(mask_token_id=MASK + 1), "which is not among the target's"),
    (z_lab, "dflash", at_top(vocab_size=7), "vocab_size is 7, the target's"),
    (z_lab, "dflash", at_top(num_target_layers=9), "num_target_layers is 9, the target's 8"),
    (
        z_lab,
        "dflash",
        at_top(layer_types=["sliding_attention", "full_attention"]),
        "sliding attention",
    ),
    (z_lab, "dflash", inside(use_swa=True), "sliding attention"),
    (z_lab, "dflash", inside(causal=True), "its blocks are causal"),
    (z_lab, "dflash", at_top(is_causal=True), "its blocks are causal"),
    (
        z_lab,
        "dflash",
        inside(input_embedding_scale=5.6),
        "says dflash_config.input_embedding_scale 5.6, .* no such factor but 1",
    ),
    (z_lab, "dflash", at_top(output_multiplier=0.5), "says output_multiplier 0.5"),
    (z_lab, "dflash", at_top(is_neox_style=False), "rotate neighbours"),
    (z_lab, "dflash", inside(attention_sink_bias=True), "attention has sinks"),
    (
        z_lab,
        "dflash",
        inside(sample_from_anchor=True),
        "its anchor drafts too .sample_from_anchor., which draftsmith.s DFlash does not",
    ),
    (z_lab, "dflash", inside(shift_label=True), "its anchor drafts too"),
    (
        deepspec,
        "dflash",
        at_top(markov_rank=0),
        "a DFlash whose anchor drafts too .markov_rank 0.",
    ),
    (
        z_lab,
        "dflash",
        at_top(architectures=["DFlash2DraftModel"]),
        "is DFlash2DraftModel, which is not supported",
    ),
    (
        z_lab,
        "dflash",
        at_top(draft_vocab_size=60),
        "drafts a part of the target's vocabulary .d2t.",
    ),
    (
        z_lab,
        "dflash",
        lambda c, t: t.update(d2t=torch.arange(60)),
        "drafts a part of the target's vocabulary",
    ),
    (z_lab, "dflash", at_top(dflash_config=[1]), "has an invalid field"),
    (deepspec, "dspark", without("markov_rank"), "lacks markov_rank"),
    (deepspec, "dspark", at_top(markov_rank=7), "markov_head.markov_w1.weight has shape"),
    (deepspec, "dspark", without("markov_head.markov_w2.weight"), "markov_w2.weight is missing"),
    (
        deepspec,
        "dspark",
        at_top(markov_head_type="gated"),
        "its transition bias is of type 'gated'",
    ),
    (deepspec, "dspark", at_top(markov_head_type="rnn"), "its transition bias is of type 'rnn'"),
    (deepspec, "dspark", at_top(sample_from_anchor=False), "its anchor does not draft"),
    (specforge, "dspark", inside(shift_label=False), "its anchor does not draft"),
    (deepspec, "dspark", at_top(enable_confidence_head=False), "it has no confidence head"),
    (
        deepspec,
        "dspark",
        at_top(confidence_head_with_markov=False),
        "computed without the token before",
    ),
    (deepspec, "dspark", at_top(final_logit_softcapping=30.0), "its logits are capped"),
    (
        deepspec,
        "dspark",
        lambda c, t: t.update({"lm_head.weight": HEAD * 1.1}),
        "lm_head.weight is up to .* from the target's",
    ),
    (
        deepspec,
        "dspark",
        lambda c, t: t.update({"embed_tokens.weight": EMBEDDING * 1.1}),
        "--set embedding=target to use the target's",
    ),
]


@pytest.mark.parametrize(
    ("config", "kind", "change", "says"),
    REFUSED,
    ids=[f"{row[0].__name__}: {row[3]}" for row in REFUSED],
)
def test_invalid_or_unsupported_block_checkpoints_are_refused_by_name(
    config: Callable[..., dict[str, Any]],
    kind: str,
    change: Callable[[dict[str, Any], Tensors], Any],
    says: str,
    tmp_path: Path,
) -> None:
    _, tensors = stored(kind)
    changed = json.loads(json.dumps(config()))
    change(changed, tensors)
    with pytest.raises(UserError, match=says):
        read(store(tmp_path / "d", changed, tensors, "model.safetensors"))


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("dspark", {"sample_from_anchor": None}, "its anchor does not draft"),
        ("dflash", {"sample_from_anchor": True}, "its anchor drafts too"),
        ("dflash", {"speculators_model_type": "peagle"}, "only eagle3, dflash, dspark are read"),
        ("dflash", {"draft_vocab_size": 60}, "drafts a part"),
        ("dflash", {"aux_hidden_state_layer_ids": None}, "has an invalid field"),
        ("dspark", {"markov_head_type": "rnn"}, "type 'rnn'"),
        (
            "dflash",
            {"transformer_layer_config": {**BACKBONE, "layer_types": ["sliding_attention"] * 2}},
            "sliding attention",
        ),
    ],
)
def test_unsupported_options_of_library_checkpoints_are_refused(
    kind: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        read(store(tmp_path / "d", library(kind, **change), stored(kind)[1], "model.safetensors"))


def test_separate_mask_embedding_is_refused(tmp_path: Path) -> None:
    folder = store(tmp_path / "d", z_lab(), stored("dflash")[1], "model.safetensors")
    torch.save(torch.ones(32), folder / "mask_embedding.pt")
    with pytest.raises(UserError, match="an embedding of its own for the mask token"):
        read(folder)


def test_answers_supply_taps_and_drop_stored_embedding(tmp_path: Path) -> None:
    drafter, tensors = stored("dflash")
    config = z_lab(dflash_config={"mask_token_id": MASK})
    folder = store(tmp_path / "d", config, tensors | {"embed_tokens.weight": EMBEDDING * 2})
    found = read(folder, Answers(taps=TAPS, target_embedding=True))
    same(found, drafter)
    assert "left out for the target's" in found.notes[0]


def test_exported_block_configs_hold_expected_keys_per_engine(tmp_path: Path) -> None:
    """Where each engine looks: taps as layers from 0 (in speculators' format as states), no key at
    which another one stops."""
    written = {}
    for kind in ("dflash", "dspark"):
        for engine in ("vllm", "speculators"):
            export(block(kind), order(engine, tmp_path / f"{kind}-{engine}"))  # type: ignore[arg-type]
            written[kind, engine] = json.loads(
                (tmp_path / f"{kind}-{engine}" / "config.json").read_text()
            )
    inner = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4]}
    flash, spark = written["dflash", "vllm"], written["dspark", "vllm"]
    assert (
        flash["dflash_config"] == inner | {"block_size": 5, "causal": False}
        and flash["block_size"] == 5
    )
    assert not {"markov_rank", "enable_confidence_head", "sample_from_anchor"} & flash.keys(), (
        "TensorRT-LLM takes it for DSpark"
    )
    assert (
        spark["dflash_config"] == inner
        and spark.items() >= {**inner, "markov_rank": 6, "sample_from_anchor": True}.items()
    )
    for kind, anchored in (("dflash", False), ("dspark", True)):
        config = written[kind, "speculators"]
        assert config["aux_hidden_state_layer_ids"] == TAPS and config["mask_token_id"] == MASK
        assert (config["sample_from_anchor"], config["sliding_window_non_causal"]) == (
            anchored,
            True,
        )
        assert (
            "dflash_config" not in config
            and config["transformer_layer_config"]["rope_theta"] == 10000.0
        )


@pytest.mark.parametrize(
    ("kind", "drafts", "sizes"),
    [("dflash", 4, (5, 5)), ("dflash", 2, (3, 3)), ("dspark", 4, (4, 5))],
)
def test_sglang_counts_the_anchor(kind: str, drafts: int, sizes: tuple[int, int]) -> None:
    """As a slot of DFlash's block, and as a draft token of both."""
    artifact = block(kind)
    command = recipe_for("sglang", artifact).serve(
        order("sglang", Path("x"), drafts=drafts), artifact.drafter
    )
    assert (
        f"--speculative-{kind}-block-size {sizes[0]} --speculative-num-draft-tokens {sizes[1]}"
        in command
    )


def test_sglang_export_writes_zero_output_projection_biases(
    tmp_path: Path,
) -> None:
    export(block(attention_bias=True), order("sglang", tmp_path / "d"))
    assert not load_file(tmp_path / "d" / "model.safetensors")[
        "layers.1.self_attn.o_proj.bias"
    ].any()
    assert also_read_by("vllm", block(attention_bias=True)) == ["sglang"]


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("final_logit_softcapping", 30.0, True),
        ("logits_scaling", 8.0, True),
        ("logit_scale", 0.25, True),
        ("logit_scale", 1.0, False),
        ("final_logit_softcapping", None, False),
    ],
)
def test_dspark_export_is_refused_if_target_rescales_logits(
    name: str, value: Any, refused: bool
) -> None:
    """Engines add it to unchanged logits, whatever the name of the target's family."""
    spark, flash = (
        replace(made, fingerprint=replace(made.fingerprint, numbers={name: value}))
        for made in (block("dspark"), block())
    )
    if refused:
        with pytest.raises(UserError, match=f"changes its logits .{name} {value:g}.*train dflash"):
            recipe_for("vllm", spark)
    else:
        assert recipe_for("vllm", spark)
    assert "llamacpp" in also_read_by("vllm", flash)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS}}),
    ("dflash", {"dflash_config": {"mask_token_id": 3, "target_layer_ids": LAYERS}}),
    ("dflash", {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": LAYERS,
    "causal": True}}),
    ("dflash", {"block_size": 6}), ("dflash", {"rope_theta": 5e5}), ("dflash",
    {"rms_norm_eps": 1e-3}),
    ("dflash", {"layer_types": ["sliding_attention"] * 2}), ("dflash", {"num_hidden_layers": 1}),
    ("dflash", {"head_dim": 16}),
    ("dspark", {"target_layer_ids": TAPS}), ("dspark",
    {"markov_rank": 5}),
    ("dspark", {"sample_from_anchor": False}), ("dspark", {"confidence_head_with_markov": False}),
    ("dspark", {"mask_token_id": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change"), CHANGES, ids=str)
def test_a_writer_that_garbles_the_config_is_caught(
    kind: str, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        exporter, "files_for", lambda *a: ((files := files_for(*a))[0] | change, files[1])
    )
    with pytest.raises(UserError):
        export(block(kind), order("vllm", tmp_path / "drafter"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(block("dspark").drafter.serving_state()))
def test_a_writer_that_drops_or_changes_a_tensor_is_caught(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines would load either without a word."""
    for spoil in (lambda t: t.pop(name), lambda t: t.update({name: t[name].roll(1, 0) + 1})):

        def spoilt(*given: Any, spoil: Callable[[Tensors], Any] = spoil) -> Any:
            config, tensors = files_for(*given)
            spoil(tensors)
            return config, tensors

        monkeypatch.setattr(exporter, "files_for", spoilt)
        with pytest.raises(UserError):
            export(block("dspark"), order("vllm", tmp_path / "drafter"))
        assert list(tmp_path.iterdir()) == []
