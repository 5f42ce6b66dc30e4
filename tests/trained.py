"""Medusa heads trained for a moment on the target's own text: right often enough that trees are really accepted."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.medusa import MedusaConfig, MedusaHeads
from draftsmith.inference.decode import generate
from draftsmith.inference.medusa import calibrate, teacher_forced
from draftsmith.inference.proposer import PlainDecoding
from draftsmith.inference.target import Target
from draftsmith.train.batches import collate
from draftsmith.train.features import LiveTarget
from draftsmith.train.medusa import MedusaLoss, MedusaObjective

PROMPTS, LENGTH, STEPS = 24, 48, 60
_kept: dict[int, Artifact] = {}


@lru_cache
def greedy_texts(target: Target) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(ids, start of the reply) of greedy replies to random short prompts."""
    texts = []
    for seed in range(PROMPTS):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(5, target.vocab_size, (3,), generator=generator).tolist()
        reply = generate(target, PlainDecoding(), prompt, LENGTH, eos_ids=frozenset()).token_ids
        texts.append((tuple(prompt + reply), len(prompt)))
    return tuple(texts)


def trained_artifact(target: Target) -> Artifact:
    """Calibrated heads for `target`, trained once a session."""
    if id(target) not in _kept:
        _kept[id(target)] = _train(target)
    return _kept[id(target)]


def _train(target: Target) -> Artifact:
    heads = MedusaHeads(MedusaConfig(4), target.hidden_size, target.vocab_size)
    heads.start_from(target.head_weight)
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
        (teacher_forced(heads, features.last[i, : len(ids)], torch.tensor(ids)), start) for i, (ids, start) in enumerate(texts)
    ]
    return Artifact(heads, target.fingerprint(), calibrate(outcomes, tree_nodes=10))
