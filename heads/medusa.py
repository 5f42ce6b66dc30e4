"""Medusa heads (Cai et al., arXiv 2401.10774).

Head i, from 0, reads the target's last hidden state at position t and predicts x[t+2+i]
(docs/notation.md#positions). Unlike in the reference code the biases of residual blocks start at
zero, so that an untrained block is exactly the identity; the blocks of a head are distinct modules;
with `shared_head` the target's head makes the logits.

Shapes: D heads, H hidden size (the target's), V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from torch import Tensor, nn
from torch.nn import functional

from .documents import Layers, Size, Tokens, demand_vocabulary
from .errors import UserError
from .files import JsonObject
from .layout import DrafterModule, EmbeddingAndHead, linear_bytes
from .vocabulary import VocabularyMaps


class ResidualBlock(nn.Module):
    """Residual block x + SiLU(A x + b), which is the identity at initialisation."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaFile(Struct):
    """`config.json` of Medusa heads."""

    medusa_num_heads: Annotated[int, Meta(ge=1, le=1 << 8)]
    medusa_num_layers: Layers
    original_lm_head: bool
    hidden_size: Size
    vocab_size: Tokens
    draft_vocab_size: Tokens | None = None

    def __post_init__(self) -> None:
        demand_vocabulary(self.draft_vocab_size, self.vocab_size)


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of Medusa heads."""

    num_heads: int
    num_layers: int = 1
    shared_head: bool = False
    draft_vocab_size: int | None = None
    """Number of tokens that can be drafted; None for all of them."""


class MedusaHeads(VocabularyMaps, DrafterModule):
    """D heads over the target's last hidden state.

    `embedding_and_head` are the target's, borrowed, not owned. They are needed for `shared_head`
    only. Raises `UserError` if they are missing.
    """

    method = kind = "medusa"
    document = MedusaFile
    weights_file = "medusa_lm_head.safetensors"
    drafted_rows = ("outputs",)

    def __init__(
        self,
        config: MedusaShape,
        hidden_size: int,
        vocab_size: int,
        embedding_and_head: EmbeddingAndHead | None = None,
    ) -> None:
        super().__init__()
        self.drafted = min(config.draft_vocab_size or vocab_size, vocab_size)
        """Number of tokens that it can draft, Vd."""
        if self.drafted == vocab_size:  # all tokens: no draft vocabulary
            config = replace(config, draft_vocab_size=None)
        self.config, self.hidden_size = config, hidden_size
        self.most_drafts, self.borrows_head = config.num_heads, config.shared_head
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        self.outputs = nn.ModuleList(
            nn.Linear(hidden_size, self.drafted, bias=False)
            for _ in range(0 if config.shared_head else config.num_heads)
        )
        # Filled by training or by loading.
        self.add_maps(self.drafted, vocab_size)
        self.embedding_and_head = embedding_and_head if config.shared_head else None
        if config.shared_head and embedding_and_head is None:
            raise UserError(
                "heads with shared_head need the target's head; load them together with their "
                "target"
            )

    def chosen(self, _options: type) -> JsonObject:
        """Return the sizes that a user chose."""
        return asdict(self.config)

    def untrained(self, drafted: int, vocab_size: int) -> MedusaHeads:
        config = replace(self.config, draft_vocab_size=drafted)
        return MedusaHeads(config, self.hidden_size, vocab_size, self.embedding_and_head)

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """Return the logits `[..., Vd]` of head number `head` for last hidden states `[..., H]`.

        They predict the token at position t + 2 + `head`, where t is the state's position.
        """
        blocks: Any = self.blocks[head]
        linear = blocks[0].linear
        # The heads may have another type than the target's states.
        states = blocks(hidden.to(linear.weight.dtype))
        return (self.borrowed_head if self.borrows_head else self.outputs[head])(states)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits `[D, ..., Vd]` of all heads for last hidden states `[..., H]`."""
        return torch.stack([self.logits(hidden, head) for head in range(self.config.num_heads)])

    def bytes_read(self, levels: int) -> tuple[float, float]:
        own = levels / self.config.num_heads * linear_bytes(self)
        return own, levels * self.borrows_head

    def facts(self) -> JsonObject:
        # The key of the draft vocabulary is left out if all tokens are drafted.
        options = {name: value for name, value in asdict(self.config).items() if value is not None}
        return {**options, "hidden_size": self.hidden_size, "vocab_size": self.vocab_size}

    # The layout on disk has the names of the original project, which TGI and vLLM <= 0.32 read
    # (docs/checkpoint-formats.md#medusa).

    def serving_state(self) -> dict[str, Tensor]:
        # Such as 0.0.linear.weight: head, block, layer.
        state: dict[str, Tensor] = {name: part for name, part in self.blocks.named_parameters()}
        # The output matrix is numbered as if it were one more block.
        for head in range(len(self.outputs)):
            matrix = self.outputs.get_parameter(f"{head}.weight")
            state[f"{head}.{self.config.num_layers}.weight"] = matrix
        return state | self.maps()

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        """Return the content of `config.json`.

        It has no `architectures`, with which TGI would take the folder for a model without heads,
        and no other `num_*` keys.
        """
        config: JsonObject = {
            "medusa_num_heads": self.config.num_heads,
            "medusa_num_layers": self.config.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": self.config.shared_head,
            "base_model_name_or_path": target_name,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }
        if self.config.draft_vocab_size is not None:
            config["draft_vocab_size"] = self.drafted
        return config

    @classmethod
    def from_serving_config(
        cls, config: JsonObject, embedding_and_head: EmbeddingAndHead | None
    ) -> MedusaHeads:
        shape = MedusaShape(
            config["medusa_num_heads"],
            config["medusa_num_layers"],
            config["original_lm_head"],
            config.get("draft_vocab_size"),
        )
        return cls(shape, config["hidden_size"], config["vocab_size"], embedding_and_head)


Drafter = MedusaHeads
