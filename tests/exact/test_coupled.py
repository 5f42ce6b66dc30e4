"""Coupled sampling writes what `target.generate` writes with the same noise, whatever drafts and in
whatever batch.

The oracle is transformers' own loop with a logits processor that adds the noise of the position. It
shares the noise with us (a pure function, checked against big integers in
tests/inference/rounds/test_noise.py) and nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.decode import Generation, Request, generate
from draftsmith.inference.evaluation.measure import first_difference
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.rounds import noise
from draftsmith.inference.targets.target import Target
from tests.conftest import ROOT, tiny_target
from tests.helpers.architectures import FromTheFuture, architecture, near_copy, proposers
from tests.helpers.trained import chat_prompts, story_prompts

LENGTH = 12
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 10},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
]


class PositionNoise(LogitsProcessor):
    def __init__(self, seed: int, request: int, sample: int) -> None:
        self._keys = noise.row_keys(seed, [(request, sample)], torch.device("cpu"))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # the absolute position of the token being chosen
        place = torch.tensor([input_ids.shape[1]])
        return scores + noise.gumbel(self._keys, noise.COUPLED, place, scores.shape[-1]).to(
            scores.dtype
        )


def oracle(
    target: Target,
    prompt: list[int],
    limit: int,
    request: int,
    sample: int,
    seed: int,
    settings: dict[str, Any],
) -> list[int]:
    steps: list[Any] = []
    if "repetition_penalty" in settings:
        steps.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    steps.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        steps.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        steps.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        steps.append(MinPLogitsWarper(settings["min_p"]))
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([*steps, PositionNoise(seed, request, sample)]),
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@lru_cache
def tiny(kind: str = "llama") -> tuple[Target, dict[str, Proposer]]:
    target = architecture(kind)
    return target, proposers(target, near_copy(target))


@pytest.mark.parametrize(
    "seeds",
    [
        range(4, 16, 3),  # every distribution and every size of a batch
        *(pytest.param(range(s, s + 100), marks=pytest.mark.full) for s in range(0, 1000, 100)),
    ],
)
def test_text_is_the_oracles_for_every_seed_proposer_and_batch(seeds: range) -> None:
    """Each seed with ragged prompts and all proposers: one by one, in a batch of three, in a batch
    of sixteen."""
    check(seeds, "llama", 30)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "end"),
    [
        pytest.param("gemma3", 11, marks=pytest.mark.full),
        ("gpt2", 9),
        *(pytest.param(kind, 13, marks=pytest.mark.full) for kind in ("gemma3", "gpt2", "qwen2")),
    ],
)
def test_coupled_text_equals_oracle_with_windows_and_learned_positions(kind: str, end: int) -> None:
    check(range(5, end), kind, 10)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3.5", "bamba", "lfm2"])
def test_coupled_text_of_hybrids_equals_the_oracle(kind: str) -> None:
    """200 seeds of the drafters that treat states in ways of their own."""
    check(range(200), kind, 30, ("plain", "ngram", "draft-model tree", "eagle3 tree"))


def check(seeds: range, kind: str, least: int, names: Sequence[str] | None = None) -> None:
    target, drafters = tiny(kind)
    if names:
        drafters = {name: drafters[name] for name in names}
    ended = 0
    accepted: dict[str, int] = dict.fromkeys(drafters, 0)
    for seed in seeds:
        settings = SETTINGS[seed % len(SETTINGS)]
        draw = random.Random(seed)
        requests = [
            Request(
                [draw.randrange(3, target.vocab_size) for _ in range(draw.randrange(1, 14))],
                draw.randrange(1000),
                k,
            )
            for k in range((1, 3, 16)[seed // len(SETTINGS) % 3])
        ]
        expected = [
            oracle(target, list(r.prompt_ids), LENGTH, r.id, r.sample, seed, settings)
            for r in requests
        ]
        texts = {tuple(r.prompt_ids): reply for r, reply in zip(requests, expected, strict=True)}
        future = {
            n: FromTheFuture(texts, n == "oracle", target.vocab_size)
            for n in ("oracle", "adversary")
        }
        for name, proposer in {**drafters, **future}.items():
            found = generate(target, proposer, requests, LENGTH, Sampling(seed=seed, **settings))
            assert [g.token_ids for g in found] == expected, f"{name}, seed {seed}"
            # half of the seeds, with every distribution and every batch size among them
            if (seed + seed // len(SETTINGS)) % 2:
                matched = generate(
                    target,
                    proposer,
                    requests,
                    LENGTH,
                    Sampling(seed=seed, rule="match", **settings),
                )
                assert [g.token_ids for g in matched] == expected, f"{name} by match, seed {seed}"
            if name in accepted:
                accepted[name] += sum(r.accepted for g in found for r in g.rounds)
            ended += sum(g.finish_reason == "eos" for g in found)
    assert all(
        accepted[name] > least
        for name in ("draft-model chain", "draft-model tree", "medusa")
        if name in accepted
    ), accepted
    assert ended, "replies that end inside the batch must occur"


@pytest.mark.parametrize(
    ("which", "count"),
    [
        ("stories", 2),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("quickstart", 2), ("quickstart", 30), ("stories", 30))
        ),
    ],
)
def test_coupled_text_of_real_targets_equals_the_oracle(
    which: str, count: int, request: pytest.FixtureRequest
) -> None:
    target: Target = request.getfixturevalue(which)
    prompts = (
        chat_prompts(target, "test", count)
        if which == "quickstart"
        else story_prompts(target, count)
    )
    specs = ["none", "ngram"]
    if which == "quickstart":
        specs += [
            str(ROOT / "scripts/quickstart/draft_model") + f":{s}"
            for s in ("length=4", "length=3,width=3,nodes=9")
        ]
        specs += [
            str(ROOT / "scripts/quickstart/drafters/distill") + f":{s}"
            for s in ("length=4", "length=3,width=2")
        ]
        for name in ("eagle1", "eagle3"):
            specs += [
                str(ROOT / "scripts/quickstart/drafters" / name) + f":{s}"
                for s in ("length=4,width=1", "length=4,nodes=12")
            ]
    for settings in SETTINGS if count > 2 else (SETTINGS[0], SETTINGS[-1]):
        expected = [
            oracle(target, prompt, 24, i, 0, 11, settings) for i, prompt in enumerate(prompts)
        ]
        for spec in specs:
            found = generate(
                target,
                load_proposer(spec, target, print),
                prompts,
                24,
                Sampling(seed=11, **settings),
            )
            assert [g.token_ids for g in found] == expected, spec


def test_other_seeds_requests_and_samples_give_other_texts() -> None:
    target, drafters = tiny()
    sampling = Sampling(temperature=1.0)
    same = [Request([5, 6, 7], 0, 0), Request([5, 6, 7], 0, 1), Request([5, 6, 7], 1, 0)]
    texts = [g.token_ids for g in generate(target, drafters["plain"], same, LENGTH, sampling)]
    texts += [
        g.token_ids
        for g in generate(
            target, drafters["plain"], same[:1], LENGTH, Sampling(temperature=1.0, seed=1)
        )
    ]
    assert len({tuple(text) for text in texts}) == 4


def test_a_deterministic_draft_under_the_rejection_rule_is_a_match_and_writes_the_same_text() -> (
    None
):
    target, drafters = tiny()
    prompts = [[5, 6, 7], [9, 8]]
    for name in ("ngram",):
        texts = [
            [
                g.token_ids
                for g in generate(
                    target, drafters[name], prompts, LENGTH, Sampling(temperature=1.0, rule=rule)
                )
            ]
            for rule in ("coupled", "rejection", "recursive")
        ]
        assert texts[0] == texts[1] == texts[2]
        found = generate(
            target, drafters[name], prompts, LENGTH, Sampling(temperature=1.0, rule="rejection")
        )
        assert {r.rule for g in found for r in g.rounds} == {"match"}


@pytest.mark.parametrize("penalty", [None, 1.3])
def test_the_gap_of_a_coupled_reply_is_that_of_the_scores_with_their_noise(
    penalty: float | None,
) -> None:
    """Recomputed at every token: the noisy best is the token that was written."""
    target = tiny_target(dtype=torch.float64)
    sampling = Sampling(temperature=0.8, seed=3, repetition_penalty=penalty)
    request = Request([5], 4, 1)  # the shortest text that there is: its root alone
    (reply,) = generate(target, PlainDecoding(), [request], 8, sampling)
    keys = noise.row_keys(3, [(4, 1)], torch.device("cpu"))
    for index, token in enumerate(reply.token_ids):
        before: Any = torch.tensor([reply.prompt_ids + reply.token_ids[:index]])
        logits = target.head(target.forward(before).last[:, -1])
        if penalty is not None:
            logits = RepetitionPenaltyLogitsProcessor(penalty)(before, logits)
        place = torch.tensor([before.shape[1]])
        added = noise.gumbel(keys, noise.COUPLED, place, target.vocab_size)
        best = (logits / 0.8 + added)[0].topk(2)
        assert int(best.indices[0]) == token
        other = Generation(reply.prompt_ids, [*reply.token_ids[:index], token + 1])
        assert first_difference(target, reply, other, sampling) == (index, None)
        at, gap = first_difference(target, reply, other, sampling, (4, 1))
        assert at == index and gap is not None
        assert gap == pytest.approx(0.8 * float(best.values[0] - best.values[1]))
