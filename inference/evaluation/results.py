"""Types of the results of `draftsmith evaluate`, and their JSON file.

docs/reference/report.md is generated from these types: the docstring of a field explains its key,
else docs/metrics.md does. Ratios of nothing are NaN, which Python writes into JSON and reads from
it; None stands for a figure that does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from ...heads.documents import Count, Document, demand, read_document
from ...heads.errors import UserError
from ...heads.files import JsonObject, whole_file, write_json
from ..conversations.sources import Benchmark

SCHEMA = 4
AGAIN = "write the report again with draftsmith evaluate --json"
NAN = float("nan")
FEWEST = 5  # prompts, or batches, for which an interval is given
MOST_EMITTED = 1 << 20  # tokens of a round; far above any tree, so a larger number is damage
Number = float | None
Interval = tuple[Number, Number]
"""Both ends of a 95% interval; NaN where it is not known."""
ByName = Mapping[str, Number]
ByDepth = Sequence[Number]
Temperature = Annotated[float, Meta(ge=0)]


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
    """Number of the first prompt with the same id, or the same text without ids."""
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
    """Rounds of whole batches: a batch runs until its last request has finished."""
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


class Speculation(Struct, kw_only=True):
    """Figures of an engine's drafts during the measured requests; null for what is not known."""

    speculates: bool | None = None
    """True if the server drafts."""
    tau_incl_bonus: Number
    """From the server's counters; `tau_definition` says how."""
    tau_definition: str = ""
    """How `tau_incl_bonus` was counted."""
    tau_emitted: Number = None
    """Tokens after the prefill's over decoding steps: compare it with a local tau."""
    survival: ByDepth = []
    """Share of the drafts of which at least d tokens were accepted, d = 1, 2, .."""
    # A server may count anything: a restart between two readings makes differences negative.
    drafts: int | None = None
    """Drafts that the server counted."""
    drafted: int | None = None
    """Drafted tokens that it counted, roots excluded."""
    accepted: int | None = None
    """Accepted tokens that it counted."""
    rounds: int | None = None
    """Decoding steps, those without a draft included; a lower bound for vLLM and llama.cpp."""
    warnings: list[str] = []
    """Reasons to doubt the figures, in words."""


class ServerFigures(Speculation, kw_only=True):
    """Figures of a live server at one temperature and concurrency."""

    temperature: Temperature
    """Temperature of the sampling; 0 is greedy."""
    concurrency: Annotated[int, Meta(ge=1)]
    """Requests at once."""
    accept_rate: Number
    """Accepted over drafted tokens."""
    mean_n_draft: Number = None
    """Drafted tokens over drafts."""
    tokens_s: Number
    """All tokens over `seconds`, prefills and queue included."""
    seconds: Number = None
    """Time from the first request to the last chunk."""
    ttft_quantiles_s: ByName | None = None
    """By the client's clock, the server's queue included."""
    tpot_quantiles_s: ByName | None = None
    """Time per later token of each reply, by the client's clock."""
    requests: Count = 0
    """Replies that the client received."""
    tokens: int = 0
    """Tokens that it received."""
    chunks: Count = 0
    """Chunks that it received."""
    equal_to_plain: Count | None = None
    """Greedy replies equal to plain decoding here."""
    compared: Count | None = None
    """Replies that could be compared."""
    largest_gap: Number = None
    """The largest `top2_gap` where one of them first differs from plain decoding's."""


class ServerReport(Struct, kw_only=True):
    """A live server, and its figures in each setting."""

    url: str
    """Address."""
    engine: str
    """`vllm`, `sglang` or `llamacpp`."""
    version: str | None
    """The engine's version; empty where the server does not give it."""
    model: str | None = None
    """Name that requests give for the model."""
    context: Count | None = None
    """Tokens that a prompt and its reply may have together; null where it is not known."""
    speculates: bool | None = None
    """The server's own answer; null where it gives none."""
    settings: list[ServerFigures]

    @property
    def title(self) -> str:
        return f"{self.engine} {self.version} at {self.url}"


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
