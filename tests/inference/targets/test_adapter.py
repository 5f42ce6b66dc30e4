"""Adapters merged into targets: text and logits are those of peft's own model, or the adapter is
refused by the name of its kind."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import generate_one
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.targets.adapter import merge_adapter
from draftsmith.inference.targets.stored import (
    EMBEDDING_AND_HEAD_FILE,
    model_of_embedding_and_head,
    save_embedding_and_head,
)
from draftsmith.inference.targets.target import Target, load_for_decoding, load_target
from tests.conftest import tiny_target
from tests.helpers.architectures import architecture
from tests.helpers.random_eagles import random_eagle

full = pytest.mark.full
PROMPT = [5, 6, 7, 8, 9]
ENDS = ["embed_tokens", "lm_head"]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IN_PROMPTS = ["PrefixTuning", "PromptEncoder", "PromptTuning"]
"""Kinds that cannot be merged."""


def base(family: str, tied: bool) -> Any:
    """Return a random model in float32, always the same one."""
    if family == "gpt2":
        return architecture("gpt2", dtype=torch.float32, tie_word_embeddings=tied)
    if family == "gemma3":
        return architecture("gemma3", dtype=torch.float32, tie_word_embeddings=tied)
    return tiny_target(tie_word_embeddings=tied, attention_bias=family == "llama with biases")


def drawn(rng: random.Random, family: str) -> tuple[str, dict[str, Any]]:
    """Return a random kind of adapter and its settings, which may contradict each other."""
    kind = rng.choice(
        [*["Lora"] * 9, "LoHa", "LoKr", "OFT", "BOFT", "IA3", "AdaLora", "Vera", "HRA",
         "LNTuning", "TrainableTokens", "RandLora", "FourierFT", "Beft", "Lily", *IN_PROMPTS]
    )  # fmt: skip
    linear = ["c_attn", "c_proj", "c_fc"] if family == "gpt2" else LINEAR
    ends = ["wte", "lm_head"] if family == "gpt2" else ENDS
    # Most other kinds take no embedding.
    taken = ends if kind in ("Lora", "OFT") else ends[1:]
    places = rng.sample(linear, rng.randint(1, 3)) + rng.sample(taken, rng.randint(0, len(taken)))
    tokens = rng.sample(range(40), 3)
    rank = rng.choice([1, 2, 4, 8])
    more: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if kind in IN_PROMPTS:
        return kind, more | {"num_virtual_tokens": 3}
    if kind == "TrainableTokens":
        return kind, more | {"token_indices": tokens}
    if rng.random() < 0.3:
        more["modules_to_save"] = rng.sample([*ends, linear[-1]], rng.randint(1, 2))
        places = [place for place in places if place not in more["modules_to_save"]]
    more["target_modules"] = places or [linear[0]]
    if kind == "LNTuning":
        more["target_modules"] = ["ln_1"] if family == "gpt2" else ["input_layernorm"]
    elif kind == "IA3":
        more["feedforward_modules"] = [p for p in more["target_modules"] if p in linear[-1:]]
    elif kind == "Lora":
        saved = more.get("modules_to_save", []) + places
        more |= dict(
            r=rank, lora_alpha=rng.choice([4, 16]), use_rslora=rng.random() < 0.3,
            use_dora=rng.random() < 0.3, bias=rng.choice(["none", "none", "all", "lora_only"]),
            ensure_weight_tying=rng.random() < 0.4,
        )  # fmt: skip
        more["lora_bias"] = not more["use_dora"] and rng.random() < 0.15
        if rng.random() < 0.3 and not set(saved) & set(ends):
            more["trainable_token_indices"] = {ends[0]: tokens}
            if rng.random() < 0.3:
                more["trainable_token_indices"][ends[1]] = tokens
        elif rng.random() < 0.1:
            more["alora_invocation_tokens"] = [7, 8]
    elif kind == "AdaLora":
        more["total_step"] = 10
    elif kind == "FourierFT":
        more["n_frequency"] = 20
    elif kind in ("LoHa", "LoKr", "HRA"):
        more["r"] = rank
    elif kind == "OFT":
        more["oft_block_size"] = 8
        more["r"] = 0
    return kind, more


@torch.no_grad()
def save_adapter(target: Any, config: Any, folder: Path, seed: int = 0) -> None:
    """Write an adapter for `target` that changes all that it may change."""
    torch.manual_seed(seed)
    tuned: Any = get_peft_model(target.model, config)
    for parameter in tuned.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn_like(parameter))
    tuned.save_pretrained(folder)


@torch.no_grad()
def text_of_peft(model: Any, folder: Path) -> tuple[torch.Tensor, list[int]]:
    """Return the logits of some tokens by peft's own model, and 24 greedy tokens."""
    tuned: Any = PeftModel.from_pretrained(model, str(folder)).eval()
    ids = torch.arange(40)[None]
    logits = tuned(input_ids=ids).logits
    return logits, greedy(tuned)


def greedy(model: Any) -> list[int]:
    prompt = torch.tensor([PROMPT])
    text = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return text[0, len(PROMPT) :].tolist()


