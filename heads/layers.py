"""Decoder layers, sizes and files that EAGLE, DFlash and DSpark drafters share.

Training and decoding run the same layer: the caller passes the attention function, which decides
what each row attends to.

Shapes: B rows of the batch, N rows of one pass, H hidden size, G attention heads, Gkv key-value
heads, E size of an attention head, V vocabulary.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Self

import torch
from msgspec import Meta, Struct
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .documents import Eps, Layers, Positions, Size, Tokens, demand, demand_vocabulary
from .elementwise import RMSNorm, gated_activation, rotate
from .errors import UserError
from .files import JsonObject
from .layout import DrafterModule, EmbeddingAndHead
from .vocabulary import VocabularyMaps

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention function: (layer, queries [B, N, G, E], keys, values [B, N, Gkv, E]) -> [B, N, G * E].

Keys and values are those of the N rows; the function itself adds those of earlier passes, or of a
block's context.
"""


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Sizes that EAGLE, DFlash and DSpark drafters have in common."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    attention_bias: bool = False
    """True only for some imported drafters; training makes none with biases."""
    taps: tuple[int, ...]
    num_layers: int
    vocab_size: int
    max_positions: int
    rope: JsonObject = field(hash=False)
    """Rotary parameters, as transformers' `rope_parameters`."""

    def chosen(self) -> JsonObject:
        """Return the sizes by name, None for those that no option of this drafter can set."""
        return asdict(self) | {"taps": list(self.taps)}


CONFIG_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "activation": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "rope": "rope_parameters",
    "attention_bias": "attention_bias",
}
"""Keys of `config.json`, by the fields of `DrafterShape`."""


class LlamaConfigFile(Struct, kw_only=True):
    """Keys of `config.json` that every drafter with attention has."""

    architectures: Annotated[list[str], Meta(min_length=1)]
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    vocab_size: Tokens
    max_position_embeddings: Positions
    rms_norm_eps: Eps
    hidden_act: str
    rope_parameters: JsonObject
    attention_bias: bool
    draft_vocab_size: Tokens | None = None

    def __post_init__(self) -> None:
        demand_vocabulary(self.draft_vocab_size, self.vocab_size)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        demand(
            heads % kv_heads == 0,
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}",
        )
        demand(
            self.head_dim % 2 == 0,
            f"head_dim {self.head_dim} is odd, and rotary positions rotate pairs",
        )
        demand(
            isinstance(self.rope_parameters.get("rope_type"), str),
            "rope_parameters name no rope_type",
        )
        for key, value in self.rope_parameters.items():
            # True is an int to Python, but a flag among these parameters.
            number = isinstance(value, int | float) and not isinstance(value, bool)
            demand(
                not number or (math.isfinite(value) and value > 0),
                f"rope_parameters: {key} is {value}, which is not above 0",
            )


