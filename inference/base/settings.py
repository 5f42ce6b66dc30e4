"""Settings that commands share: servers, rows, the target, and sampling."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from ...heads.errors import UserError

LEAST_TEMPERATURE = 1e-5  # below this, logits divided by the temperature leave the range of float32
LARGEST_PENALTY = 1e5  # the same for logits multiplied or divided by a repetition penalty
Rule = Literal["auto", "coupled", "match", "rejection", "recursive"]


OTHER_NAMES = {
    "model": "target.path", "model_name_or_path": "target.path", "model_name": "target.path",
    "dataset": "data.sources", "dataset_name": "data.sources", "train_file": "data.sources",
    "output": "out", "output_dir": "out", "resume_from_checkpoint": "checkpoints.resume",
    "learning_rate": "optim.lr", "lr_scheduler_type": "optim.schedule",
    "warmup_ratio": "optim.warmup_share", "warmup_steps": "optim.warmup_share",
    "max_grad_norm": "optim.clip_norm", "adam_beta1": "optim.betas", "adam_beta2": "optim.betas",
    "num_train_epochs": "epochs", "num_epochs": "epochs",
    "steps": "max_steps", "max_train_steps": "max_steps",
    "per_device_train_batch_size": "batch_rows", "gradient_accumulation_steps": "rows_per_step",
    "accumulation": "rows_per_step", "global_batch_size": "rows_per_step",
    "train_batch_size": "rows_per_step", "max_seq_length": "data.max_length",
    "max_length": "data.max_length max_new_tokens", "max_tokens": "max_new_tokens",
    "bf16": "precision", "fp16": "precision", "mixed_precision": "precision",
    "gradient_checkpointing": "objective.recompute", "torch_dtype": "target.dtype",
    "logging_steps": "log_every", "save_steps": "checkpoints.every",
    "save_total_limit": "checkpoints.keep", "eval_steps": "evaluation.every",
    "report_to": "tracker", "log_with": "tracker", "run_name": "project",
    "push_to_hub": "push", "hub_model_id": "push",
    "temp": "temperature", "do_sample": "temperature", "m": "target.path",
    "draft_model": "drafter", "speculative_model": "drafter", "speculative_config": "drafter",
    "model_draft": "drafter", "spec_draft_model": "drafter", "md": "drafter",
    "n_predict": "max_new_tokens", "predict": "max_new_tokens", "n": "samples max_new_tokens",
    "num_return_sequences": "samples", "p": "prompt prompts",
}  # fmt: skip
"""Option names of other tools (their last part) and ours for the same setting; a command suggests
the first of ours that it has."""


def check_url(url: str | None, option: str) -> None:
    """Raise `UserError` that names `option` unless `url` is the address of a server, or None."""
    if url is None:
        return
    try:
        address = urlsplit(url)
        sound = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # a port that is not a number, or above 65535; an incomplete IPv6 address
        sound = False
    if not sound:
        raise UserError(
            f"{option} {url!r} is not the URL of a server; write it as http://localhost:8000/v1"
        )


SERVER_KEY_VARIABLE = "DRAFTSMITH_SERVER_KEY"
"""Environment variable with the API key for requests to servers, used if no file is named.

A key comes from a file or the environment, since every user of a machine can read the arguments of
a process."""


def read_key(key: str | None, file: str | None, option: str) -> str | None:
    """Return the key in `file`, which the user named with `option`, else `key`.

    Raises `UserError` for a file that cannot be read and for a key that cannot be sent.
    """
    source = "the API key"
    if file is not None:
        source = f"{option} {file}"
        try:
            key = Path(file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise UserError(f"cannot read {source}: {reason}; check the path") from error
        if not key:
            raise UserError(f"{source} is empty; write the key into it")
    # A header of HTTP can carry neither control characters nor spaces at its ends.
    if key and (key != key.strip() or not key.isprintable()):
        raise UserError(f"{source} has spaces around it or characters that cannot be sent")
    return key or None


def headers_with_key(file: str | None = None, option: str = "") -> dict[str, str]:
    """Return the header with the key in `file`, else in `SERVER_KEY_VARIABLE`; empty without a key.

    `option` is the option that names `file`. Raises `UserError` as `read_key` does.
    """
    key = read_key(os.environ.get(SERVER_KEY_VARIABLE), file, option)
    if key is not None and not key.isascii():
        raise UserError("the API key has characters that cannot be sent")
    return {} if key is None else {"Authorization": f"Bearer {key}"}


DTYPES = ("float32", "bfloat16", "float16")
"""Types of weights that targets and trained drafters may have."""
SHORT_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp64": "float64",
    "double": "float64",
}
"""Full names of types of weights by their short ones."""


def dtype_named(name: str) -> str:
    """Return the full name of a type of weights, bfloat16 for bf16; another text as it is."""
    return SHORT_DTYPES.get(name, name)


# Names of engines that differ from ours in more than upper case, spaces and points.
OTHER_SPELLINGS = {"tensorrtllm": "trtllm", "huggingface": "hf", "transformers": "hf"}


def choice_named(word: str, choices: Iterable[Any]) -> Any:
    """Return the one of `choices` that equals `word` but for case and punctuation, else the word.

    Examples: h100 and H-100 are H100, RTX4090 is RTX 4090, llama.cpp is llamacpp, tensorrt-llm is
    trtllm.
    """
    wanted = letters(word)
    wanted = {wanted, OTHER_SPELLINGS.get(wanted, wanted)}
    return next((choice for choice in choices if letters(str(choice)) in wanted), word)


def letters(word: str) -> str:
    """Return the letters and digits of a word in lower case."""
    return "".join(c for c in word.lower() if c.isalnum())


def check_dtype(name: str) -> str:
    """Return the full name of a target's type of weights. Raises `UserError` for another text."""
    if (full := dtype_named(name)) not in ("auto", *DTYPES, "float64"):
        raise UserError(f"unknown dtype {name!r}; use auto, float32, bfloat16 or float16")
    return full


