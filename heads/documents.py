"""The JSON files that are read here, each as a type: its keys, their types and ranges, and what has
to agree.

A file is read through `read_document`, which names the key that is wrong. Keys that a type does not
list are left alone: engines and later versions of their own add some. A `schema` above ours is
refused: its writer knew something that we do not.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from .errors import UserError
from .files import read_json
from .fingerprint import Fingerprint

SCHEMA = 2  # of draftsmith.json; 1 called the method draft_model draft_lm
FORMER_METHODS = {"draft_lm": "draft_model"}
T = TypeVar("T")
D = TypeVar("D", bound="Document")

# Bounds that no model comes near, so that a damaged number is refused before anything of that size
# is built.
Size = Annotated[int, Meta(ge=1, le=1 << 20)]
Layers = Annotated[int, Meta(ge=1, le=1 << 10)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
Token = Annotated[int, Meta(ge=0, le=1 << 24)]
Positions = Annotated[int, Meta(ge=1, le=1 << 40)]
Count = Annotated[int, Meta(ge=0, le=1 << 50)]
Tap = Annotated[int, Meta(ge=0, le=1 << 10)]
Share = Annotated[float, Meta(ge=0, le=1)]
Eps = Annotated[float, Meta(gt=0, lt=1)]
Shares = list[list[Share]]


class DocumentError(UserError):
    """A value that is not what its type says; the message begins with the key."""


class Document(Struct):
    """A file that says which version of its form it has."""

    what: ClassVar[str]
    """Its name in messages."""
    version_key: ClassVar[str] = "schema"
    newest: ClassVar[int] = SCHEMA
    finite: ClassVar[bool] = True
    """True where NaN and infinities are mistakes."""


def read_document(path: Path, kind: type[D], remedy: str) -> tuple[D, Any]:
    """The JSON file at `path` as `kind`, and as it is. Raises `UserError` that names the file, the
    key and `remedy`."""
    value = read_json(path, kind.finite, remedy)
    theirs = value.get(kind.version_key) if isinstance(value, dict) else None
    if isinstance(theirs, int) and theirs > kind.newest:
        found = f"{kind.version_key} {theirs}, this one reads {kind.newest}"
        raise UserError(f"{path} was written by a newer draftsmith ({found}); update draftsmith")
    try:
        return convert(value, kind), value
    except DocumentError as error:
        raise UserError(f"{path} is not {kind.what}: {error}; {remedy}") from error


def convert(value: Any, kind: type[T]) -> T:
    """`value`, as `json.loads` gives it, as `kind`. Raises `DocumentError`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at $")
        key = where.strip(".")
        raise DocumentError(f"{key}: {what}" if key else what) from error


def demand(holds: bool, what: str) -> None:
    """Raise `ValueError`, which msgspec turns into its own error, unless `holds`."""
    if not holds:
        raise ValueError(what)


class Confidence(Struct):
    """Temperatures that calibrate a DSpark drafter's confidence, by position."""

    temperatures: list[Annotated[float, Meta(gt=0)]] = []


class Calibration(Struct):
    """Measurements on held-out texts; each method notes some of them."""

    rank_accuracy: Shares = []
    tree_nodes: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    length: Annotated[int, Meta(ge=1, le=1 << 12)] = 1
    width: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    roots: Annotated[int, Meta(ge=0)] = 0
    adaptive: list[tuple[float, Annotated[int, Meta(ge=1)], float, float]] = []
    confidence: Confidence = msgspec.field(default_factory=Confidence)


class FileFacts(Struct):
    """Size and SHA-256 of a file, for `files.differs` to look at."""

    bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class Export(Struct):
    """Of an export: whose layout it has, and the SHA-256 of its files."""

    layout: str = "native"
    sha256: dict[str, str] = {}


class WeightsIndex(Document):
    """`model.safetensors.index.json` and its like: which file holds which tensor."""

    what: ClassVar[str] = "an index of weights"

    weight_map: dict[str, str]

    def __post_init__(self) -> None:
        demand(bool(self.weight_map), "weight_map names no files of weights")


class AdapterFile(Document):
    """`adapter_config.json`: what a LoRA adapter is for."""

    what: ClassVar[str] = "the config of an adapter"

    base_model_name_or_path: str | None = None


class OwnFile(Document):
    """`draftsmith.json`: what only we need of a drafter."""

    what: ClassVar[str] = "what draftsmith wrote beside a drafter"

    method: str
    dtype: Literal["float32", "bfloat16", "float16"]
    taps: list[Tap]
    target: Fingerprint
    schema: Annotated[int, Meta(ge=1)] = 1
    shape: dict[str, Any] = {}
    calibration: dict[str, Any] = {}
    provenance: dict[str, Any] = {}
    files: dict[str, FileFacts] = {}
    """Of every other file of the drafter; drafters of version 0.1 and exports, which have a list of
    their own, have none."""
    export: Export | None = None

    def __post_init__(self) -> None:
        self.method = FORMER_METHODS.get(self.method, self.method)
        layers = self.target.num_layers
        demand(
            all(tap <= layers for tap in self.taps),
            f"taps {self.taps} are not all among the target's {layers} layers",
        )
        # kept as it is: later versions may note more
        msgspec.convert(self.calibration, Calibration)


class LlamaFile(Struct):
    """What every `config.json` of a drafter with attention holds."""

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
    rope_parameters: dict[str, Any]
    attention_bias: bool

    def __post_init__(self) -> None:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        demand(
            heads % groups == 0,
            f"num_attention_heads {heads} is no multiple of num_key_value_heads {groups}",
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
            number = isinstance(value, int | float) and not isinstance(value, bool)
            demand(
                not number or (math.isfinite(value) and value > 0),
                f"rope_parameters: {key} is {value}, which is not above 0",
            )


class EagleFile(LlamaFile):
    """`config.json` of an EAGLE drafter; those of EAGLE-1 have no keys with defaults here."""

    bias: bool
    target_hidden_size: Size | None = None
    draft_vocab_size: Tokens | None = None
    eagle_aux_hidden_state_layer_ids: list[Tap] = []
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = self.draft_vocab_size or self.vocab_size
        demand(
            kept <= self.vocab_size,
            f"draft_vocab_size {kept} is more than vocab_size {self.vocab_size}",
        )


class BlockInner(Struct):
    """What engines look for under `dflash_config`."""

    mask_token_id: Token
    target_layer_ids: Annotated[list[Tap], Meta(min_length=1)]


class BlockFile(LlamaFile):
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


class DSparkFile(BlockFile):
    """`config.json` of a DSpark drafter."""

    markov_rank: Size


class MedusaFile(Struct):
    """`config.json` of Medusa heads."""

    medusa_num_heads: Annotated[int, Meta(ge=1, le=1 << 8)]
    medusa_num_layers: Layers
    original_lm_head: bool
    hidden_size: Size
    vocab_size: Tokens
