"""Speculative decoding of one text in its simplest form, without caches and without batches.

This file explains the engine, and docs/how-it-works.md walks through it. `decode.py` emits the same
tokens in the same rounds, which tests require, but it keeps caches, decodes batches, and verifies a
whole tree in one forward pass.

Shapes: S tokens of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .base.tree_settings import Ranks
from .rounds import noise

Ids = list[int]
Model = Callable[[Ids], Tensor]
"""Function from a text to the logits `[S, V]` after each of its tokens."""
Tree = Sequence[Ranks]
"""Shape of the draft tree, parents first: (0,) is the drafter's best token after the root, (0, 2)
its third-best token after that. [(0,), (0, 0)] is a chain of two drafts."""
Draft = tuple[int, ...]
"""Draft with all drafts before it. The root, the newest token of the text, is written as ()."""


def decode(
    target: Model, drafter: Model, prompt: Ids, tree: Tree, limit: int
) -> tuple[Ids, list[int]]:
    """Return `limit` tokens, and how many drafts each round accepted."""
    text = [*prompt, int(target(prompt)[-1].argmax())]
    accepted = []
    while len(text) < len(prompt) + limit:
        drafts = draft(drafter, text, tree)
        choices = verify(target, text, drafts)
        path, bonus = accept(choices)
        text += [*path, bonus]  # commit
        accepted.append(len(path))
    return text[len(prompt) :][:limit], accepted


def draft(drafter: Model, text: Ids, tree: Tree) -> list[Draft]:
    """Return the root and the drafter's guesses of what follows it."""
    drafts: dict[Ranks, Draft] = {(): ()}
    for ranks in tree:
        parent, rank = drafts[ranks[:-1]], ranks[-1]
        best = drafter([*text, *parent])[-1].topk(rank + 1).indices
        drafts[ranks] = (*parent, int(best[rank]))
    return list(drafts.values())


def verify(target: Model, text: Ids, drafts: list[Draft]) -> dict[Draft, int]:
    """Return the target's choice after the root and after each draft."""
    choices: dict[Draft, int] = {}
    for path in reversed(drafts):
        # One pass gives the choices after every token of a path.
        if path not in choices:
            logits = target([*text, *path])[len(text) - 1 :]
            for depth, choice in enumerate(logits.argmax(-1).tolist()):
                choices[path[:depth]] = choice
    return choices


def accept(choices: dict[Draft, int]) -> tuple[Draft, int]:
    """Return the longest path that the target chose, and its next choice."""
    path: Draft = ()
    while (*path, choices[path]) in choices:
        path = (*path, choices[path])
    return path, choices[path]


def with_noise(model: Model, temperature: float, seed: int) -> Model:
    """Return a model whose best token is a random draw of `model` (Gumbel-max).

    The noise depends only on the seed and the position. With the same noise in
    target and drafter, `decode` returns the same text as plain sampling with
    that noise.
    """
    keys = noise.row_keys(seed, [(0, 0)], torch.device("cpu"))

    def noisy(text: Ids) -> Tensor:
        logits = model(text)
        positions = torch.arange(1, len(text) + 1)  # of the chosen tokens
        gumbel = noise.gumbel(keys, noise.COUPLED, positions, logits.shape[-1])
        return logits / temperature + gumbel.to(logits.dtype)

    return noisy
