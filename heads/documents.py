"""Types of JSON files: their keys, with types and ranges, and which have to agree.

The types of `config.json` of the methods are in their files.

`read_document` reads a file as one of these types and names the key that is wrong. Keys that a type
does not list are ignored, because engines and their later versions add some. A file whose `schema`
is above the newest that this version knows is refused: its content may mean something else.
"""

from __future__ import annotations

import logging
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


def demand_vocabulary(drafted: int | None, vocab_size: int) -> None:
    """Raise `ValueError` for a draft vocabulary that is larger than the target's."""
    demand(
        drafted is None or drafted <= vocab_size,
        f"draft_vocab_size {drafted} is more than vocab_size {vocab_size}",
    )


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
