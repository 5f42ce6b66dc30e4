"""Hazards of decoding on a GPU, found without one: see tests/fake_cuda/rounds.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from draftsmith.inference.rounds import device
from draftsmith.inference.rounds.attention import aligned
from draftsmith.inference.rounds.cache import TreeCache
from tests.conftest import ROOT
from tests.fake_cuda.build import run_with_guard

BUDGET = ROOT / "tests/fake_cuda/operators.json"
"""Operators of a round of each method on a target of two layers. They may grow by 5%; what grows
more is measured, said in the commit, and written here."""


@pytest.fixture(
    scope="module", params=["quick", pytest.param("every", marks=pytest.mark.full)], name="found"
)
def fixture_found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Facts of rounds, by method and setting."""
    folder = tmp_path_factory.mktemp("guard")
    return run_with_guard(folder, "rounds", *["--every"] * (request.param == "every"))


def test_rounds_stay_on_the_device(found: dict[str, Any]) -> None:
    """No operator mixes devices, and the host reads one packed tensor in a round."""
    for way, facts in found.items():
        assert facts["faults"] == {}, way
        assert facts["reads"]["packed"] == 1, way
        # what a growing cache sends is pinned, so that it does not wait
        assert facts["uploads"] <= facts["reads"].get("pinned", 0), way
        # What a lookup finds is the host's.
        if "static" in way and "lookup" not in way:
            assert facts["uploads"] == 0, f"{way}: a captured graph takes nothing of the host"


def test_kernels_of_attention_take_every_call(found: dict[str, Any]) -> None:
    """Masks are additive in the queries' type, their rows are aligned, and heads are folded."""
    for way, facts in found.items():
        # Trees, and a drafter's few nodes, are run by draftsmith's kernel where it can be used. The
        # layers of a target over several devices call attention by transformers' own function.
        assert bool(facts["attention"]) == way.endswith(", torch"), way
        for call in map(json.loads, facts["attention"]):
            assert call["shared"] == 1, (way, call)
            assert call["head"] % 8 == 0, (way, call)
            if "mask" in call:
                assert call["mask"] == [call["type"], 0, 0, 1], (way, call)


def test_operators_of_a_round_keep_their_budget(found: dict[str, Any]) -> None:
    budget = json.loads(BUDGET.read_text())
    for way, facts in found.items():
        assert facts["operators"] <= 1.05 * budget[way], way


def test_masks_are_aligned() -> None:
    """13 slots: rows are 16 numbers apart, 32 bytes in bfloat16."""
    see = torch.arange(13) < torch.tensor([[4], [13]])
    mask = aligned(see[None, None], torch.bfloat16)
    assert mask.shape == (1, 1, 2, 13) and mask.stride() == (32, 32, 16, 1)
    assert mask[0, 0, 0].tolist() == [0.0] * 4 + [torch.finfo(torch.bfloat16).min] * 9
    assert torch.equal(aligned(mask, torch.bfloat16), mask), "an additive one stays what it is"
    assert aligned(see[:, :8][None, None], torch.float32).stride()[-2] == 8


def test_cudnn_attention_is_switched_off() -> None:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        device.prepare(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        device.prepare(torch.device("cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def test_slots_go_to_the_device_of_each_layer() -> None:
    """A target spread over devices writes a layer where it lies; "meta" stands for the other."""
    cache = TreeCache(2, 8, "cpu")
    cache.commit([1, 3])
    for number, place in enumerate(("meta", "cpu")):
        window = cache.open(2)
        layer = torch.zeros(2, 1, 2, 4, device=place)
        window.update(layer, layer, number)
        assert window._slots is not None
        assert window._slots.device.type == place and window._slots.shape == (2, 2)
    assert window._slots is not None and window._slots.tolist() == [[1, 2], [3, 4]]
