"""Medusa heads trained on the target's own text: right often enough that trees are really
accepted."""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.medusa import MedusaHeads, MedusaShape
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.proposers.tree_plan import grow
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.batches import collate
from draftsmith.train.data.features import LiveTarget
from draftsmith.train.methods.medusa.config import MedusaLoss
from draftsmith.train.methods.medusa.loss import MedusaObjective
from draftsmith.train.methods.medusa.method import METHOD, copy_head
from tests.conftest import ROOT

MEDUSA = ROOT / "scripts" / "quickstart" / "drafters" / "medusa"
PROMPTS, LENGTH, STEPS = 16, 48, 60
_kept: dict[int, Artifact] = {}


def chat_prompts(target: Target, split: str, count: int) -> list[list[int]]:
    """Functions of the standard library, as the quickstart asks for them."""
    chats = [[{"role": "user", "content": asked}] for asked in questions(split, count)]
    return [
        target.tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for c in chats
    ]


@lru_cache
def questions(split: str, count: int) -> list[str]:
    chosen = functions_module().select(
        all_functions(), split, count, seed=1, min_body=80, max_chars=700
    )
    return [function.prompt for function in chosen]


@lru_cache
def all_functions() -> list[Any]:
    """Of the standard library: reading it takes six seconds, once a process."""
    return list(functions_module().stdlib_functions())


def functions_module() -> Any:
    sys.path.insert(0, str(ROOT / "scripts" / "quickstart"))
    try:
        return importlib.import_module("functions")
    finally:
        sys.path.pop(0)


STARTS = [
    "Once upon a time",
    "The dog",
    "Lily and Tom",
    "One day, a big",
    "There was a",
    "In the park",
    "Mom",
    "A cat",
]
ENDS = ["", " was happy", " went to", " saw a", ' said, "', " did not"]


def story_prompts(target: Target, count: int) -> list[list[int]]:
    return [target.tokenizer(a + b)["input_ids"] for b in ENDS for a in STARTS][:count]


@lru_cache
def greedy_texts(target: Target) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(ids, start of the reply) of greedy replies to prompts of the target's kind."""
    prompts = (
        chat_prompts(target, "train", PROMPTS)
        if target.tokenizer.chat_template
        else story_prompts(target, PROMPTS)
    )
    replies = generate(target, PlainDecoding(), prompts, LENGTH, eos_ids=frozenset())
    return tuple(
        (tuple(prompt + reply.token_ids), len(prompt))
        for prompt, reply in zip(prompts, replies, strict=True)
    )


def trained_artifact(target: Target) -> Artifact:
    """Calibrated heads: the quickstart's for its target, otherwise trained once a session."""
    if id(target) not in _kept:
        chat = target.tokenizer.chat_template
        _kept[id(target)] = (
            Artifact.load(MEDUSA, target.fingerprint()) if chat else trained_heads(target)
        )
    return _kept[id(target)]


def trained_heads(target: Target) -> Artifact:
    """Four calibrated heads for `target`, trained for a few seconds."""
    heads = MedusaHeads(
        MedusaShape(4),
        target.hidden_size,
        target.vocab_size,
        target.embedding_and_head,
    )
    copy_head(heads, target.head_weight)
    objective = MedusaObjective(MedusaLoss(), 4, target.head)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-3)
    texts = greedy_texts(target)
    rows: list[Any] = [[(np.array(ids), np.arange(len(ids)) >= start)] for ids, start in texts]
    features = LiveTarget(target).features(collate(rows))
    denominators = objective.weights(features.batch)
    for _ in range(STEPS):
        loss, _ = objective.forward(heads, features, denominators)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    heads.eval().requires_grad_(False)
    outcomes = [
        (
            METHOD.teacher_forced(heads, Hidden(features.last[i, : len(ids)]), torch.tensor(ids)),
            start,
        )
        for i, (ids, start) in enumerate(texts)
    ]
    return Artifact(heads, target.fingerprint(), METHOD.calibrate(outcomes, tree_nodes=10))


def accepted_in_chains(ranks: torch.Tensor, length: int) -> list[int]:
    """How many drafts of a greedy chain are right at each root, by ranks `[S, D]`, 0 the best."""
    # A running product stops at the first wrong draft: 1 1 0 1 becomes 1 1 0 0, so 2.
    return (ranks == 0)[:, :length].int().cumprod(-1).sum(-1).tolist()


def accepted_in_tree(ranks: torch.Tensor, calibration: dict) -> list[int]:
    """How many drafts of the calibrated tree are right at each root, by ranks `[S, D]`.

    At each depth at most one rank is right, so it is the longest prefix that is a node.
    """
    paths = set(grow(calibration["rank_accuracy"], calibration["tree_nodes"]))
    accepted = []
    for row in ranks.tolist():
        depth = 0
        while depth < len(row) and tuple(row[: depth + 1]) in paths:
            depth += 1
        accepted.append(depth)
    return accepted
