"""Options of the commands that prepare data, move drafters and look at the machine.

Their modules need torch and transformers, which take seconds to import; a help text or a mistyped
option needs only these.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ..heads.errors import UserError
from ..heads.exchange.engine_names import EngineName
from ..inference.evaluation.gains import GPUS
from ..inference.settings import COLDEST, BadRows, Sampling, TargetConfig, check_url
from .method import Method

StoreType = Literal["float32", "bfloat16", "fp8"]


@dataclass
class PlanOptions:
    """What a training run will cost: feature bytes, GPU-hours of each stage, memory of one GPU."""

    example: ClassVar[str] = (
        "draftsmith data plan --method eagle --run configs/eagle/llama-3.1-8b.yaml --tokens 1e9 "
        "--gpu H100 --gpus 8"
    )

    run: str
    """The run's config file; its target, heads (or student), objective and batch are used."""
    method: Method | None = None
    """The run's method; known by the config file's path (configs/eagle/...) or its keys if not
    given."""
    tokens: float = 1e9
    """Tokens of data, prompts included."""
    reply_share: float = 1.0
    """Share of them that the target writes."""
    gpu: str = "H100"
    """GPU, as its data sheet names it."""
    gpus: int = 8
    """How many."""
    mfu: float = 0.4
    """Share of the data sheet's bf16 peak that a forward or training pass reaches."""
    json: str | None = None
    """Write the numbers to this file."""
    set: list[str] = field(default_factory=list)
    """Keys of the run to change, as target.path=FOLDER (a folder that holds a config.json is
    enough); may be repeated."""

    def __post_init__(self) -> None:
        if wrong := [change for change in self.set if "=" not in change]:
            raise UserError(f"--set {wrong[0]} sets nothing; write KEY=VALUE, such as batch_rows=4")
        if self.gpu not in GPUS:
            raise UserError(f"unknown GPU {self.gpu!r}; there are: {', '.join(GPUS)}")
        if (
            self.tokens <= 0
            or self.gpus < 1
            or not 0 < self.mfu <= 1
            or not 0 < self.reply_share <= 1
        ):
            raise UserError("tokens and gpus must be above 0, mfu and reply_share in (0, 1]")


@dataclass
class ExtractOptions:
    """Store the target's features for a training run, so that it needs no target: only what its
    method reads.

    With many workers: accelerate launch -m draftsmith.train data extract --method METHOD --run FILE
    --out STORE
    """

    example: ClassVar[str] = (
        "draftsmith data extract --method eagle --run configs/eagle/quickstart.yaml --out "
        "runs/quickstart/store"
    )

    run: str
    """The run's config file; its target, data, heads, seed and evaluation are used."""
    out: str
    """Folder of the store."""
    method: Method | None = None
    """The run's method; known by the config file's path (configs/eagle/...) or its keys if not
    given."""
    dtype: StoreType = "bfloat16"
    """float32, bfloat16, or fp8 (e4m3 with a scale for each position: half of bfloat16)."""
    rows_per_shard: int = 64
    """Packed rows in a shard."""
    ring: int | None = None
    """Keep at most this many shards, those that the training which runs beside this needs next."""

    def __post_init__(self) -> None:
        if self.rows_per_shard < 1 or (self.ring is not None and self.ring < 2):
            raise UserError(
                "rows_per_shard must be at least 1, ring at least 2: one shard is read while the "
                "next is written"
            )


@dataclass
class ReplySampling:
    """How the target writes: use what will be used in serving."""

    temperature: float = 0.7
    """0 is greedy. Small targets loop under greedy decoding, so sample."""
    top_p: float = 1.0
    """Keep the likeliest tokens up to this mass."""
    top_k: int = 0
    """Keep this many likeliest tokens; 0 keeps all."""
    max_new_tokens: int = 1024
    """Longest reply."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or 0 < self.temperature < COLDEST:
            raise UserError(
                f"sampling: temperature must be 0 (greedy) or at least {COLDEST:g}, not "
                f"{self.temperature}"
            )
        if not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_new_tokens < 1:
            raise UserError(
                "sampling: top_k must be at least 0, top_p in (0, 1], max_new_tokens at least 1"
            )


@dataclass
class ServerOptions:
    """An OpenAI-compatible server that runs the target."""

    url: str | None = None
    """Base address, such as http://localhost:8000/v1; the target runs in this process if not
    given."""
    model: str | None = None
    """Model name to ask for; the target's path if not given."""
    concurrency: int = 32
    """Requests under way at one time."""
    retries: int = 5
    """Attempts after a failed one (429, 5xx, lost connection, an answer in another form), with
    growing pauses."""
    timeout_s: float = 600.0
    """Longest wait for a whole reply."""

    def __post_init__(self) -> None:
        check_url(self.url, "--server.url")
        if self.concurrency < 1 or self.retries < 0 or self.timeout_s <= 0:
            raise UserError(
                "server: concurrency must be at least 1, retries at least 0, timeout_s above 0"
            )


@dataclass
class RegenerateOptions:
    """Let the target write the replies of a data set; prompts are kept, everything an assistant
    said is replaced."""

    example: ClassVar[str] = (
        "draftsmith data regenerate --target TARGET --data prompts.jsonl --out replies.jsonl "
        "--sampling.temperature 0.8"
    )

    target: TargetConfig
    data: str
    """JSON, JSONL or parquet file, folder, or hub data set of conversations or prompts."""
    out: str
    """JSONL file to write, or to go on with."""
    sampling: ReplySampling = field(default_factory=ReplySampling)
    server: ServerOptions = field(default_factory=ServerOptions)
    bad_rows: BadRows = "stop"
    """What a malformed row does: stop, or skip it (it is named)."""
    limit: int | None = None
    """Take the first so many rows."""
    batch_size: int = 32
    """Prompts decoded together in this process."""
    max_prompt_tokens: int | None = None
    """Skip (and count) longer prompts; what fits the target's context if not given."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the chat template, such as enable_thinking."""

    def __post_init__(self) -> None:
        if self.batch_size < 1 or (self.limit is not None and self.limit < 1):
            raise UserError("batch_size and limit must be at least 1")