BadRows = Literal["stop", "skip"]
"""Treatment of a malformed row: stop with an error that names it, or skip it with a warning."""


@dataclass
class RowSource:
    """Rows as a user names them; as text it is its path."""

    path: str
    """JSON, JSONL or parquet file, a folder of them, or the name of a data set on the hub."""
    split: str = "train"
    """Split of a data set."""
    config_name: str | None = None
    """Configuration of a data set on the hub; not needed where there is one."""
    revision: str | None = None
    """Branch, tag or commit of a data set on the hub; its main branch if not given."""

    def __str__(self) -> str:
        return self.path


@dataclass(kw_only=True)
class SourceOptions:
    """Options of a command that say which rows of a data set are read; see `RowSource`."""

    split: str = "train"
    """Name of the split of a data set to read."""
    config_name: str | None = None
    """Name of the configuration of a data set on the hub, such as main."""
    revision: str | None = None
    """Name of a branch or tag of a data set on the hub, or a commit; the main branch if not
    given."""

    def source(self, path: str) -> RowSource:
        """Return the source that the options and `path` name."""
        return RowSource(path, self.split, self.config_name, self.revision)


@dataclass(kw_only=True)
class RowOptions(SourceOptions):
    """Options of a command that needs every row of a data set."""

    bad_rows: BadRows = "stop"
    """Treatment of a malformed row: stop the command, or skip the row; it is named either way."""


@dataclass(kw_only=True)
class TemplateOptions:
    """Options of a command that renders conversations."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, such as '{"enable_thinking": false}'; a row's own
    variables take precedence."""


