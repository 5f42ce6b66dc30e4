"""The loop around the rules: limits, ends, batches that shrink, requests that take turns, records,
synchronisations."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import Request, decode, generate, generate_one
from draftsmith.inference.metrics import split
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.proposers.draft_model import DraftModelProposer
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.rounds.cache import TreeCache
from draftsmith.inference.targets.target import Target
from tests.conftest import tiny_target
from tests.helpers.architectures import FromTheFuture, near_copy, proposers

NONE: frozenset[int] = frozenset()
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11], [20, 21, 22, 23, 24, 25, 26, 27, 28]]


@lru_cache
def everything() -> tuple[Target, dict[str, Proposer]]:
    target = tiny_target(seed=5, dtype=torch.float64)
    return target, proposers(target, near_copy(target))


def oracle(target: Target, prompt: list[int], text: list[int]) -> FromTheFuture:
    return FromTheFuture({tuple(prompt): text}, True, target.vocab_size)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_max_new_tokens_is_exact(limit: int) -> None:
    target, drafters = everything()
    whole = [g.token_ids for g in generate(target, PlainDecoding(), PROMPTS, 12, eos_ids=NONE)]
    drafters = {
        **drafters,
        "oracle": FromTheFuture(
            {tuple(p): t for p, t in zip(PROMPTS, whole, strict=True)}, True, 280
        ),
    }
    for name, proposer in drafters.items():
        found = generate(target, proposer, PROMPTS, limit, eos_ids=NONE)
        assert [g.token_ids for g in found] == [text[:limit] for text in whole], name
        assert all(g.finish_reason == "length" for g in found)


@pytest.mark.parametrize("left", [0, 1, 2, 5])
def test_decoding_stops_where_the_positions_end(left: int) -> None:
    target = tiny_target(seed=5, max_position_embeddings=16)
    prompt = [4 + i for i in range(16 - left)]
    if not left:
        with pytest.raises(UserError, match="leaves no room in 16 positions"):
            generate_one(target, PlainDecoding(), prompt, 4)
        return
    expected = generate_one(target, PlainDecoding(), prompt, 100, eos_ids=NONE).token_ids
    assert len(expected) == left
    for proposer in (oracle(target, prompt, expected), *proposers(target, target).values()):
        found = generate_one(target, proposer, prompt, 100, eos_ids=NONE)
        assert found.token_ids == expected and found.finish_reason == "context"
    narrow = DraftModelProposer(target, target.vocab_size, TreeSettings(length=4, width=4, nodes=4))
    for rule in ("coupled", "rejection"):
        found = generate_one(
            target, narrow, prompt, 100, sampling=Sampling(rule=rule), eos_ids=NONE
        )
        assert found.token_ids == expected
    batch = generate(
        target, DraftModelProposer(target, target.vocab_size), [prompt, [5, 6]], 100, eos_ids=NONE
    )
    assert [len(g.token_ids) for g in batch] == [left, 14]


def test_an_end_token_inside_an_accepted_run_ends_the_text_there() -> None:
    target, _ = everything()
    whole = generate_one(target, PlainDecoding(), PROMPTS[0], 30, eos_ids=NONE).token_ids
    cut_inside = 0
    for end in set(whole[1:]):
        found = generate_one(
            target, oracle(target, PROMPTS[0], whole), PROMPTS[0], 30, eos_ids=frozenset({end})
        )
        assert found.token_ids == whole[: whole.index(end) + 1] and found.finish_reason == "eos"
        cut_inside += (
            bool(found.rounds) and len(found.rounds[-1].tokens) <= found.rounds[-1].accepted
        )
    assert cut_inside > 3


def test_finished_rows_leave_the_batch_without_affecting_others() -> None:
    target, drafters = everything()
    alone = {
        name: [generate_one(target, p, prompt, 24).token_ids for prompt in PROMPTS]
        for name, p in drafters.items()
    }
    ends = frozenset(alone["plain"][i][3 * i + 1] for i in range(3))
    for name, proposer in drafters.items():
        found = generate(target, proposer, PROMPTS, 24, eos_ids=ends)
        for generation, text in zip(found, alone["plain"], strict=True):
            end = next((i for i, token in enumerate(text) if token in ends), len(text) - 1)
            assert generation.token_ids == text[: end + 1], name
        rows = [
            max((g.rounds[i].rows for g in found if len(g.rounds) > i), default=0)
            for i in range(20)
        ]
        assert rows == sorted(rows, reverse=True) and len(set(rows)) > 1


def test_interleaved_requests_give_the_same_text_as_alone() -> None:
    """Two decoders over one target, taking turns: nothing is kept on the model."""
    target = tiny_target(seed=5, dtype=torch.float64)
    drafter = near_copy(target)
    requests = [Request(prompt, i) for i, prompt in enumerate(PROMPTS[:2])]
    for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, rule="rejection")):
        alone, *each = (proposers(target, drafter) for _ in range(3))
        for name in alone:
            expected = [
                generate(target, alone[name], [request], 16, sampling, NONE)[0].token_ids
                for request in requests
            ]
            pairs = zip(each, requests, strict=True)
            streams = [
                decode(target, own[name], [request], 16, sampling, NONE) for own, request in pairs
            ]
            together: list[list[int]] = [[], []]
            running = [0, 1]
            while running:
                for i in list(running):
                    steps = next(streams[i], None)
                    if steps is None:
                        running.remove(i)
                    else:
                        together[i] += steps[0][1].tokens
            assert together == expected, name


def test_a_proposer_starts_afresh_with_every_call() -> None:
    target, drafters = everything()
    for name, proposer in drafters.items():
        first = generate(target, proposer, PROMPTS[:2], 12, Sampling(temperature=1.0), NONE)
        generate(target, proposer, PROMPTS[2:], 30, eos_ids=NONE)
        again = generate(target, proposer, PROMPTS[:2], 12, Sampling(temperature=1.0), NONE)
        assert [g.token_ids for g in first] == [g.token_ids for g in again], name
        assert [[r.accepted for r in g.rounds] for g in first] == [
            [r.accepted for r in g.rounds] for g in again
        ], name


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(), marks=pytest.mark.full),
        pytest.param(Sampling(temperature=1.0), marks=pytest.mark.full),
        Sampling(temperature=1.0, rule="rejection"),
    ],
)
def test_at_most_one_synchronisation_a_round(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the ways from a tensor to Python: tolist, item, bool, int, float, and copies to
    numpy."""
    target, drafters = everything()
    count = 0
    for name in (
        "tolist",
        "item",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "numpy",
        "__array__",
        "cpu",
        "nonzero",
    ):
        original = getattr(torch.Tensor, name)

        def counted(
            self: torch.Tensor, *args: Any, original: Callable = original, **kwargs: Any
        ) -> Any:
            nonlocal count
            count += 1
            return original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for name, proposer in drafters.items():
        for prompts in (PROMPTS[:1], PROMPTS):
            count = 0
            found = generate(target, proposer, prompts, 20, sampling, NONE)
            rounds = max(len(g.rounds) for g in found)
            # A small model's adaptive chain asks after every draft but the last, a block's once.
            asked = {"draft-model adaptive": 5, "dspark adaptive": 2}.get(name, 1)
            assert 2 <= count <= asked * rounds + 1, name  # one more: the prefill's token


