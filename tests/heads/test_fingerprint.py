"""The fingerprint of a target: which elements of its tensors it reads, at every size, and which
values of its configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, GraniteConfig, LlamaConfig, MixtralConfig

from draftsmith.heads.fingerprint import (
    LARGEST_EXACT,
    changed_numbers,
    hash_of,
    output_settings,
    sampled_places,
)
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.targets.target import load_target

ROOT = Path(__file__).parents[2]
SMOLLM2_EMBEDDING = 49152 * 576
LLAMA_70B_EMBEDDING = 128256 * 8192
QWEN3_32B_EMBEDDING = 151936 * 5120


def test_sampled_places_match_hand_computed_values() -> None:
    assert sampled_places(1) == [0]
    assert sampled_places(4) == [0, 1, 2, 3]
    assert sampled_places(32) == list(range(32))
    assert sampled_places(311) == [10 * i for i in range(32)]
    assert sampled_places(31 * 2**27 + 1) == [i * 2**27 for i in range(32)]


@given(
    st.integers(1, 1 << 40)
    | st.sampled_from([LARGEST_EXACT, LARGEST_EXACT + 1, 1 << 31, SMOLLM2_EMBEDDING])
)
def test_sampled_places_are_distinct_and_span_a_tensor_of_any_size(size: int) -> None:
    places = sampled_places(size)
    assert len(places) == min(size, 32)
    assert places == sorted(set(places))
    assert places[0] == 0 and places[-1] == size - 1


@given(st.integers(1, LARGEST_EXACT))
def test_fingerprints_stored_before_stay_valid(size: int) -> None:
    """They were made with float32 `torch.linspace`, whose numbers are those of this reference: an
    exact product, rounded once."""
    count, last = min(size, 32), size - 1
    step = float(torch.tensor(float(last)) / torch.tensor(float(max(count - 1, 1))))
    exact = [step * i if i < count // 2 else last - step * (count - 1 - i) for i in range(count)]
    assert sampled_places(size) == torch.tensor(exact, dtype=torch.float64).float().long().tolist()


def test_the_quickstart_targets_fingerprint_is_the_one_its_committed_drafters_name() -> None:
    target = load_target(
        TargetConfig(str(ROOT / "scripts" / "quickstart" / "target"), device="cpu")
    )
    named = (
        ROOT / "scripts" / "quickstart" / "drafters" / "eagle3" / "draftsmith.json"
    ).read_text()
    assert target.fingerprint().weights_hash in named


def mapped(folder: Path, size: int) -> torch.Tensor:
    """A tensor of `size` zeros in bfloat16 in a file that takes no room on disk until it is written
    to."""
    path = folder / "weights.bin"
    with path.open("wb") as file:
        file.truncate(2 * size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.bfloat16)


def test_a_tensor_of_more_elements_than_int32_can_count_is_fingerprinted(tmp_path: Path) -> None:
    size = 577 * ((1 << 31) // 577 + 64)
    tensor = mapped(tmp_path, size).view(577, -1)
    before = hash_of(["embedding"], {"embedding": tensor}.get)
    tensor[-1, -1] = 1.0
    last = hash_of(["embedding"], {"embedding": tensor}.get)
    tensor[-1, -1], tensor.view(-1)[sampled_places(size)[20]] = 0.0, 1.0
    middle = hash_of(["embedding"], {"embedding": tensor}.get)
    assert len({before, last, middle}) == 3


def test_embeddings_of_models_in_use_are_fingerprinted(tmp_path: Path) -> None:
    for size in (SMOLLM2_EMBEDDING, QWEN3_32B_EMBEDDING, LLAMA_70B_EMBEDDING):
        tensor = mapped(tmp_path, size)
        before = hash_of(["embedding"], {"embedding": tensor}.get)
        tensor[-1] = 1.0
        assert hash_of(["embedding"], {"embedding": tensor}.get) != before


ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (LlamaConfig, "rms_norm_eps", 1e-2),
        (LlamaConfig, "hidden_act", "gelu"),
        (LlamaConfig, "rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
        (LlamaConfig, "rope_parameters", {**ROPE, "original_max_position_embeddings": 1024}),
        (Gemma3TextConfig, "query_pre_attn_scalar", 7),
        (Gemma3TextConfig, "final_logit_softcapping", 9.0),
        (Gemma3TextConfig, "sliding_window", 77),
        (Gemma3TextConfig, "layer_types", ["full_attention"] * 26),
        (GraniteConfig, "logits_scaling", 3.0),
        (GraniteConfig, "residual_multiplier", 0.3),
        (GraniteConfig, "embedding_multiplier", 3.0),
        (GraniteConfig, "attention_multiplier", 0.3),
        (MixtralConfig, "num_experts_per_tok", 1),
    ],
)
def test_each_number_that_changes_the_output_is_noticed(kind: Any, name: str, value: Any) -> None:
    before = output_settings(kind())
    assert not changed_numbers(before, json.loads(json.dumps(before))), "as a drafter stores them"
    now = output_settings(kind(**{name: value}))
    assert name in changed_numbers(before, now)


def test_fingerprint_ignores_values_that_do_not_affect_output() -> None:
    before = output_settings(LlamaConfig())
    more = LlamaConfig(
        initializer_range=0.5, attention_dropout=0.5, use_cache=False, max_position_embeddings=4096
    )
    assert output_settings(more) == before
    assert "max_position_embeddings" not in output_settings(LlamaConfig(rope_parameters=ROPE))
    dynamic = {**ROPE, "rope_type": "dynamic"}
    assert "max_position_embeddings" in output_settings(LlamaConfig(rope_parameters=dynamic))


class Written:
    """A configuration as another version of transformers writes it."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return self.values


