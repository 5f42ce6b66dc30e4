"""EAGLE: one decoder layer that continues the target's features.

EAGLE-1 is arXiv 2401.15077, EAGLE-3 arXiv 2503.01840. A row at position t pairs the target's
feature of t with the token at t + 1, and predicts the token at t + 2. For the next draft the
layer's own output is recycled as the feature of the next row (docs/notation.md#positions).

Shapes: B rows of the batch, N rows of one pass, H hidden size, Ht the target's hidden size, F taps,
V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from .documents import Size, Tap
from .elementwise import RMSNorm, Rotary
from .errors import UserError
from .files import JsonObject
from .layers import (
    Attend,
    DecoderLayer,
    DrafterShape,
    LlamaConfigFile,
    RecyclingDrafter,
    shared_sizes,
)
from .layout import EmbeddingAndHead


class EagleFile(LlamaConfigFile, kw_only=True):
    """`config.json` of an EAGLE drafter; one of EAGLE-1 lacks the keys that have defaults here."""

    bias: bool
    target_hidden_size: Size | None = None
    eagle_aux_hidden_state_layer_ids: tuple[Tap, ...] = ()
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    shared_head: bool = False


@dataclass(frozen=True, kw_only=True)
class EagleShape(DrafterShape):
    """All sizes and flags of an EAGLE drafter, as in its `config.json`."""

    version: int
    target_hidden_size: int
    draft_vocab_size: int
    norm_taps: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    shared_head: bool = False
    """The target's head makes the logits of EAGLE-3 too, and the drafter stores none."""
    # Only imported drafters have any of the following.
    norm_fused_taps: bool = False
    """One norm over all taps together, before they are fused (engines call it norm_before_fc)."""
    norm_before_residual: bool = False
    """The residual stream begins with the normed state instead of the state itself."""
    fc_bias: bool = False

    def chosen(self) -> JsonObject:
        fixed = {"draft_vocab_size": None, "hidden_size": None} if self.version == 1 else {}
        return super().chosen() | fixed


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Return taps 2, L/2 and L-3, as engines assume. Raises `UserError` below 7 layers."""
    # Of 6 layers they would be 2, 3 and 3.
    if num_layers < 7:
        raise UserError(
            f"the target has {num_layers} layers, too few for default taps; give heads.taps, such "
            "as [1, 3, 4] of 5"
        )
    return (2, num_layers // 2, num_layers - 3)


class EagleDrafter(RecyclingDrafter):
    """Base of both versions: a joint of token and state, and the decoder layers after it."""

    method = "eagle"
    importable = True
    document = EagleFile
    shape: EagleShape
    first_normed: int
    """First layer with a norm for its input."""

    def __init__(
        self, shape: EagleShape, embedding_and_head: EmbeddingAndHead, fused: int, first: int
    ) -> None:
        """Make the parts of both versions; `fused` are the inputs of `fc`, `first` of layer 0."""
        super().__init__(shape, embedding_and_head)
        hidden = shape.hidden_size
        self.fc = nn.Linear(fused, hidden, bias=shape.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, hidden if i else first, shape.qk_norm)
            for i in range(shape.num_layers)
        )
        # Under the numbers of their layers, which a list would shift where the first has no norm.
        normed = range(self.first_normed, shape.num_layers)
        self.input_norms = nn.ModuleDict({str(i): RMSNorm(hidden, shape.norm_eps) for i in normed})
        # Filled by training or by loading.
        self.add_maps(shape.draft_vocab_size, shape.vocab_size)
        self.rotary = Rotary(shape.head_dim, shape.max_positions, shape.rope)

    @abstractmethod
    def enter(self, token_part: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first layer's residual stream `[B, N, H]` and its `qkv`; see `advance`."""

    def advance(
        self, token_part: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        state, qkv = self.enter(token_part, state)
        first, *others = self.decoder_layers
        state = first(0, state, qkv, rotary, attend)
        for i, layer in enumerate(others, 1):
            state = layer(i, state, layer.qkv(self.input_norms[str(i)](state)), rotary, attend)
        return state

    # docs/checkpoint-formats.md#eagle describes the layout on disk.

    def prefix_of(self, layer: int) -> str:
        """Return the beginning of the names on disk of a layer's tensors."""
        return f"layers.{layer}."

    def serving_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {f"fc.{name}": p for name, p in self.fc.named_parameters()}
        for i, layer in enumerate(self.decoder_layers):
            prefix = self.prefix_of(i)
            state |= {prefix + name: weight for name, weight in layer.matrices().items()}
            if str(i) in self.input_norms:
                norm = self.input_norms.get_parameter(f"{i}.weight")
                state[prefix + "input_layernorm.weight"] = norm
        return state | self.maps()

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        # Every flag is written out, because readers' defaults differ, and no value is null.
        shape = self.shape
        return {
            "architectures": [ARCHITECTURES[shape.version, shape.qk_norm]],
            "model_type": "llama",
            **super().serving_config(target_name, dtype),
            "mlp_bias": False,
            "bias": shape.fc_bias,
        }

    @classmethod
    def of_shape(cls, shape: EagleShape, lender: EmbeddingAndHead) -> EagleDrafter:
        return drafter_of(shape, lender)

    @classmethod
    def shape_from(cls, config: JsonObject) -> EagleShape:
        version, qk_norm = VERSIONS[config["architectures"][0]]
        # EAGLE-1 has none of the keys that have defaults here.
        return EagleShape(
            version=version,
            taps=tuple(config.get("eagle_aux_hidden_state_layer_ids", ())),
            target_hidden_size=config.get("target_hidden_size", config["hidden_size"]),
            draft_vocab_size=config.get("draft_vocab_size", config["vocab_size"]),
            norm_taps=config.get("fc_norm", False),
            norm_output=config.get("norm_output", False),
            qk_norm=qk_norm,
            norm_fused_taps=config.get("norm_before_fc", False),
            norm_before_residual=config.get("norm_before_residual", False),
            fc_bias=config["bias"],
            shared_head=config.get("shared_head", False),
            **shared_sizes(config),
        )


class Eagle1Drafter(EagleDrafter):
    """EAGLE-1: token and state meet in `fc`, and the target's head makes the logits."""

    kind = "eagle1"
    borrows_head = reads_last = True
    first_normed = 1

    def __init__(self, shape: EagleShape, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(shape, embedding_and_head, 2 * shape.hidden_size, shape.hidden_size)

    def enter(self, token_part: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.join(token_part, state)
        return state, self.decoder_layers[0].qkv(state)

    def logits(self, output: Tensor) -> Tensor:
        return self.borrowed_head(output)

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        config, shape = super().serving_config(target_name, dtype), self.shape
        if shape.draft_vocab_size < shape.vocab_size:  # for a target with added tokens
            config["draft_vocab_size"] = shape.draft_vocab_size
        return config


class Eagle3Drafter(EagleDrafter):
    """EAGLE-3: `fc` fuses the taps, token and state meet in the first layer; own norm and head.

    With `shared_head` the head is the target's.
    """

    kind = "eagle3"
    reads_last = False
    first_normed = 0
    drafted_rows, read_rows = ("lm_head",), ("embedding",)

    def __init__(self, shape: EagleShape, embedding_and_head: EmbeddingAndHead) -> None:
        hidden, wide = shape.hidden_size, shape.target_hidden_size
        super().__init__(shape, embedding_and_head, len(shape.taps) * wide, 2 * hidden)
        self.tap_norms = nn.ModuleList(
            RMSNorm(wide, shape.norm_eps) for _ in shape.taps if shape.norm_taps
        )
        self.fused_tap_norm = (
            RMSNorm(len(shape.taps) * wide, shape.norm_eps) if shape.norm_fused_taps else None
        )
        self.hidden_norm = RMSNorm(hidden, shape.norm_eps)
        self.norm = RMSNorm(hidden, shape.norm_eps)
        self.borrows_head = self.head_in_exports = shape.shared_head
        self.lm_head = (
            None if shape.shared_head else nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        )
        # The target's rows have the target's width, so a drafter of another width cannot borrow
        # them.
        self.embedding = nn.Embedding(shape.vocab_size, hidden) if hidden != wide else None

    def with_own_head(self, head: Tensor) -> Self:
        """Return a drafter with a copy of the rows that it reads of the target's head `[V, H]`."""
        owner = type(self)(replace(self.shape, shared_head=False), self.embedding_and_head)
        ids, weight = self.draft_vocab_ids, self.fc.weight
        rows = (head if ids is None else head[ids]).to("cpu", weight.dtype)
        return owner.fill({**self.state_dict(), "lm_head.weight": rows}, weight)

    @property
    def joint(self) -> nn.Linear:
        return self.decoder_layers[0].qkv

    def fuse(self, taps: tuple[Tensor, ...], last: Tensor) -> Tensor:
        # Stored features may have another dtype than the drafter.
        features = [tap.to(self.fc.weight.dtype) for tap in taps]
        if self.shape.norm_taps:
            features = [norm(state) for norm, state in zip(self.tap_norms, features, strict=True)]
        fused = torch.cat(features, dim=-1)
        return self.fc(fused if self.fused_tap_norm is None else self.fused_tap_norm(fused))

    def embedded(self, ids: Tensor) -> Tensor:
        own = self.embedding
        embedded = super().embedded(ids) if own is None else own(ids).to(self.fc.weight.dtype)
        return self.input_norms["0"](embedded)

    def enter(self, token_part: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(state)
        qkv = self.join(token_part, normed)
        return normed if self.shape.norm_before_residual else state, qkv

    def recycled(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.shape.norm_output else output

    def feature(self, output: Tensor) -> Tensor:
        """See `RecyclingDrafter.feature`: the final norm's weight is applied, not the norm itself.

        After the norm a state of any size would do, and one that grows drowns what the layer adds
        to it.
        """
        return output * self.norm.weight.detach()

    def logits(self, output: Tensor) -> Tensor:
        return (self.lm_head or self.borrowed_head)(self.norm(output))

    @property
    def head_parameters(self) -> list[Tensor]:
        return [self.norm.weight, *(() if self.lm_head is None else self.lm_head.parameters())]

    def prefix_of(self, layer: int) -> str:
        return "midlayer." if self.shape.num_layers == 1 else super().prefix_of(layer)

    def serving_state(self) -> dict[str, Tensor]:
        state = super().serving_state()
        state[self.prefix_of(0) + "hidden_norm.weight"] = self.hidden_norm.weight
        state |= {f"fc_norm.{name}": weight for name, weight in self.tap_norms.named_parameters()}
        if self.fused_tap_norm is not None:
            state["input_norm.weight"] = self.fused_tap_norm.weight
        state["norm.weight"] = self.norm.weight
        if self.lm_head is not None:
            state["lm_head.weight"] = self.lm_head.weight
        if self.embedding is not None:
            state["embed_tokens.weight"] = self.embedding.weight
        return state

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        shape = self.shape
        config = super().serving_config(target_name, dtype) | {
            "draft_vocab_size": shape.draft_vocab_size,
            "norm_before_residual": shape.norm_before_residual,
            "norm_before_fc": shape.norm_fused_taps,
            "fc_norm": shape.norm_taps,
            "norm_output": shape.norm_output,
            "num_aux_hidden_states": len(shape.taps),
            "eagle_aux_hidden_state_layer_ids": list(shape.taps),
            "eagle_config": {  # SGLang counts layers from 0, without the embeddings
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in shape.taps],
            },
        }
        if shape.norm_fused_taps:  # TensorRT-LLM looks for it there
            config["eagle_config"]["norm_before_fc"] = True
        if shape.shared_head:  # a key of draftsmith's own; engines are given the rows
            config["shared_head"] = True
        if shape.target_hidden_size != shape.hidden_size:
            config["target_hidden_size"] = shape.target_hidden_size
        return config


CLASSES: dict[int, type[Eagle1Drafter | Eagle3Drafter]] = {1: Eagle1Drafter, 3: Eagle3Drafter}


def drafter_of(shape: EagleShape, embedding_and_head: EmbeddingAndHead) -> EagleDrafter:
    """Return an untrained drafter of the version that `shape` names."""
    return CLASSES[shape.version](shape, embedding_and_head)


ARCHITECTURES = {
    (3, False): "LlamaForCausalLMEagle3",
    (3, True): "Eagle3Qwen3ForCausalLM",
    (1, False): "EagleLlamaForCausalLM",
}
# Loading recognises version and norms by the architecture's name.
VERSIONS = {name: key for key, name in ARCHITECTURES.items()}


Drafter = EagleDrafter
