"""The one place that reads models, configurations and tokenizers through transformers' Auto
classes.

No code that comes with a checkpoint runs unless the caller passes `trust_remote_code`, which only a
target's own option does: left open, transformers asks on standard input, and a `yes` that is piped
there for another question runs it. Weights are read from safetensors files only: pickled ones can
run code when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub.errors import StrictDataclassError
from msgspec import Meta, Struct
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from .documents import DocumentError, convert
from .errors import UserError, first_line
from .files import read_json
from .stored_tensors import files_in

WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


LayerCount = Annotated[int, Meta(ge=0, le=1 << 10)]
ExpertCount = Annotated[int, Meta(ge=0, le=1 << 16)]


class Repeated(Struct):
    """The numbers of a config.json by which a model repeats its parts.

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
    """Demand numbers of layers and experts that a model may have. Raises `UserError`."""
    if not (folder / "config.json").is_file():
        return
    try:
        convert(read_json(folder / "config.json"), Repeated)
    except DocumentError as error:
        raise UserError(
            f"{folder / 'config.json'} is damaged ({error}); copy or download it again"
        ) from error


def read_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The configuration of a model. Raises `UserError` for a damaged number of layers, else what
    transformers raises; see `clear_errors`."""
    check_repeated(Path(path))
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def read_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model. Raises what transformers raises; see `clear_errors`."""
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def read_causal_lm(path: str | Path, trust_remote_code: bool = False, **options: Any) -> Any:
    """A causal language model with its weights; `options` are those of `from_pretrained`.

    Raises `UserError` for weights that are pickled, or that an index looks for outside of the
    folder, else what transformers raises; see `clear_errors`.
    """
    if Path(path).is_dir():
        check_repeated(Path(path))
        check_weights(Path(path))
    return AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code=trust_remote_code, use_safetensors=True, **options
    )


def make_causal_lm(config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
    """A causal language model of a configuration, untrained; `options` are those of
    `from_config`."""
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


def check_weights(folder: Path) -> None:
    """Demand safetensors files, and an index (if there is one) that names files of the folder only.
    Raises `UserError`."""
    if (folder / WEIGHTS_INDEX).is_file():
        files_in(folder / WEIGHTS_INDEX)
    elif not any(folder.glob("*.safetensors")):
        pickled = [file.name for pattern in PICKLES for file in sorted(folder.glob(pattern))]
        if pickled:
            raise UserError(
                f"{folder} holds its weights in {pickled[0]}, a pickle, which can run code when "
                "it is read; "
                "save the model again with save_pretrained, which writes safetensors"
            )
        raise UserError(
            f"{folder} holds no weights: there is no *.safetensors file; copy or download the "
            "model again"
        )


@contextmanager
def clear_errors(path: str | Path, what: str = "target", remedy: str = "") -> Iterator[None]:
    """Within this, what transformers raises for files that it cannot read becomes a `UserError`,
    and what it prints about them is not printed."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except UserError:
        raise
    # tokenizers raises Exception itself, and each architecture has its own way to fail
    except Exception as error:
        raise UserError(
            f"cannot load {what} {str(path)!r}: {reason_of(error)}{'; ' + remedy if remedy else ''}"
        ) from error
    finally:
        transformers_logging.set_verbosity(before)


def reason_of(error: Exception) -> str:
    """What a library says of files that it cannot read, in a line that makes sense without the rest
    of its message."""
    reason = first_line(error)
    if isinstance(error, KeyError):
        return f"one of its files lacks {reason}"
    if isinstance(error, RecursionError):
        return "one of its files is nested too deeply"
    if isinstance(error, StrictDataclassError):
        return f"its config.json contradicts itself ({str(error).strip().splitlines()[-1].strip()})"
    if "ignore_mismatched_sizes" in reason:
        return (
            "its files hold tensors of other shapes than its config.json describes; they are not "
            "of one model"
        )
    if "Unrecognized configuration class" in reason:
        return "it is no causal language model that transformers knows"
    if "custom code" in reason:
        return (
            "it comes with code of its own, which is not run; for a target that you trust, give "
            "--target.trust-remote-code"
        )
    if "backend tokenizer" in reason:
        return "there is no tokenizer that can be read"
    return reason
