"""Estimated tau counts what decoding counts: on target-greedy text in fp32 the rounds agree one by
one."""

from __future__ import annotations

import pytest
import torch

from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import generate_one
from draftsmith.inference.metrics import emitted_per_round
from draftsmith.inference.proposers.medusa import MedusaProposer, make_proposer
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.proposers.tree_plan import grow
from draftsmith.inference.replay import replay
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.inference.targets.target import Target
from draftsmith.train.methods.medusa.method import METHOD
from tests.conftest import random_heads, tiny_target
from tests.helpers.trained import accepted_in_tree, chat_prompts, story_prompts, trained_artifact


def check(
    target: Target,
    proposer: MedusaProposer,
    heads,
    calibration: dict,
    prompts: list[list[int]],
    limit: int,
) -> int:
    """Compare the emitted tokens of every round; returns how many rounds accepted something."""
    busy = 0
    for prompt in prompts:
        ids = prompt + generate_one(target, PlainDecoding(), prompt, limit).token_ids
        with torch.no_grad():
            last = target.forward(torch.tensor([ids])).last[0]
        ranks = METHOD.teacher_forced(heads, Hidden(last), torch.tensor(ids))
        estimated = replay(accepted_in_tree(ranks, calibration), len(prompt), len(ids))
        decoded = emitted_per_round(generate_one(target, proposer, prompt, limit))
        assert estimated == decoded
        busy += sum(count > 1 for count in decoded)
    return busy


@pytest.mark.parametrize("count", [6, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.parametrize("which", ["quickstart", "stories"])
def test_rounds_agree_for_trained_heads(
    which: str, count: int, request: pytest.FixtureRequest
) -> None:
    target: Target = request.getfixturevalue(which)
    artifact = trained_artifact(target)
    prompts = (
        chat_prompts(target, "test", count)
        if which == "quickstart"
        else story_prompts(target, count)
    )
    busy = check(
        target,
        make_proposer(artifact),
        artifact.drafter,
        artifact.calibration,
        prompts,
        limit=64,
    )
    assert busy > count // 3, "heads that are never right would prove nothing"


def test_rounds_agree_where_replies_end_and_are_cut() -> None:
    target = tiny_target(seed=5)
    heads = random_heads(target)
    calibration = {"rank_accuracy": [[0.5, 0.3, 0.2]] * 4, "tree_nodes": 20}
    proposer = MedusaProposer(heads, TreeSettings(shape=grow(calibration["rank_accuracy"], 20)))
    prompts = [[4 + (i * j) % 200 for j in range(1, 5)] for i in range(40)]
    assert (
        sum(check(target, proposer, heads, calibration, prompts, limit) for limit in (1, 2, 3, 30))
        > 3
    )


@pytest.mark.parametrize("limit", [2, 3, 5, 17])
def test_rounds_agree_when_an_accepted_run_crosses_the_limit(
    quickstart: Target, limit: int
) -> None:
    artifact = trained_artifact(quickstart)
    prompts = chat_prompts(quickstart, "valid", 8)
    check(
        quickstart,
        make_proposer(artifact),
        artifact.drafter,
        artifact.calibration,
        prompts,
        limit,
    )


def test_calibration_counts_ranks_over_roots_with_every_label() -> None:
    # Two heads; a reply at 2..6: roots 2..4 have two tokens ahead, root 5 has one.
    ranks = torch.tensor([[-1, -1], [9, 9], [0, 1], [0, 0], [1, -1], [0, -1], [-1, -1]])
    table = METHOD.calibrate([(ranks, 2)], tree_nodes=4)
    assert table["roots"] == 3
    assert table["rank_accuracy"][0][:3] == [2 / 3, 1 / 3, 0]
    assert table["rank_accuracy"][1][:3] == [1 / 3, 1 / 3, 0]
