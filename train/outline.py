"""Outline of a run from its configs alone: a drafter without weights, and the work to train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..heads.embedding_and_head import EmbeddingAndHead
from ..heads.pretrained import clear_errors, make_causal_lm, read_config
from ..inference.targets.target_files import check_there


@dataclass(frozen=True)
class Outline:
    """Drafter of a run on the meta device, and the amount of work in training it."""

    drafter: nn.Module
    logit_rows: int
    """Number of rows of logits that exist at one time in the objective."""
    passes: float = 1.0
    """Average number of passes of the drafter over a position, in a step."""
    borrowed_params: int = 0
    """Number of frozen parameters of the target's head that the gradients of a pass go through,
    over all heads of a drafter."""
    layers: int = 1
    """Number of decoder layers whose states a pass keeps for its backward pass."""


class ConfigOnly:
    """Config of a target, under the attributes of a target that methods read."""

    def __init__(self, config: Any) -> None:
        self.config = config.get_text_config()
        self.num_layers, self.vocab_size = self.config.num_hidden_layers, self.config.vocab_size
        # One id, a list of ids, or None.
        eos = getattr(config, "eos_token_id", None)
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        # Never called: a drafter is only built with it.
        self.embedding_and_head = EmbeddingAndHead(
            lambda ids: ids, lambda last: last, self.vocab_size
        )


def config_at(path: str, trust: bool = False) -> Any:
    """Return the config of a model on the hub or in a folder; `trust`: code beside it may be run.

    Raises `UserError` where there is none.
    """
    check_there(path)
    with clear_errors(path, "the config of", "a folder with its config.json is enough"):
        return read_config(path, trust)


def empty(config: Any) -> Any:
    """Return a model of this config on the meta device, without weights."""
    with torch.device("meta"):
        return make_causal_lm(config)
