"""EAGLE-3 by speculators 0.9.0: its model, collator, losses, optimisers and schedule.

Its trainer only runs on an accelerator, so that the order of calls of `Trainer.train_epoch` stands
here: forward, backward, clipping at 1, optimisers, schedules. On a CPU its attention is
scaled_dot_product_attention and its losses are the eager ones, since its FlexAttention has no
gradients there and its fused losses are Triton kernels.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from peer_data import Data, Document

if importlib.util.find_spec("datasets") is None:
    # Its data loader alone needs this package, which is too large to be carried to a GPU machine;
    # no data is loaded by it here.
    sys.modules["datasets"] = ModuleType("datasets")
    sys.modules["datasets"].load_from_disk = None  # type: ignore[attr-defined]

from speculators.models.eagle3 import Eagle3DraftModel, shift_batch
from speculators.train.config.schema import TrainConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from transformers import LlamaConfig, get_linear_schedule_with_warmup

DEFAULT_STEPS = 3


class Learner:
    """A drafter in training."""

    def __init__(
        self, data: Data, device: torch.device, bf16: bool, optimizer: str, **options: Any
    ) -> None:
        """`optimizer` is muon, its default, or adamw; `options` are those of its drafter."""
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)
        shape, self._device, cuda = data.shape, device, device.type == "cuda"
        config = LlamaConfig.from_pretrained(data.target)
        config.num_hidden_layers = 1
        config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.kv_heads
        config.head_dim = config.hidden_size // shape.heads
        config.intermediate_size = shape.mlp
        config.layer_types = None
        to_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
        to_draft[: shape.draft_vocab] = True
        # A vocabulary that begins with the draft vocabulary: no token moves.
        offsets = torch.zeros(shape.draft_vocab, dtype=torch.long)
        options = {"norm_before_fc": True, "norm_output": True} | options
        self.steps = shape.steps or DEFAULT_STEPS
        self.model = Eagle3DraftModel.from_training_args(
            verifier_config=config,
            t2d=to_draft,
            d2t=offsets,
            draft_vocab_size=shape.draft_vocab,
            norm_before_residual=False,
            target_layer_ids=list(shape.taps),
            ttt_steps=self.steps,
            verifier_name_or_path=str(data.target),
            draft_attn_impl="simple_flex_attention" if cuda else "sdpa",
            **options,
        ).to(device, torch.float32)
        self._calls, _ = Eagle3DraftModel.get_trainer_kwargs(
            loss_fn="kl_div",
            loss_implementation="fused" if cuda else "eager",
            ttt_steps=self.steps,
            ttt_step_loss_decay=1.0,
        )
        self._optimizer = optimizer
        self._hidden = config.hidden_size

    def begin(self, lr: float, steps: int) -> None:
        """Make optimisers and schedules of a run of `steps`, as its trainer does."""
        defaults = TrainConfig.model_fields["optimizer"].default_factory()
        config = defaults.model_dump() | {"lr": lr, "muon_lr": lr, "optimizer": self._optimizer}
        self._optimizers = build_optimizers(self.model, SimpleNamespace(**config))
        self._schedules = [
            get_linear_schedule_with_warmup(optimizer, steps // 100, steps)
            for optimizer in self._optimizers
        ]

    def batch(self, documents: list[Document]) -> dict[str, Tensor]:
        """Return documents in one packed row."""
        items = []
        for document in documents:
            length = len(document.ids)
            item = {
                "hidden_states": document.taps,
                "input_ids": document.ids,
                "verifier_last_hidden_states": document.raw,
                "loss_mask": document.loss_mask.bool(),
                "lengths": torch.tensor([length]),
                "position_ids": torch.arange(length),
            }
            items.append(item)
        # Each document loses its first position, so this row has no padding.
        length = sum(len(document.ids) - 1 for document in documents)
        collate = CollateFn(length, self._hidden, 3, torch.float32, shift_batch)
        batch = collate(items)
        return {
            name: value.to(self._device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }

    def step(self, batch: dict[str, Tensor]) -> float:
        """Take a step; return its loss."""
        with self._autocast:
            _, loss, _ = self.model(**batch, **self._calls)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        for schedule in self._schedules:
            schedule.step()
        return float(loss.detach())

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
