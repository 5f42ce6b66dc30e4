"""Options of the commands that decode and measure.

Their modules need torch and transformers, which take seconds to import; a help text or a mistyped
option needs only these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...heads.errors import UserError
from ..settings import BadRows, Sampling, TargetConfig
from .gains import GPUS

SAMPLES = 24  # rounds behind every median that tune takes
SWEEPS = 4


@dataclass
class EvaluateOptions:
    """Acceptance and speed of drafters on held-out prompts, beside plain decoding in the same loop.

    `--sampling.temperature 0.7` may be written `--temperature 0.7`, and so on.
    """

    example: ClassVar[str] = (
        "draftsmith evaluate --target TARGET --drafter runs/medusa/best --prompts held_out.jsonl "
        "--json out.json"
    )

    target: TargetConfig = field(default_factory=lambda: TargetConfig(""))
    prompts: str | None = None
    """Prompts or conversations: a JSON, JSONL or parquet file, a folder of them, or a data set on
    the hub; Spec-Bench's and MT-Bench's questions with all their turns."""
    split: str = "train"
    """Split to take of a hub data set."""
    bad_rows: BadRows = "stop"
    """What a malformed row does: stop, or skip it (it is named)."""
    features: str | None = None
    """Instead of a target and prompts: a feature store, on whose held-out texts drafters are
    replayed (greedy)."""
    drafter: list[str] = field(default_factory=list)
    """A drafter's folder, a small model's folder, or ngram, suffix, lookahead, early-exit; settings
    follow a colon: ngram:length=8. May be given several times. Plain decoding is always there."""
    server: str | None = None
    """Address of a running vLLM or SGLang: its acceptance and speed on the same prompts, and
    drafters here only if named."""
    server_model: str | None = None
    """Name of the model there, if it serves several."""
    concurrency: str | None = None
    """Requests in flight at the server, a row for each: 1,8,32,64 if not given."""
    profile: str | None = None
    """What draftsmith tune wrote: drafters that are in it are measured with its settings too."""
    like: list[str] = field(default_factory=list)
    """Decode as an engine would, its shape, drafts and rule: vllm, sglang or llamacpp; settings
    follow a colon: vllm:drafts=5,draws=probabilistic. May be given several times."""
    baselines: bool = True
    """Measure ngram, lookahead and early-exit too, and transformers' assisted generation where a
    small model drafts."""
    sampling: Sampling = field(default_factory=Sampling)
    """Greedy if not given."""
    temperatures: str | None = None
    """Several, one table each: 0,1. In place of sampling.temperature."""
    batch_sizes: str | None = None
    """Several, one table each: 1,4,16. In place of batch_size."""
    limit: int | None = None
    """Use the first so many prompts."""
    max_new_tokens: int = 128
    """Longest reply."""
    batch_size: int = 1
    """Prompts decoded together."""
    repeats: int = 3
    """Timed runs of every request."""
    json: str | None = None
    """Write the numbers to this file."""
    spec_bench: str | None = None
    """Write the replies to this folder, a file for each drafter, in Spec-Bench's form (the first
    setting's)."""


@dataclass
class CompareOptions:
    """Tau before and after, by category, with intervals; regressions are flagged."""

    example: ClassVar[str] = (
        "draftsmith compare --report public.json --report tuned.json --fail-on-regression 2%"
    )

    report: list[str] = field(default_factory=list)
    """JSON of draftsmith evaluate; the first is what the others are compared with."""
    drafter: list[str] = field(default_factory=list)
    """Name of the drafter in each report, in the same order; not needed where a report has one
    besides the baselines."""
    fail_on_regression: str | None = None
    """End with exit code 3 if a category's tau has fallen by more than this, such as 2%, and its
    interval lies below 0; of five prompts at least."""
    json: str | None = None
    """Write the numbers to this file."""


@dataclass
class ReportOptions:
    """Acceptance, speed, replies token by token and training curves, as one HTML file that opens
    anywhere, or as Markdown."""

    example: ClassVar[str] = "draftsmith report out.json runs/medusa --out report.html"

    runs: list[str] = field(default_factory=list, metadata={"positional": "RUN"})
    """JSON files of draftsmith evaluate, folders of training runs, or folders that hold such files
    or runs."""
    out: str | None = None
    """The file to write: report.html if not given; Markdown goes to the terminal if not given."""
    format: Literal["html", "md"] = "html"
    """A page, or its tables alone as Markdown."""