@torch.no_grad()
def check(family: str, tied: bool, kind: str, settings: dict[str, Any], folder: Path) -> str:
    """Raise `AssertionError` unless an adapter is merged right, or refused. Returns what it was."""
    try:
        config = getattr(peft, f"{kind}Config")(**settings)
        save_adapter(base(family, tied), config, folder)
    except Exception:  # noqa: BLE001
        return "not made by peft"
    what = (family, tied, kind, settings)
    model, state = base(family, tied).model, torch.random.get_rng_state()
    try:
        target = Target(merge_adapter(model, str(folder)), None, family)
    except UserError as error:
        assert kind.upper() in str(error).replace("_", "").upper() or kind in IN_PROMPTS, error
        assert len(str(error).splitlines()) == 1, error
        return "refused"
    finally:
        assert torch.equal(torch.random.get_rng_state(), state), "random numbers are used up"
    target.check_head()
    target.fuse(move=True)
    logits, text = text_of_peft(base(family, tied).model, folder)
    found = target.head(target.forward(torch.arange(40)[None]).last)
    torch.testing.assert_close(found, logits, atol=2e-3, rtol=1e-3, msg=lambda m: f"{what}: {m}")
    assert generate_one(target, PlainDecoding(), PROMPT, 24).token_ids == text, what
    one = target.model.get_input_embeddings().weight is target.head_weight
    assert one == target.config.tie_word_embeddings == target.model.config.tie_word_embeddings
    return "merged"


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 400), marks=full)], ids=["few", "many"]
)
def test_random_adapters_match_peft_or_are_refused(seeds: range, tmp_path: Path) -> None:
    found: Counter[str] = Counter()
    for seed in seeds:
        rng = random.Random(seed)
        family = rng.choice(["llama", "llama", "llama with biases", "gemma3", "gpt2"])
        tied = rng.random() < 0.6
        kind, settings = drawn(rng, family)
        result = check(family, tied, kind, settings, tmp_path / str(seed))
        found[result] += 1
        found[f"{kind} {result}"] += 1
    print(sorted(found.items()))
    assert found["merged"] > len(seeds) / 3


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose embedding and head are one matrix, as a folder."""
    folder, target = tmp_path_factory.mktemp("tied"), tiny_target(tie_word_embeddings=True)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("place", [["embed_tokens"], ["lm_head"], ["o_proj"]])
@torch.no_grad()
def test_an_adapter_of_a_tied_matrix_changes_the_one_that_it_names(
    place: list[str], tied: Path, tmp_path: Path
) -> None:
    """Also as drafters, feature stores and saved models see it."""
    adapter = tmp_path / "adapter"
    save_adapter(
        tiny_target(tie_word_embeddings=True), peft.LoraConfig(target_modules=place), adapter
    )
    logits, text = text_of_peft(tiny_target(tie_word_embeddings=True).model, adapter)
    config = TargetConfig(str(tied), adapter=str(adapter), device="cpu")
    target, packed = load_target(config), load_for_decoding(config)
    assert target.fingerprint() == packed.fingerprint()
    drafter = EagleProposer(
        random_eagle(target, "eagle1"), TreeSettings(length=3, width=2, nodes=6)
    )
    for loaded, proposer in ((target, drafter), (packed, PlainDecoding())):
        found = loaded.head(loaded.forward(torch.arange(40)[None]).last)
        torch.testing.assert_close(found, logits, atol=1e-3, rtol=1e-3)
        assert generate_one(loaded, proposer, PROMPT, 24).token_ids == text
    target.model.save_pretrained(tmp_path / "merged")
    assert greedy(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) == text
    save_embedding_and_head(target, tmp_path / "store")
    tensors = load_file(tmp_path / "store" / EMBEDDING_AND_HEAD_FILE)
    stored = model_of_embedding_and_head(
        tmp_path / "store", torch.device("cpu"), torch.float32, tensors.get
    )
    for ours, theirs in (
        (target.head_weight, stored.get_output_embeddings().weight),
        (target.embed(torch.arange(40)), stored.get_input_embeddings()(torch.arange(40))),
    ):
        assert torch.equal(ours, theirs)
    assert (stored.get_input_embeddings().weight is stored.get_output_embeddings().weight) == (
        place == ["o_proj"]
    )


REFUSED = {
    "PREFIX_TUNING": (peft.PrefixTuningConfig, {"num_virtual_tokens": 3}),
    "LORA": (peft.LoraConfig, {"alora_invocation_tokens": [5, 6]}),
    "BEFT": (peft.BeftConfig, {"target_modules": ["v_proj"]}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_merged_is_refused_by_its_kind(kind: str, tmp_path: Path) -> None:
    make, settings = REFUSED[kind]
    save_adapter(tiny_target(), make(task_type="CAUSAL_LM", **settings), tmp_path)
    with pytest.raises(UserError, match=rf"\(of the kind {kind}\) cannot be merged: .*; decode"):
        merge_adapter(tiny_target().model, str(tmp_path))


def test_a_merge_that_differs_from_the_adapters_own_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_adapter(tiny_target(), peft.LoraConfig(target_modules=["v_proj"]), tmp_path)
    monkeypatch.setattr(peft.tuners.lora.Linear, "merge", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"kind LORA.*differ from peft's own"):
        merge_adapter(tiny_target().model, str(tmp_path))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    three = tiny_target(num_hidden_layers=3)
    save_adapter(three, peft.LoraConfig(target_modules=["v_proj"]), tmp_path / "three")
    with pytest.raises(UserError, match="has 2 tensors for which the target has no place"):
        merge_adapter(tiny_target().model, str(tmp_path / "three"))
    save_adapter(tiny_target(), peft.LoraConfig(target_modules=["v_proj"]), tmp_path / "two")
    with pytest.raises(UserError, match="lacks 2 of its tensors"):
        merge_adapter(tiny_target(num_hidden_layers=3).model, str(tmp_path / "two"))


def test_a_kind_that_peft_does_not_have_is_refused(tmp_path: Path) -> None:
    save_adapter(tiny_target(), peft.LoraConfig(target_modules=["v_proj"]), tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "NEXT_YEARS"}))
    with pytest.raises(UserError, match="of the kind NEXT_YEARS, which peft .* does not have"):
        merge_adapter(tiny_target().model, str(tmp_path))
