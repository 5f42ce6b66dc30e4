"""Options of the commands that measure.

The commands' own modules need torch and transformers, which take seconds to import; a help text or
a mistyped option needs only this module. The docstrings are the help texts of the options.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ...heads.errors import UserError
from ..base.costs import known_gpu
from ..base.settings import RowOptions, Sampling, SourceOptions, TargetConfig, TemplateOptions


@dataclass
class EvaluateOptions(RowOptions, TemplateOptions):
    """Measure the acceptance and speed of drafters on held-out prompts, next to plain decoding.

    Both run in the same loop. `--sampling.temperature 0.7` may be written `--temperature 0.7`, and
    so on.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith evaluate --target TARGET --drafter runs/medusa/best --prompts "
        "held_out.jsonl --json out.json",
        "draftsmith evaluate --target TARGET --drafter runs/eagle/best --drafter ngram:length=8"
        " --no-baselines --prompts held_out.jsonl --temperature 0,1 --batch-size 1,8",
        "draftsmith evaluate --target TARGET --drafter runs/eagle/best --like vllm --prompts "
        "held_out.jsonl",
        "draftsmith evaluate --target TARGET --drafter runs/eagle/best --prompts gsm8k --limit 80",
        "draftsmith evaluate --target TARGET --server http://127.0.0.1:8000 --prompts "
        "held_out.jsonl",
    )

    target: TargetConfig
    prompts: str
    """Prompts or conversations: mt-bench, gsm8k, humaneval or spec-bench, whose questions are read
    from the hub or their project; a JSON, JSONL or parquet file, a folder of them, or a data set
    on the hub. MT-Bench's and Spec-Bench's questions are taken with all their turns."""
    drafter: list[str] = field(default_factory=list)
    """A drafter's folder, a draft model's folder, or ngram, or
    module:Class of your own; settings follow a colon: ngram:length=8. May be given several times.
    Plain decoding is always measured too."""
    server: str | None = None
    """Address of a running vLLM, SGLang or llama.cpp: its acceptance and speed are measured on the
    same prompts. Drafters are then measured here only if they are named. The variable
    DRAFTSMITH_SERVER_KEY holds the API key that it wants."""
    server_model: str | None = None
    """Name of the model on the server, if it serves several."""
    concurrency: list[int] = field(default_factory=list)
    """Numbers of concurrent requests to the server; each is a row of the results: 1,8,32,64 if not
    given."""
    profile: str | None = None
    """Profile that draftsmith tune wrote: drafters in it are measured with its settings as well."""
    like: list[str] = field(default_factory=list)
    """Engine to imitate, such as vllm, sglang or llamacpp: its tree shape, number of drafts and
    acceptance rule are used. Settings follow a colon: vllm:drafts=5,draws=probabilistic. May be
    given several times."""
    baselines: bool = True
    """Measure the n-gram baseline."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling settings; greedy if not given."""
    temperature: list[float] = field(default_factory=list)
    """Temperature, 0 for greedy decoding; several, such as 0,1, are each measured."""
    limit: int | None = None
    """Number of prompts to use, drawn evenly over their categories; all if not given."""
    max_new_tokens: int = 128
    """Longest reply, in tokens."""
    batch_size: list[int] = field(default_factory=lambda: [1])
    """Prompts decoded together; several numbers, such as 1,4,16, are each measured at every
    temperature."""
    repeats: int = 3
    """Timed runs of every request; the run with the median time is reported."""
    json: str | None = None
    """File to write the numbers to; `-` prints them in place of the tables."""


@dataclass
class CompareOptions:
    """Compare tau across evaluations, by category, with intervals; regressions are flagged."""

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith compare public.json tuned.json",
        "draftsmith compare public.json tuned.json --fail-on-regression 2%",
    )

    reports: list[str] = field(default_factory=list, metadata={"positional": "REPORT"})
    """JSON files of draftsmith evaluate; the first is the one that the others are compared with."""
    drafter: list[str] = field(default_factory=list, metadata={"form": "NAME"})
    """Name of the drafter in each report, in the same order. Not needed if each report has one
    drafter besides the baselines, or one drafter and its --like row (the --like row is then
    compared). With a single report, give it twice to compare two drafters of that report."""
    fail_on_regression: str | None = None
    """End with exit code 3 if a category's tau has fallen by more than this, such as 2%, its
    interval lies below 0, and it has at least five prompts."""


