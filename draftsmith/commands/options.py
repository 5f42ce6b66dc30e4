"""Options of the commands that prepare data, move and try drafters, and check the machine.

The commands' own modules need torch and transformers, which take seconds to import; a help text or
a mistyped option needs only this module. The docstrings are the help texts of the options.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ..heads.errors import UserError
from ..heads.exchange.engines import EngineName
from ..inference.base.settings import (
    RowOptions,
    Sampling,
    SourceOptions,
    TargetConfig,
    TemplateOptions,
    check_url,
)
from ..train.data.config import StoreType
from ..train.methods.registry import MethodName
from .run_file import RunFile

# The form of the names that the hub knows licences by.
LICENCE = re.compile(r"[a-z0-9][a-z0-9.\-]*")


@dataclass
class RecipeOptions:
    """Print the configuration of a method for a known target, to start from.

    Without a target all recipes are listed. Nobody has run them: each says what it rests on.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith recipe",
        "draftsmith recipe --method dflash --target qwen3-32b --out dflash-qwen3-32b.yaml",
    )

    method: MethodName = "eagle"
    """Method of the drafter."""
    target: str | None = None
    """Target, by its name on the hub or a short one, such as qwen3-32b."""
    out: str | None = field(default=None, metadata={"form": "FILE"})
    """File to write; the terminal if not given."""


@dataclass
class ExtractOptions(RunFile):
    """Store the target's features that a training run reads, so that it needs no target.

    With many workers: accelerate launch -m draftsmith.train data extract --config FILE --out STORE.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith data extract --config configs/eagle/quickstart.yaml --out "
        "runs/quickstart/store",
        "accelerate launch -m draftsmith.train data extract --config run.yaml --out STORE",
    )

    out: str
    """Folder of the feature store."""
    dtype: StoreType = "bfloat16"
    """Type of the stored features: float32, bfloat16, or fp8 (e4m3 with a scale for each position,
    which takes half of bfloat16)."""
    rows_per_shard: int = 64
    """Number of packed rows in a shard."""
    ring: int | None = None
    """Largest number of shards that are kept: those that the training needs next."""

    def __post_init__(self) -> None:
        if self.rows_per_shard < 1 or (self.ring is not None and self.ring < 2):
            raise UserError(
                "rows_per_shard must be at least 1, ring at least 2: one shard is read while the "
                "next is written"
            )


@dataclass
class ServerOptions:
    """OpenAI-compatible server that runs the target.

    An API key that it wants is in the variable DRAFTSMITH_SERVER_KEY.
    """

    url: str | None = None
    """Base address, such as http://localhost:8000/v1; if not given, the target runs in this
    process."""
    model: str | None = None
    """Name of the model on the server; the target's path if not given."""
    concurrency: int = 32
    """Number of requests under way at one time."""

    def __post_init__(self) -> None:
        check_url(self.url, "--server.url")
        if self.concurrency < 1:
            raise UserError("--server.concurrency must be at least 1")


@dataclass
class RegenerateOptions(RowOptions, TemplateOptions):
    """Let the target write the replies of a data set.

    Prompts are kept, and everything that an assistant said is replaced.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith data regenerate --target TARGET --data prompts.jsonl --out replies.jsonl "
        "--temperature 0.8",
        "draftsmith data regenerate --target TARGET --server.url http://localhost:8000/v1 "
        "--data prompts.jsonl --out replies.jsonl",
        "draftsmith data regenerate --target TARGET --data prompts.jsonl --out replies --share 0/4",
        "draftsmith data regenerate --target TARGET --data openai/gsm8k --config-name main "
        "--split train --out replies.jsonl",
    )

    target: TargetConfig
    data: str
    """Conversations or prompts: a JSON, JSONL or parquet file, a folder of them, or a data set on
    the hub, such as openai/gsm8k with its `config_name` and `split`."""
    out: str = field(metadata={"form": "FILE"})
    """JSONL file to write; one that was not finished is continued. With `share` a folder."""
    max_new_tokens: int = 1024
    """Largest number of tokens of a reply."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.7))
    """Sampling of the replies: use the settings that will be used in serving. At temperature 0
    small targets repeat themselves."""
    server: ServerOptions = field(default_factory=ServerOptions)
    limit: int | None = None
    """Number of rows to take, from the first one on; all if not given."""
    batch_size: int = 32
    """Number of prompts that are decoded together in this process."""
    share: str | None = None
    """Share of one of several workers, such as 3/64: the fourth of 64 (from 0), a 64th of the
    conversations. It adds a file to the folder `out`. What any file there has is not answered
    again, so that fewer workers, with other shares, can finish what lost ones left."""

    def __post_init__(self) -> None:
        if min(self.batch_size, self.max_new_tokens, self.limit or 1) < 1 or self.limit == 0:
            raise UserError("batch_size, max_new_tokens and limit must be at least 1")
        if self.sampling.rule != "auto":
            raise UserError("--sampling.rule accepts drafts, and replies are written without")
        if self.share is not None:
            found = re.fullmatch(r"(\d+)/(\d+)", self.share)
            if found is None or int(found[1]) >= int(found[2]):
                raise UserError(
                    f"share is {self.share!r}; write number/workers with a number from 0, such as "
                    "0/4, 1/4, 2/4 and 3/4 for four workers"
                )

    @property
    def decoding(self) -> Sampling:
        """Sampling of the decode loop: a penalty that only the target's own config has is none."""
        penalty = self.sampling.repetition_penalty
        return replace(self.sampling, repetition_penalty=1.0 if penalty is None else penalty)


