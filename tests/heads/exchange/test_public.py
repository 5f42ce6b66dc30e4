"""Other people's layouts, written here as they write them: read to the same numbers, or refused or
asked about by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange.foreign import Answers
from draftsmith.heads.stored_tensors import StoredTensors
from tests.helpers.public_checkpoints import (
    EMBEDDING,
    LLAMA,
    Tensors,
    eagle1,
    eagle3,
    read,
    same,
    specforge,
    speculators_config,
    store,
)
from tests.helpers.random_artifacts import TAPS, TARGET, eagle, heads


def test_eagle1_with_bias_and_embedding_is_read(tmp_path: Path) -> None:
    drafter, tensors = eagle1(fc_bias=True)
    found = read(store(tmp_path / "e", LLAMA, tensors))
    same(found, drafter)
    assert found.layout == "eagle1" and found.notes == []


def test_qkv_bias_key_of_qwen2_eagle1_is_read(tmp_path: Path) -> None:
    drafter, tensors = eagle1(fc_bias=True, attention_bias=True)
    same(read(store(tmp_path / "e", LLAMA | {"qkv_bias": True}, tensors)), drafter)


def test_missing_rope_base_defaults_to_10000_with_a_note(tmp_path: Path) -> None:
    drafter, tensors = eagle1()
    config = {key: value for key, value in (LLAMA | {"bias": False}).items() if key != "rope_theta"}
    found = read(store(tmp_path / "e", config, tensors))
    same(found, drafter)
    assert len(found.notes) == 1 and "10000" in found.notes[0]


def test_safeailab_eagle3_checkpoint_is_read_with_notes(tmp_path: Path) -> None:
    """No taps, 40 layers in the config, maps beside the head."""
    drafter, tensors = eagle3("eagle3 draft vocabulary")
    config = LLAMA | {"draft_vocab_size": 60, "num_hidden_layers": 40}
    found = read(store(tmp_path / "e", config, tensors))
    same(found, drafter)
    assert found.drafter.taps == (2, 4, 5) and [
        "layers" in note or "taps" in note for note in found.notes
    ] == [True, True]


def test_specforge_counts_layers_from_0_and_stores_maps_of_the_whole_vocabulary(
    tmp_path: Path,
) -> None:
    drafter, tensors = eagle3()
    whole = (
        torch.zeros(TARGET.vocab_size, dtype=torch.int64),
        torch.ones(TARGET.vocab_size, dtype=torch.bool),
    )
    found = read(
        store(
            tmp_path / "e",
            specforge(),
            tensors | {"d2t": whole[0], "t2d": whole[1]},
            "model.safetensors",
        )
    )
    same(found, drafter)
    assert found.drafter.taps == (2, 4, 5)


def test_nemo_prefix_and_old_norm_names_are_read(tmp_path: Path) -> None:
    """NeMo keeps a head in `model.`; aux_norm_low and its like are fc_norm.0, 1, 2."""
    drafter, tensors = eagle3("eagle3.1")
    names = {"fc_norm.0.weight": "aux_norm_low.weight", "fc_norm.1.weight": "aux_norm_mid.weight"}
    names |= {"fc_norm.2.weight": "aux_norm_high.weight"}
    renamed = {f"model.{names.get(name, name)}": tensor for name, tensor in tensors.items()}
    config = specforge(
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_norm": True},
        norm_output=True,
    )
    same(read(store(tmp_path / "e", config, renamed), Answers(norm_output=True)), drafter)


def test_speculators_checkpoint_is_read_without_notes(tmp_path: Path) -> None:
    """Its frozen copy of the target's embedding is dropped; flags are its own and need no
    asking."""
    drafter, tensors = eagle3(norm_before_residual=True, norm_output=True, norm_fused_taps=True)
    stored = {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
    } | {"embed_tokens.weight": EMBEDDING}
    found = read(store(tmp_path / "e", speculators_config(drafter), stored, "model.safetensors"))
    same(found, drafter)
    assert found.layout == "speculators" and found.notes == []


def test_heads_that_may_have_been_converted_wrongly_are_noted(tmp_path: Path) -> None:
    """Converters have counted taps one too low, and SpecForge has trained heads without a norm."""
    drafter, tensors = eagle3(norm_before_residual=True, norm_output=True, norm_fused_taps=True)
    stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    low = speculators_config(drafter, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    (note,) = read(store(tmp_path / "s", low, stored)).notes
    assert "taps are one too low" in note
    _, tensors = eagle3()
    ones = tensors | {"norm.weight": torch.ones_like(tensors["norm.weight"])}
    found = read(
        store(tmp_path / "f", specforge(norm_output=True), ones), Answers(norm_output=True)
    )
    assert not any("all ones" in note for note in found.notes), "the user has said it"
    found = read(store(tmp_path / "g", specforge(norm_output=False), ones), Answers())
    assert any("all ones" in note for note in found.notes)


def test_medusa_heads_are_refused(tmp_path: Path) -> None:
    config = {"medusa_num_heads": 4, "medusa_num_layers": 1}
    tensors = dict(heads().drafter.serving_state())
    with pytest.raises(UserError, match="holds Medusa heads, which are not imported"):
        read(store(tmp_path / "m", config, tensors))


def test_half_precision_is_kept_unless_dtypes_are_mixed(tmp_path: Path) -> None:
    _, tensors = eagle3()
    half = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    assert read(store(tmp_path / "e", specforge(), half)).dtype == torch.float16
    assert (
        read(
            store(
                tmp_path / "f", specforge(), half | {"norm.weight": tensors["norm.weight"].float()}
            )
        ).dtype
        == torch.float32
    )


def without(name: str) -> Callable[[dict[str, Any], Tensors], Any]:
    return lambda config, tensors: (config.pop(name, None), tensors.pop(name, None))


TAPS_KEY = "eagle_aux_hidden_state_layer_ids"


REFUSED: list[tuple[Callable[[dict[str, Any], Tensors], Any], str]] = [
    (without("fc.weight"), "fc.weight is missing"),
    (without("midlayer.hidden_norm.weight"), "midlayer.hidden_norm.weight is missing"),
    (without("lm_head.weight"), "lm_head.weight is missing"),
    (without("d2t"), "d2t is missing, so it is unknown which 60"),
    (
        lambda c, t: t.update({"norms.weight": t.pop("norm.weight")}),
        "norm.weight is missing; norms.weight is not part",
    ),
    (
        lambda c, t: t.update({"midlayer.self_attn.q_proj.bias": torch.ones(32)}),
        "k_proj.bias is missing",
    ),
    (lambda c, t: t["d2t"].__setitem__(1, t["d2t"][0] - 1), "names tokens twice"),
    (lambda c, t: t["d2t"].__setitem__(-1, 10_000), "outside the target's vocabulary"),
    (lambda c, t: t["t2d"].logical_not_(), "d2t and t2d. name different tokens"),
    (without("hidden_size"), "lacks hidden_size"),
    (lambda c, t: c.update(vocab_size=7), "vocab_size is 7, the target's"),
    (
        lambda c, t: c.update(rope_parameters={"rope_theta": 5.0}),
        "rope_theta 10000.0 .rope_theta. and 5.0 .rope_parameters.rope_theta.",
    ),
    (lambda c, t: c.update(fc_norm=True, norm_before_fc=True), "fc_norm and norm_before_fc"),
    (lambda c, t: c.update(norm_before_fc=True), "input_norm.weight is missing"),
    (
        lambda c, t: c.update(norm_output=True),
        "norm_output=true if drafts recycle.*norm_output=false",
    ),
    (
        lambda c, t: c.update({TAPS_KEY: [2, 4, 6]}),
        r"taps \[2, 4, 6\] and, inside eagle_config, \[1, 3, 4\]",
    ),
    (
        lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}),
        r"hidden states \[2, 4, 7\] for .*choose with --set taps",
    ),
    (lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}), "fed by the last state"),
    (
        lambda c, t: c.update({TAPS_KEY: [2, 5]}, eagle_config={}),
        "fuses 3 taps of width 32, the config names 2",
    ),
    (lambda c, t: c.update({TAPS_KEY: [2, 4, 9]}, eagle_config={}), "between 0 and 7"),
    (
        lambda c, t: c.update({TAPS_KEY: [2, 4, 8]}, eagle_config={}),
        r"taps \[2, 4, 8\] include 8, the state after the last layer.* cannot be imported",
    ),
    (lambda c, t: t.update({"embed_tokens.weight": EMBEDDING * 1.1}), "--set embedding=target"),
    (lambda c, t: c.update(eagle_config=[1]), "has an invalid field"),
    (lambda c, t: c.update(num_attention_heads="four"), "has an invalid field"),
    (
        lambda c, t: t.clear() or t.update(x=torch.ones(1)) or c.pop("draft_vocab_size"),
        "not an EAGLE, DFlash, DSpark or",
    ),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_invalid_or_ambiguous_checkpoints_are_refused_by_name(
    change: Callable[[dict[str, Any], Tensors], Any], says: str, tmp_path: Path
) -> None:
    _, tensors = eagle3("eagle3 draft vocabulary")
    config, tensors = (
        specforge(draft_vocab_size=60),
        {name: tensor.clone() for name, tensor in tensors.items()},
    )
    change(config, tensors)
    with pytest.raises(UserError, match=says):
        read(store(tmp_path / "e", config, tensors))


def test_answers_resolve_ambiguous_checkpoint_settings(tmp_path: Path) -> None:
    drafter, tensors = eagle3(norm_output=True)
    folder = store(
        tmp_path / "e", specforge(norm_output=True, eagle_config={}, fc_norm=False), tensors
    )
    for answer in (True, False):
        found = read(folder, Answers(taps=TAPS, norm_output=answer)).drafter
        assert found.shape == replace(drafter.shape, norm_output=answer, max_positions=256)
    config = {
        key: value
        for key, value in speculators_config(drafter).items()
        if key != "norm_before_residual"
    }
    stored = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    with pytest.raises(
        UserError, match="default is false and vLLM's true.*norm_before_residual=true"
    ):
        read(store(tmp_path / "s", config, stored))
    assert read(
        tmp_path / "s", Answers(norm_before_residual=True)
    ).drafter.shape.norm_before_residual
    folder = store(tmp_path / "m", specforge(), tensors | {"embed_tokens.weight": EMBEDDING * 2})
    assert "left out" in read(folder, Answers(target_embedding=True)).notes[0]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_pickled_heads_are_read_as_the_same_tensors(name: str, tmp_path: Path) -> None:
    tensors = dict(eagle("eagle1").drafter.serving_state())
    folder = store(tmp_path / "e", LLAMA, tensors)
    expected = read(folder).drafter.serving_state()
    (folder / "model.safetensors").unlink()
    torch.save({key: tensor.detach().clone() for key, tensor in tensors.items()}, folder / name)
    found = read(folder).drafter.serving_state()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_folders_without_a_valid_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*config.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no weights"):
        read(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"cannot read .*model.safetensors"):
        read(tmp_path)


def test_tensor_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="x is in two files"):
        StoredTensors(tmp_path)


def test_an_index_says_which_files_are_the_weights(tmp_path: Path) -> None:
    drafter, tensors = eagle1(fc_bias=True)
    folder = store(tmp_path / "e", LLAMA, tensors)
    names = sorted(tensors)
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    for part in (0, 1):
        save_file(
            {name: tensors[name].clone() for name in names[part::2]},
            folder / f"model-{part}.safetensors",
        )
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same(read(folder), drafter)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match="names model-1.safetensors, which is not there"):
        read(folder)


def test_tensor_errors_are_reported_verbatim(tmp_path: Path) -> None:
    """And not as a garbled field of the config."""
    _, tensors = eagle3()
    del tensors["fc.weight"]
    with pytest.raises(UserError, match=r"^\S+ does not fit its config: fc.weight is missing$"):
        read(store(tmp_path / "e", specforge(), tensors))
    with pytest.raises(UserError, match="fc.weight is torch.float8_e4m3fn, which is not read here"):
        read(
            store(
                tmp_path / "f",
                specforge(),
                tensors | {"fc.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)},
            )
        )