@dataclass
class SimulateOptions:
    """Estimate tokens per round, speed-up and best draft length from an acceptance rate."""

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith simulate --acceptance 0.8 --length 5 --draft-cost 0.05 --gpu H100 --params 8B",
        "draftsmith simulate --acceptance out.json",
        "draftsmith simulate --acceptance out.json --gpu H100 --params 8B --context 2000",
    )

    acceptance: str
    """Probability that a draft is accepted if those before it were: 0.8, or one for each position:
    0.85,0.8,0.75; or the JSON of draftsmith evaluate, of which the acceptances of the longest chain
    are taken."""
    length: int = 5
    """Drafts in a chain."""
    draft_cost: float | None = None
    """Time of one draft step divided by the time of one plain decoding step; if not given, as
    measured in the JSON of draftsmith evaluate, or else 0.05."""
    gpu: str | None = None
    """GPU for which a roofline estimate is computed, for several numbers of concurrent requests;
    needs --params."""
    params: float | None = None
    """Parameters of the target, such as 8e9."""
    context: int = 2000
    """Positions that each request has already, for the roofline."""
    json: str | None = None
    """File to write the numbers to; `-` prints them in place of the tables."""

    def __post_init__(self) -> None:
        if self.length < 1 or (self.draft_cost or 0) < 0 or self.context < 0:
            raise UserError("--length must be at least 1, --draft-cost and --context at least 0")
        if (self.gpu is None) != (self.params is None):
            raise UserError("--gpu and --params go together")
        if self.params is not None and self.params <= 0:
            raise UserError(f"--params must be above 0; it cannot be {self.params:g}")
        self.gpu = None if self.gpu is None else known_gpu(self.gpu)


@dataclass
class ReportOptions:
    """Write evaluations and training runs to one HTML file that opens anywhere, or as tables.

    The page shows acceptance, speed, replies token by token and training curves.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith report out.json runs/medusa --out report.html",
        "draftsmith report before.json after.json --format md",
        "draftsmith report before.json after.json --out report.md",
    )

    runs: list[str] = field(default_factory=list, metadata={"positional": "RUN"})
    """JSON files of draftsmith evaluate, folders of training runs, or folders that hold such files
    or runs."""
    out: str | None = field(default=None, metadata={"form": "FILE"})
    """File to write. If not given, HTML goes to report.html and Markdown to the terminal."""
    format: Literal["html", "md"] | None = None
    """html: a page; md: its tables alone, as Markdown. If not given, the extension of --out
    decides; html without --out."""


@dataclass
class TuneOptions(SourceOptions):
    """Find the fastest chain or tree for each drafter, temperature and batch size on this machine.

    Tries up to ten chains and trees: all of them on a few prompts, the faster half on more, and so
    on. The profile keeps the default unless the best candidate is significantly faster.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith tune --target TARGET --drafter runs/eagle/best --prompts calibration.jsonl "
        "--out profile.json",
        "draftsmith evaluate --target TARGET --drafter runs/eagle/best --profile profile.json "
        "--prompts held_out.jsonl",
    )

    target: TargetConfig
    prompts: str
    """Calibration prompts in any form that `draftsmith evaluate` accepts, including a benchmark
    name. Do not use the prompts that you evaluate on. As many are used as fit in --budget."""
    out: str = field(metadata={"form": "FILE"})
    """Profile to write; `evaluate` and `generate` take it as --profile."""
    drafter: list[str] = field(default_factory=list)
    """A trained drafter's folder, a draft model's folder, or ngram. May be given several times."""
    temperature: list[float] = field(default_factory=list)
    """Temperatures to tune for, such as 0,0.7; 0, greedy decoding, if not given."""
    batch_size: list[int] = field(default_factory=lambda: [1])
    """Batch sizes to tune for: 1,4,16."""
    budget: float = 5.0
    """Minutes that tuning may take, roughly: prompts and reply lengths are cut to fit. 0 sets no
    limit."""
    sampling: Sampling = field(default_factory=Sampling)
    """Other sampling settings."""

    def __post_init__(self) -> None:
        if not self.drafter:
            raise UserError("name a drafter to tune: --drafter FOLDER")
        if not 0 <= self.budget < 1e6:
            raise UserError(f"--budget is in minutes, 0 for no limit; it cannot be {self.budget:g}")
        # the text has to be the same for every tree, so that all of them are timed on one text
        if self.sampling.rule not in ("auto", "coupled"):
            raise UserError(
                "tune works with greedy and coupled decoding, not with rule "
                f"{self.sampling.rule}; leave it out"
            )
