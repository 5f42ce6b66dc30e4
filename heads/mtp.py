"""Multi-token prediction (MTP): the decoder layer for drafts that a target was published with.

DeepSeek-V3 (arXiv 2412.19437) introduced it; Qwen3-Next, Qwen3.5 and GLM-4.5 have the same. A row
at position t joins the normed embedding of the token at t + 1 with the normed state of t, runs one
decoder layer of the target's own class, and a norm; the target's head makes the logits. For the
next draft the output after that norm is the state, as engines serve it.

Shapes: B rows of the batch, N rows of one pass, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from .errors import UserError, first_line
from .files import JsonObject
from .layers import (
    Attend,
    DrafterShape,
    RecyclingDrafter,
    first_of,
    inner_size,
    layout_of,
)
from .layout import EmbeddingAndHead
from .pretrained import UNSUPPORTED, check_numbers, config_of_values, make_causal_lm

ATTENTION = "draftsmith_recycling"
"""Name among transformers' functions of attention."""
HARMLESS = {"dropout", "position_ids", "use_cache", "is_causal"}
"""Arguments of these functions that change nothing here."""
NOT_SIZES = {
    "architectures", "dtype", "torch_dtype", "id2label", "label2id", "transformers_version",
    "_name_or_path", "_attn_implementation", "quantization_config",
}  # fmt: skip
"""Keys of a target's configuration that say nothing about its layers."""


class MtpFile(Struct):
    """`config.json` of an MTP layer."""

    layer: JsonObject
    """transformers' configuration of a model of this layer alone."""


@dataclass(frozen=True, kw_only=True)
class MtpShape(DrafterShape):
    """Sizes of an MTP layer: the configuration of its target with a single layer."""

    layer: JsonObject = field(hash=False)
    """transformers' configuration of a model of one layer, which is this one."""


