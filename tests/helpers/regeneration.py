"""Replies that a target writes alone."""

from __future__ import annotations

import torch

from draftsmith.inference.targets.target import Target


def alone(target: Target, prompt: list[int], limit: int) -> list[int]:
    """The target's greedy reply to one prompt, cut behind its end token."""
    out = target.model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=limit, pad_token_id=0
    )[0, len(prompt) :].tolist()
    end = next((i for i, t in enumerate(out) if t in target.eos_ids), len(out) - 1)
    return out[: end + 1]