def test_versions_of_transformers_may_write_the_same_in_other_ways() -> None:
    """Whole numbers for floats, tuples for lists, a new key."""
    before = output_settings(Written(rope_parameters={**ROPE, "factor": 2}, windows=(1, 2)))
    now = output_settings(
        Written(
            rope_parameters={**ROPE, "factor": 2.0}, windows=[1, 2], residual_multiplier=1.0,
            _window=3,
        )
    )  # fmt: skip
    assert not changed_numbers(before, now) and "_window" not in now
    kinds = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    assert output_settings(Written(rope_parameters=kinds)) == {
        "rope_parameters.full_attention.rope_theta": 1e6,
        "rope_parameters.sliding_attention.rope_theta": 1e4,
    }


@pytest.mark.parametrize("before, now", [({}, {"mscale": 0.7}), ({"attention_factor": 2.0}, {})])
def test_a_rotary_parameter_that_is_added_or_taken_away_is_noticed(
    before: dict[str, float], now: dict[str, float]
) -> None:
    tables = [output_settings(Written(rope_parameters=ROPE | more)) for more in (before, now)]
    (name, value), *_ = [*before.items(), *now.items()]
    was, found = (value, "not set") if before else ("not set", value)
    assert changed_numbers(*tables) == f"rope_parameters.{name} was {was}, is {found}"
    plain = output_settings(Written(rope_parameters={"rope_theta": 1e6}))
    assert not changed_numbers(plain, plain | {"rope_parameters.rope_type": "default"})
    assert "rope_type was not set, is yarn" in changed_numbers(plain, tables[0])


def test_a_message_names_a_few_values_and_counts_the_rest() -> None:
    before = {"a_eps": 1, "b_eps": 1, "c_eps": 1, "d_eps": 1, "layer_types": ["full"] * 40}
    now = {name: 2 for name in before} | {"layer_types": ["sliding"] * 40}
    found = changed_numbers(before, now)
    assert found == "a_eps was 1, is 2; b_eps was 1, is 2; c_eps was 1, is 2; and 2 more"
    listed = changed_numbers({"layer_types": before["layer_types"]}, now)
    assert listed.endswith("...") and len(listed) < 120
