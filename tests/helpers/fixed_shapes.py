"""Decoding in fixed shapes, and what has to be equal to it."""

from __future__ import annotations

from typing import Any

import pytest

from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.decode import Generation, Request, generate
from draftsmith.inference.proposers.contract import Proposer
from draftsmith.inference.targets.target import Target

SAMPLINGS = {
    "greedy": Sampling(),
    "coupled": Sampling(temperature=0.8, seed=2),
    "rejection": Sampling(temperature=0.8, seed=2, rule="rejection"),
    "penalty": Sampling(repetition_penalty=1.3),
}

full = pytest.mark.full

PROMPTS = [[5, 9, 33, 7], [12], [40, 41, 42, 43, 44, 45, 46, 8, 3], [7, 7, 7]]


def run(target: Target, proposer: Proposer, sampling: Sampling) -> list[Generation]:
    """Replies of different lengths, so that rows leave the batch one by one."""
    requests = [Request(prompt, place) for place, prompt in enumerate(PROMPTS)]
    return generate(target, proposer, requests, 24, sampling, frozenset({1, 2, 50, 51}))


def without_times(replies: list[Generation]) -> list[Any]:
    found = []
    for reply in replies:
        rounds = []
        for r in reply.rounds:
            overlap = None if r.overlap is None else [round(x, 4) for x in r.overlap]
            rounds.append((r.tokens, r.drafted, r.accepted, r.offered, r.rule, r.rows, overlap))
        found.append((reply.token_ids, reply.finish_reason, rounds))
    return found
