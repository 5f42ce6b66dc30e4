"""Results of `draftsmith evaluate`, as types: what is measured, written as JSON and read again.

docs/reference/report.md is made of these types: the docstring of a field explains its key, else
docs/metrics.md does. Ratios of nothing are NaN, which Python writes into JSON and reads from it;
None stands for what does not apply.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, TypeGuard

import msgspec
from msgspec import Meta, Struct

from ...heads.documents import Count, Document, demand, read_document
from ...heads.errors import UserError
from ...heads.files import JsonObject, whole_file, write_json
from ..conversations.sources import Benchmark
from .server_figures import ByDepth, ByName, Interval, Number, ServerReport, Temperature

SCHEMA = 4
AGAIN = "write the report again with draftsmith evaluate --json"
NAN = float("nan")
NOTHING = "-"  # in place of a figure that was not measured
FEWEST = 5  # prompts, or batches, for which an interval is given
SHOWN = 3  # positions whose acceptance tables in the terminal show; the JSON holds all
MOST_EMITTED = 1 << 20  # tokens of a round; no tree comes near it, so a larger number is damage


class RequestRecord(Struct, kw_only=True):
    """One reply with one drafter."""

    id: str | int
    """The row's id, or its number."""
    category: str
    """The row's category."""
    turn: Count
    """Turn of the conversation, from 0."""
    rounds: list[tuple[Count, Count, Count]]
    prompt: Count | None = None
    """Number of the prompt among those that were read, from 0."""
    unit: Count
    """Number of the first prompt with the same id, or without ids the same text."""
    n_prompt: Count = 0
    """Tokens of the prompt."""
    n_out: Count = 0
    """Tokens of the reply."""
    offered_hist: list[Count] = []
    """Rounds by offered depth: accepted, and 1 more if the draft after them was rejected."""
    tau_incl_bonus: Number = None
    ttft_s: Number = None
    decode_s: Number = None
    """Wall time of its rounds."""
    tpot_s: Number = None
    """Time per token after the first."""
    finish_reason: str | None = None
    """`eos`, `stop`, `length`, or `context` (the target's positions)."""
    equal_to_ar: bool | None = None
    """True if the reply equals plain decoding's; null where that is not promised."""
    first_divergence: Count | None = None
    top2_gap: Number = None
    verify_mode: str | None = None
    """Rule of its first round."""

    def __post_init__(self) -> None:
        demand(
            all(emitted <= MOST_EMITTED for *_, emitted in self.rounds),
            "a round emitted more tokens than any tree holds",
        )

    @property
    def emitted(self) -> list[int]:
        """Tokens emitted in each round."""
        return [emitted for _, _, emitted in self.rounds]


class Sample(Struct, kw_only=True):
    """Reply token by token, as the page shows it."""

    tokens: list[str]
    """Its tokens as text."""
    came: list[int]
    """Depth of an accepted draft, 0 the target's own, -1 the prefill's."""
    p: ByDepth
    """The target's probability of each token; at T = 1 where decoding is greedy."""
    best: list[list[tuple[str, float]]]
    """The target's most likely tokens in place of each, with their probabilities."""
    id: str | int = ""
    """The row's id, or its number."""
    turn: Count = 0
    """Turn of the conversation, from 0."""
    prompt: str = ""
    """The prompt."""

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.tokens, self.came, self.p, self.best)}
        demand(len(lengths) == 1, "tokens, came, p and best are not of one length")


class CategoryFigures(Struct, kw_only=True):
    """Tau over the prompts of one category."""

    tau_incl_bonus: float
    tau_ci95: Interval
    requests: Count = 0
    """Replies of the category."""


class DrafterFigures(Struct, kw_only=True):
    """Figures of one drafter, or of plain decoding, in one setting."""

    requests: Count
    """Replies."""
    rounds: Count = 0
    """Rounds of all replies."""
    steps: Count = 0
    """Rounds of whole batches: a batch goes on until its last request has finished."""
    tokens: Count = 0
    """Tokens, the prefills' included."""
    tau_incl_bonus: Number
    tau_ci95: Interval | None
    tau_by_position: ByName | None = None
    tau_untruncated: Number = None
    survival: ByDepth = []
    cond_accept: ByDepth = []
    cond_offered: ByDepth = []
    accept_rate: Number = None
    mean_n_draft: Number
    accepted_hist: list[Count] = []
    """Rounds that accepted 0, 1, 2, ... drafts."""
    alpha: float | ByDepth | None = None
    verify_mode: list[str] = []
    loop_share: Number = None
    equal_to_ar: Count | None = None
    tokens_s: Number
    ttft_s: Number = None
    ttft_quantiles_s: ByName | None = None
    tpot_quantiles_s: ByName | None = None
    chunk_gap_quantiles_s: ByName | None = None
    split_s: dict[str, float] | None = None
    decode_s: Number = None
    speedup: Number = None
    speedup_ci95: Interval | None = None
    verify_cost: Number = None
    round_cost: Number = None
    warnings: list[str] = []
    """Reasons to doubt the figures, in words."""
    by_category: dict[str, CategoryFigures] = {}
    per_request: list[RequestRecord] = []
    samples: list[Sample] = []
    """The first replies, token by token."""
    setting: JsonObject | None = None
    """Settings of the tree that a profile or an engine chose."""
    spec: str | None = None
    """Spec of the drafter for which they were chosen."""
    kind: str | None = None
    """The drafter's method and settings, such as `eagle3:length=3`."""

    @property
    def split(self) -> dict[str, float]:
        """Seconds of each part of the rounds, see `metrics.split`; empty where not known."""
        return self.split_s or {}

    @property
    def largest_gap(self) -> float | None:
        """The largest `top2_gap` of a reply that differs from plain decoding's; None for none."""
        gaps = [r.top2_gap for r in self.per_request if r.top2_gap is not None]
        return max(gaps, default=None)