class MtpDrafter(RecyclingDrafter):
    """MTP layer: norms, `fc`, and a decoder layer of transformers' class for the target."""

    method = kind = "mtp"
    borrows_head = reads_last = True
    document = MtpFile
    resizable = False
    not_exported = (
        "engines read an MTP layer inside of its target's checkpoint; write it there with "
        "draftsmith mtp stitch"
    )
    other_remedy = "put the layer into the new target with draftsmith mtp extract --base"
    shape: MtpShape

    def __init__(self, shape: MtpShape, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__(shape, embedding_and_head)
        hidden = shape.hidden_size
        layer, self.rotary = layer_and_rotary(shape.layer)
        norm = next(type(part) for name, part in layer.named_modules() if "norm" in name)
        self.enorm, self.hnorm, self.norm = (norm(hidden, eps=shape.norm_eps) for _ in range(3))
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([layer])
        self.add_maps(shape.vocab_size, shape.vocab_size)

    def embedded(self, ids: Tensor) -> Tensor:
        return self.enorm(super().embedded(ids))

    def advance(
        self, token_part: Tensor, state: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        joined = self.join(token_part, self.hnorm(state))
        # The angles were exact; the layer wants their cosines in the type of its queries.
        angles = tuple(table.to(joined.dtype) for table in rotary)
        output = self.layers[0](
            joined, position_embeddings=angles, attention_mask=None, attend=attend
        )
        return output[0] if isinstance(output, tuple) else output

    def recycled(self, output: Tensor) -> Tensor:
        return self.norm(output)

    feature = recycled

    def logits(self, output: Tensor) -> Tensor:
        return self.embedding_and_head.head(self.norm(output))

    @property
    def head_parameters(self) -> list[Tensor]:
        return list(self.norm.parameters())

    def facts(self) -> JsonObject:
        return {"taps": []}

    def serving_state(self) -> dict[str, Tensor]:
        parts = {
            "enorm": self.enorm,
            "hnorm": self.hnorm,
            "fc": self.fc,
            "norm": self.norm,
            "layer": self.layers[0],
        }
        return {
            f"{name}.{part}": tensor
            for name, module in parts.items()
            for part, tensor in module.state_dict(keep_vars=True).items()
        }

    def serving_config(self, target_name: str, dtype: str) -> JsonObject:
        return {
            "architectures": ["DraftsmithMtp"],
            "dtype": dtype,
            "layer": self.shape.layer,
            "base_model_name_or_path": target_name,
        }

    @classmethod
    def shape_from(cls, config: JsonObject) -> MtpShape:
        values = config["layer"]
        check_numbers(values, "config.json")
        return shape_of(config_of_values(values), values)


def shape_for(target: Any) -> MtpShape:
    """Return the sizes of an MTP layer for a target's transformers config.

    Raises `UserError` if the target has no layer of full attention.
    """
    config = one_layer(target)
    values = {key: value for key, value in config.to_dict().items() if key not in NOT_SIZES}
    return shape_of(config, json.loads(json.dumps(values)))


def shape_of(config: Any, values: JsonObject) -> MtpShape:
    """Return the sizes of an MTP layer from the configuration of a model with that layer alone."""
    sizes = layout_of(config)
    if (size := getattr(config, "qk_head_dim", None)) is not None:  # latent attention
        sizes |= {"head_dim": size, "num_kv_heads": sizes["num_heads"]}
    return MtpShape(
        layer=values,
        taps=(),
        num_layers=1,
        hidden_size=config.hidden_size,
        intermediate_size=inner_size(config),
        activation=first_of(config, "hidden_act", "hidden_activation") or "silu",
        **sizes,
    )


def one_layer(target: Any) -> Any:
    """Return a target's configuration with one layer of full attention, sparse where it has any.

    Raises `UserError` if the target has no layer of full attention.
    """
    kinds = getattr(target, "layer_types", None) or ["full_attention"]
    if "full_attention" not in kinds:
        raise UserError(
            f"{target.model_type} has no layer of full attention, of which an MTP layer is made; "
            "train an EAGLE drafter for it"
        )
    config = copy.deepcopy(target)
    config.num_hidden_layers = 1
    # Only those that the family has: others would change what `to_dict` writes.
    for name, value in {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
    }.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def layer_and_rotary(
    values: JsonObject,
) -> tuple[nn.Module, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Return an untrained decoder layer of the class of a configuration, and its rotary positions.

    The layer calls the function that is passed to it as `attend` for its attention.
    """
    with unsupported_layers(values["model_type"]):
        config = config_of_values(values)
        # The embedding and the head of this model are not used.
        config.vocab_size, config.pad_token_id = 2, None
        model = make_causal_lm(config, dtype=torch.float32, attn_implementation=ATTENTION)
        decoder = model.get_decoder()
        return decoder.layers[0], TargetsRotary(decoder.rotary_emb)


@contextmanager
def unsupported_layers(model_type: str) -> Iterator[None]:
    """Turn errors of transformers' classes for a family into `UserError`s."""
    try:
        yield
    except UserError:
        raise
    except UNSUPPORTED as error:
        raise UserError(
            f"an MTP layer cannot be made of {model_type}'s decoder layers ({first_line(error)}); "
            "train an EAGLE drafter for it"
        ) from error


@torch.no_grad()
def check_layer(drafter: MtpDrafter, model_type: str) -> None:
    """Raise `UserError` unless the decoder layer can be run as `MtpDrafter.advance` does."""

    def attend(_layer: int, queries: Tensor, _keys: Tensor, _values: Tensor) -> Tensor:
        return torch.zeros_like(queries).flatten(2)

    weight = drafter.fc.weight
    states = weight.new_ones(1, 2, drafter.shape.hidden_size)
    positions = torch.arange(2, device=weight.device)[None]
    with unsupported_layers(model_type):
        drafter.advance(states, states, drafter.rotary(positions), attend)


class TargetsRotary:
    """Cosines and sines of positions by the target's own class.

    This is not a module, because casting a drafter to bfloat16 must not cast its frequencies.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 cosines and sines of positions `[B, N]`, as the layer takes them."""
        self._rotary.to(positions.device)
        if hasattr(self._rotary, "mrope_section"):
            # Three axes of positions, all alike in a text; transformers before 5.19 asks for them.
            positions = positions[None].expand(3, -1, -1)
        return self._rotary(torch.empty(0, device=positions.device), positions)


def attend_by_argument(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    attend: Attend | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Return the attention of `attend`, in the form of transformers' functions of attention.

    Raises `ValueError` for what `attend` does not do: sinks, windows, capped scores.
    """
    assert attend is not None, "the layer is run by MtpDrafter.advance"
    given = {name for name, value in others.items() if value is not None}
    if unknown := sorted(given - HARMLESS):
        raise ValueError(f"its attention has {unknown[0]}")
    # Under autocast norms of queries and keys give float32, and kernels want one type.
    query, key = query.to(value.dtype), key.to(value.dtype)
    size, wanted = query.shape[-1], value.shape[-1]
    if wanted < size:  # latent attention: not every kernel takes values of another size
        value = functional.pad(value, (0, size - wanted))
    if scaling is not None and scaling != size**-0.5:
        query = query * (scaling * size**0.5)  # `attend` divides by the root of the size
    read = attend(0, *(states.transpose(1, 2) for states in (query, key, value)))
    return read.unflatten(-1, (query.shape[1], -1))[..., :wanted], None


AttentionInterface.register(ATTENTION, attend_by_argument)

Drafter = MtpDrafter
