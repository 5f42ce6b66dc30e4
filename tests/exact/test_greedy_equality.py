"""Greedy output equals `target.generate(do_sample=False)` token for token, with good, random and always-wrong heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draftsmith.heads.errors import UserError
from draftsmith.heads.medusa import MedusaHeads
from draftsmith.inference.decode import generate
from draftsmith.inference.medusa import MedusaProposer, make_proposer
from draftsmith.inference.proposer import PlainDecoding, Proposer
from draftsmith.inference.target import Target
from draftsmith.inference.tree import DraftTree, TreeShape
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    MistralConfig,
    Qwen2Config,
)

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


class Oracle:
    """Always right: the root with a chain of what the target will write, and beside each right node a wrong one."""

    name, max_drafted = "oracle", 8
    taps: tuple[int, ...] = ()
    shape = TreeShape((-1, 0, 0, 2, 2, 4, 4, 6, 6))

    def __init__(self, text: list[int]) -> None:
        self.text, self.at = text, 0

    def prefill(self, ids: torch.Tensor, hidden: object) -> None:
        self.at = 1

    def propose(self, root: torch.Tensor) -> DraftTree:
        ahead = [*self.text[self.at : self.at + 4], 3, 3, 3, 3][:4]
        tokens = [int(root)] + [t for right in ahead for t in ((right + 1) % 300, right)]
        return DraftTree(self.shape, torch.tensor([tokens]))

    def commit(self, ids: torch.Tensor, hidden: object) -> None:
        self.at += ids.shape[1]


def test_right_drafts_are_accepted_to_the_end_of_the_text_and_token_zero_is_an_ordinary_one() -> None:
    """Replies that end at an end token or at the limit, and that hold token 0, with accepted runs crossing each of them."""
    target = tiny_target(seed=5, dtype=torch.float64)
    target.model.generation_config.eos_token_id = list(range(100, 103))
    generator = torch.Generator().manual_seed(0)
    ended = zeros = 0
    for length in range(1, 40):
        prompt = torch.randint(0, target.vocab_size, (length,), generator=generator).tolist()
        with torch.no_grad():  # make token 0 what this prompt's second token was
            target.head_weight[0] = 0
            second = reference(target, prompt, 2)[-1]
            target.head_weight[0] = 1.001 * target.head_weight[second]
        expected = reference(target, prompt, 23)
        found = generate(target, Oracle(expected), prompt, 23)
        assert found.token_ids == expected
        assert all(r.accepted == 4 for r in found.rounds[:-1])
        ended += found.finish_reason == "eos"
        zeros += 0 in expected
    assert ended > 3 and zeros > 3, "the cases that this test is about must occur"


WINDOWS = {
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "gemma2": (Gemma2Config, {"sliding_window": 8, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3_text": (
        Gemma3TextConfig,
        {"sliding_window": 8, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2-full": (Qwen2Config, {"sliding_window": 8}),
    "gpt2": (GPT2Config, {"n_positions": 64}),
    "cohere": (CohereConfig, {"logit_scale": 0.5}),
}


@pytest.mark.parametrize("kind", list(WINDOWS))
def test_sliding_windows_soft_caps_scales_and_learned_positions(kind: str) -> None:
    """Targets whose text is longer than their window; drafts from the future text, so that trees are really accepted."""
    make, extra = WINDOWS[kind]
    torch.manual_seed(0)
    sizes: dict = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=300, initializer_range=0.3)
    if kind != "gpt2":
        sizes |= dict(num_key_value_heads=2, intermediate_size=64, max_position_embeddings=256)
    special = dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
    model = AutoModelForCausalLM.from_config(make(**sizes, **special, **extra), dtype=torch.float64)
    target = Target(model, None, kind)
    target.check_head()
    for seed in range(4):
        prompt = torch.randint(3, 300, (5 + 3 * seed,), generator=torch.Generator().manual_seed(seed)).tolist()
        expected = reference(target, prompt, 24)
        found = generate(target, Oracle(expected), prompt, 24)
        assert found.token_ids == expected
        assert sum(r.accepted for r in found.rounds) >= len(expected) // 2


def test_a_target_that_cannot_be_rolled_back_is_refused_by_name() -> None:
    target = tiny_target()
    target.model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="linear_attention"):
        Target(target.model, target.tokenizer, "hybrid")


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
    found = generate(target, Oracle(expected), prompt, 100, eos_ids=frozenset())
    assert found.token_ids == expected and len(expected) == left and found.finish_reason == "context"
    assert left < 3 or found.rounds[-1].accepted > 0


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
