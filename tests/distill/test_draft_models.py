"""Draft models: what is kept of a target, checked against the target itself and by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from draftsmith.distill.draft_models import (
    FACTORS,
    DraftModelConfig,
    chosen_layers,
    layers_of,
    make_draft_model,
    scale_norm,
    size_and_cost,
)
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.draft_model import DraftModel, tokenizer_difference
from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.features import check_packing
from tests.conftest import make_tokenizer, tiny_target
from tests.helpers.architectures import architecture

TEXTS = [torch.arange(3, 40), torch.arange(60, 20, -1)]
IDS = torch.arange(5, 30)[None]
FULL_WIDTH = [
    "bamba",
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt-neox",
    "gpt2",
    "cohere",
]


def texts() -> list[torch.Tensor]:
    return TEXTS


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (1, [0]),
        (2, [0, 7]),
        (3, [0, 4, 7]),
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([2, 5], [2, 5]),
        (None, [0]),
    ],
)
def test_layer_choice_picks_expected_layers_of_eight(
    layers: int | list[int] | None, expected: list[int]
) -> None:
    assert chosen_layers(DraftModelConfig(layers=layers), 8) == expected


@pytest.mark.parametrize("layers", [[], [3, 1], [1, 1], [8], 0, 9])
def test_impossible_layers_are_refused(layers: int | list[int]) -> None:
    with pytest.raises(UserError, match="draft_model.layers"):
        chosen_layers(DraftModelConfig(layers=layers), 8)


def target_of(draft_model: DraftModel) -> Target:
    return Target(draft_model.model, draft_model.tokenizer, "draft_model")


def without_layer(_: torch.nn.Module, arguments: tuple, named: dict[str, Any], output: Any) -> Any:
    before = arguments[0] if arguments else named["hidden_states"]
    return (before, *output[1:]) if isinstance(output, tuple) else before


@pytest.mark.parametrize("kind", FULL_WIDTH)
def test_a_cut_has_the_targets_distribution_with_the_other_layers_gone(kind: str) -> None:
    """All layers: the target itself. The second: the target when its other layers are skipped, but
    for how sure it is."""
    target = architecture(kind, dtype=torch.float32)

    def logits(model):
        return model.head(model.forward(IDS).last)

    whole = make_draft_model(DraftModelConfig(layers=target.num_layers), target, texts)
    torch.testing.assert_close(logits(target_of(whole)), logits(target))
    draft_model = target_of(make_draft_model(DraftModelConfig(layers=[1]), target, texts))
    check_packing(draft_model, kind)
    draft_model.check_tree()
    skipped = copy.deepcopy(target)
    _, layers = layers_of(skipped)
    for skip in {0, target.num_layers - 1} - {1}:
        layers[skip].register_forward_hook(without_layer, with_kwargs=True)
    ours, theirs = draft_model.forward(IDS).last, skipped.forward(IDS).last
    factor = float((ours * theirs).sum() / theirs.square().sum())
    torch.testing.assert_close(ours, factor * theirs, rtol=1e-3, atol=1e-4)

    def loss(known: float) -> float:
        total = 0.0
        for ids in TEXTS:
            log_p = target.head(target.forward(ids[None]).last[0]).log_softmax(-1)
            log_q = skipped.head(skipped.forward(ids[None]).last[0] * known).log_softmax(-1)
            total += float((log_p.exp() * (log_p - log_q)).sum())
        return total

    assert factor == pytest.approx(min(FACTORS, key=loss), rel=1e-3), "as sure as it is right"


@pytest.mark.parametrize("norm", [torch.nn.RMSNorm(16), torch.nn.LayerNorm(16), Gemma3RMSNorm(16)])
def test_scaling_a_norm_scales_what_it_gives(norm: torch.nn.Module) -> None:
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 16)
    before = norm(x)
    assert scale_norm(norm, 0.3, 16)
    torch.testing.assert_close(norm(x), 0.3 * before, rtol=1e-4, atol=1e-5)


def test_the_plan_counts_what_a_draft_reads() -> None:
    """32 wide, 64 inner, heads 4 and 2 of 8: a layer has 32 * (32 + 16 + 16 + 32) + 3 * 32 * 64 +
    64 = 9,280 weights."""
    target = tiny_target(num_hidden_layers=4)
    vocab = target.vocab_size
    cost = (9280 + 32 + 32 * vocab) / (4 * 9280 + 32 + 32 * vocab)

    def lines(whole: Target) -> list[str]:
        small = make_draft_model(DraftModelConfig(layers=1), whole, texts).model
        return size_and_cost(small, whole.model, torch.bfloat16)

    size, read = lines(target)
    own, whole = 9280 + 32 + 2 * 32 * vocab, 4 * 9280 + 32 + 2 * 32 * vocab
    assert f"{own / 1e6:.2f}M parameters" in size and f"{own / whole:.1%}" in size
    assert "MB in bfloat16" in size and f"target's {whole / 1e6:.2f}M" in size
    assert read.startswith(f"a draft reads {cost:.1%} ")
    size, tied_read = lines(tiny_target(num_hidden_layers=4, tie_word_embeddings=True))
    assert f"{(own - 32 * vocab) / 1e6:.2f}M parameters" in size and tied_read == read


def test_draft_models_are_made_from_a_folder(tmp_path: Path) -> None:
    target = tiny_target()
    fresh = make_draft_model(DraftModelConfig(layers=1), target, texts)
    fresh.save(tmp_path / "saved", "tiny", torch.float32)
    again = make_draft_model(DraftModelConfig(path=str(tmp_path / "saved")), target, texts)
    assert all(
        torch.equal(a, b) for a, b in zip(fresh.parameters(), again.parameters(), strict=True)
    )
    with pytest.raises(UserError, match="draft_model.path and draft_model.layers exclude each o"):
        DraftModelConfig(path="x", layers=1)
    with pytest.raises(UserError, match="nowhere does not exist"):
        make_draft_model(DraftModelConfig(path="./nowhere"), target, texts)


def test_tokenizer_differences_in_vocabulary_or_behaviour_are_reported() -> None:
    first = make_tokenizer(["<p>", "<e>"], None, eos="<e>")
    assert tokenizer_difference(first, make_tokenizer(["<p>", "<e>"], None, eos="<e>")) is None
    assert "token '<p>' is 0 in the target and 1 in" in (
        tokenizer_difference(first, make_tokenizer(["<e>", "<p>"], None, eos="<e>")) or ""
    )
    more = make_tokenizer(["<p>", "<e>"], None, eos="<e>")
    more.add_tokens(["extra"])
    assert "1 tokens more, such as 'extra'" in (tokenizer_difference(first, more) or "")
    assert "missing" in (tokenizer_difference(more, first) or "")
    lower = make_tokenizer(["<p>", "<e>"], None, eos="<e>")
    from tokenizers import normalizers

    lower.backend_tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[attr-defined]
    assert "the same tokens, but 'The quick brown" in (tokenizer_difference(first, lower) or "")


def test_a_saved_draft_model_is_a_plain_model_folder_that_transformers_decodes_with(
    tmp_path: Path, quickstart: Target
) -> None:
    """As `assistant_model` in transformers, and as our drafter: the same text at T = 0."""
    draft_model = make_draft_model(DraftModelConfig(layers=2), quickstart, texts)
    Artifact(draft_model, quickstart.fingerprint(), {"length": 4}).save(
        tmp_path / "draft_model", torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft_model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft_model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "def f(x):"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    theirs = quickstart.model.generate(
        ids, assistant_model=model, max_new_tokens=40, do_sample=False
    )[0, ids.shape[1] :]
    proposer = load_proposer(str(tmp_path / "draft_model"), quickstart, pytest.fail)
    ours = generate(quickstart, proposer, [ids[0].tolist()], 40)[0]
    assert ours.token_ids == theirs.tolist()


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"layers": [0, 3]},
    ],
    ids=str,
)
def test_decoding_is_lossless_with_every_draft_model_saved_and_loaded(
    tmp_path: Path, quickstart: Target, options: dict[str, Any]
) -> None:
    draft_model = make_draft_model(DraftModelConfig(**options), quickstart, texts)
    Artifact(draft_model, quickstart.fingerprint()).save(tmp_path / "draft_model", torch.bfloat16)
    prompts = [[5, 90, 40, 11], [7, 8, 9]]
    for sampling in (Sampling(), Sampling(temperature=1.0, seed=5)):
        plain = generate(quickstart, PlainDecoding(), prompts, 30, sampling)
        for settings in ("length=3", "length=3,width=2"):
            proposer = load_proposer(
                f"{tmp_path / 'draft_model'}:{settings}", quickstart, pytest.fail
            )
            found = generate(quickstart, proposer, prompts, 30, sampling)
            assert [g.token_ids for g in found] == [g.token_ids for g in plain]
            assert all(r.drafted for g in found for r in g.rounds)


def test_an_incomplete_or_foreign_draft_model_is_refused(
    tmp_path: Path, quickstart: Target
) -> None:
    tiny = tiny_target()
    draft_model = make_draft_model(DraftModelConfig(layers=1), tiny, texts)
    Artifact(draft_model, tiny.fingerprint()).save(tmp_path / "draft_model")
    with pytest.raises(UserError, match="has another tokenizer than the target"):
        load_proposer(str(tmp_path / "draft_model"), quickstart, lambda message: None)
    (tmp_path / "draft_model" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="model.safetensors has 0 bytes instead of"):
        load_proposer(str(tmp_path / "draft_model"), tiny, pytest.fail)


def test_a_layer_that_is_special_by_its_place_is_cut_with_its_place() -> None:
    """SmolLM3 names layers without rotary positions in a list of its own."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "smollm3", hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100, no_rope_layers=[1, 1, 1, 0], pad_token_id=0, eos_token_id=1,
        bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), None, "smollm3")
    draft_model = make_draft_model(DraftModelConfig(layers=[3]), target, texts)
    assert draft_model.model.config.no_rope_layers == [0]


def test_rotary_frequencies_stay_exact_in_low_precision(tmp_path: Path) -> None:
    tiny = tiny_target(max_position_embeddings=1024)
    Artifact(make_draft_model(DraftModelConfig(layers=1), tiny, texts), tiny.fingerprint()).save(
        tmp_path / "draft_model"
    )
    low = tiny_target(max_position_embeddings=1024, dtype=torch.bfloat16)
    proposer: Any = load_proposer(str(tmp_path / "draft_model"), low, lambda message: None)
    frequencies = [b for name, b in proposer.model.model.named_buffers() if "inv_freq" in name]
    assert (
        proposer.model.dtype == torch.bfloat16
        and frequencies
        and all(b.dtype == torch.float32 for b in frequencies)
    )
