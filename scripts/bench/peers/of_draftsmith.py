"""EAGLE-3 by this checkout: its drafter and objective, on the same features; for the speed only."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from peer_data import Data, Document
from transformers import AutoModelForCausalLM

from draftsmith.heads.eagle import EagleShape, drafter_of
from draftsmith.heads.layout import EmbeddingAndHead
from draftsmith.train.data.batches import Batch, collate
from draftsmith.train.data.features import Features
from draftsmith.train.losses.unrolled import UnrolledObjective
from draftsmith.train.methods.eagle.config import EagleLoss
from draftsmith.train.methods.eagle.method import first_weights

DEFAULT_STEPS = 7


class Learner:
    """A drafter in training."""

    def __init__(
        self,
        data: Data,
        device: torch.device,
        bf16: bool,
        metrics_every: int = 1,
        **options: Any,
    ) -> None:
        """`options` are those of `EagleLoss`; metrics are counted every `metrics_every` steps."""
        self._metrics_every = metrics_every
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        shape, self._device = data.shape, device
        loaded = AutoModelForCausalLM.from_pretrained(data.target, dtype=torch.float32)
        target = cast(Any, loaded).to(device)
        config = target.config
        hidden = config.hidden_size
        embedding = target.get_input_embeddings().weight.detach()
        head = target.get_output_embeddings().weight.detach()
        functional = torch.nn.functional
        both = EmbeddingAndHead(
            lambda ids: functional.embedding(ids, embedding),
            lambda last: functional.linear(last, head),
        )
        sizes = EagleShape(
            version=3, taps=shape.taps, hidden_size=hidden, target_hidden_size=hidden,
            intermediate_size=shape.mlp, num_layers=1, num_heads=shape.heads,
            num_kv_heads=shape.kv_heads, head_dim=hidden // shape.heads,
            vocab_size=config.vocab_size, draft_vocab_size=shape.draft_vocab,
            max_positions=config.max_position_embeddings, norm_eps=config.rms_norm_eps,
            activation="silu", rope={"rope_type": "default", "rope_theta": 10000.0},
        )  # fmt: skip
        drafter = drafter_of(sizes, both)
        first_weights(
            drafter, head, target.model.norm.weight.detach(), torch.arange(shape.draft_vocab)
        )
        self.model = drafter.to(device)
        self.steps = shape.steps or DEFAULT_STEPS
        settings = EagleLoss(steps=self.steps, **options).resolved(3)
        self._objective = UnrolledObjective(settings, drafter, both.head)
        self._turn = 0

    def begin(self, lr: float, steps: int) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True)

    def batch(self, documents: list[Document]) -> tuple[Features, Any]:
        """Return documents in one packed row."""
        row = [(np.asarray(d.ids), np.asarray(d.loss_mask).astype(bool)) for d in documents]
        batch: Batch = collate([row])

        def joined(name: str) -> torch.Tensor:
            return torch.cat([getattr(d, name) for d in documents])[None].to(self._device)

        features = Features(batch, joined("last"), joined("taps").chunk(3, dim=-1))
        return features, self._objective.weights(batch)

    def step(self, batch: tuple[Features, Any]) -> float:
        """Take a step, with metrics where they are due; return its loss."""
        features, denominators = batch
        self._turn += 1
        with self._autocast:
            loss, _ = self._objective.forward(
                self.model, features, denominators, self._turn % self._metrics_every == 0
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
