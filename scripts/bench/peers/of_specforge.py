"""EAGLE-3 by SpecForge 0.2.0: its model, collator, loss, optimiser and schedule.

Its trainer needs a server or CUDA, so that its training strategy is called directly. On a CPU its
loss is the reference next to its Triton kernel in the same module.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import specforge.algorithms.eagle3.model as eagle3
import torch
from peer_data import Data, Document
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.core.loss import _compute_loss
from specforge.data.utils import DataCollatorWithPadding
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

DEFAULT_STEPS = 7
LONGEST = 1 << 20


class Learner:
    """A drafter in training."""

    def __init__(self, data: Data, device: torch.device, bf16: bool, **options: Any) -> None:
        """`options` are keys of the drafter's config."""
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        shape, cuda = data.shape, device.type == "cuda"
        if not cuda:
            eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
        config = LlamaConfig.from_pretrained(data.target)
        config.num_hidden_layers = 1
        config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.kv_heads
        config.head_dim = config.hidden_size // shape.heads
        config.intermediate_size = shape.mlp
        config.draft_vocab_size = shape.draft_vocab
        config.tie_word_embeddings = False
        for name, value in options.items():
            setattr(config, name, value)
        backend = "flex_attention" if cuda else "sdpa"
        self.draft = LlamaForCausalLMEagle3(config, attention_backend=backend)
        target: Any = AutoModelForCausalLM.from_pretrained(data.target, dtype=torch.float32)
        head = TargetHead(str(data.target))
        with torch.no_grad():
            self.draft.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
            head.fc.weight.copy_(target.get_output_embeddings().weight)
        self.draft.t2d.zero_()[: shape.draft_vocab] = True  # and d2t stays 0: no token moves
        self.draft.freeze_embedding()
        head.freeze_weights()
        self.draft.to(device)
        self.steps = shape.steps or DEFAULT_STEPS
        self.model = eagle3.OnlineEagle3Model(
            self.draft, length=self.steps, attention_backend=backend
        )
        self._strategy = Eagle3TrainStrategy(self.model, target_head=head.to(device))
        self._collate = DataCollatorWithPadding()

    def begin(self, lr: float, steps: int) -> None:
        self._optimizer = BF16Optimizer(self.draft, lr, total_steps=steps)

    def batch(self, documents: list[Document]) -> TrainBatch:
        """Return one padded row for each document: its unrolled attention has no documents."""
        items = []
        for document in documents:
            raw = {
                "aux_hidden_state": document.taps[None],
                "hidden_state": document.last[None],
                "input_ids": document.ids,
                "loss_mask": document.loss_mask,
            }
            items.append(normalize_offline_sample(raw, LONGEST))
        tensors = {k: v for k, v in self._collate(items).items() if isinstance(v, Tensor)}
        return TrainBatch(
            strategy="eagle3",
            sample_ids=[str(i) for i in range(len(items))],
            tensors=tensors,
            metadata={"target_repr": "hidden_state"},
        )

    def step(self, batch: TrainBatch) -> float:
        """Take a step; return its loss."""
        with self._autocast:
            loss = self._strategy.forward_loss(batch).loss
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        self.draft.save_pretrained(folder)
