"""Greedy output equals `target.generate(do_sample=False)` token for token, with good, random and always-wrong heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draftsmith.heads.medusa import MedusaHeads
from draftsmith.inference.decode import generate
from draftsmith.inference.medusa import MedusaProposer, make_proposer
from draftsmith.inference.proposer import PlainDecoding, Proposer
from draftsmith.inference.target import Target

from tests.conftest import random_heads, tiny_target, wrong_heads
from tests.trained import chat_prompts, story_prompts, trained_artifact

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]
KINDS = ("plain", "trained", "random", "wrong")


def proposer_of(kind: str, target: Target) -> Proposer:
    if kind == "plain":
        return PlainDecoding()
    if kind == "trained":
        return make_proposer(trained_artifact(target), "trained", tree_nodes=10)
    heads: MedusaHeads = random_heads(target) if kind == "random" else wrong_heads(target)
    return MedusaProposer(heads, TREE)


def reference(target: Target, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What transformers writes."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def check(target: Target, prompts: list[list[int]], kinds: tuple[str, ...], max_new_tokens: int) -> None:
    proposers = {kind: proposer_of(kind, target) for kind in kinds}
    for prompt in prompts:
        expected = reference(target, prompt, max_new_tokens)
        for kind, proposer in proposers.items():
            found = generate(target, proposer, prompt, max_new_tokens)
            assert found.token_ids == expected, f"{kind} heads, prompt of {len(prompt)} tokens"
            assert sum(len(r.tokens) for r in found.rounds) == len(expected) - 1
            if kind == "wrong":
                assert all(r.accepted == 0 for r in found.rounds)


@pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.full)])
def test_quickstart_target(quickstart: Target, count: int) -> None:
    check(quickstart, chat_prompts(quickstart, "test", count), KINDS, max_new_tokens=64)


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.full)])
def test_real_pretrained_target(stories: Target, count: int) -> None:
    check(stories, story_prompts(stories, count), KINDS, max_new_tokens=64)


def test_random_target_whose_replies_end_and_emit_token_zero() -> None:
    """A wide random model writes every id, token 0 included, and stops at its end token."""
    target = tiny_target(seed=5, dtype=torch.float64)
    prompts = [
        torch.randint(0, target.vocab_size, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(1, 12)
    ]
    check(target, prompts, ("plain", "random", "wrong"), max_new_tokens=40)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_max_new_tokens_is_exact(tiny: Target, limit: int) -> None:
    for proposer in (PlainDecoding(), MedusaProposer(random_heads(tiny), TREE)):
        found = generate(tiny, proposer, [5, 6, 7], limit, eos_ids=frozenset())
        assert len(found.token_ids) == limit and found.finish_reason == "length"


@pytest.mark.parametrize("left", [1, 2, 5])
def test_decoding_stops_where_the_positions_end(left: int) -> None:
    target = tiny_target(max_position_embeddings=32)
    prompt = [5 + i % 7 for i in range(32 - left)]
    expected = generate(target, PlainDecoding(), prompt, 100, eos_ids=frozenset()).token_ids
    found = generate(target, MedusaProposer(random_heads(target), TREE), prompt, 100, eos_ids=frozenset())
    assert found.token_ids == expected and len(expected) == left and found.finish_reason == "context"


def test_an_end_token_inside_an_accepted_run_ends_the_text_there(tiny: Target) -> None:
    heads = random_heads(tiny)
    whole = generate(tiny, PlainDecoding(), [5, 6, 7], 30, eos_ids=frozenset()).token_ids
    for end in set(whole[1:]):
        found = generate(tiny, MedusaProposer(heads, TREE), [5, 6, 7], 30, eos_ids=frozenset({end}))
        assert found.token_ids == whole[: whole.index(end) + 1]


def test_a_tree_without_nodes_is_plain_decoding(tiny: Target) -> None:
    found = generate(tiny, MedusaProposer(random_heads(tiny), []), [5, 6, 7], 10)
    assert found.token_ids == generate(tiny, PlainDecoding(), [5, 6, 7], 10).token_ids


def test_two_requests_in_turns_give_the_same_text_as_alone(tiny: Target) -> None:
    from draftsmith.inference.decode import decode

    prompts = ([5, 6, 7], [9, 8, 7, 6, 5, 4])
    make: Callable[[], Proposer] = lambda: MedusaProposer(random_heads(tiny), TREE)  # noqa: E731
    alone = [generate(tiny, make(), p, 20, eos_ids=frozenset()).token_ids for p in prompts]
    streams = [decode(tiny, make(), p, 20, frozenset()) for p in prompts]
    together: list[list[int]] = [[], []]
    running = [0, 1]
    while running:
        for i in list(running):
            step = next(streams[i], None)
            if step is None:
                running.remove(i)
            else:
                together[i] += step.tokens
    assert together == alone


def test_at_most_one_synchronisation_a_round(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted at the only ways from a tensor to Python: tolist, item, bool, int."""
    count = 0
    for name in ("tolist", "item", "__bool__", "__int__", "__index__"):
        original = getattr(torch.Tensor, name)

        def counted(self: torch.Tensor, *args: object, original: Callable = original) -> object:
            nonlocal count
            count += 1
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    proposer = MedusaProposer(random_heads(tiny), TREE)
    count = 0
    found = generate(tiny, proposer, [5, 6, 7], 30, eos_ids=frozenset())
    assert count <= len(found.rounds) + 1  # one more: the prefill's token
