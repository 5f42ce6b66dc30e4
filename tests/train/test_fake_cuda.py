"""Hazards of training on a GPU, found without one: see tests/fake_cuda/training.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftsmith.train.losses.backends import bucket
from tests.fake_cuda.build import run_with_guard


@pytest.fixture(scope="module")
def facts_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_with_guard(tmp_path_factory.mktemp("guard"), "training")


@pytest.fixture(name="found")
def fixture_found(facts_of_a_run: dict[str, Any]) -> dict[str, Any]:
    """Facts of a step's forward pass, by method and backend of attention."""
    return facts_of_a_run["steps"]


def test_drafters_begin_and_are_evaluated_on_the_device(facts_of_a_run: dict[str, Any]) -> None:
    """On the first GPU every block drafter's run ended when its first weights were made."""
    ways = ("medusa", "eagle", "eagle shared-head", "dflash", "dspark")
    assert facts_of_a_run["beginnings"] == dict.fromkeys(ways, "ok")


def test_steps_stay_on_the_device(found: dict[str, Any]) -> None:
    """No operator mixes devices or copies a number to the host; copies are from pinned memory."""
    assert {way.split()[0] for way in found} == {"medusa", "eagle", "dflash", "dspark", "distill"}
    for way, facts in found.items():
        assert facts["faults"] == {}, way
        assert 0 < facts["uploads"] <= facts["pinned"], way


def test_kernels_of_attention_take_every_call(found: dict[str, Any]) -> None:
    """Masks are additive in the queries' type and their rows are aligned; no heads are left to be
    grouped but where flash attention groups them; FlexAttention gets lengths that are compiled
    once. The live target's own calls have no masks."""
    for way, facts in found.items():
        assert bool(facts["attention"]) == (way != "medusa"), way
        assert facts["extraction"], way
        extraction = list(map(json.loads, facts["extraction"]))
        assert {call["kernel"] for call in extraction} == {"maskless"}, way
        for call in [*extraction, *map(json.loads, facts["attention"])]:
            assert call["head"] % 8 == 0, (way, call)
            # Float32 has no flash attention, and the other kernels do not group heads.
            half = call.get("types") == ["torch.bfloat16"]
            assert half or not call["grouped"], (way, call)
            if call["kernel"] == "maskless":
                assert len(call["types"]) == 1 and call["last"] == [1, 1, 1], (way, call)
            elif call["kernel"] == "flex":
                context = call["keys"] - (0 if way.startswith("eagle") else call["rows"])
                assert context == bucket(context), (way, call)
            else:
                assert call["type"] and call["last"] == [1, 1, 1, 1], (way, call)
                assert call["row"] == call["start"] == 0, (way, call)
