"""`model.generate(custom_generate=FOLDER)` of an export gives plain `generate`'s text."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
)

from draftsmith.commands.exporting import ExportOptions, run
from draftsmith.heads.errors import UserError
from draftsmith.inference.api import load
from tests.conftest import QUICKSTART
from tests.helpers.trained import questions

DRAFTERS = ("eagle3", "medusa", "dspark", "distill")


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("exports")
    for name in DRAFTERS:
        run(ExportOptions(str(QUICKSTART.parent / "drafters" / name), "hf", str(folder / name)))
    return {name: str(folder / name) for name in DRAFTERS}


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(QUICKSTART, padding_side="left")


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> Any:
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": words}], tokenize=False, add_generation_prompt=True
        )
        for words in questions("test", 3)
    ]
    return tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)


def custom(model: Any, folder: str, **arguments: Any) -> Any:
    return model.generate(custom_generate=folder, trust_remote_code=True, **arguments)


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_sequences_are_those_of_plain_generate(
    model: Any, prompts: Any, exports: dict[str, str], name: str
) -> None:
    """A batch with padding on the left and replies of different lengths, token for token."""
    plain = model.generate(**prompts, max_new_tokens=40, do_sample=False)
    found = custom(model, exports[name], **prompts, max_new_tokens=40, do_sample=False)
    assert found.tolist() == plain.tolist()
    one = {key: value[:1] for key, value in prompts.items()}
    assert (
        custom(model, exports[name], **one, max_new_tokens=9).shape[1]
        == (model.generate(**one, max_new_tokens=9).shape[1])
    )


def test_options_of_generate_mean_the_same(
    model: Any, tokenizer: Any, prompts: Any, exports: dict[str, str]
) -> None:
    folder = exports["eagle3"]
    one = {key: value[:1] for key, value in prompts.items()}
    for options in (
        {},  # transformers' default length
        {"max_length": one["input_ids"].shape[1] + 7},
        {"repetition_penalty": 1.3, "max_new_tokens": 24},
        {"eos_token_id": None, "max_new_tokens": 60},
        {"stop_strings": ["return"], "tokenizer": tokenizer, "max_new_tokens": 40},
        {"return_dict_in_generate": True, "max_new_tokens": 5},
    ):
        plain, found = model.generate(**one, **options), custom(model, folder, **one, **options)
        if "return_dict_in_generate" in options:
            plain, found = plain.sequences, found.sequences
        assert found.tolist() == plain.tolist(), options


def test_a_generation_config_is_filled_from_the_models(
    model: Any, prompts: Any, exports: dict[str, str]
) -> None:
    """A config of the caller's own leaves the end token and the rest to the model's."""
    one = {key: value[:1] for key, value in prompts.items()}
    config = GenerationConfig(max_new_tokens=120)
    before = model.generation_config.repetition_penalty
    try:
        for penalty in (None, 1.5):
            model.generation_config.repetition_penalty = penalty
            plain = model.generate(**one, generation_config=config)
            found = custom(model, exports["eagle3"], **one, generation_config=config)
            assert found.tolist() == plain.tolist(), penalty
            assert plain.shape[1] < one["input_ids"].shape[1] + 120
    finally:
        model.generation_config.repetition_penalty = before


def test_a_mask_is_inferred_and_a_wrong_one_refused(
    model: Any, prompts: Any, exports: dict[str, str]
) -> None:
    ids, pad = prompts["input_ids"], int(prompts["input_ids"][prompts["attention_mask"] == 0][0])
    options = {"max_new_tokens": 12, "pad_token_id": pad, "eos_token_id": None}
    plain = model.generate(ids, **options)
    assert custom(model, exports["eagle3"], inputs=ids, **options).tolist() == plain.tolist()
    with pytest.raises(UserError, match="attention_mask has the shape"):
        custom(
            model, exports["eagle3"], inputs=ids, attention_mask=prompts["attention_mask"][:, 1:]
        )


def test_a_model_keeps_its_mode_and_is_released(prompts: Any, exports: dict[str, str]) -> None:
    own = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype="float32")
    own.train()
    custom(own, exports["medusa"], **prompts, max_new_tokens=3)
    assert own.training
    there = weakref.ref(own)
    del own
    gc.collect()
    assert there() is None


def test_a_streamer_gets_the_tokens_as_they_come(
    model: Any, tokenizer: Any, prompts: Any, exports: dict[str, str]
) -> None:
    one = {key: value[:1] for key, value in prompts.items()}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    found = custom(model, exports["eagle3"], **one, max_new_tokens=24, streamer=streamer)
    pieces = list(streamer)
    assert len(pieces) > 3
    assert "".join(pieces) == tokenizer.decode(found[0, one["input_ids"].shape[1] :])
    with pytest.raises(UserError, match="a streamer takes one reply"):
        custom(model, exports["eagle3"], **prompts, max_new_tokens=4, streamer=streamer)


def test_samples_follow_torchs_seed(model: Any, prompts: Any, exports: dict[str, str]) -> None:
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12}
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(custom(model, exports["eagle3"], **prompts, **options).tolist())
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 6
    # The text of the first row is the decoder's own, with the seed that was drawn.
    torch.manual_seed(1)
    seed = int(torch.randint(1 << 31, ()))
    ids = prompts["input_ids"][0][prompts["attention_mask"][0].bool()].tolist()
    reply = load(model).generate(ids, 12, temperature=1.0, top_k=50, seed=seed)
    start = prompts["input_ids"].shape[1]
    assert drawn[0][0][start : start + len(reply.token_ids)] == reply.token_ids


def test_what_would_change_the_text_is_refused(
    model: Any, prompts: Any, exports: dict[str, str]
) -> None:
    for options, said in (
        ({"num_beams": 4}, "num_beams=4 is not supported"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size=2 is not supported"),
        ({"output_scores": True}, "output_scores=True is not supported"),
    ):
        with pytest.raises(UserError, match=said):
            custom(model, exports["eagle3"], **prompts, **options)
    # transformers' own refusals
    with pytest.raises(ValueError, match="`max_length` is set to 3"):
        custom(model, exports["eagle3"], **prompts, max_length=3)
    # Code of a folder runs only where it is allowed.
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**prompts, custom_generate=exports["eagle3"], trust_remote_code=False)


def test_an_export_is_a_drafter_and_its_code_is_the_one_file(exports: dict[str, str]) -> None:
    for folder in exports.values():
        code = [str(file.relative_to(folder)) for file in Path(folder).rglob("*.py")]
        assert code == ["custom_generate/generate.py"]
        assert load(QUICKSTART, folder, device="cpu").generate("def f():", 4).rounds
