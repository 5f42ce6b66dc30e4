"""Types of the JSON files of drafters: their keys, with types and ranges, and which have to agree.

`read_document` reads a file as one of these types and names the key that is wrong. Keys that a type
does not list are ignored, because engines and their later versions add some. A file whose `schema`
is above the newest that this version knows is refused: its content may mean something else.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from .errors import UserError
from .files import JsonObject, read_json
from .fingerprint import Fingerprint

log = logging.getLogger(__name__)

SCHEMA = 2  # version of draftsmith.json
T = TypeVar("T")
D = TypeVar("D", bound="Document")

# These bounds are far beyond any model. With them a damaged number is refused before anything of
# that size is built.
Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Layers = Annotated[int, Meta(ge=1, le=1 << 10)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
Token = Annotated[int, Meta(ge=0, le=1 << 24)]
Positions = Annotated[int, Meta(ge=1, le=1 << 40)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Tap = Annotated[int, Meta(ge=0, le=1 << 10)]
Share = Annotated[float, Meta(ge=0, le=1)]
Eps = Annotated[float, Meta(gt=0, lt=1)]


class DocumentError(UserError):
    """Value of a JSON file that does not fit its type; the message begins with the key."""


class Document(Struct):
    """JSON file in which a key gives the version of its form."""

    what: ClassVar[str]
    """Description of the file for error messages."""
    version_key: ClassVar[str] = "schema"
    """Key with the version of the form."""
    newest: ClassVar[int] = 1
    """Newest version that can be read."""
    finite: ClassVar[bool] = True
    """True if NaN and infinities are mistakes in this file."""


def read_document(path: Path, kind: type[D], remedy: str) -> tuple[D, JsonObject]:
    """Return the JSON file at `path` as an object of type `kind`, and as plain JSON.

    Raises `UserError`, which names the file, the key and `remedy`.
    """
    value = read_json(path, kind.finite, remedy)
    # The version is compared first: a newer form may not fit the type, and updating is the remedy.
    version = value.get(kind.version_key) if isinstance(value, dict) else None
    if isinstance(version, int) and version > kind.newest:
        versions = f"{kind.version_key} {version}, this one reads {kind.newest}"
        raise UserError(f"{path} was written by a newer draftsmith ({versions}); update draftsmith")
    try:
        return convert(value, kind), value
    except DocumentError as error:
        raise UserError(f"{path} is not {kind.what}: {error}; {remedy}") from error


def convert(value: object, kind: type[T]) -> T:
    """Return JSON's `value` as an object of type `kind`. Raises `DocumentError`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # msgspec writes "Expected `int`, got `str` - at `$.target.hidden_size`".
        reason, _, json_path = str(error).replace("`", "").partition(" - at $")
        key = json_path.strip(".")
        raise DocumentError(f"{key}: {reason}" if key else reason) from error


def demand(holds: bool, what: str) -> None:
    """Raise `ValueError(what)` unless `holds`, for `__post_init__`: msgspec adds the key."""
    if not holds:
        raise ValueError(what)


class Tree(Struct, forbid_unknown_fields=True):
    """Draft tree, as a user names it: `length=3,width=2,nodes=4`."""

    length: Annotated[int, Meta(ge=1, le=1 << 10)]
    width: Annotated[int, Meta(ge=1, le=1 << 10)]
    nodes: Annotated[int, Meta(ge=1, le=1 << 10)]

    def __post_init__(self) -> None:
        demand(self.nodes >= self.length, "nodes of a tree are fewer than its length")


class Calibration(Struct):
    """Measurements on held-out texts; each method notes some of them."""

    rank_accuracy: list[Annotated[list[Share], Meta(min_length=1)]] = []
    """Share of roots, by depth and then by rank, at which this candidate is the target's token."""
    tree_nodes: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    """Nodes of the draft tree that training evaluated with."""
    length: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    """Default depth of a draft tree."""
    width: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    """Default width of a draft tree."""
    roots: Annotated[int, Meta(ge=0)] = 0
    """Number of positions at which `rank_accuracy` was counted."""
    trees: dict[Literal["cpu", "cuda"], Tree] = {}
    """Tree to draft on a type of device where a user names none: the one of published figures."""