@dataclass
class SplitOptions(RowOptions):
    """Set a share of the conversations aside, for evaluation only.

    All rows of a conversation lie on one side: rows with an equal id, or with an equal prompt
    (everything before the first reply), as every turn of a logged conversation has. The side
    depends on the conversation alone, so that a log that has grown is split alike.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith data split --data logs.jsonl --out rows --share 0.1",
    )

    data: str
    """Conversations or prompts: a JSON, JSONL or parquet file, a folder of them, or a data set on
    the hub."""
    out: str
    """Folder to write: train.jsonl has the rows that may be trained on, as they are, and
    held_out.jsonl the others."""
    share: float = 0.1
    """Share of the conversations that is set aside."""
    last_turn: bool = False
    """Keep only the last row of a conversation that was logged once per turn, with all turns before
    it."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"share must lie between 0 and 1, not {self.share:g}")


@dataclass
class ExportOptions:
    """Write a drafter in the layout that a serving engine loads.

    The command that serves it is printed, and a model card is in the folder.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith export --drafter runs/mine/best --to vllm --out exports/eagle3-mine",
        "draftsmith export --drafter runs/mine/best --to hf --out exports/mine --push me/mine",
    )

    drafter: str
    """Folder of the drafter."""
    to: EngineName
    """Engine that is to serve the drafter."""
    out: str
    """Folder to write."""
    target: str | None = None
    """Target that the engine is to load, for the serve command and the config: a folder or a name
    on the hub; if not given, the name that it had in training. Its output matrix is read where the
    engine wants it next to the drafter."""
    drafts: int | None = None
    """Number of drafts per round in the serve command; if not given, all heads of a Medusa drafter,
    all drafts of a block, else 3."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the stored weights; auto keeps the drafter's."""
    license: str | None = None
    """Licence in the card, by the hub's name for it, such as apache-2.0; if not given, the card
    names none."""
    push: str | None = None
    """Repository on the hub that the folder is put into, such as me/eagle3-mine; private if it is
    new."""

    def __post_init__(self) -> None:
        if self.drafts is not None and self.drafts < 1:
            raise UserError(f"drafts must be at least 1, not {self.drafts}")
        if self.license is not None and not LICENCE.fullmatch(self.license):
            raise UserError(
                f"license {self.license!r} is no name that the hub knows, such as apache-2.0, mit "
                "or other"
            )


