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
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .errors import UserError, first_line
from .files import JsonObject, read_json
from .stored_tensors import files_of

LARGEST = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), 1 << 10)
LARGEST |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16)
LARGEST |= dict.fromkeys(("vocab_size", "hidden_size"), 1 << 24)
"""Largest plausible values of numbers in a config.json.

transformers makes a list or a module for each layer and expert, even of a model whose tensors take
no memory, before it compares anything with the weights: a damaged number would keep it busy for
hours. Drafters are made from the sizes before the weights are read.
"""

UNSUPPORTED = (AssertionError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Errors that a class of transformers raises for a use that it does not support."""


def check_numbers(values: Any, where: object) -> None:
    """Raise `UserError`, which names the file `where`, for implausible numbers under `LARGEST`."""
    for table in (values, values.get("text_config")) if isinstance(values, dict) else ():
        if not isinstance(table, dict):
            continue
        for name, most in LARGEST.items():
            given = table.get(name)
            # Of experts there may be one number for each layer.
            for number in given if isinstance(given, list) else [given]:
                if number is not None and (type(number) is not int or not 0 <= number <= most):
                    raise UserError(
                        f"{where} is damaged ({name} is {number!r:.40}); copy or download it again"
                    )


def check_config(folder: Path) -> None:
    """Raise `UserError` for a config.json in a folder that `check_numbers` refuses."""
    if (path := folder / "config.json").is_file():
        check_numbers(read_json(path), path)


def read_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Return the configuration of a model in a folder or on the hub.

    Raises `UserError` for a damaged number of those in `LARGEST`, and the errors of transformers,
    see `as_user_errors`.
    """
    check_config(Path(path))
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def save_model(model: Any, folder: str | Path) -> None:
    # transformers imports deepspeed to save a model, which would print a warning without a GPU.
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    model.save_pretrained(folder)


def config_of_values(values: JsonObject) -> Any:
    """Return the configuration that `to_dict` of one gave."""
    return AutoConfig.for_model(**values)


def read_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a model.

    Raises `UserError` for a damaged file at which the library's code stops, and the errors of
    transformers, see `as_user_errors`.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except BaseException as error:
        # It has no public name, and is not an `Exception`.
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"the tokenizer.json of {path} is damaged ({first_line(error)}); copy or download it "
            "again"
        ) from error


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

    Raises `UserError` for weights that are missing, or named by an index but outside of the folder,
    and the errors of transformers, see `as_user_errors`.
    """
    if Path(path).is_dir():
        check_config(Path(path))
        files_of(Path(path))
    return AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=trust_remote_code, use_safetensors=True, **options
    )


def make_causal_lm(config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return an untrained causal language model; `options` are those of `from_config`."""
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


@contextmanager
def as_user_errors(path: str | Path, what: str = "target", remedy: str = "") -> Iterator[None]:
    """Turn the errors of transformers about files that it cannot read into `UserError`s.

    The message begins with `what` was to be loaded and ends with `remedy`; what transformers itself
    would print about the files is not printed.
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


# Parts of messages, and the texts that replace these messages.
REASONS = {
    "ignore_mismatched_sizes": "its files hold tensors of other shapes than its config.json "
    "describes; they are not of one model",
    "Unrecognized configuration class": "it is not a causal language model that transformers knows",
    "custom code": "it comes with code of its own, which is not run; for a target that you trust, "
    "give --target.trust-remote-code",
    "backend tokenizer": "it has no tokenizer that can be read",
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
    """Return the first line of an error's message, or the text of `REASONS` that replaces it."""
    reason = first_line(error)
    return next((text for part, text in REASONS.items() if part in reason), reason)