@dataclass
class SimulateOptions:
    """Tokens a round, speed-up and the best draft length of a drafter whose acceptance is known or
    assumed."""

    example: ClassVar[str] = (
        "draftsmith simulate --acceptance 0.8 --draft-length 5 --draft-cost 0.05 --gpu H100 "
        "--params 8e9"
    )

    acceptance: str | None = None
    """Chance that a draft is accepted given those before it: 0.8, or one for each position:
    0.85,0.8,0.75."""
    report: str | None = None
    """Instead: the JSON of draftsmith evaluate, whose drafters' measured acceptances are used."""
    draft_length: int = 5
    """Drafts in a chain."""
    draft_cost: float = 0.05
    """Time of a draft step over that of a plain step of the target."""
    longest: int = 32
    """Longest chain that is tried."""
    gpu: str | None = None
    """With params: the roofline on this GPU, over batch sizes and contexts."""
    params: float | None = None
    """Parameters of the target, such as 8e9; without the experts, if it has any."""
    weight_bytes: float = 2.0
    """Bytes of a parameter."""
    kv_bytes: float = 131072.0
    """Bytes that keys and values of one position take, all layers together (131072: Llama-3.1-8B in
    bf16)."""
    expert_params: float = 0.0
    """Parameters of all experts together."""
    experts: int = 0
    """Experts of a layer."""
    active: int = 0
    """Experts that a token passes through."""
    profile: str | None = None
    """What draftsmith tune wrote: the same with the verifications that it timed on its machine."""
    batch: str = "1,16,64,256"
    """Batch sizes of the roofline."""
    context: str = "1000,8000,32000"
    """Positions that each request has behind it, of the roofline."""
    json: str | None = None
    """Write the numbers to this file."""

    def __post_init__(self) -> None:
        if (self.acceptance is None) == (self.report is None):
            raise UserError("give either --acceptance or --report")
        if self.draft_length < 1 or self.longest < self.draft_length or self.draft_cost < 0:
            raise UserError(
                "--draft-length must be at least 1 and at most --longest, --draft-cost at least 0"
            )
        if self.report is not None and any((self.profile, self.gpu, self.params)):
            raise UserError(
                "--profile, --gpu and --params go with --acceptance; a report has costs of its own"
            )
        if (self.gpu is None) != (self.params is None):
            raise UserError("--gpu and --params go together")
        if self.gpu is not None and self.gpu not in GPUS:
            raise UserError(f"unknown GPU {self.gpu!r}; there are: {', '.join(GPUS)}")


@dataclass
class TuneOptions:
    """Find the chain or tree of most tokens a second for each drafter, temperature and batch size,
    on this machine.

    What every chain, fixed shape and confidence-led tree would accept is counted on the target's
    own replies; what rounds cost is timed; the best few of the predictions are then decoded, and
    the fastest goes into the profile.
    """

    example: ClassVar[str] = (
        "draftsmith tune --target TARGET --drafter runs/eagle/best --prompts calibration.jsonl "
        "--out profile.json"
    )

    target: TargetConfig
    prompts: str
    """Calibration prompts, as `draftsmith evaluate` takes them; not those that you evaluate on."""
    out: str
    """The profile to write; `evaluate` and `generate` take it as --profile."""
    drafter: list[str] = field(default_factory=list)
    """A trained drafter's folder, a small model's folder, ngram or suffix. May be given several
    times."""
    split: str = "train"
    """Split to take of a hub data set."""
    bad_rows: BadRows = "stop"
    """What a malformed row does: stop, or skip it (it is named)."""
    limit: int = 24
    """Use the first so many prompts."""
    max_new_tokens: int = 96
    """Longest reply."""
    temperatures: str | None = None
    """Tune for each of these: 0,0.7. In place of sampling.temperature."""
    batch_sizes: str = "1"
    """Tune for each of these: 1,4,16."""
    contexts: str = "128,1024,4096"
    """Contexts at which verification is timed; cut to what the target allows."""
    budget: float = 5.0
    """Minutes that it may take, more or less: what follows is cut to fit. 0 takes as long as it
    takes."""
    finalists: int = 3
    """Predictions that are measured, beside the default; the most promising ones."""
    repeats: int = 3
    """Timed runs of every request."""
    samples: int = SAMPLES
    """Rounds behind every timing; fewer are quicker and less exact."""
    sampling: Sampling = field(default_factory=Sampling)
    """Other sampling settings."""

    def __post_init__(self) -> None:
        if not self.drafter:
            raise UserError("name a drafter to tune: --drafter FOLDER")
        for name in ("limit", "max_new_tokens", "finalists", "repeats"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}"
                )
        if not 0 <= self.budget < 1e6:
            raise UserError(f"--budget is in minutes, 0 for no limit; it cannot be {self.budget:g}")
        if self.samples < SWEEPS:
            raise UserError(f"--samples must be at least {SWEEPS}, not {self.samples}")
        if self.sampling.rule not in ("auto", "coupled"):
            raise UserError(
                "tune works with greedy and coupled decoding, not with rule "
                f"{self.sampling.rule}; leave it out"
            )
