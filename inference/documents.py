"""JSON files that commands write and read again, each as a type: reports, profiles, manifests.

Files are checked against these types when they are read; the commands then work with the JSON
itself. Keys with a default may be missing. Ratios of nothing are NaN, which Python writes into JSON
and reads from it.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from ..heads.documents import Count, Document, FileFacts, Tap, demand
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


class Request(Struct):
    """Record of one reply with one drafter; an entry of `per_request`."""

    id: str | int
    category: str
    turn: Count
    rounds: list[tuple[Count, Count, Count]]
    """Drafted nodes, accepted drafts and emitted tokens of each round."""
    prompt: Count | None = None
    """Number of the prompt's row in its file, from 0."""
    top2_gap: float | None = None

    def __post_init__(self) -> None:
        # no tree comes near this bound: a larger number is damage
        demand(
            all(emitted <= 1 << 20 for *_, emitted in self.rounds),
            "a round kept more tokens than any tree holds",
        )


class Sample(Struct):
    """Reply token by token, as the page shows it."""

    tokens: list[str]
    came: list[int]
    """Depth of the accepted draft, 0 for the target's own token, -1 for the prefill's."""
    p: Numbers
    """The target's probability of each token."""
    best: list[list[tuple[str, float]]]
    """The target's most likely tokens in place of each, with their probabilities."""
    id: str | int = ""
    turn: Count = 0
    prompt: str = ""

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.tokens, self.came, self.p, self.best)}
        demand(len(lengths) == 1, "tokens, came, p and best are not of one length")


class CategoryFigures(Struct):
    """Figures over the prompts of one category."""

    tau_incl_bonus: float
    tau_ci95: Interval
    requests: Count = 0


class Figures(Struct):
    """Measurements of one drafter in one setting; keys as in docs/metrics.md#report-keys."""

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
    """Entry of `settings`: a temperature and a batch size, with the figures of every drafter."""

    drafters: dict[str, Figures]
    temperature: Annotated[float, Meta(ge=0)]
    batch: Annotated[int, Meta(ge=1)]
    lossless: bool

    def __post_init__(self) -> None:
        # every speed-up is a ratio to plain decoding
        demand("plain" in self.drafters, "plain decoding is not among the drafters")
        demand(math.isfinite(self.temperature), "the temperature is not finite")


class ServerSetting(Struct):
    """Figures of a live server at one temperature and concurrency."""

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
    """Entry `server`: a live server, with the figures of each setting."""

    engine: str
    version: str | None
    url: str
    settings: list[ServerSetting]
    model: str | None = None


class PromptSet(Struct):
    """Prompts that were decoded."""

    sha256: str
    prompts: Count
    path: str | None = None
    categories: dict[str, Count] = {}


class TargetFacts(Struct):
    """Target that was measured."""

    name: str = ""
    weights_hash: str | None = None


class ReportFile(Document):
    """JSON report of `draftsmith evaluate`; keys as in docs/metrics.md#report-keys."""

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