class SettingFigures(Struct, kw_only=True):
    """Figures of every drafter at one temperature and batch size."""

    temperature: Temperature
    """Temperature of the sampling; 0 is greedy."""
    batch: Annotated[int, Meta(ge=1)]
    """Requests that are decoded together."""
    drafters: dict[str, DrafterFigures]
    """A table for each way of decoding, by its name; `plain` is plain decoding."""

    def __post_init__(self) -> None:
        # every speed-up is a ratio to plain decoding
        demand("plain" in self.drafters, "plain decoding is not among the drafters")
        demand(math.isfinite(self.temperature), "the temperature is not finite")

    @property
    def plain(self) -> DrafterFigures:
        return self.drafters["plain"]

    @property
    def drafting(self) -> dict[str, DrafterFigures]:
        """Figures of every way to decode that drafts, by name: all but plain decoding."""
        return {name: figures for name, figures in self.drafters.items() if name != "plain"}


class PromptSet(Struct, kw_only=True):
    """Prompts that were decoded."""

    path: str | None = None
    """File, folder or data set as it was named."""
    sha256: str
    """Hash of the token ids and later turns."""
    prompts: Count
    """Number of prompts."""
    categories: dict[str, Count] = {}
    """Number of prompts of each category."""
    benchmark: Benchmark | None = None
    """Benchmark that was read by its name."""


class DrafterOrigin(Struct, kw_only=True):
    """A drafter's spec, and the hashes of its weight files; None for one without files."""

    spec: str = ""
    """Drafter as it was given."""
    sha256: str | None = None
    """Hash of its weights."""


class Conditions(Struct, kw_only=True):
    """Conditions that speeds depend on: processor, load, and layout of the matrices."""

    processor: str | None = None
    """Name of the GPU that the target lies on, else of the machine's processor."""
    cores: Count | None = None
    """Processor cores that this process may use."""
    machine_cores: Count | None = None
    """All cores of the machine, which `load_before` and `load_after` are about."""
    load_before: Number = None
    """Mean number of processes that ran in the minute before the measurement."""
    load_after: Number = None
    """The same in its last minute; the measurement itself is among them."""
    layout: str | None = None
    """`packed`, or `as stored`: the order of the target's matrices."""
    packed_bytes: Count | None = None
    """Bytes of the matrices that were packed."""

    def __str__(self) -> str:
        loads = [f"{load:.1f}" for load in (self.load_before, self.load_after) if load is not None]
        parts = [
            self.processor,
            None if self.cores is None else f"cores: {self.cores}",
            f"load before and after: {', '.join(loads)}" if loads else None,
            None if self.layout is None else f"matrices {self.layout}",
        ]
        return ", ".join(part for part in parts if part)


