"""DSpark: DFlash with a transition bias between drafts and a confidence (arXiv 2607.05147).

The anchor's slot drafts too: slot j of a block at anchor a predicts the token at position
a + j + 1. A bias W2 W1[x] is added to its logits, where x is the token before the draft: the
anchor's own, or the draft before. So drafts are chosen one after another, though the layers run
only once. A confidence head estimates from the slot's state and W1[x], before the draft is chosen,
how much of its distribution the target will accept (docs/objectives.md#dspark).

Shapes: H hidden size, Vd draft vocabulary, r rank of the transition.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .dflash import BlockFile, BlockShape, DFlashDrafter
from .documents import Size
from .files import JsonObject
from .layout import EmbeddingAndHead


class DSparkFile(BlockFile, kw_only=True):
    """`config.json` of a DSpark drafter."""

    markov_rank: Size


class DSparkDrafter(DFlashDrafter):
    """DFlash drafter with a transition bias and a confidence head."""

    method = kind = "dspark"
    document = DSparkFile
    architecture = "Qwen3DSparkModel"
    first_slot = 0
    drafts_in_turn = True
    drafted_rows, read_rows = ("transition_out",), ("transition_in",)

    def __init__(self, shape: BlockShape, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(shape, embedding_and_head)
        rank = shape.markov_rank
        assert rank is not None, "the config of a DSpark drafter has its rank"
        self.transition_in = nn.Embedding(shape.vocab_size, rank)
        drafted = shape.draft_vocab_size or shape.vocab_size
        self.transition_out = nn.Linear(rank, drafted, bias=False)
        self.confidence_head = nn.Linear(shape.hidden_size + rank, 1)

    def bytes_read(self, levels: int) -> tuple[float, float]:
        own, heads = super().bytes_read(levels)
        # The transition is read again for each draft of a chain.
        return own + (levels - 1) * self.transition_out.weight.nbytes, heads

    def state(self, output: Tensor, before: Tensor) -> Tensor:
        """Return `[..., H + r]`: the slot's output and W1 of the token `before` its draft."""
        # Both parts travel as one tensor, so that training can make logits of states in chunks for
        # every method alike.
        return torch.cat([output, self.transition_in(before)], dim=-1)

    def logits(self, state: Tensor) -> Tensor:
        """Return drafts' logits `[..., Vd]`, transition included, of states `[..., H + r]`."""
        hidden = self.shape.hidden_size
        return self.base_logits(state[..., :hidden]) + self.transition_out(state[..., hidden:])

    def transition(self, before: Tensor) -> Tensor:
        """Return the bias `[..., Vd]` on the next draft's logits that target ids `[...]` give."""
        return self.transition_out(self.transition_in(before))

    def confidence(self, state: Tensor) -> Tensor:
        """Return the confidence `[...]` in drafts, as a logit, for states `[..., H + r]`.

        It is the share of a draft's distribution that the target is expected to accept
        (docs/objectives.md#confidence).
        """
        hidden = self.shape.hidden_size
        # As for the logits, the layers' output passes the final norm. The rows of W1 have none.
        normed = torch.cat([self.norm(state[..., :hidden]), state[..., hidden:]], dim=-1)
        return self.confidence_head(normed)[..., 0]

    @property
    def head_parameters(self) -> list[Tensor]:
        """Parameters that `logits` and `confidence` read, without W1.

        States hold rows of W1 already, so that its gradient is part of that of the states.
        """
        return [
            self.norm.weight,
            self.transition_out.weight,
            self.confidence_head.weight,
            self.confidence_head.bias,
        ]

    def serving_state(self) -> dict[str, Tensor]:
        return super().serving_state() | {
            "markov_head.markov_w1.weight": self.transition_in.weight,
            "markov_head.markov_w2.weight": self.transition_out.weight,
            "confidence_head.proj.weight": self.confidence_head.weight,
            "confidence_head.proj.bias": self.confidence_head.bias,
        }

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        """Return the content of `config.json`: DFlash's with the keys of DSpark."""
        config = super().serving_config(target_name, dtype)
        inner = config["dflash_config"]
        # A reader of DSpark refuses the first of these keys, and looks for the second at the top.
        del inner["causal"], inner["block_size"]
        return config | {
            "target_layer_ids": inner["target_layer_ids"],
            "mask_token_id": inner["mask_token_id"],
            "markov_rank": self.shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
        }


Drafter = DSparkDrafter
