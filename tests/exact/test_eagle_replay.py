"""Estimated tau counts what decoding counts, for EAGLE's chains and trees: on target-greedy text in
fp32, round by round."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftsmith.heads.eagle import EagleDrafter
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import generate, generate_one
from draftsmith.inference.metrics import emitted_per_round
from draftsmith.inference.proposers.contract import Accepted
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.medusa import MedusaProposer
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.replay import replay, rounds_on_text
from draftsmith.inference.targets.stored import HeldOutPrompt
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.batches import collate
from draftsmith.train.data.config import Evaluation
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.evaluation import write_text
from draftsmith.train.methods.eagle.method import METHOD
from tests.conftest import random_heads, tiny_target
from tests.helpers.architectures import architecture
from tests.helpers.eagle_texts import text_of
from tests.helpers.random_eagles import committed, random_eagle
from tests.helpers.trained import accepted_in_chains, chat_prompts

LENGTH = 4


def check(target: Target, drafter: EagleDrafter, prompts: list[list[int]], limit: int) -> float:
    """Chain: training pass, replay and decoding agree. Tree: replay and decoding agree. Returns the
    share of rounds that accepted something."""
    busy = rounds = 0
    for prompt in prompts:
        ids, hidden = text_of(target, prompt, drafter.taps, limit)
        ranks = METHOD.teacher_forced(drafter, hidden, ids, LENGTH)
        trained = replay(accepted_in_chains(ranks, LENGTH), len(prompt), len(ids))
        for width, nodes in ((1, None), (4, 12)):
            expanded = rounds_on_text(
                EagleProposer(drafter, TreeSettings(length=LENGTH, width=width, nodes=nodes)),
                ids,
                len(prompt),
                hidden,
            )
            decoded = emitted_per_round(
                generate_one(
                    target,
                    EagleProposer(drafter, TreeSettings(length=LENGTH, width=width, nodes=nodes)),
                    prompt,
                    limit,
                )
            )
            assert expanded == decoded
            if width == 1:
                assert trained == decoded
            busy += sum(count > 1 for count in decoded)
            rounds += len(decoded)
    return busy / max(rounds, 1)


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_rounds_agree_for_trained_drafters(name: str, count: int, quickstart: Target) -> None:
    drafter = committed(name, quickstart).drafter
    busy = check(quickstart, drafter, chat_prompts(quickstart, "test", count), limit=48)
    assert busy > 0.3, "a drafter that is never right would prove nothing"


@pytest.mark.parametrize(
    "kind",
    [
        "eagle3 draft vocabulary",
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("eagle1", "eagle3.1")),
    ],
)
def test_rounds_agree_where_replies_end_and_are_cut(kind: str) -> None:
    target = tiny_target(seed=5)
    drafter = random_eagle(target, kind)
    prompts = [[4 + (i * j) % 200 for j in range(1, 5)] for i in range(12)]
    for limit in (1, 2, 3, 30):
        check(target, drafter, prompts, limit)


@pytest.mark.parametrize("kind", ["qwen3.5", "nemotron-h", "zamba2"])
def test_features_of_hybrids_are_those_of_decoding(kind: str) -> None:
    """Those of estimated tau and of training, also where steps are limited in prompts alone."""
    target = architecture(kind)
    with torch.no_grad():
        for name, parameter in target.model.named_parameters():
            if name.endswith("dt_bias"):  # steps of about the least, 0.001
                parameter.sub_(5)
    prompt = [5, 9, 33, 7, 21, 8]
    decoded: list[torch.Tensor] = []

    class Recorder(PlainDecoding):
        traceable = False

        def commit(self, accepted: Accepted) -> None:
            decoded.append(accepted.hidden.last[0])

    generate_one(target, Recorder(), prompt, 40)
    expected = torch.cat(decoded)
    text = write_text(target, HeldOutPrompt(prompt, 0), (), Evaluation(max_new_tokens=40))
    after = slice(len(prompt), len(prompt) + len(expected))
    torch.testing.assert_close(text.hidden.last[after], expected, rtol=1e-3, atol=1e-4)
    mask = np.arange(len(text.ids)) >= len(prompt)
    rows = collate([[(np.arange(7), np.zeros(7, bool)), (np.array(text.ids), mask)]])
    trained = LiveTarget(target).features(rows).last[0, 7:][after]
    torch.testing.assert_close(trained, expected, rtol=1e-3, atol=1e-4)
    whole = target.forward(torch.tensor([text.ids])).last[0, after]
    if kind != "qwen3.5":
        assert not torch.allclose(whole, expected, rtol=0.01, atol=0.01), "no step was limited"


def test_a_replay_of_a_text_is_right_for_other_drafters_too() -> None:
    """Heads with a fixed tree: the same rounds as in decoding."""
    target = tiny_target(seed=5)
    shape = [(0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0)]
    proposer = MedusaProposer(random_heads(target), TreeSettings(shape=shape))
    for i in range(12):
        prompt = [4 + (i * j) % 200 for j in range(1, 5)]
        ids, hidden = text_of(target, prompt, (), 30)
        expanded = rounds_on_text(proposer, ids, len(prompt), hidden)
        assert expanded == emitted_per_round(generate_one(target, proposer, prompt, 30))


def test_a_ragged_batch_drafts_what_each_row_drafts_alone(quickstart: Target) -> None:
    """Same rounds, not only the same text: the cache of every row follows its own commits."""
    drafter = committed("eagle3", quickstart).drafter
    prompts = chat_prompts(quickstart, "test", 5)
    for width, nodes in ((1, None), (5, 16)):
        alone = [
            generate_one(
                quickstart,
                EagleProposer(drafter, TreeSettings(length=4, width=width, nodes=nodes)),
                prompt,
                32,
            )
            for prompt in prompts
        ]
        together = generate(
            quickstart,
            EagleProposer(drafter, TreeSettings(length=4, width=width, nodes=nodes)),
            prompts,
            32,
        )
        assert [emitted_per_round(g) for g in alone] == [emitted_per_round(g) for g in together]
