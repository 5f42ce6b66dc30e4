"""DFlash: a block of drafts in one pass over the target's features (arXiv 2602.06036).

A block begins at an anchor, the root at position a: slot 0 holds the root's own token, the slots
after it hold mask tokens. The rows of a block attend to each other and, as further keys and values,
to the target's fused features of all positions before a. Slot j predicts the token at position
a + j (docs/objectives.md#dflash). Embedding and head are the target's, of the head only the rows of
the draft vocabulary if there is one.

Shapes: B rows of the batch, S positions of the context, N rows of one pass (of one block or
several), Sa anchors, b slots of a block, F taps, H hidden size (the target's too), E size of an
attention head, G attention heads, Gkv key-value heads, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
from msgspec import Meta, Struct
from torch import Tensor, nn

from .documents import Layers, Tap, Token, demand
from .elementwise import RMSNorm, Rotary
from .errors import UserError
from .files import JsonObject
from .layers import (
    Attend,
    DecoderLayer,
    DrafterShape,
    LayeredDrafter,
    LlamaConfigFile,
    shared_sizes,
)
from .layout import EmbeddingAndHead

Pair = tuple[Tensor, Tensor]
"""Keys and values, [B, N, Gkv, E] each."""


class DFlashSection(Struct):
    """Keys of `config.json` that engines look for under `dflash_config`."""

    mask_token_id: Token
    target_layer_ids: Annotated[list[Tap], Meta(min_length=1)]
    """Layers counted from 0 without the embeddings: tap - 1."""


class BlockFile(LlamaConfigFile, kw_only=True):
    """`config.json` of a DFlash drafter."""

    block_size: Annotated[int, Meta(ge=2, le=1 << 12)]
    num_target_layers: Layers
    dflash_config: DFlashSection

    def __post_init__(self) -> None:
        super().__post_init__()
        inner, layers = self.dflash_config, self.num_target_layers
        demand(
            self.block_size <= self.max_position_embeddings,
            f"block_size {self.block_size} is more than the positions",
        )
        demand(
            inner.mask_token_id < self.vocab_size,
            f"mask_token_id {inner.mask_token_id} is not below vocab_size {self.vocab_size}",
        )
        demand(
            max(inner.target_layer_ids) < layers,
            f"target_layer_ids are not all below the target's {layers} layers",
        )


@dataclass(frozen=True, kw_only=True)
class BlockShape(DrafterShape):
    """All sizes of a block drafter, as in its `config.json`."""

    block_size: int
    mask_token: int
    target_layers: int
    draft_vocab_size: int | None = None
    """Number of tokens that can be drafted; None: all."""
    markov_rank: int | None = None
    """Rank of DSpark's transition bias; None for DFlash, which has none."""


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Return `count` taps, spread evenly from 2 to L - 2; for a `count` of 1 the middle one.

    These are the taps of DFlash's releases; these count layers from 0 without the embeddings, hence
    the `+ 1` after `round`. Raises `UserError` for a target with too few layers.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    # Example: 5 taps of 28 layers are 2, 8, 14, 20, 26.
    # The multiplication comes first, so that whole results are exact in floating point.
    taps = tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))
    if len(set(taps)) < count or taps[-1] >= num_layers:
        raise UserError(
            f"the target has {num_layers} layers, too few for {count} taps; give heads.taps, such "
            "as [2, 4]"
        )
    return taps


