"""Every setting of transformers' GenerationConfig that changes a text is applied, or named."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.targets.target import load_target
from draftsmith.inference.targets.target_files import (
    APPLIED,
    SAMPLING,
    WITHOUT_EFFECT,
    not_applied,
    other_sampling,
)
from tests.conftest import tiny_target

KNOWN = {name for name in vars(GenerationConfig()) if name[0] != "_"}
CHANGING: dict[str, Any] = {
    "guidance_scale": 3.0,
    "watermarking_config": {"bias": 9.0, "seeding_scheme": "lefthash"},
    "num_beams": 4,
    "stop_strings": None,  # of the text, see below
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 5.0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "forced_eos_token_id": 7,
    "max_time": 1e-9,
}
HARMLESS: dict[str, Any] = {
    "early_stopping": True,
    "length_penalty": 2.0,
    "use_cache": False,
    "prefill_chunk_size": 2,
    "max_matching_ngram_size": 3,
    "num_assistant_tokens": 3,
    "output_scores": True,
    "return_dict_in_generate": False,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "decoder_start_token_id": 4,
    "disable_compile": True,
}


def text(model: Any, tokenizer: Any, **settings: Any) -> list[int]:
    """Return the greedy text of `generate` with the model's own settings changed."""
    model = copy.copy(model)
    model.generation_config = copy.deepcopy(model.generation_config)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    ids = torch.tensor([[*range(5, 200)]])  # some settings are about the tokens of the prompt
    model.generation_config.max_new_tokens = 12
    torch.manual_seed(0)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, tokenizer=tokenizer
    )[0, ids.shape[1] :].tolist()


def test_exactly_the_settings_that_change_text_are_named() -> None:
    target = tiny_target(eos_token_id=None)
    without = text(target.model, target.tokenizer)
    words = [target.tokenizer.decode([token]) for token in without]
    own: dict[str, Any] = {
        "stop_strings": [next(word for word in words if word.isascii() and word.isprintable())],
        "bad_words_ids": [[without[0]]],
        "suppress_tokens": [without[0]],
        "begin_suppress_tokens": [without[0]],
        "sequence_bias": [[[without[0]], -1e9]],
    }
    for name, value in (CHANGING | own).items():
        if name == "watermarking_config":
            value = GenerationConfig(watermarking_config=value).watermarking_config
        if name not in KNOWN:  # of another version of transformers
            continue
        assert text(target.model, target.tokenizer, **{name: value}) != without, name
        assert not_applied(GenerationConfig(**{name: value})).keys() == {name}
    for name, value in HARMLESS.items():
        assert text(target.model, target.tokenizer, **{name: value}) == without, name
        assert not_applied(GenerationConfig(**{name: value})) == {}


def test_settings_are_those_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting in no list, such as one of a later version, is named; defaults are not."""
    listed = APPLIED | {*SAMPLING} | WITHOUT_EFFECT | {"do_sample"}
    for name in KNOWN - listed:
        config = GenerationConfig()
        setattr(config, name, 0.25)
        assert not_applied(config) == {name: 0.25}

    class Later(GenerationConfig):
        def __init__(self, **more: Any) -> None:
            self.new_penalty = more.pop("new_penalty", 1.0)
            super().__init__(**more)

    assert not_applied(Later()) == {}
    assert not_applied(Later(new_penalty=1.0, no_repeat_ngram_size=0, num_beams=1)) == {}
    assert not_applied(Later(new_penalty=1.5)) == {"new_penalty": 1.5}


def test_loading_warns_about_unsupported_generation_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_target()
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=1, guidance_scale=2.0, stop_strings=["x"]).save_pretrained(
        tmp_path
    )
    with caplog.at_level(logging.WARNING):
        load_target(TargetConfig(str(tmp_path), device="cpu"))
    assert "asks generate for stop_strings=['x'], guidance_scale=2.0; decoding here" in caplog.text


def test_sampling_that_differs_from_recommended_is_reported() -> None:
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=64, top_p=0.95)
    said = other_sampling(config, Sampling(0.7))
    assert "temperature=1.0, top_k=64, top_p=0.95" in said
    assert "temperature=0.7, top_k=0, top_p=1, min_p=0 are taken" in said
    assert other_sampling(config, Sampling(1.0, 64, 0.95)) == ""
    assert other_sampling(GenerationConfig(top_k=64), Sampling(0.7)) == ""
