"""The JSON files that commands write and read again, each as a type: reports, tuned profiles,
manifests of feature stores.

They are checked when they are read; what is worked with is the JSON itself. Keys that may be
missing have defaults here; `report.checked` demands those that a page shows. Ratios of nothing are
NaN, which Python writes into JSON and reads from it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from ..heads.documents import Count, Document, FileFacts, Tap, demand
from ..heads.fingerprint import Fingerprint

Numbers = list[float | None]
Interval = tuple[float | None, float | None]
ByName = dict[str, float | None]


class StoreLayout(Struct):
    """The layout of features in the shards of a feature store, see `train/data/store.py`."""

    taps: list[Tap]
    all_last: bool
    dtype: Literal["float32", "bfloat16", "fp8"]
    rows_per_shard: Annotated[int, Meta(ge=1, le=1 << 30)]
    ring: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None


class Manifest(Document):
    """`manifest.json` of a feature store."""

    what: ClassVar[str] = "the manifest of a feature store"

    target: Fingerprint
    layout: StoreLayout
    taps: list[Tap]
    max_length: Annotated[int, Meta(ge=2)]
    seed: int
    tables: str
    """The key of its data, see `train/data/tables.py`."""
    tap_sizes: dict[str, Annotated[float, Meta(ge=0)]]
    files: dict[str, FileFacts | str]
    """Size and SHA-256 of all but shards and data, of which they stand beside them; version 0.1
    noted three SHA-256."""
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


class Request(Struct):
    """One reply of one drafter."""

    id: str | int
    category: str
    turn: Count
    rounds: list[tuple[Count, Count, Count]]
    prompt: Count | None = None
    top2_gap: float | None = None

    def __post_init__(self) -> None:
        demand(
            all(kept <= 1 << 20 for *_, kept in self.rounds),
            "a round kept more tokens than any tree holds",
        )


class Sample(Struct):
    """A reply token by token."""

    tokens: list[str]
    came: list[int]
    p: Numbers
    best: list[list[tuple[str, float]]]
    id: str | int = ""
    turn: Count = 0
    prompt: str = ""

    def __post_init__(self) -> None:
        lengths = {len(part) for part in (self.tokens, self.came, self.p, self.best)}
        demand(len(lengths) == 1, "tokens, came, p and best are not of one length")


class CategoryFigures(Struct):
    """Of the prompts of one category."""

    tau_incl_bonus: float
    tau_ci95: Interval
    requests: Count = 0


class Figures(Struct):
    """What was measured of one drafter in one setting."""

    requests: Count
    tau_incl_bonus: float | None
    tau_ci95: Interval | None
    tokens_s: float | None
    mean_n_draft: float | None
    rounds: Count = 0
    tokens: Count = 0
    tau_untruncated: float | None = None
    survival: Numbers = []
    cond_accept: Numbers = []
    cond_offered: Numbers = []
    accept_rate: float | None = None
    discarded_share: float | None = None
    loop_share: float | None = None
    ttft_s: float | None = None
    ttft_quantiles_s: ByName | None = None
    tpot_quantiles_s: ByName | None = None
    chunk_gap_quantiles_s: ByName | None = None
    tau_by_position: ByName | None = None
    split_s: dict[str, Annotated[float, Meta(ge=0)]] | None = None
    speedup: float | None = None
    speedup_ci95: Interval | None = None
    predicted_speedup: float | None = None
    modelled_speedup: float | None = None
    verify_cost: float | None = None
    round_cost: float | None = None
    rb_tau: float | None = None
    alpha: float | list[float | None] | None = None
    equal_to_ar: Count | None = None
    warnings: list[str] = []
    accepted_hist: list[Count] = []
    by_category: dict[str, CategoryFigures] = {}
    per_request: list[Request] = []
    samples: list[Sample] = []


class SettingFile(Struct):
    """A temperature and a batch size, and every drafter in it."""

    drafters: dict[str, Figures]
    temperature: Annotated[float, Meta(ge=0)]
    batch: Annotated[int, Meta(ge=1)]
    lossless: bool

    def __post_init__(self) -> None:
        demand("plain" in self.drafters, "plain decoding is not among the drafters")
        demand(math.isfinite(self.temperature), "the temperature is not finite")


class ServerSetting(Struct):
    """What a live server did at one temperature and concurrency."""

    temperature: Annotated[float, Meta(ge=0)]
    concurrency: Annotated[int, Meta(ge=1)]
    tau_incl_bonus: float | None
    tau_kept: float | None
    survival: Numbers
    accept_rate: float | None
    tokens_s: float | None
    speculates: bool | None = None
    ttft_quantiles_s: ByName | None = None
    tpot_quantiles_s: ByName | None = None
    equal_to_plain: Count | None = None
    compared: Count | None = None
    tau_definition: str = ""


class ServerFile(Struct):
    """A live server, and its settings."""

    engine: str
    version: str | None
    url: str
    settings: list[ServerSetting]
    model: str | None = None


class PromptSet(Struct):
    """The prompts that were decoded."""

    sha256: str
    prompts: Count
    path: str | None = None
    categories: dict[str, Count] = {}


class TargetFacts(Struct):
    """The target that was measured."""

    name: str = ""
    weights_hash: str | None = None


class ReportFile(Document):
    """The JSON of `draftsmith evaluate`."""

    what: ClassVar[str] = "a report of draftsmith evaluate"
    version_key: ClassVar[str] = "schema_version"
    newest: ClassVar[int] = 2
    finite: ClassVar[bool] = False

    prompt_set: PromptSet
    settings: list[SettingFile]
    target: TargetFacts | None = None
    command: str = ""
    started_at: str = ""
    dtype: str | None = None
    device: str | None = None
    threads: Count | None = None
    peak_memory_bytes: Count | None = None
    machine: dict[str, Any] | None = None
    versions: dict[str, str] = {}
    sampling: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    definitions: dict[str, str] = {}
    left_out: dict[str, str] = {}
    drafters: dict[str, dict[str, Any]] = {}
    drafter_bytes: dict[str, int | None] = {}
    server: ServerFile | None = None
    partial: str = ""
    schema_version: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        demand(bool(self.settings) or self.server is not None, "it holds no setting")


class TunedRow(Struct):
    """What was found best for one drafter, temperature and batch size."""

    temperature: Annotated[float, Meta(ge=0)]
    batch: Annotated[int, Meta(ge=1)]
    setting: dict[str, int | float | str | bool | list[list[int]] | None]
    """What the drafter is loaded with; a fixed tree is a list of its paths."""


class ProfileFile(Document):
    """The JSON of `draftsmith tune`."""

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
