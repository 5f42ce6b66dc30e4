"""Tiny targets that the fused pass decodes."""

from __future__ import annotations

import torch
from torch import Tensor

from draftsmith.inference.rounds.cache import TreeCache
from draftsmith.inference.rounds.outcome import Hidden
from draftsmith.inference.rounds.tree import Pass
from draftsmith.inference.targets.target import Target

FUSED = {"llama", "llama-mqa", "qwen2", "qwen3", "mistral"}


def states_of(target: Target, ids: Tensor, lengths: list[int]) -> list[Hidden]:
    """States of a prefill of rows of different lengths, and of a tree behind it."""
    cache = TreeCache(len(ids), 16)
    taps = (0, 1, target.num_layers)
    prompt = target.prefill(ids, lengths, cache, taps)
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)[None]
    depths = torch.tensor([[0, 1, 1]])
    tree = target.forward(ids[:, :3], Pass(depths=depths, visible=visible), cache, taps)
    return [prompt, tree]