LICENCE = re.compile(r"[a-z0-9][a-z0-9.\-]*")


@dataclass
class ExportOptions:
    """Write a drafter as a serving engine loads it, with the command that serves it and a model
    card."""

    example: ClassVar[str] = (
        "draftsmith export --drafter runs/mine/best --to vllm --out exports/eagle3-mine --report "
        "out.json"
    )

    drafter: str
    """The drafter's folder."""
    to: EngineName
    """Who is to serve it."""
    out: str
    """The folder to write."""
    serve_as: str | None = None
    """What the serve command and the config call the target: a folder or a name on the hub; as in
    training if not given."""
    drafts: int | None = None
    """Drafts a round in the serve command: if not given all of a Medusa drafter's heads or of a
    block, else 3."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the stored weights; auto: as the drafter has it."""
    report: list[str] = field(default_factory=list)
    """JSON of draftsmith evaluate, whose figures go into the card."""
    license: str = "other"
    """For the card, by the hub's name, such as apache-2.0."""
    draft_vocab_size: int | None = None
    """EAGLE-3: keep the so many most frequent tokens of `vocab_data`, special tokens always among
    them."""
    vocab_data: list[str] = field(default_factory=list)
    """Replies that the target wrote, in which tokens are counted."""
    bad_rows: BadRows = "stop"
    """What a malformed row of `vocab_data` does: stop, or skip it (it is named)."""
    target: str | None = None
    """The target, where its tokenizer or its output matrix is needed; that and its embedding are
    all that is loaded."""
    push: str | None = None
    """Put the folder on the hub under this name, such as me/eagle3-mine; private if it is new."""

    def __post_init__(self) -> None:
        if self.drafts is not None and self.drafts < 1:
            raise UserError(f"drafts must be at least 1, not {self.drafts}")
        if (self.draft_vocab_size is None) != (not self.vocab_data):
            raise UserError(
                "--draft-vocab-size and --vocab-data go together: tokens are kept by how often "
                "the target wrote them"
            )
        if self.draft_vocab_size is not None and self.target is None:
            raise UserError("--draft-vocab-size needs --target, whose tokenizer counts the tokens")
        if not LICENCE.fullmatch(self.license):
            raise UserError(
                f"license {self.license!r} is no name that the hub knows, such as apache-2.0, mit "
                "or other"
            )


@dataclass
class ImportOptions:
    """Read a public drafter, or an export of ours, for the target that it was trained for."""

    example: ClassVar[str] = (
        "draftsmith import --from yuhuili/EAGLE3-LLaMA3.1-Instruct-8B "
        "--target meta-llama/Llama-3.1-8B-Instruct --out drafters/eagle3"
    )

    from_: str
    """Its folder, or its name on the hub."""
    target: str
    """The target: a folder, or a name on the hub. Only its embedding, final norm and head are
    loaded."""
    out: str
    """The drafter's folder to write."""
    taps: str | None = None
    """Hidden states that it fuses, such as [2,16,29], where the checkpoint leaves them open."""
    norm_output: bool | None = None
    """Whether drafts recycle the normed state (EAGLE-3.1), where the checkpoint leaves it open."""
    norm_before_residual: bool | None = None
    """Whether the layer adds to the normed state, where the checkpoint leaves it open."""
    target_embedding: bool = False
    """Use the target's embedding although the checkpoint's differs."""


@dataclass
class GenerateOptions:
    """Decode one prompt and show what was accepted: accepted drafts in green, the target's own
    tokens plain.

    `--sampling.temperature 0.7` may be written `--temperature 0.7`, and so on.
    """

    example: ClassVar[str] = (
        "draftsmith generate --target TARGET --drafter runs/medusa/best --prompt 'def add(a, b):'"
    )

    target: TargetConfig
    prompt: str
    """The user's words; `-` reads them from standard input."""
    drafter: str = "none"
    """A drafter's folder, a small model's folder, or none, ngram, suffix, lookahead, early-exit;
    settings follow a colon: ngram:length=8."""
    profile: str | None = None
    """What draftsmith tune wrote: draft with its settings."""
    max_new_tokens: int = 256
    """Longest reply."""
    sampling: Sampling = field(default_factory=Sampling)
    """Greedy if not given."""
    stop: list[str] = field(default_factory=list)
    """Text that ends the reply, as it is (a line break in bash: $'\\n'); may be given several
    times."""
    color: bool | None = None
    """Colour accepted drafts; only on a terminal if not given."""
    raw: bool = False
    """Give the prompt to the target as it is, without the chat template."""


@dataclass
class DoctorOptions:
    """Check this machine, and a target and a training config if given. Exits with 2 if something
    would not run."""

    example: ClassVar[str] = (
        "draftsmith doctor --target scripts/quickstart/target --run configs/medusa/quickstart.yaml"
    )

    target: TargetConfig = field(default_factory=lambda: TargetConfig(""))
    """Target to load and check."""
    run: str | None = None
    """Training config to check; its target is checked too."""
    method: Method | None = None
    """The run's method; known by the config file's path (configs/eagle/...) or its keys if not
    given."""
    json: bool = False
    """Print JSON instead of a table."""