class FileFacts(Struct):
    """Size in bytes and SHA-256 of a file, which `files.differs` compares."""

    bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Export(Struct):
    """Facts about an export that are noted next to it."""

    layout: str = "native"
    """Layout of its files; native is draftsmith's own."""


class WeightsIndex(Document):
    """Index of weights that are split over files, such as `model.safetensors.index.json`."""

    what: ClassVar[str] = "an index of weights"

    weight_map: dict[str, str]
    """File of each tensor, by the tensor's name."""

    def __post_init__(self) -> None:
        demand(bool(self.weight_map), "weight_map names no files of weights")


class AdapterFile(Document):
    """`adapter_config.json` of a LoRA adapter."""

    what: ClassVar[str] = "the config of an adapter"

    base_model_name_or_path: str | None = None


class OwnFile(Document):
    """`draftsmith.json`: facts for draftsmith alone (docs/checkpoint-formats.md#artifact)."""

    what: ClassVar[str] = "what draftsmith wrote next to a drafter"
    newest: ClassVar[int] = SCHEMA

    method: str
    dtype: Literal["float32", "bfloat16", "float16"]
    target: Fingerprint
    schema: Annotated[int, Meta(ge=1)] = 1
    embedding_scale: float | None = None
    """Factor of the target's embedding, see `EmbeddingAndHead.scale`; None if it is not used."""
    calibration: JsonObject = {}
    provenance: JsonObject = {}
    files: dict[str, FileFacts] = {}
    """Size and SHA-256 of every other file of the drafter, but for the card of an export."""
    export: Export | None = None

    def __post_init__(self) -> None:
        # The table is checked, but stays as it was read: later versions may note more in it.
        msgspec.convert(self.calibration, Calibration)


class LlamaFile(Struct, kw_only=True):
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
        drafted = self.draft_vocab_size or self.vocab_size
        demand(
            drafted <= self.vocab_size,
            f"draft_vocab_size {drafted} is more than vocab_size {self.vocab_size}",
        )
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        demand(
            heads % kv_heads == 0,
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}",
        )
        demand(
            self.head_dim % 2 == 0,
            f"head_dim {self.head_dim} is odd, and rotary positions turn pairs",
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


class EagleFile(LlamaFile, kw_only=True):
    """`config.json` of an EAGLE drafter; one of EAGLE-1 lacks the keys that have defaults here."""

    bias: bool
    target_hidden_size: Size | None = None
    eagle_aux_hidden_state_layer_ids: list[Tap] = []
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    shared_head: bool = False


class BlockInner(Struct):
    """Keys of `config.json` that engines look for under `dflash_config`."""

    mask_token_id: Token
    target_layer_ids: Annotated[list[Tap], Meta(min_length=1)]
    """Layers counted from 0 without the embeddings: tap - 1."""


class BlockFile(LlamaFile, kw_only=True):
    """`config.json` of a DFlash drafter."""

    block_size: Annotated[int, Meta(ge=2, le=1 << 12)]
    num_target_layers: Layers
    dflash_config: BlockInner

    def __post_init__(self) -> None:
        super().__post_init__()
        inner, layers = self.dflash_config, self.num_target_layers
        demand(
            self.block_size <= self.max_position_embeddings,
            f"block_size {self.block_size} is more than the positions",
        )
        demand(
            inner.mask_token_id < self.vocab_size,
            f"mask_token_id {inner.mask_token_id} is no token of {self.vocab_size}",
        )
        demand(
            max(inner.target_layer_ids) < layers,
            f"target_layer_ids are not all below the target's {layers} layers",
        )


class DSparkFile(BlockFile, kw_only=True):
    """`config.json` of a DSpark drafter."""

    markov_rank: Size


class MtpFile(Struct):
    """`config.json` of an MTP layer."""

    layer: JsonObject
    """transformers' configuration of a model of this layer alone."""


class MedusaFile(Struct):
    """`config.json` of Medusa heads."""

    medusa_num_heads: Annotated[int, Meta(ge=1, le=1 << 8)]
    medusa_num_layers: Layers
    original_lm_head: bool
    hidden_size: Size
    vocab_size: Tokens
    draft_vocab_size: Tokens | None = None

    def __post_init__(self) -> None:
        drafted = self.draft_vocab_size or self.vocab_size
        demand(
            drafted <= self.vocab_size,
            f"draft_vocab_size {drafted} is more than vocab_size {self.vocab_size}",
        )