class DFlashDrafter(LayeredDrafter):
    """DFlash drafter: fusion of the taps, decoder layers, and the final norm before the head."""

    method = kind = "dflash"
    importable = True
    borrows_head = True
    document = BlockFile
    architecture = "DFlashDraftModel"
    shape: BlockShape
    first_slot = 1
    """Number of the first slot that drafts; it drafts the token after the anchor."""
    tap_scales: Tensor
    """Factors `[F]` of the taps while the drafter is trained; on disk `fc` has them."""

    def __init__(self, shape: BlockShape, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(shape, embedding_and_head)
        self.most_drafts, self.rows_of_pass = self.drafts, shape.block_size
        hidden = shape.hidden_size
        self.fc = nn.Linear(len(shape.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, shape.norm_eps)
        self.input_norms = nn.ModuleList(
            RMSNorm(hidden, shape.norm_eps) for _ in range(shape.num_layers)
        )
        # Block drafters are made of Qwen3's layers, which have norms on queries and keys.
        self.layers = nn.ModuleList(
            DecoderLayer(shape, hidden, qk_norm=True) for _ in range(shape.num_layers)
        )
        self.norm = RMSNorm(hidden, shape.norm_eps)
        self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope)
        # A buffer, not a parameter: a checkpoint keeps it, the optimiser does not change it.
        self.register_buffer("tap_scales", torch.ones(len(shape.taps)))
        self.add_maps(shape.draft_vocab_size or shape.vocab_size, shape.vocab_size)

    def untrained(self, drafted: int, vocab_size: int) -> Self:
        if (mask := self.shape.mask_token) >= vocab_size:
            raise UserError(
                f"the drafter's mask_token_id {mask} is not among the target's {vocab_size} "
                "tokens; it cannot draft for this target"
            )
        reduced = drafted if drafted < vocab_size else None
        shape = replace(self.shape, vocab_size=vocab_size, draft_vocab_size=reduced)
        return type(self)(shape, self.embedding_and_head)

    def columns(self, scales: Tensor) -> Tensor:
        """Return a factor for each column of `fc`, `[F * H]`, for `scales` `[F]` of the taps."""
        return scales.to(self.fc.weight.dtype).repeat_interleave(self.shape.hidden_size)

    @property
    def drafts(self) -> int:
        """Number of drafts of a block."""
        return self.shape.block_size - self.first_slot

    def fuse(self, taps: tuple[Tensor, ...]) -> Tensor:
        """Return the context `[B, S, H]` of all layers for the target's taps, `[B, S, H]` each."""
        features = torch.cat([tap.to(self.fc.weight.dtype) for tap in taps], dim=-1)
        return self.hidden_norm(self.fc(features * self.columns(self.tap_scales)))

    def context(self, fused: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Pair]:
        """Return each layer's keys and values of the context `fused` `[B, S, H]`.

        The layers' input norms are not applied to it: `fuse` ends with a norm of its own.
        """
        return [layer.keys_values(fused, rotary) for layer in self.decoder_layers]

    def embed(self, anchors: Tensor, slots: int | None = None) -> Tensor:
        """Return the rows `[B, Sa * b, H]` of the blocks whose anchors hold tokens `[B, Sa]`.

        `slots` is the number of slots that are needed, if not b.
        """
        # `expand` repeats without memory of its own, and the slots are about to be written.
        ids = anchors[..., None].expand(*anchors.shape, slots or self.shape.block_size).clone()
        ids[..., 1:] = self.shape.mask_token
        return self.embedding_and_head.rows(ids.flatten(1)).to(self.fc.weight.dtype)

    def layer(
        self, index: int, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Return the output `[B, N, H]` of layer number `index` for rows `state` `[B, N, H]`."""
        layer = self.decoder_layers[index]
        return layer(index, state, layer.qkv(self.input_norms[index](state)), rotary, attend)

    def state(self, output: Tensor, before: Tensor) -> Tensor:
        """Return the state of which `logits` makes a draft's distribution.

        For DFlash it is the layers' `output` `[..., H]` in the draft's slot; it does not depend on
        the token `before` the draft `[...]`.
        """
        return output

    def logits(self, state: Tensor) -> Tensor:
        """Return the logits `[..., Vd]` of drafts, by the target's head, for states `[..., H]`."""
        return self.base_logits(state)

    def base_logits(self, output: Tensor) -> Tensor:
        """Return the logits `[..., Vd]` for the layers' output `[..., H]` in the drafts' slots."""
        return self.borrowed_head(self.norm(output))

    @property
    def head_parameters(self) -> list[Tensor]:
        """Parameters that `logits` reads and that are trained."""
        return [self.norm.weight]

    # docs/checkpoint-formats.md#dflash-and-dspark describes the layout on disk.

    def serving_state(self) -> dict[str, Tensor]:
        weight = self.fc.weight
        # On disk `fc` has the scales in it; others than 1 exist only in training. Otherwise the
        # weight itself is returned, which loading fills. Tensors on the meta device hold no
        # numbers to compare.
        if not weight.is_meta and bool((self.tap_scales != 1).any()):
            weight = weight * self.columns(self.tap_scales)
        state: dict[str, Tensor] = {
            "fc.weight": weight,
            "hidden_norm.weight": self.hidden_norm.weight,
        }
        for i, layer in enumerate(self.decoder_layers):
            state |= {f"layers.{i}.{name}": weight for name, weight in layer.matrices().items()}
            norm = self.input_norms.get_parameter(f"{i}.weight")
            state[f"layers.{i}.input_layernorm.weight"] = norm
        return state | {"norm.weight": self.norm.weight} | self.maps()

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        shape = self.shape
        config: JsonObject = {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            **super().serving_config(target_name, dtype),
            "num_target_layers": shape.target_layers,
            "layer_types": ["full_attention"] * shape.num_layers,
            "block_size": shape.block_size,
            "dflash_config": {
                "block_size": shape.block_size,
                "mask_token_id": shape.mask_token,
                # Layers counted from 0, without the embeddings, as engines read them.
                "target_layer_ids": [tap - 1 for tap in shape.taps],
                "causal": False,
            },
        }
        if shape.draft_vocab_size is not None:
            config["draft_vocab_size"] = shape.draft_vocab_size
        return config

    @classmethod
    def shape_from(cls, config: JsonObject) -> BlockShape:
        inner = config["dflash_config"]
        return BlockShape(
            taps=tuple(layer + 1 for layer in inner["target_layer_ids"]),
            block_size=config["block_size"],
            mask_token=inner["mask_token_id"],
            target_layers=config["num_target_layers"],
            draft_vocab_size=config.get("draft_vocab_size"),
            markov_rank=config.get("markov_rank"),
            **shared_sizes(config),
        )


Drafter = DFlashDrafter
