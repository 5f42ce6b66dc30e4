"""Draft models cut from a tiny target."""

from __future__ import annotations

import torch

from draftsmith.distill.draft_models import DraftModelConfig, make_draft_model
from draftsmith.heads.draft_model import DraftModel
from draftsmith.inference.targets.target import Target
from tests.conftest import tiny_target

TARGET = tiny_target(seed=4, dtype=torch.float64, num_hidden_layers=3)


def draft_model_of(target: Target = TARGET, vocab_size: int | None = None) -> DraftModel:
    """A cut of one layer, with the first tokens only if their number is given."""
    draft_model = make_draft_model(
        DraftModelConfig(layers=1), target, lambda: [torch.arange(3, 20)]
    )
    if vocab_size is not None:
        draft_model.model.resize_token_embeddings(vocab_size)
    return draft_model.to(target.dtype)
