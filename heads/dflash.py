"""DFlash: a block of drafts in one pass over the target's features (arXiv 2602.06036).

A block stands at an anchor, the root at position a: its own token in slot 0, mask tokens in the
slots after it. Its rows attend to each other and, as extra keys and values, to the target's fused
features of all positions before a. Slot j says what stands at a + j (drafter-recipes 6). Embedding
and head are the target's.

Shapes: B batch, S context positions, N rows of blocks, H hidden size, K taps, V vocabulary, b slots
of a block.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .documents import BlockFile
from .embedding_and_head import EmbeddingAndHead
from .errors import UserError
from .layers import Attend, DecoderLayer, RMSNorm, inner_size, layout_of
from .layout import EngineLayout
from .rotary import Rotary

WEIGHTS_FILE = "model.safetensors"
NEARBY = 5.0  # how much of queries and keys begins as the shared direction; chance makes about 3
RIDGE = 0.03
Pair = tuple[Tensor, Tensor]
"""Keys and values [B, N, Gkv, D]."""


@dataclass
class DFlashConfig:
    """What is chosen of a block drafter; width, head layout, rotary positions and norm epsilon are
    the target's own."""

    num_layers: int = 5
    """Decoder layers."""
    block_size: int = 8
    """Slots of a block, the anchor's own among them: one draft fewer a round."""
    taps: list[int] | None = None
    """Hidden states that are fused, ascending; if not given, as many as layers, evenly from 2 to L
    - 2."""
    mask_token: int | None = None
    """Id of the token in the slots to be filled, one that no text holds; if not given, an unused
    one of the target's."""
    intermediate_size: int | None = None
    """Width of the MLP; the target's if not given."""
    activation: str = "silu"
    """Of the MLP, by transformers' name; engines load silu only, whatever the target has."""

    def __post_init__(self) -> None:
        if self.activation not in ACT2FN:
            raise UserError(
                f"heads.activation {self.activation!r} is unknown; there are: "
                f"{', '.join(sorted(ACT2FN))}"
            )
        if self.block_size < 2:
            raise UserError(
                f"heads.block_size must be at least 2, not {self.block_size}: the first slot is "
                "the anchor's own"
            )
        for name in ("num_layers", "intermediate_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"heads.{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class BlockShape:
    """All sizes of a drafter: what its `config.json` says."""

    taps: tuple[int, ...]
    block_size: int
    mask_token: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    activation: str
    target_layers: int
    rope: dict[str, Any] = field(hash=False)
    attention_bias: bool = False
    """Of imported drafters; training makes none."""

    @property
    def qk_norm(self) -> bool:
        return True


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` hidden states, evenly from 2 to L - 2; the middle one if it is one. Of DFlash's
    releases, counted as ours are."""
    if count == 1:
        return (num_layers // 2 + 1,)
    found = tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))
    if len(set(found)) < count or found[-1] >= num_layers:
        raise UserError(
            f"the target has {num_layers} layers, too few for {count} taps; give heads.taps, such "
            "as [2, 4]"
        )
    return found


class DFlashDrafter(EngineLayout, nn.Module):
    """The layers with what stands before and behind them. `embedding_and_head` are the target's
    embedding and head, borrowed, not owned."""

    method = "dflash"
    document = BlockFile
    architecture = "DFlashDraftModel"
    weights_file = WEIGHTS_FILE
    first_slot = 1
    """The first slot that drafts; its draft is about the token after the anchor."""
    tap_scales: Tensor

    def __init__(self, shape: BlockShape, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        self.shape, self.taps, self.embedding_and_head = shape, shape.taps, embedding_and_head
        hidden = shape.hidden_size
        self.fc = nn.Linear(len(shape.taps) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, shape.norm_eps)
        self.input_norms = nn.ModuleList(
            RMSNorm(hidden, shape.norm_eps) for _ in range(shape.num_layers)
        )
        self.layers = nn.ModuleList(DecoderLayer(shape, hidden) for _ in range(shape.num_layers))
        self.norm = RMSNorm(hidden, shape.norm_eps)
        self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope)
        self.register_buffer("tap_scales", torch.ones(len(shape.taps)))

    @torch.no_grad()
    def start_from(self, norm_weight: Tensor | None) -> None:
        """Begin with the target's final norm `[H]`, and with taps that weigh the same once they are
        scaled (`rescale`)."""
        if norm_weight is not None:
            self.norm.weight.copy_(norm_weight)
        nn.init.normal_(self.fc.weight, std=self.fc.weight.shape[1] ** -0.5)

    @torch.no_grad()
    def rescale(self, tap_sizes: tuple[float, ...], keep: bool) -> None:
        """Divide taps of these root mean squares by powers of two near them, so that `fc` learns at
        the pace of the other matrices: raw taps are 10 to 100 in size, its weights as much smaller,
        and a step of AdamW changes them by as much as they are. `keep`: what is computed, which it
        does bit for bit."""
        scales = torch.tensor(
            [2.0 ** -round(math.log2(size)) for size in tap_sizes], device=self.tap_scales.device
        )
        if keep:
            self.fc.weight.div_(self._columns(scales / self.tap_scales))
        self.tap_scales.copy_(scales)

    @torch.no_grad()
    def attend_nearby(self, taps: tuple[Tensor, ...], ids: Tensor) -> None:
        """Begin with attention that finds what a draft is made of: the anchor's token in the first
        of the key heads, the newest context in the others. `taps` `[n, H]` each and `ids` `[n]` are
        a sample of the target's features and tokens.

        Left to chance, attention starts out even over hundreds of rows. Queries all begin as one
        direction of a head; keys as its multiple by how much a row is wanted, a linear function
        fitted to the sample. Which of the wanted rows is nearest, rotary positions tell: the
        context's direction lies in the fast turning half of the head, the anchor's in the slow one.
        With it the first draft of the quickstart target is right 20% of the time after 200 steps,
        without it 9% (EXPERIMENTS.md).
        """
        context = functional.rms_norm(
            self.fuse(tuple(tap[None] for tap in taps))[0].float(), self.norm.weight.shape
        )
        embedded = functional.rms_norm(
            self.embed(ids[None]).float()[0].unflatten(0, (len(ids), -1)), self.norm.weight.shape
        )
        tokens, masks = embedded[:, 0], embedded[:1, 1].expand(len(ids), -1)
        rows = torch.cat([context, tokens, masks])

        def wants(*values):
            return torch.tensor(values, device=rows.device).repeat_interleave(len(ids))

        asks, token, near = (
            linear_fit(rows, wants(*v))
            for v in ((0.0, 1.0, 1.0), (-1.0, 1.0, -1.0), (1.0, -1.0, -1.0))
        )
        size, turns = self.shape.head_dim, torch.arange(self.shape.head_dim)
        fast, slow = (
            turns < self.rotary.size // 4,
            (turns >= self.rotary.size // 4) & (turns < self.rotary.size // 2),
        )
        for layer in self._layers:
            queries, keys, _ = layer.qkv.weight.unflatten(0, (-1, size)).split(
                [layer.heads, layer.kv_heads, layer.kv_heads]
            )
            for head, key in enumerate(keys):
                first = head < max(layer.kv_heads // 3, 1) and layer.kv_heads > 1
                direction = functional.normalize((slow if first else fast).to(rows), dim=0) * NEARBY
                key += torch.outer(direction, token if first else near)
                queries.unflatten(0, (layer.kv_heads, -1))[head] += torch.outer(direction, asks)

    def _columns(self, scales: Tensor) -> Tensor:
        return scales.to(self.fc.weight.dtype).repeat_interleave(self.shape.hidden_size)

    @property
    def drafts(self) -> int:
        """Drafts of a block."""
        return self.shape.block_size - self.first_slot

    def fuse(self, taps: tuple[Tensor, ...]) -> Tensor:
        """The target's features `[B, S, H]` of each tap -> the context `[B, S, H]`, the same for
        all layers."""
        together = torch.cat([tap.to(self.fc.weight.dtype) for tap in taps], dim=-1)
        return self.hidden_norm(self.fc(together * self._columns(self.tap_scales)))

    def context(self, fused: Tensor, rotary: tuple[Tensor, Tensor]) -> list[Pair]:
        """Each layer's keys and values of the context; its own input norm is not applied."""
        return [layer.keys_values(fused, rotary) for layer in self._layers]

    def embed(self, anchors: Tensor, slots: int | None = None) -> Tensor:
        """The anchors' tokens `[B, A]` -> the rows of their blocks `[B, A * b, H]`; `slots`: how
        many, if not b."""
        ids = anchors[..., None].expand(*anchors.shape, slots or self.shape.block_size).clone()
        ids[..., 1:] = self.shape.mask_token
        return self.embedding_and_head.rows(ids.flatten(1)).to(self.fc.weight.dtype)

    def layer(
        self, index: int, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """One layer over rows `[B, N, H]`."""
        layer = self._layers[index]
        return layer(index, state, layer.qkv(self.input_norms[index](state)), rotary, attend)

    def state(self, output: Tensor, before: Tensor) -> Tensor:
        """What a draft's distribution is made of: the layers' output `[..., H]` in its slot,
        whatever the token `before` it `[...]`."""
        return output

    def logits(self, state: Tensor) -> Tensor:
        """`state` `[..., H]` of slots -> logits `[..., V]` of their drafts, through the target's
        own head."""
        return self.base_logits(state)

    def base_logits(self, output: Tensor) -> Tensor:
        """What the slots alone say `[..., V]`."""
        return self.embedding_and_head.head(self.norm(output))

    @property
    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    @property
    def head_parameters(self) -> list[Tensor]:
        """What the logits have to train."""
        return [self.norm.weight]

    def facts(self) -> dict[str, Any]:
        return {**asdict(self.shape), "taps": list(self.taps)}

    # What is on disk: reference/checkpoint-formats.md section 8.

    def serving_state(self) -> dict[str, Tensor]:
        weight = self.fc.weight
        # Only while it learns: a view of the weight is what loading fills, and on the meta device
        # there are no numbers.
        if not weight.is_meta and bool((self.tap_scales != 1).any()):
            weight = weight * self._columns(self.tap_scales)
        state: dict[str, Tensor] = {
            "fc.weight": weight,
            "hidden_norm.weight": self.hidden_norm.weight,
        }
        for i, layer in enumerate(self._layers):
            norm = self.input_norms[i]
            assert isinstance(norm, RMSNorm)
            state |= {f"layers.{i}.{name}": weight for name, weight in layer.matrices().items()}
            state[f"layers.{i}.input_layernorm.weight"] = norm.weight
        return state | {"norm.weight": self.norm.weight}

    def serving_config(self, target_name: str, dtype: str) -> dict[str, Any]:
        """`config.json` beside the tensors. Taps are counted from 0, without the embeddings, as all
        engines do here."""
        shape = self.shape
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            "dtype": dtype,
            "num_hidden_layers": shape.num_layers,
            "num_target_layers": shape.target_layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": shape.activation,
            "rms_norm_eps": shape.norm_eps,
            "vocab_size": shape.vocab_size,
            "max_position_embeddings": shape.max_positions,
            "rope_theta": shape.rope["rope_theta"],
            "rope_parameters": shape.rope,
            "attention_bias": shape.attention_bias,
            "layer_types": ["full_attention"] * shape.num_layers,
            "tie_word_embeddings": False,
            "block_size": shape.block_size,
            "dflash_config": {
                "block_size": shape.block_size,
                "mask_token_id": shape.mask_token,
                "target_layer_ids": [tap - 1 for tap in shape.taps],
                "causal": False,
            },
            "base_model_name_or_path": target_name,
        }
        if (share := shape.rope.get("partial_rotary_factor")) is not None:
            config["partial_rotary_factor"] = share
        if shape.rope["rope_type"] != "default":
            config["rope_scaling"] = shape.rope
        return config

    @classmethod
    def from_serving_config(
        cls, config: dict[str, Any], embedding_and_head: EmbeddingAndHead | None
    ) -> Self:
        if embedding_and_head is None:
            raise UserError(
                "a block drafter needs the target's embedding and head; load it together with its "
                "target"
            )
        return cls(cls.shape_from(config), embedding_and_head)

    @classmethod
    def shape_from(cls, config: dict[str, Any]) -> BlockShape:
        """The shape that `config.json` describes; `KeyError` when a key is missing."""
        return BlockShape(**sizes_from(config))


def linear_fit(rows: Tensor, wanted: Tensor) -> Tensor:
    """`w` `[H]` with `rows` `[n, H]` times w near `wanted` `[n]`: ridge regression, by way of the n
    x n products."""
    products = rows @ rows.T
    return rows.T @ torch.linalg.solve(
        products + RIDGE * products.diagonal().mean() * torch.eye(len(rows)).to(rows), wanted
    )


def sizes_from(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `BlockShape` in a `config.json`."""
    inner = config["dflash_config"]
    return {
        "taps": tuple(layer + 1 for layer in inner["target_layer_ids"]),
        "block_size": config["block_size"],
        "mask_token": inner["mask_token_id"],
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "activation": config["hidden_act"],
        "target_layers": config["num_target_layers"],
        "rope": config["rope_parameters"],
        "attention_bias": config["attention_bias"],
    }


def sizes_for(config: DFlashConfig, target: Any, mask_token: int) -> dict[str, Any]:
    """The fields of `BlockShape` that `config` asks for, in the layout of a target's transformers
    config. Raises `UserError`."""
    layers = target.num_hidden_layers
    taps = tuple(config.taps) if config.taps else default_taps(layers, config.num_layers)
    if sorted(set(taps)) != list(taps) or any(not 1 <= tap < layers for tap in taps):
        raise UserError(
            f"heads.taps {list(taps)} must be ascending, distinct, and between 1 and {layers - 1}"
        )
    if not 0 <= mask_token < target.vocab_size:
        raise UserError(
            f"heads.mask_token {mask_token} is no token: the target has {target.vocab_size}, from 0"
        )
    return {
        "taps": taps,
        "block_size": config.block_size,
        "mask_token": mask_token,
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size or inner_size(target),
        "num_layers": config.num_layers,
        "activation": config.activation,
        "target_layers": layers,
        **layout_of(target),
    }


def shape_for(config: DFlashConfig, target: Any, mask_token: int) -> BlockShape:
    """The drafter that `config` asks for. Raises `UserError`."""
    return BlockShape(**sizes_for(config, target, mask_token))


def config_of(shape: BlockShape) -> dict[str, Any]:
    """The part of a shape that a user chose, by the names of `DFlashConfig`."""
    chosen = {
        name: value
        for name, value in asdict(shape).items()
        if name in DFlashConfig.__dataclass_fields__
    }
    return chosen | {"taps": list(shape.taps)}


Drafter = DFlashDrafter
