"""Texts of a target, and the features of an EAGLE drafter along them."""

from __future__ import annotations

import torch

from draftsmith.inference.decode import generate, generate_one
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.inference.targets.target import Target


def own_texts(target: Target, prompts: list[list[int]], limit: int) -> list[tuple[list[int], int]]:
    from draftsmith.inference.proposers.ngram import PlainDecoding

    replies = generate(target, PlainDecoding(), prompts, limit, eos_ids=frozenset())
    return [
        (prompt + reply.token_ids, len(prompt))
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def text_of(
    target: Target, prompt: list[int], taps: tuple[int, ...], limit: int
) -> tuple[torch.Tensor, Hidden]:
    """The prompt with the target's greedy reply, and its features from one plain forward."""
    ids = torch.tensor(prompt + generate_one(target, PlainDecoding(), prompt, limit).token_ids)
    with torch.no_grad():
        hidden = target.forward(ids[None], taps=taps)
    return ids, Hidden(hidden.last[0], tuple(tap[0] for tap in hidden.taps))
