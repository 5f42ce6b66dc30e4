"""What is known of a run before anything is loaded: configs, drafters without numbers, what their
training runs through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..heads.embedding_and_head import EmbeddingAndHead
from ..heads.pretrained import clear_errors, make_causal_lm, read_config
from ..inference.target_files import check_there


@dataclass(frozen=True)
class Outline:
    """A run's drafter on the meta device, and what its training runs through."""

    drafter: nn.Module
    passes: float = 1.0
    """Passes of the drafter over a position."""
    borrowed_params: int = 0
    """Frozen parameters of the target's head that gradients of such a pass go through, over all of
    a drafter's heads."""
    layers: int = 1
    """Decoder layers whose states a pass keeps."""
    distributions: int = 1
    """Rows of logits for each of objective.rows_per_chunk."""


class ConfigOnly:
    """A target's config under the names that methods ask a target by."""

    def __init__(self, config: Any) -> None:
        self.config = config.get_text_config()
        self.num_layers, self.vocab_size = self.config.num_hidden_layers, self.config.vocab_size
        eos = getattr(config, "eos_token_id", None)
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        self.embedding_and_head = EmbeddingAndHead(
            lambda ids: ids, lambda last: last, self.vocab_size
        )


def config_at(path: str, trust: bool = False) -> Any:
    """The config of a model on the hub or in a folder. Raises `UserError` where none is to be
    had."""
    check_there(path)
    with clear_errors(path, "the config of", "a folder with its config.json is enough"):
        return read_config(path, trust)


def empty(config: Any) -> Any:
    """A model without numbers."""
    with torch.device("meta"):
        return make_causal_lm(config)