class Report(Document, kw_only=True):
    """JSON report of `draftsmith evaluate`."""

    what: ClassVar[str] = "a report of draftsmith evaluate"
    version_key: ClassVar[str] = "schema_version"
    newest: ClassVar[int] = SCHEMA
    finite: ClassVar[bool] = False

    schema_version: Annotated[int, Meta(ge=1)] = 1
    """4; earlier versions, of before the first release, are not read."""
    command: str = ""
    """The command line."""
    started_at: str = ""
    """Time of the start, UTC."""
    target: JsonObject | None = None
    """Fingerprint of the target; of one without weights only `name` and `tokenizer_hash`."""
    dtype: str | None = None
    """Type of the target's weights."""
    device: str | None = None
    """Device of the target."""
    threads: Count | None = None
    """Threads of torch."""
    machine: JsonObject | None = None
    """The machine."""
    conditions: Conditions | None = None
    versions: dict[str, str] = {}
    """Versions of Python and packages."""
    sampling: JsonObject | None = None
    """Sampling settings as they were resolved."""
    options: JsonObject | None = None
    """All options as they were resolved."""
    prompt_set: PromptSet
    peak_memory_bytes: Count | None = None
    """Most memory of this process: the GPU's if the target is there, else resident."""
    left_out: dict[str, str] = {}
    """Baselines and engines that were not measured, and why."""
    drafters: dict[str, DrafterOrigin] = {}
    """What each name stands for."""
    drafter_bytes: Mapping[str, int | None] = {}
    """Bytes of each drafter's own weights, without what it shares with the target."""
    settings: list[SettingFigures]
    """A table for each temperature and batch size."""
    server: ServerReport | None = None
    """A live server; only with `--server`."""

    @property
    def target_name(self) -> str:
        return str((self.target or {}).get("name") or "target")

    @property
    def scope(self) -> str:
        """Prompts measured: `88 prompts`."""
        count = self.prompt_set.prompts
        return f"{count} prompt{'s' if count != 1 else ''}"

    @property
    def measured_on(self) -> str:
        """Device, type, threads and `conditions`, as far as they are known; "" if not at all."""
        known = [
            self.device,
            self.dtype,
            None if self.threads is None else f"threads: {self.threads}",
            None if self.conditions is None else str(self.conditions),
        ]
        return ", ".join(part for part in known if part)

    def __str__(self) -> str:
        lines = [f"{self.target_name}, {self.scope}"]
        for setting in self.settings:
            for name, figures in setting.drafters.items():
                tau, gain = figures.tau_incl_bonus, figures.speedup
                lines.append(
                    f"T = {setting.temperature:g}, batch {setting.batch}, {name}: "
                    f"tau {NAN if tau is None else tau:.2f}, "
                    f"{NAN if gain is None else gain:.2f}x plain decoding"
                )
        return "\n".join(lines)

    __repr__ = __str__  # what a notebook shows

    def to_json(self) -> JsonObject:
        """Return the report as JSON can hold it; `server` only where one was measured."""
        value = msgspec.to_builtins(self)
        if value["server"] is None:
            del value["server"]
        return value


def caption(*settings: SettingFigures) -> str:
    """Return `T = 0, batch 1, 4` for settings that differ in batch size only."""
    sizes = ", ".join(str(setting.batch) for setting in settings)
    return f"T = {settings[0].temperature:g}, batch {sizes}"


def is_measured(value: object) -> TypeGuard[float]:
    """Return whether a figure was measured; ratios of nothing are NaN, JSON has huge numbers."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def number_text(value: object, form: str = ".2f", scale: float = 1.0) -> str:
    """Return `value * scale` in the format `form`; a dash for one that was not measured."""
    return format(value * scale, form) if is_measured(value) else NOTHING


def ratio_text(value: object) -> str:
    """Return a ratio as `1.34x`; a dash where there is none."""
    return f"{value:.2f}x" if is_measured(value) else NOTHING


def ends(pair: Sequence[Number] | None) -> tuple[float, float] | None:
    """Return both ends of an interval; None unless both are known."""
    low, high = pair or (None, None)
    return (low, high) if is_measured(low) and is_measured(high) else None


def interval_text(pair: Sequence[Number] | None, form: str = "{:.2f}-{:.2f}") -> str:
    """Return both ends of an interval in the format `form`; empty where it is not known."""
    found = ends(pair)
    return form.format(*found) if found else ""


def number_with_interval(value: object, pair: Sequence[Number] | None) -> str:
    """Return `2.31 (2.01-2.34)`, without the brackets where the interval is not known."""
    return number_text(value) + interval_text(pair, " ({:.2f}-{:.2f})")


def survival_text(survival: ByDepth) -> str:
    """Return the first figures of `survival` as a table shows them: `.71 .44 .25`."""
    shares = [share for share in survival[:SHOWN] if share is not None]
    return " ".join(f"{share:.2f}".removeprefix("0") for share in shares) or NOTHING


def equal_replies_text(same: int | None, of: int | None) -> str:
    """Return `yes`, `3 of 4`, or a dash where replies were not compared."""
    if same is None or not of:
        return NOTHING
    return "yes" if same == of else f"{same} of {of}"


def read_report(path: str) -> Report:
    """Return the report of `draftsmith evaluate` in a file. Raises `UserError`."""
    report, _ = read_document(Path(path), Report, AGAIN)
    if not report.settings and report.server is None:
        raise UserError(f"{path} is not {Report.what}: it holds no setting; {AGAIN}")
    return report


def read_measured(path: str) -> Report:
    """Return a report that has drafters, not only a server's figures. Raises `UserError`."""
    report = read_report(path)
    if not report.settings:
        raise UserError(
            f"{path} holds the figures of a server only; evaluate with a --drafter too to compare "
            "it"
        )
    return report


def write_report(report: Report, path: str | None) -> None:
    """Write the report to the file that the user named, if any."""
    if path is not None:
        with whole_file(path) as aside:
            write_json(aside, report.to_json())