@dataclass
class ImportOptions:
    """Make a drafter of a public checkpoint, or of an export of draftsmith.

    The target is the one that the drafter was trained for, or one that was tuned from it without
    added tokens.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith import --from yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target "
        "meta-llama/Llama-3.1-8B-Instruct --out drafters/eagle3",
        "draftsmith import --from FOLDER --target TARGET --out drafters/eagle3 --set taps=2,16,29",
    )

    from_: str
    """Folder of the checkpoint, or its name on the hub."""
    target: str
    """Target: a folder, or a name on the hub. Of it, only embedding, final norm and head are
    loaded."""
    out: str
    """Folder of the drafter to write."""
    set: list[str] = field(default_factory=list, metadata={"form": "KEY=VALUE"})
    """Answer where the checkpoint leaves something open; may be given several times: taps=2,16,29
    (hidden states that the drafter fuses), norm_output=true or false (recycle the normed state, as
    EAGLE-3.1 does), norm_before_residual=true or false (add the layer's output to the normed
    state), embedding=target (use the target's although the checkpoint's differs)."""


@dataclass
class ExtractLayerOptions:
    """Make a drafter of the MTP layer in a target's checkpoint, or in that of its base model.

    A base model's layer is as it was; train it on with `draftsmith train mtp --init-from`.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp extract --from Qwen/Qwen3.5-0.8B --out drafters/mtp",
        "draftsmith mtp extract --from FINE_TUNE --base Qwen/Qwen3.5-0.8B --out drafters/mtp",
    )

    from_: str
    """Folder of the target, or its name on the hub."""
    out: str
    """Folder of the drafter to write."""
    base: str | None = None
    """Folder or name of the model that the target was tuned from, to take its layer in place of the
    target's own, which was lost."""


@dataclass
class StitchOptions:
    """Write an MTP layer into a copy of its target's checkpoint, for engines.

    All other tensors and files are copied as they are.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp stitch --drafter runs/mtp/best --into FINE_TUNE --out model-with-mtp",
    )

    drafter: str
    """Folder of the drafter."""
    into: str = field(metadata={"form": "FOLDER"})
    """Folder of the target."""
    out: str
    """Folder to write."""


@dataclass
class GenerateOptions(SourceOptions, TemplateOptions):
    """Decode prompts, and show which drafts were accepted.

    Accepted drafts are green, the target's own tokens plain.

    `--sampling.temperature 0.7` may be written `--temperature 0.7`, and so on.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith generate --target TARGET --drafter runs/medusa/best --prompt 'def add(a, b):'",
        "draftsmith generate --target TARGET --drafter ngram:length=8 --prompt - --temperature "
        "0.7 < prompt.txt",
        "draftsmith generate --target TARGET --drafter runs/eagle/best --prompts gsm8k",
    )

    target: TargetConfig
    prompt: str | None = None
    """Prompt of the user; `-` reads it from standard input."""
    prompts: str | None = None
    """Prompts that are decoded one after the other: a benchmark or a file as `draftsmith evaluate`
    takes it, or a text file; `-` reads standard input. A line of text or standard input is a
    prompt, or a JSON row."""
    drafter: str = "none"
    """Folder of a drafter or of a draft model, or none, ngram;
    settings follow a colon: ngram:length=8."""
    profile: str | None = None
    """Profile that draftsmith tune wrote; its settings are drafted with."""
    max_new_tokens: int = 256
    """Largest number of tokens of the reply."""
    sampling: Sampling = field(default_factory=Sampling)
    """Sampling settings; greedy if not given."""
    compare: bool = False
    """Decode plainly as well, and say how fast that is and whether the text is the same."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if (self.prompt is None) == (self.prompts is None):
            raise UserError("give either --prompt WORDS or --prompts FILE")


@dataclass
class DoctorOptions(SourceOptions, RunFile):
    """Check this machine, and a target and a training config if given.

    The exit status is 2 if something would not run.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith doctor",
        "draftsmith doctor --target scripts/quickstart/target --chat train.jsonl",
        "draftsmith doctor --target scripts/quickstart/target --config "
        "configs/medusa/quickstart.yaml",
    )

    target: TargetConfig = field(default_factory=lambda: TargetConfig(""))
    """Target to load and check."""
    config: str | None = None  # type: ignore[assignment]
    """Training config to check; its target is checked too, unless another one is named."""
    chat: bool | str = field(default=False, metadata={"form": "[FILE]"})
    """Show the first rows of a file, or a built-in one, as the chat template renders them, with
    what training would learn in green or in [[brackets]]."""
    json: str | None = None
    """File to write the findings to; `-` prints them in place of the table."""

    def __post_init__(self) -> None:
        if self.chat and not self.target.path and self.config is None:
            raise UserError("--chat needs a chat template; name the target with --target")
        if self.set and self.config is None:
            raise UserError(
                f"{self.set[0].partition('=')[0]} is a key of a config; name it with --config"
            )
