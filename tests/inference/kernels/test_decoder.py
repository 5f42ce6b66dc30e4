"""Passes over trees by the kernels: transformers' states, and the texts of plain decoding.

Without a GPU the kernels are interpreted.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from draftsmith.inference.decode import Request, generate
from draftsmith.inference.kernels import operators
from draftsmith.inference.rounds.attention import attention_of_nodes
from draftsmith.inference.rounds.cache import Counts, StaticTreeCache, TreeCache
from draftsmith.inference.targets.target import Target
from tests.conftest import by_default
from tests.helpers.architectures import architecture, near_copy, proposers
from tests.helpers.fused_targets import FUSED, states_of
from tests.helpers.tape import Tape

pytest.importorskip("triton")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "DEVICES", {"cpu", "cuda"})


def takes_trees(target: Target) -> bool:
    return target.fused is not None and target.fused.takes_trees


@pytest.mark.parametrize("kind", by_default(sorted(FUSED), "qwen3"))
def test_kernels_give_the_states_of_transformers(kind: str, interpreted: None) -> None:
    """Rows have different lengths, and two kinds have windows shorter than the texts."""
    target = architecture(kind, dtype=torch.float32)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = states_of(target, ids, [12, 9])[1]
    target.fuse(move=True)
    assert takes_trees(target)
    found = states_of(target, ids, [12, 9])[1]
    for own, other in zip((found.last, *found.taps), (expected.last, *expected.taps), strict=True):
        torch.testing.assert_close(own, other, atol=3e-5, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    "way",
    ["dflash chain", "draft-model tree", "eagle3 tree"],
)
def test_recorded_rounds_with_kernels_write_the_same_texts(
    way: str,
    interpreted: None,
    tapes: list[Tape],
) -> None:
    """Rows of two lengths, growing and recorded; in float32, as the kernels know no float64."""
    target = architecture("llama", dtype=torch.float32)
    requests = [Request([5, 9, 33, 7]), Request([12])]

    # Rounds are replayed from the fourth on, and a draft model that is nearly the target has few.
    length = 24 if way == "draft-model tree" else 5

    def texts(proposer: Any) -> list[list[int]]:
        replies = generate(target, proposer, requests, length, eos_ids=frozenset())
        return [reply.token_ids for reply in replies]

    plain = texts(proposers(target, near_copy(target))["plain"])
    target.fuse(move=True)
    assert takes_trees(target)
    proposer = proposers(target, near_copy(target))[way]
    assert texts(proposer) == plain
    target.static = True
    assert texts(proposer) == plain
    assert sum(tape.replays for tape in tapes)


@pytest.mark.parametrize("kind", [TreeCache, StaticTreeCache])
@pytest.mark.parametrize("seen", ["whole", "by all rows", "by each row", "causal"])
@pytest.mark.parametrize("lengths", by_default([[7, 4], [7, 7], [7]], [7, 4]))
def test_a_drafters_nodes_attend_as_by_torch(
    kind: type[TreeCache], seen: str, lengths: list[int], interpreted: None
) -> None:
    """Rows of committed slots, two staged nodes, and three more, with heads in groups."""
    found, rows = [], len(lengths)
    for kernel in (False, True):
        torch.manual_seed(0)
        cache = kind(rows, 40)
        window = cache.open(7)
        keys, values = torch.randn(2, rows, 2, 7, 16)
        window.update(keys, values, 0)
        cache.commit(Counts(lengths, torch.tensor(lengths)))
        for count, slots in ((2, 2), (3, 5)):
            window = cache.open(count)
            visible = torch.rand(rows if seen == "by each row" else 1, count, slots) < 0.5
            visible[:, :, -count:] |= torch.eye(count, dtype=torch.bool)
            if seen == "causal":
                visible = torch.ones(1, count, slots, dtype=torch.bool).tril(slots - count)
            given = None if seen == "whole" else visible
            attend = attention_of_nodes(window, given, slots, kernel)
            queries, keys, values = torch.randn(3, rows, count, 4, 16)
            found.append(attend(0, queries, keys[:, :, :2], values[:, :, :2]))
            cache.stage(count)
    for own, other in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("way", ["eagle3 tree", "dflash tree"])
def test_a_drafter_uses_the_kernel(
    way: str, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the target's own passes by torch, whatever calls the kernel is the drafter."""
    target = architecture("llama", dtype=torch.float32)
    calls = []
    right = operators.attend
    monkeypatch.setattr(operators, "attend", lambda *given: calls.append(1) or right(*given))
    proposer: Any = proposers(target, near_copy(target))[way]
    tried = len(calls)
    generate(target, proposer, [Request([5, 9, 33, 7])], 5, eos_ids=frozenset())
    assert len(calls) > tried
    calls.clear()
    target.model.double()
    proposer.drafter.double()  # the kernel knows no float64
    generate(target, proposer, [Request([5, 9, 33, 7])], 5, eos_ids=frozenset())
    assert not calls


def test_kernels_that_fail_are_left_out(
    interpreted: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With no compiler on the machine, or wrong numbers, the fused pass goes on without them."""
    caplog.set_level(logging.INFO)

    def fail(*given: Any) -> Any:
        raise FileNotFoundError("there is no gcc")

    target = architecture("llama", dtype=torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(operators, "attend", fail)
        target.fuse(move=True)
    assert target.fused is not None and not takes_trees(target)
    assert "no gcc" in caplog.text

    far, right = architecture("llama", dtype=torch.float32), operators.attend
    with monkeypatch.context() as patched:  # wrong where the model's own short trial does not come

        def forgets(*given: Any) -> Any:
            return right(*given) * (1 - 0.01 * (given[3] > 200)[:, None, None])

        patched.setattr(operators, "attend", forgets)
        far.fuse(move=True)
    assert far.fused is not None and not takes_trees(far)
    assert "attention of 1 nodes differs from torch's by 1.0e-02" in caplog.text

    other = architecture("llama", dtype=torch.float32)
    with monkeypatch.context() as patched:
        patched.setattr(operators, "attend", lambda *given: 1.01 * right(*given))
        other.fuse(move=True)
    assert other.fused is not None and not takes_trees(other)
    assert "differs from transformers'" in caplog.text


def test_a_model_that_is_cast_after_its_trial_runs_without_them(interpreted: None) -> None:
    """Kernels know no float64."""
    target = architecture("llama", dtype=torch.float32)
    target.fuse(move=False)
    assert takes_trees(target)
    target.model.double()
    ids = torch.randint(3, 100, (1, 5), generator=torch.Generator().manual_seed(0))
    assert not target.fused.takes(ids)  # type: ignore[union-attr]
    assert states_of(target, ids, [5])[1].last.dtype == torch.float64