class DecoderLayer(nn.Module):
    """Llama layer that is given projected queries, keys and values.

    The norm before the projection is the caller's, because EAGLE-3 adds the projections of a token
    and of a state. Matrices that share an input are stored as one: `qkv` `[(G + 2 Gkv) * E,
    inputs]` makes queries, keys and values in this order, and `gate_up` both factors of the MLP.
    """

    def __init__(self, shape: DrafterShape, inputs: int, qk_norm: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size
        self.qkv = nn.Linear(
            inputs, (self.heads + 2 * self.kv_heads) * self.size, bias=shape.attention_bias
        )
        self.output = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.post_attention_norm = RMSNorm(hidden, shape.norm_eps)
        self.act = ACT2FN[shape.activation]
        self.q_norm = RMSNorm(self.size, shape.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.size, shape.norm_eps) if qk_norm else None

    def forward(
        self,
        index: int,
        residual: Tensor,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Attend,
    ) -> Tensor:
        """Return the output `[B, N, H]` of layer number `index`, without a norm after it.

        `residual` is `[B, N, H]`, and `qkv` `[B, N, (G + 2 Gkv) * E]` the projection of the layer's
        input. `rotary` holds cosines and sines of the rows' positions, see `Rotary`.
        """
        # [B, N, G + 2 Gkv, E].
        by_head = qkv.unflatten(-1, (-1, self.size))
        # Queries and keys stay in one tensor, so that one call rotates both.
        queries_keys, values = by_head.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = queries_keys.split([self.heads, self.kv_heads], dim=2)
            queries_keys = torch.cat([self.q_norm(queries), self.k_norm(keys)], dim=2)
            # Under autocast a norm gives float32.
            queries_keys = queries_keys.to(values.dtype)
        queries, keys = rotate(queries_keys, rotary).split([self.heads, self.kv_heads], dim=2)
        attended = residual + self.output(attend(index, queries, keys, values))
        inner = gated_activation(self.gate_up(self.post_attention_norm(attended)), self.act)
        return attended + self.down(inner)

    def keys_values(self, states: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values `[B, N, Gkv, E]` of `states` `[B, N, inputs]`.

        The rows are context that others attend to; they have no queries of their own.
        """
        first = self.heads * self.size  # the rows of `qkv` before it make queries
        bias = None if self.qkv.bias is None else self.qkv.bias[first:]
        projected = functional.linear(states, self.qkv.weight[first:], bias)
        # [B, N, 2 Gkv, E]: the keys of all heads, then the values of all heads.
        keys, values = projected.unflatten(-1, (-1, self.size)).chunk(2, dim=2)
        if self.k_norm is not None:
            keys = self.k_norm(keys).to(values.dtype)
        return rotate(keys, rotary), values

    def matrices(self) -> dict[str, Tensor]:
        """Return views of the layer's weights under their names on disk."""
        sizes = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        # `split` and `chunk` give views, so that loading can fill the stored matrices by these
        # names.
        queries, keys, values = self.qkv.weight.split(sizes)
        gate, up = self.gate_up.weight.chunk(2)
        named = {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": self.output.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": self.down.weight,
            "post_attention_layernorm": self.post_attention_norm.weight,
        }
        if self.q_norm is not None and self.k_norm is not None:
            named |= {
                "self_attn.q_norm": self.q_norm.weight,
                "self_attn.k_norm": self.k_norm.weight,
            }
        named = {f"{name}.weight": weight for name, weight in named.items()}
        if self.qkv.bias is not None:
            names = (f"self_attn.{letter}_proj.bias" for letter in "qkv")
            named |= dict(zip(names, self.qkv.bias.split(sizes), strict=True))
        return named


class LayeredDrafter(VocabularyMaps, DrafterModule):
    """Base of drafters that consist of decoder layers, after `fc` has fused the target's features.

    `embedding_and_head` are the target's embedding and head, borrowed, not owned.
    """

    layers: nn.ModuleList
    fc: nn.Linear
    """Layer that every row's input passes."""
    shape: DrafterShape
    embedding_and_head: EmbeddingAndHead

    def __init__(self, shape: DrafterShape, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        self.shape, self.taps, self.embedding_and_head = shape, shape.taps, embedding_and_head

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def chosen(self, options: type) -> JsonObject:
        """Return the sizes that a user chose, by the names of the class `options`."""
        chosen = self.shape.chosen()
        return {name: chosen[name] for name in options.__dataclass_fields__ if name in chosen}

    @classmethod
    @abstractmethod
    def shape_from(cls, config: JsonObject) -> Any:
        """Return the sizes in a `config.json`; `KeyError` if one of its keys is missing."""

    @classmethod
    def from_serving_config(
        cls, config: JsonObject, embedding_and_head: EmbeddingAndHead | None
    ) -> Any:
        if embedding_and_head is None:
            raise UserError(
                f"a drafter of {cls.method} needs the target's embedding and head; load it "
                "together with its target"
            )
        return cls.of_shape(cls.shape_from(config), embedding_and_head)

    @classmethod
    def of_shape(cls, shape: Any, lender: EmbeddingAndHead) -> Any:
        return cls(shape, lender)

    def untrained(self, drafted: int, vocab_size: int) -> Self:
        shape: Any = self.shape
        shape = replace(shape, vocab_size=vocab_size, draft_vocab_size=drafted)
        return type(self)(shape, self.embedding_and_head)

    def facts(self) -> JsonObject:
        return {**asdict(self.shape), "taps": list(self.taps)}

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        """Return the keys of `config.json` that all these drafters have."""
        shape, rope = self.shape, dict(self.shape.rope)
        if "factor" in rope:  # vLLM and SGLang take an integer for a list of factors
            rope["factor"] = float(rope["factor"])
        config: JsonObject = {
            "dtype": dtype,
            **{key: getattr(shape, name) for name, key in CONFIG_KEYS.items()},
            "rope_parameters": rope,
            "rope_theta": rope["rope_theta"],
            "tie_word_embeddings": False,
            "base_model_name_or_path": target_name,
        }
        if (share := rope.get("partial_rotary_factor")) is not None:
            config["partial_rotary_factor"] = share  # SGLang looks for it here
        if rope["rope_type"] != "default":
            config["rope_scaling"] = rope  # readers of older layouts look for it here
        return config


class RecyclingDrafter(LayeredDrafter):
    """Base of drafters that continue from their own output: EAGLE drafters and MTP layers.

    A row at position t pairs a state of t with the token at t + 1, and predicts the token at t + 2.
    The first state is the target's. For the next draft the drafter's own output is recycled as the
    state of the next row (docs/notation.md#positions). This is the contract with the proposer that
    drafts a level at a time, and with the unrolled training. Ht is the target's hidden size, Vd the
    draft vocabulary.
    """

    drafts_by_level = True
    reads_last: bool
    """True if rows begin with the target's last hidden state, false if with its taps."""
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]]
    """Function from positions `[B, N]` to their cosines and sines, as `advance` takes them."""

    def fuse(self, taps: tuple[Tensor, ...], last: Tensor) -> Tensor:
        """Return the state `[B, N, H]` with which rows begin, from the target's features.

        These are its `taps` and its `last` hidden states, `[B, N, Ht]` each.
        """
        return last.to(self.fc.weight.dtype)

    @property
    def joint(self) -> nn.Linear:
        """Layer in which token and state meet: the token's columns of its matrix come first."""
        return self.fc

    def embedded(self, ids: Tensor) -> Tensor:
        """Return the inputs `[B, N, H]` of `joint` for tokens `ids` `[B, N]`."""
        return self.embedding_and_head.embed(ids).to(self.fc.weight.dtype)

    def token_part(self, ids: Tensor) -> Tensor:
        """Return the tokens' part of the output of `joint`, for tokens `ids` `[B, N]`.

        Training computes this part once for all unrolled steps.
        """
        return functional.linear(self.embedded(ids), self.joint.weight[:, : self.shape.hidden_size])

    def join(self, token_part: Tensor, state: Tensor) -> Tensor:
        """Return the output of `joint` for the tokens of `token_part` and states `[B, N, H]`.

        It is one product with the concatenation of both, of which `token_part` is the first half.
        The bias is added once, here.
        """
        weight = self.joint.weight[:, self.shape.hidden_size :]
        return token_part + functional.linear(state, weight, self.joint.bias)

    @abstractmethod
    def advance(
        self, token_part: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        """Return the layers' output `[B, N, H]` of one pass.

        `state` `[B, N, H]` comes from `fuse`, or for drafts of a greater depth from `recycled`.
        """

    def recycled(self, output: Tensor) -> Tensor:
        """Return the layers' output as the state `[B, N, H]` of the next row."""
        return output

    def feature(self, output: Tensor) -> Tensor:
        """Return the layers' output `[..., H]` in the scale of the target's last hidden state.

        A feature loss compares the two (docs/objectives.md#eagle).
        """
        return output

    @abstractmethod
    def logits(self, output: Tensor) -> Tensor:
        """Return the logits `[..., Vd]` for the layers' output `[..., H]`."""

    @property
    def head_parameters(self) -> list[Tensor]:
        """Parameters of the drafter that `logits` reads."""
        return []


def shared_sizes(config: JsonObject) -> JsonObject:
    """Return the fields of `DrafterShape` but the taps, by name, from a `config.json`."""
    return {name: config[key] for name, key in CONFIG_KEYS.items()}


def check_taps(taps: tuple[int, ...], least: int, layers: int) -> None:
    """Raise `UserError` unless `taps` are ascending, from `least`, below the number of layers."""
    if sorted(set(taps)) != list(taps) or any(not least <= tap < layers for tap in taps):
        raise UserError(
            f"heads.taps {list(taps)} must be ascending, distinct, and between {least} and "
            f"{layers - 1}"
        )


HEAD_SIZE = 64
"""Size of a drafter's attention heads for a target without attention."""


def chosen_sizes(config: Any, target: Any) -> JsonObject:
    """Return fields of `DrafterShape`, without taps and width, for options and a target."""
    return {
        "num_layers": config.num_layers,
        "intermediate_size": config.intermediate_size or inner_size(target),
        "activation": "silu",  # engines load no other, so it need not be the target's
        **layout_of(target),
    }


def layout_of(target: Any) -> JsonObject:
    """Return the fields of `DrafterShape` that a drafter takes from a target's config."""
    layer = last_layer_of(target)
    hidden = target.hidden_size
    heads, size = first_of(layer, "num_attention_heads"), first_of(layer, "head_dim")
    if not heads:  # a target without attention, whose `head_dim` is that of its recurrence
        heads, size = max(hidden // HEAD_SIZE, 1), None
    eps = first_of(target, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
    return {
        "num_heads": heads,
        # A config without the key, or with None, is of a model whose attention heads all have their
        # own keys.
        "num_kv_heads": first_of(layer, "num_key_value_heads") or heads,
        "head_dim": size or hidden // heads,
        "vocab_size": target.vocab_size,
        "max_positions": first_of(target, "max_position_embeddings") or 1 << 20,
        "norm_eps": eps or 1e-6,
        "rope": rope_of(target),
    }


def inner_size(target: Any) -> int:
    """Return the width of the MLP in the target's last layer."""
    size = first_of(last_layer_of(target), "intermediate_size", "n_inner")
    if isinstance(size, list | tuple):  # one for each layer
        size = size[-1]
    return size or 4 * target.hidden_size


def last_layer_of(target: Any) -> Any:
    """Return the config of the target's last layer, where layers differ in size, else its own."""
    layers = getattr(target, "per_layer_config", None)
    return layers[-1] if layers else target


def rope_of(target: Any) -> JsonObject:
    """Return the rotary parameters of a target, as transformers' `rope_parameters`.

    They are those of its full-attention layers where the kinds of layers differ; for a target
    without rotary positions they have the base 10000.
    """
    parameters = getattr(target, "rope_parameters", None) or {}
    # Where the kinds of layers differ, transformers keeps a table for each kind.
    parameters = parameters.get("full_attention") or parameters
    given = {name: value for name, value in parameters.items() if value is not None}
    return {"rope_type": "default", "rope_theta": 10000.0} | given


def first_of(config: Any, *names: str) -> Any:
    """Return the first attribute of `config` among `names` that is not None, or None."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    return None
