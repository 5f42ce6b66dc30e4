"""Models, configurations and tokenizers from disk or hub, read with transformers' Auto classes.

No other module calls these classes. Code that comes with a checkpoint runs only if the caller
passes `trust_remote_code`, which only a target's own option does. Without a value for it,
transformers asks on standard input, and a `yes` that was piped there for another question would run
the code. Weights are read from safetensors files only: pickled ones can run code when they are
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from huggingface_hub.errors import StrictDataclassError
from msgspec import Meta, Struct
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .documents import DocumentError, convert
from .errors import UserError, first_line
from .files import JsonObject, read_json
from .stored_tensors import files_in

WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


LayerCount = Annotated[int, Meta(ge=0, le=1 << 10)]
ExpertCount = Annotated[int, Meta(ge=0, le=1 << 16)]


class Repeated(Struct):
    """Numbers of a config.json by which a model repeats its layers and experts.

    transformers makes a list or a module for each, even of a model whose tensors take no memory,
    before it compares anything with the weights: a damaged number would keep it busy for hours.
    """

    num_hidden_layers: LayerCount | None = None
    num_layers: LayerCount | None = None
    n_layers: LayerCount | None = None
    n_layer: LayerCount | None = None
    num_experts: ExpertCount | list[ExpertCount] | None = None
    num_local_experts: ExpertCount | list[ExpertCount] | None = None
    n_routed_experts: ExpertCount | list[ExpertCount] | None = None
    text_config: Repeated | None = None


def check_repeated(folder: Path) -> None:
    """Raise `UserError` for implausible numbers of layers or experts in a config.json."""
    if not (folder / "config.json").is_file():
        return
    try:
        convert(read_json(folder / "config.json"), Repeated)
    except DocumentError as error:
        raise UserError(
            f"{folder / 'config.json'} is damaged ({error}); copy or download it again"
        ) from error


class SubwordModel(Struct):
    """Part of a tokenizer.json of which its library does not check that it fits together."""

    continuing_subword_prefix: str | None = None
    merges: list[str | list[str]] = []


class TokenizerFile(Struct):
    """A tokenizer.json, as far as it is checked before its library reads it."""

    model: SubwordModel


def check_merges(folder: Path) -> None:
    """Raise `UserError` if a merge of a tokenizer.json does not carry the prefix of continuing
    subwords.

    tokenizers cuts that prefix off the second part of each merge unseen; where there is none, its
    code ends the process.
    """
    file = folder / "tokenizer.json"
    try:
        model = msgspec.json.decode(file.read_bytes(), type=TokenizerFile).model
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # tokenizers says what is wrong with it, or it is of another form
    prefix = model.continuing_subword_prefix or ""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model.merges)
    if prefix and not all(pair[-1].startswith(prefix) for pair in pairs if pair):
        raise UserError(
            f"{file} is damaged (continuing_subword_prefix: its merges do not begin with "
            f"{prefix!r}); copy or download it again"
        )


def read_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model in a folder or on the hub.

    Raises `UserError` for a damaged number of layers or experts, and the errors of transformers,
    see `clear_errors`.
    """
    check_repeated(Path(path))
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def save_model(model: Any, folder: str | Path) -> None:
    """Write a model as Hugging Face files."""
    # transformers imports deepspeed to save a model, which would print a warning without a GPU.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    model.save_pretrained(folder)


def config_of_values(values: JsonObject) -> Any:
    """Return the configuration that `to_dict` of one gave."""
    return AutoConfig.for_model(**values)


def read_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model.

    Raises `UserError` for merges that do not fit together, and the errors of transformers, see
    `clear_errors`.
    """
    check_merges(Path(path))
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def end_ids(setting: Any) -> list[int]:
    """Return the ids of an `eos_token_id`, which is an id, a list of them, or None.

    Raises `UserError` for any other value.
    """
    ids = setting if isinstance(setting, list) else [] if setting is None else [setting]
    if not all(type(each) is int for each in ids):
        raise UserError(
            f"eos_token_id of generation_config.json or config.json is {setting!r}; it has to be "
            "an id or a list of ids"
        )
    return list(ids)


def read_causal_lm(path: str | Path, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return a causal language model with its weights; `options` are those of `from_pretrained`.

    Raises `UserError` for weights that are missing, pickled, or named by an index but outside of
    the folder, and the errors of transformers, see `clear_errors`.
    """
    if Path(path).is_dir():
        check_repeated(Path(path))
        check_weights(Path(path))
    return AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=trust_remote_code, use_safetensors=True, **options
    )


def make_causal_lm(config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return an untrained causal language model; `options` are those of `from_config`."""
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


def check_weights(folder: Path) -> None:
    """Raise `UserError` unless `folder` holds all its weights in safetensors files."""
    if (folder / WEIGHTS_INDEX).is_file():
        files_in(folder / WEIGHTS_INDEX)
    elif not any(folder.glob("*.safetensors")):
        pickled = [file for pattern in PICKLES for file in sorted(folder.glob(pattern))]
        if pickled:
            raise UserError(
                f"{folder} holds its weights in {pickled[0].name}, a pickle, which can run code "
                "when it is read; save the model again with save_pretrained, which writes "
                "safetensors"
            )
        raise UserError(
            f"{folder} holds no weights: there is no *.safetensors file; copy or download the "
            "model again"
        )


@contextmanager
def clear_errors(path: str | Path, what: str = "target", remedy: str = "") -> Iterator[None]:
    """Turn the errors of transformers about files that it cannot read into `UserError`s.

    This is a context manager. The message begins with `what` was to be loaded and ends with
    `remedy`; what transformers itself would print about the files is not printed.
    """
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except UserError:
        raise
    # tokenizers raises Exception itself, and every architecture fails in its own way.
    except Exception as error:
        raise UserError(
            f"cannot load {what} {str(path)!r}: {reason_of(error)}{'; ' + remedy if remedy else ''}"
        ) from error
    finally:
        transformers_logging.set_verbosity(before)


# Parts of messages, and what is said in their place.
REASONS = {
    "ignore_mismatched_sizes": "its files hold tensors of other shapes than its config.json "
    "describes; they are not of one model",
    "Unrecognized configuration class": "it is no causal language model that transformers knows",
    "custom code": "it comes with code of its own, which is not run; for a target that you trust, "
    "give --target.trust-remote-code",
    "backend tokenizer": "there is no tokenizer that can be read",
    "does not support float32": "the kernels of flash-linear-attention, which transformers found, "
    "do not take float32: give --target.dtype bfloat16, or remove that package",
    "is_cuda() to be true": "the kernels of causal-conv1d, which transformers found, run on GPUs "
    "only: remove that package",
}


def reason_of(error: Exception) -> str:
    """Return why a library cannot read some files, in one line.

    The first line of some libraries' messages makes no sense without the rest, or names a remedy
    that does not exist here; these are replaced.
    """
    reason = first_line(error)
    if isinstance(error, KeyError):
        return f"one of its files lacks {reason}"
    if isinstance(error, RecursionError):
        return "one of its files is nested too deeply"
    if isinstance(error, StrictDataclassError):
        return f"its config.json contradicts itself ({str(error).strip().splitlines()[-1].strip()})"
    return known_reason(error)


def known_reason(error: Exception) -> str:
    """Return the first line of an error's message, or what is said in its place (`REASONS`)."""
    reason = first_line(error)
    return next((text for part, text in REASONS.items() if part in reason), reason)
