"""The running loop keeps the target's distribution: chi-square over sampled texts, and the
identities of acceptance."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import Generation, Request, generate
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.proposers.draft_model import DraftModelProposer
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.growth import Level, grow_fixed
from draftsmith.inference.proposers.medusa import MedusaProposer
from draftsmith.inference.proposers.ngram import NgramLookup
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.rounds.accept import judge
from draftsmith.inference.rounds.noise import row_keys
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import TreeShape
from draftsmith.inference.targets.target import Target
from tests.conftest import ROOT, by_default, random_heads
from tests.helpers.architectures import near_copy
from tests.helpers.enumeration import token_level
from tests.helpers.random_blocks import proposer_of, random_block
from tests.helpers.random_eagles import random_eagle
from tests.helpers.trained import chat_prompts
from tests.helpers.trees import wide_tree

VOCAB, LENGTH, PROMPT = 5, 3, [1, 3]
SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.7, top-k 4": {"temperature": 0.7, "top_k": 4},
    "T=1.5, top-p 0.9": {"temperature": 1.5, "top_p": 0.9},
}


@lru_cache
def toy() -> tuple[Target, Target]:
    """A target of five tokens and a drafter that differs from it."""
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float64), None, "toy")
    return target, near_copy(target, noise=0.25)


def next_probs(target: Target, prefix: list[int], sampling: Sampling) -> Tensor:
    ids: Any = torch.tensor([[*PROMPT, *prefix]])
    with torch.no_grad():
        logits = target.model(ids).logits[0, -1:]
    return sampling.warpers(ids, logits)[0].softmax(-1)


def joint(target: Target, sampling: Sampling) -> dict[tuple[int, ...], float]:
    found = {}
    probs = {
        p: next_probs(target, list(p), sampling)
        for n in range(LENGTH)
        for p in itertools.product(range(VOCAB), repeat=n)
    }
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        found[text] = float(torch.stack([probs[text[:i]][text[i]] for i in range(LENGTH)]).prod())
    return found


def p_value(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square with the rare texts pooled; texts of probability 0 must not occur at all."""
    total = sum(counts.values())
    assert all(expected[text] > 0 for text in counts)
    common = [text for text, chance in expected.items() if chance * total >= 5]
    observed = [counts.get(text, 0) for text in common]
    hoped = [expected[text] * total for text in common]
    rest = total - sum(hoped)
    if rest > 1:
        observed, hoped = [*observed, total - sum(observed)], [*hoped, rest]
    statistic = sum((o - h) ** 2 / h for o, h in zip(observed, hoped, strict=True))
    halves = torch.tensor([(len(hoped) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))  # upper tail of chi-square


def sample(proposer: Proposer, sampling: Sampling, count: int) -> list[Generation]:
    target, _ = toy()
    requests = [Request(PROMPT, 0, i) for i in range(count)]
    found = []
    for start in range(0, count, 250):
        found += generate(target, proposer, requests[start : start + 250], LENGTH, sampling)
    return found


def drafters() -> dict[str, tuple[Proposer, str]]:
    """Proposers and a rule for each, with what must have decided."""
    target, drafter = toy()
    tree: dict[str, Any] = {"length": 2, "width": 2, "nodes": 6}
    # one token of five can never be drafted
    four = random_eagle(target, "eagle3", draft_vocab_size=4)
    return {
        "rejection chain": (DraftModelProposer(drafter, VOCAB, TreeSettings(length=2)), "block"),
        "rejection tree": (DraftModelProposer(drafter, VOCAB, TreeSettings(**tree)), "traversal"),
        "recursive tree": (DraftModelProposer(drafter, VOCAB, TreeSettings(**tree)), "rrs"),
        "rejection heads": (
            MedusaProposer(random_heads(target, heads=2), TreeSettings(shape=[(0,), (1,), (0, 0)])),
            "traversal",
        ),
        "rejection lookup": (NgramLookup(length=2), "match"),
        "rejection eagle chain": (EagleProposer(four, TreeSettings(length=2, width=1)), "block"),
        "rejection eagle tree": (
            EagleProposer(random_eagle(target, "eagle1"), TreeSettings(length=2, width=2, nodes=6)),
            "traversal",
        ),
        "recursive eagle tree": (
            EagleProposer(four, TreeSettings(length=2, width=2, nodes=6)),
            "rrs",
        ),
        "coupled eagle tree": (
            EagleProposer(four, TreeSettings(length=2, width=2, nodes=6)),
            "gumbel",
        ),
        "coupled tree": (DraftModelProposer(drafter, VOCAB, TreeSettings(**tree)), "gumbel"),
        "rejection dflash chain": (proposer_of(random_block(target, block_size=3)), "block"),
        "rejection dflash tree": (proposer_of(random_block(target), **tree), "traversal"),
        "rejection dspark chain": (proposer_of(random_block(target, "dspark"), length=2), "block"),
        "recursive dspark tree": (proposer_of(random_block(target, "dspark"), **tree), "rrs"),
    }


@pytest.mark.parametrize("count", [2000, pytest.param(40000, marks=pytest.mark.full)])
@pytest.mark.parametrize("settings", by_default(SETTINGS, "T=0.7, top-k 4"))
@pytest.mark.parametrize("name", list(drafters()))
def test_sampled_texts_have_the_targets_distribution(name: str, settings: str, count: int) -> None:
    proposer, rule = drafters()[name]
    sampling = Sampling(rule=name.split()[0], seed=1, **SETTINGS[settings])  # type: ignore[arg-type]
    found = sample(proposer, sampling, count)
    assert {r.rule for g in found for r in g.rounds} == {rule}
    counts: dict[tuple[int, ...], int] = {}
    for generation in found:
        text = tuple(generation.token_ids)
        counts[text] = counts.get(text, 0) + 1
    assert p_value(counts, joint(toy()[0], sampling)) > 1e-4
    if name != "rejection lookup":
        assert sum(r.accepted for g in found for r in g.rounds) > count / 20


def test_another_distribution_is_caught_by_the_same_test() -> None:
    target, drafter = toy()
    sampling = Sampling(temperature=0.7)
    found = sample(DraftModelProposer(drafter, VOCAB, TreeSettings(length=2)), sampling, 3000)
    counts: dict[tuple[int, ...], int] = {}
    for generation in found:
        counts[tuple(generation.token_ids)] = counts.get(tuple(generation.token_ids), 0) + 1
    assert p_value(counts, joint(target, Sampling(temperature=1.0))) < 1e-6


@pytest.mark.parametrize("rule", ["rejection", "recursive"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_drafter_equal_to_the_target_is_always_accepted(rule: str, shape: str) -> None:
    target, _ = toy()
    settings: dict[str, Any] = {"width": 2, "nodes": 7} if shape == "tree" else {}
    same = DraftModelProposer(target, VOCAB, TreeSettings(length=3, **settings))
    found = generate(
        target,
        same,
        [Request(PROMPT, 0, i) for i in range(40)],
        21,
        Sampling(temperature=1.0, rule=rule),  # type: ignore[arg-type]
    )
    assert all(r.accepted == 3 for g in found for r in g.rounds)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        pytest.param("draft_model:length=1", 4, marks=pytest.mark.full),
        pytest.param("draft_model:length=1", 24, marks=pytest.mark.full),
        pytest.param("drafters/eagle3:length=1,width=1", 24, marks=pytest.mark.full),
        pytest.param("drafters/distill:length=1", 24, marks=pytest.mark.full),
    ],
)
def test_mean_overlap_is_the_acceptance_of_the_token_level_rule_on_real_logits(
    quickstart: Target, count: int, spec: str
) -> None:
    """One draft a round, where block verification is the token-level rule: accepted against sum
    min(p, q), round by round."""
    drafter = load_proposer(str(ROOT / "scripts/quickstart" / spec), quickstart, print)
    prompts = chat_prompts(quickstart, "test", count)
    requests = [Request(p, i, k) for i, p in enumerate(prompts) for k in range(4)]
    for temperature in (0.7, 1.0):
        found = generate(
            quickstart,
            drafter,
            requests,
            64,
            Sampling(temperature=temperature, rule="rejection"),
            frozenset(),
        )
        rounds = [r for g in found for r in g.rounds]
        overlap = torch.tensor([r.overlap[0] for r in rounds if r.overlap])
        assert len(overlap) == len(rounds) > 100 * count
        measured = sum(r.accepted for r in rounds) / len(rounds)
        error = float((overlap * (1 - overlap)).sum().sqrt()) / len(rounds)
        assert abs(measured - float(overlap.mean())) < 4 * error
        assert 0.3 < measured < 0.95


@pytest.mark.full
def test_token_level_rule_accepts_what_the_overlap_says_along_chains(quickstart: Target) -> None:
    """The reference rule on the distributions of target and drafter over a real text, four drafts a
    chain."""
    from draftsmith.inference.targets.target import TargetConfig, load_target

    drafter = load_target(
        TargetConfig(str(ROOT / "scripts/quickstart/draft_model"), dtype="float32")
    )
    ids = torch.tensor([chat_prompts(quickstart, "test", 1)[0][:200]])
    with torch.no_grad():
        p = quickstart.head(quickstart.forward(ids).last)[0].double().softmax(-1)
        q = drafter.head(drafter.forward(ids).last)[0].double().softmax(-1)[:, : p.shape[-1]]
    generator = torch.Generator().manual_seed(0)
    repeats = 60
    p, q = p.repeat(repeats, 1), q.repeat(repeats, 1)
    drawn = torch.multinomial(q, 1, generator=generator)
    tokens = torch.cat([torch.zeros_like(drawn), drawn], dim=1)
    plan = token_level(TreeShape.chain(1), tokens, torch.stack([p, p], 1), torch.stack([q, q], 1))
    coins = torch.rand(len(p), 2, generator=generator, dtype=torch.float64) < plan.chances
    overlap = torch.minimum(p, q).sum(-1)
    measured = (plan.select(coins) == 1).double().mean()
    error = (overlap * (1 - overlap)).sum().sqrt() / len(p)
    assert abs(measured - overlap.mean()) < 4 * error


@pytest.mark.parametrize("rule", ["rejection", "recursive"])
@pytest.mark.parametrize("temperature", [0.05, 0.2])
def test_overconfident_drafter_at_low_temperature_keeps_target_distribution(
    rule: str, temperature: float
) -> None:
    """One round of a tree of two children, through the functions of the loop: its first token has
    the target's probabilities, though the drafter's second child has 1e-26 and less."""
    rounds = 20_000
    sampling = Sampling(temperature=temperature, seed=1, rule=rule)  # type: ignore[arg-type]
    keys = row_keys(1, [(0, i) for i in range(rounds)], torch.device("cpu"))
    root = torch.zeros(rounds, dtype=torch.long)
    draws = Draws(sampling, keys, root[:, None], root)
    shape = wide_tree((2,))
    # 60 units of the processed scores between the drafter's first token and the others
    drafted = torch.tensor([60.0, 0.0, -0.5]) * temperature
    wanted = torch.tensor([0.4, 0.3, 0.3])
    tree, _ = grow_fixed(drafted.expand(rounds, -1), root, draws, no_levels, shape)
    logits = (wanted.log() * temperature).expand(rounds, shape.nodes, -1)
    verdict = judge(tree, logits, draws)
    taken = tree.tokens.gather(1, verdict.node[:, None])[:, 0]
    first = torch.where(verdict.node > 0, taken, verdict.bonus)
    shares = first.bincount(minlength=3) / rounds
    assert float((shares - wanted).abs().max()) < 0.015  # four standard deviations


def no_levels(level: Level) -> Tensor:
    """Stand for a drafter whose tree has one level, so that nothing is run."""
    raise AssertionError("no node has children")


def test_coins_and_draws_do_not_depend_on_the_batch() -> None:
    target, drafter = toy()
    sampling = Sampling(temperature=1.0, rule="rejection")
    proposer = DraftModelProposer(drafter, VOCAB, TreeSettings(length=2, width=2))
    requests = [Request([1, 2, 3][: 1 + i % 3], i, 0) for i in range(9)]
    together = [g.token_ids for g in generate(target, proposer, requests, 12, sampling)]
    assert together == [
        generate(target, proposer, [r], 12, sampling)[0].token_ids for r in requests
    ]


def test_draft_and_verifier_noise_streams_are_separate() -> None:
    """Draws, coins and the last token of a round come from streams of their own."""
    keys = torch.tensor([5])
    lengths = torch.tensor([9])
    draws = Draws(
        Sampling(temperature=1.0, rule="rejection"),
        keys,
        torch.zeros(1, 16, dtype=torch.long),
        lengths,
    )
    drawn, _ = draws.sample(torch.zeros(1, 1, 50), 0, 50, None)
    assert sorted(drawn[0, 0].tolist()) == list(range(50)), "without replacement"
    last = int(draws.last(torch.full((1, 50), 1 / 50)))
    choice = int(draws.choices(torch.zeros(1, 1, 50), 0))
    assert len({int(drawn[0, 0, 0]), last, choice}) == 3