def test_invalid_prompts_limits_and_sampling_are_refused(tiny: Target) -> None:
    for prompts, limit, message in (
        ([], 5, "no prompt"), ([[]], 5, "empty"), ([[5]], 0, "at least 1"), ([[5]], 4.5,
        "whole number"),
        ([[5, 10**6]], 5, "no token id"), ([[5, -3]], 5, "no token id"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            generate(tiny, PlainDecoding(), prompts, limit)  # type: ignore[arg-type]
    for settings in (
        {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 2.0},
        {"repetition_penalty": 0.0}, {"rule": "exact"},
        {"temperature": "0.7"}, {"top_k": 5.0, "temperature": 1.0}, {"top_k": 5}, {"top_p": 0.9},
        {"seed": 0.5},
    ):  # fmt: skip
        with pytest.raises(UserError, match=next(iter(settings))):
            Sampling(**settings)  # type: ignore[arg-type]


def test_every_round_leaves_a_whole_record() -> None:
    target, drafters = everything()
    for name, proposer in drafters.items():
        for sampling, rules in (
            (Sampling(), {"greedy"}),
            (Sampling(temperature=1.0), {"gumbel"}),
            (Sampling(temperature=1.0, rule="rejection"), {"match", "block", "traversal"}),
        ):
            found = generate(target, proposer, PROMPTS, 12, sampling, NONE)
            for round_ in (r for g in found for r in g.rounds):
                assert (
                    round_.drafted is not None
                    and 0 <= round_.accepted <= round_.drafted <= proposer.max_drafted
                ), name
                assert 1 <= len(round_.tokens) <= round_.accepted + 1
                assert round_.rule in rules
                parts = [round_.t_draft_s, round_.t_verify_s, round_.t_accept_s, round_.t_kv_s]
                assert min(parts) > 0 and sum(parts) <= round_.t_round_s
                assert (round_.overlap is not None) == (round_.rule in ("block", "traversal"))
                assert round_.overlap is None or all(0 <= x <= 1 + 1e-6 for x in round_.overlap)
            seconds = split([r for g in found for r in g.rounds])
            assert all(value > 0 for value in seconds.values()) and set(seconds) == {
                "draft",
                "verify",
                "accept",
                "kv",
                "host",
            }
            assert all(g.ttft_s > 0 and g.decode_s > 0 for g in found)


def test_nothing_of_a_batch_is_kept_when_it_ends_or_is_given_up() -> None:
    target, _ = everything()
    for name, proposer in proposers(target, near_copy(target)).items():
        for give_up in (False, True):
            steps = decode(target, proposer, [Request(PROMPTS[0])], 12, Sampling(), NONE)
            next(steps)
            next(steps)
            if give_up:
                steps.close()
            else:
                list(steps)
            holder = getattr(proposer, "trained", proposer)  # beside a lookup
            caches = [value for value in vars(holder).values() if isinstance(value, TreeCache)]
            assert not any(cache.layers for cache in caches), name
