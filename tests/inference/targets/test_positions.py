"""Positions at which a model computes otherwise than before them: text, trees, batches, and packed
rows far from position 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftsmith.heads.errors import UserError
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.ngram import NgramLookup, PlainDecoding
from draftsmith.inference.targets.model_head import borders_of
from draftsmith.inference.targets.target import Target, checked
from draftsmith.train.data.features import packing_error
from tests.helpers.families import (
    BORDER,
    POSITIONS,
    TOKENIZER,
    outcome,
    reference,
    small_config,
    small_model,
)

LONGROPE: dict[str, Any] = {
    "partial_rotary_factor": 1.0,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": BORDER,
    },
    "original_max_position_embeddings": BORDER,
}


def longrope() -> Target:
    """A Phi-3 whose rotary factors change at `BORDER`."""
    model = small_model("phi3", LONGROPE)
    return checked(Target(model, TOKENIZER, "phi3", frozen=False), fused=True, move=False)


def test_text_ends_where_longrope_changes_its_factors(caplog: pytest.LogCaptureFixture) -> None:
    target = longrope()
    assert target.max_positions == BORDER < POSITIONS
    assert f"text ends after {BORDER} positions here, of {POSITIONS}" in caplog.text
    prompt = [5, 9, 14, 9, 14, 31, 5, 9]
    expected = reference(target.model, prompt, BORDER - len(prompt))
    for proposer in (PlainDecoding(), NgramLookup(length=4)):
        for batch in ([prompt], [prompt, prompt[:3]]):
            reply = generate(target, proposer, batch, 100, eos_ids=frozenset())[0]
            assert reply.token_ids == expected and reply.finish_reason == "context"


def test_longrope_is_found_in_per_layer_type_rope_tables() -> None:
    target = longrope()
    table = target.config.rope_parameters
    target.config.rope_parameters = {"full_attention": table, "sliding_attention": {}}
    assert target.max_positions == BORDER
    table["rope_type"] = "yarn"  # which has one set of factors
    assert target.max_positions == POSITIONS


def test_the_families_whose_output_changes_past_a_border_are_decoded_exactly() -> None:
    assert outcome("phi3", LONGROPE) == "equal"
    # Its queries are multiplied by a factor of the position, which the fused pass does not know.
    assert outcome("ministral3") == "equal"


def test_the_fused_pass_is_tried_at_the_borders_of_the_configuration() -> None:
    model = small_model("ministral3", {})
    target = Target(model, TOKENIZER, "ministral3", frozen=False)
    assert BORDER in borders_of(model.config.to_dict())
    assert any(start < BORDER <= start + 5 for start in target.trial_starts)
    assert target.trial_starts[-1] < POSITIONS
    target.fuse(move=False)
    assert target.fused is None


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_low_precision_does_not_hide_what_changes_at_a_border(beta: float) -> None:
    """The states differ by less there than two passes in bfloat16 may anywhere."""
    torch.manual_seed(0)
    config = small_config(
        "ministral3", {"hidden_size": 256, "num_hidden_layers": 6, "head_dim": 64}
    )
    config.initializer_range = 0.04
    config.rope_parameters["llama_4_scaling_beta"] = beta
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    target = Target(model, TOKENIZER, "ministral3", frozen=False)
    target.fuse(move=False)
    assert (target.fused is None) == (beta > 0)


def test_borders_are_the_numbers_of_positions_that_a_config_names() -> None:
    config = {
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "max_window_layers": 7,
        "sliding_window": None,
        "use_sliding_window": True,
        "rope_parameters": {"original_max_position_embeddings": 16, "rope_theta": 10000.0},
        "attention_chunk_size": 24,
    }
    assert borders_of(config) == {64, 16, 24}


def test_a_pass_that_changes_at_a_border_is_refused_or_capped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the cap, the trial of trees finds what longrope does to the border."""
    monkeypatch.setattr(Target, "longrope_border", None)
    target = Target(small_model("phi3", LONGROPE), TOKENIZER, "phi3", frozen=False)
    with pytest.raises(UserError, match="differ from their own paths at positions from"):
        target.check_tree()


def test_packed_documents_are_tried_at_the_borders_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = longrope()
    assert packing_error(target) < 1e-6
    monkeypatch.setattr(Target, "longrope_border", None)
    assert packing_error(target) > 1e-3


def test_the_head_and_trees_of_a_model_with_few_positions_are_tried() -> None:
    """A trial never begins before position 0, nor runs past the last one."""
    torch.manual_seed(0)
    from transformers import GPT2Config

    config = GPT2Config(n_positions=8, n_embd=32, n_layer=2, n_head=4, vocab_size=len(TOKENIZER))
    model = AutoModelForCausalLM.from_config(config).eval()
    target = checked(Target(model, TOKENIZER, "gpt2", frozen=False), fused=True, move=False)
    assert target.trial_starts == [0]
