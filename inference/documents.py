"""JSON files that commands write and read again, each as a type: reports, profiles, manifests.

Files are checked against these types when they are read; the commands then work with the JSON
itself. Keys with a default may be missing. Ratios of nothing are NaN, which Python writes into JSON
and reads from it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from ..heads.documents import Document, FileFacts, Tap, demand
from ..heads.fingerprint import Fingerprint

# Python writes NaN as `NaN`, which msgspec reads as a float; null stands for what does not apply.
Numbers = list[float | None]
Interval = tuple[float | None, float | None]
ByName = dict[str, float | None]


class StoreLayout(Struct):
    """Layout of the features in the shards of a feature store, see `train/data/store.py`."""

    taps: list[Tap]
    all_last: bool
    dtype: Literal["float32", "bfloat16", "fp8"]
    rows_per_shard: Annotated[int, Meta(ge=1, le=1 << 30)]
    ring: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None


class Manifest(Document):
    """The file `manifest.json` of a feature store (docs/checkpoint-formats.md#feature-store)."""

    what: ClassVar[str] = "the manifest of a feature store"

    target: Fingerprint
    layout: StoreLayout
    taps: list[Tap]
    max_length: Annotated[int, Meta(ge=2)]
    seed: int
    tables: str
    """Key of the store's data, see `train/data/tables.py`."""
    tap_sizes: dict[str, Annotated[float, Meta(ge=0)]]
    """Root mean square of each tap, by its index."""
    files: dict[str, FileFacts | str]
    """Size and SHA-256 of the store's files by name. Shards and data have notes of their own beside
    them. Stores of version 0.1 have the SHA-256 of three files instead."""
    schema: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        layers = self.target.num_layers
        demand(self.taps == self.layout.taps, "taps and layout.taps differ")
        demand(
            set(self.tap_sizes) == set(map(str, self.taps)),
            f"tap_sizes is of {sorted(self.tap_sizes)}, taps {self.taps}",
        )
        demand(
            all(tap <= layers for tap in self.taps),
            f"a tap of {self.taps} is beyond the target's {layers} layers",
        )


class TunedRow(Struct):
    """Best setting of one drafter for one temperature and batch size."""

    temperature: Annotated[float, Meta(ge=0)]
    batch: Annotated[int, Meta(ge=1)]
    setting: dict[str, int | float | str | bool | list[list[int]] | None]
    """Settings that the drafter is loaded with; a fixed tree is a list of rank tuples."""


class ProfileFile(Document):
    """JSON profile of `draftsmith tune`."""

    what: ClassVar[str] = "a profile of draftsmith tune"
    version_key: ClassVar[str] = "schema_version"
    finite: ClassVar[bool] = False

    target: Fingerprint | None = None
    machine: dict[str, Any] = {}
    drafters: dict[str, list[TunedRow]] = {}
    verification_s: dict[str, dict[str, dict[str, float]]] = {}
    prompts: dict[str, Any] = {}
    command: str = ""
    started_at: str = ""
    partial: str = ""
    schema_version: Annotated[int, Meta(ge=1)] = 1