@dataclass
class TargetConfig:
    """Location of the target, and how it is loaded."""

    path: str
    """Model folder, or the model's name on the hub. `--target X` is short for `--target.path X`."""
    dtype: str = "auto"
    """Type of the weights: auto (as stored, but float32 on a CPU), float32, bfloat16 or float16;
    bf16, fp16, fp32 and fp64 are taken too."""
    device: str = "auto"
    """Device: auto (cuda if there is one, else cpu), cpu, cuda or cuda:N."""
    adapter: str | None = None
    """Folder of a LoRA adapter, which is merged into the weights on loading (needs peft)."""
    attention: str | None = None
    """Attention implementation of transformers, such as sdpa: the target then uses transformers'
    own forward pass and weight layout (the reference). If not given, Llama-style models use
    draftsmith's fused forward pass, provided that its output agrees with the reference; on a CPU,
    weights are also reordered for speed."""
    compile: bool = False
    """Run a round as one function over buffers of fixed size: on a GPU a CUDA graph, recorded in
    about a second; on a CPU compiled, which takes up to two minutes and is cached on disk."""
    spread: Literal["whole", "fsdp", "devices"] = "whole"
    """Distribution over ranks and GPUs. whole: a copy on every rank; fsdp: each decoder layer
    sharded over all ranks; devices: layers distributed over the GPUs of one
    process."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Give it only for sources that you trust."""
    allow_added_tokens: bool = False
    """Accept drafters trained for the base model even if fine-tuning added tokens at the end of the
    vocabulary. The added tokens are never drafted."""

    def __post_init__(self) -> None:
        # From Python a type of torch may be given.
        if isinstance(self.dtype, str):
            self.dtype = check_dtype(self.dtype)

    @property
    def fused(self) -> bool:
        """True if the target decodes by our own forward pass, where that agrees with its own."""
        return self.attention is None


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters and acceptance rule. Raises `UserError` for values out of range."""

    temperature: float = 0.0
    """Temperature of sampling; 0 is greedy decoding."""
    top_k: int = 0
    """Keep only this many of the best tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest tokens that hold this much probability."""
    min_p: float = 0.0
    """Keep the tokens that are at least this likely, relative to the likeliest one."""
    repetition_penalty: float | None = None
    """Penalty for tokens that the text contains already (CTRL, arXiv 1909.05858); 1 is off. The
    target's own setting if not given."""
    seed: int = 0
    """Seed of all noise, together with a request's id and the number of the sample."""
    rule: Rule = "auto"
    """Acceptance rule at T > 0. coupled (auto): the text that plain sampling with the same noise
    writes, whatever the drafter; match: the same text, but drafts are the drafter's best tokens,
    chosen without the noise, as in most engines; rejection: block verification of a sampled chain,
    traversal of a sampled tree, match of deterministic drafts; recursive: recursive rejection of
    sampled chains and trees."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "top_k", "seed"):
            if self.repetition_penalty is not None or name != "repetition_penalty":
                object.__setattr__(self, name, self._number(name))
        temperature, least, most = self.temperature, 1 / LARGEST_PENALTY, LARGEST_PENALTY
        penalty = 1.0 if self.repetition_penalty is None else self.repetition_penalty
        # Truncation never removes the best token, the only one that greedy decoding takes.
        neutral = {"top_k": 0, "top_p": 1, "min_p": 0}
        truncates = [name for name, off in neutral.items() if getattr(self, name) != off]
        for holds, what in (
            (0 <= temperature < float("inf"), f"temperature must be 0 or more, not {temperature}"),
            (
                not 0 < temperature < LEAST_TEMPERATURE,
                f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}, not "
                f"{temperature}",
            ),
            (self.top_k >= 0, f"top_k must be 0 (all) or more, not {self.top_k}"),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}"),
            (
                least <= penalty <= most,
                f"repetition_penalty must be between {least:g} and {most:g}, not {penalty}",
            ),
            (
                not (self.greedy and truncates),
                f"{', '.join(truncates)} means nothing at temperature 0; give a temperature "
                "too, also where several temperatures are named",
            ),
            (
                self.rule in get_args(Rule),
                f"unknown rule {self.rule!r}; use one of {', '.join(get_args(Rule))}",
            ),
        ):
            if not holds:
                raise UserError(what)

    def _number(self, name: str) -> float:
        """Return a setting as Python's own number, which transformers' processors take."""
        # Values given from Python have not been parsed.
        value, whole = getattr(self, name), name in ("top_k", "seed")
        kind = "whole number" if whole else "number"
        try:
            # Python counts True among the integers.
            if isinstance(value, Integral if whole else Real) and not isinstance(value, bool):
                return int(value) if whole else float(value)  # type: ignore[arg-type]  # see above
        except OverflowError:  # a whole number beyond every float
            pass
        raise UserError(f"{name} must be a {kind}, not {value!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain_greedy(self) -> bool:
        """True if the choice is the best token of the raw logits: greedy without a penalty."""
        return self.greedy and self.history_processor is None

    @property
    def compares_distributions(self) -> bool:
        """True if the rule compares the distributions of target and drafter.

        Drafts then have to be fresh draws from a distribution that the tree keeps.
        """
        return not self.greedy and self.rule in ("rejection", "recursive")

    @property
    def coupled(self) -> bool:
        return not self.greedy and self.rule in ("auto", "coupled")

    @cached_property
    def history_processor(self) -> Any | None:
        """The processor of the repetition penalty, which reads the text so far, if there is one."""
        # The import takes seconds. `--help` reads this module and need not wait for it.
        from transformers import RepetitionPenaltyLogitsProcessor

        penalty = self.repetition_penalty
        return RepetitionPenaltyLogitsProcessor(penalty) if penalty not in (None, 1) else None

    @cached_property
    def warpers(self) -> Any:
        """The `LogitsProcessorList` of temperature and truncation, ordered as in `generate`."""
        from transformers import (
            LogitsProcessorList,
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        warpers: Any = LogitsProcessorList()
        if self.temperature not in (0, 1):
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            warpers.append(MinPLogitsWarper(self.min_p))
        return warpers

    def resolved(self, own_penalty: float) -> Sampling:
        """Return these settings with the target's own repetition penalty if none was given."""
        if self.repetition_penalty is not None:
            return self
        return replace(self, repetition_penalty=own_penalty)


GREEDY = Sampling()
