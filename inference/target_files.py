"""Reading a target's files: what may be wrong with them, in one clear line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from ..heads.errors import UserError
from ..heads.files import read_json

HUB = "https://huggingface.co/"
DRAFTER_FILE = "draftsmith.json"


def check_there(path: str) -> None:
    """Demand a model folder, or a name that the hub or its local cache knows; the loaders would retry for a minute first.

    Raises `UserError`, also for a folder or file that is something else.
    """
    if not path:
        raise UserError("name a target: --target FOLDER, or target.path in the config")
    folder = Path(path)
    if folder.is_dir():
        return check_folder(folder)
    if folder.is_file():
        raise UserError(f"target {path} is a file; name a model's folder, with config.json, weights in safetensors and tokenizer")
    if path.startswith(HUB):
        name = "/".join(path.removeprefix(HUB).split("/")[:2])
        raise UserError(f"target {path} is an address; give the model's name, {name}")
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(f"target folder {path} does not exist; check the path")
    try:
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            HfApi().model_info(path, timeout=10)
    except Exception as error:
        reason = first_line(error)
        raise UserError(f"target {path!r} is no folder here, and the hub cannot give it ({reason}); check the path") from error


def check_folder(folder: Path) -> None:
    """Demand that a folder looks like a model's, or like a LoRA adapter's. Raises `UserError`."""
    if (own := folder / DRAFTER_FILE).is_file() and (method := read_json(own).get("method")) not in (None, "draft_lm"):
        raise UserError(f"{folder} is a drafter ({method}), not a target; give it as --drafter, and its target as --target")
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return
    kind = (
        "a GGUF file, which has to be turned into a Hugging Face folder first" if any(folder.glob("*.gguf")) else "no config.json"
    )
    raise UserError(f"target folder {folder} holds {kind}; name the folder of a Hugging Face model")


def read_model(path: str, options: dict[str, Any]) -> nn.Module:
    """The causal language model in a folder or of a name, with every weight from its files. Raises `UserError`."""
    with clear_errors(path):
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    model, found = loaded
    for what, names in (("lack", found["missing_keys"]), ("have in another shape", found.get("mismatched_keys", ()))):
        if names:
            names = sorted(name if isinstance(name, str) else name[0] for name in names)
            raise UserError(
                f"target {path}: its files {what} {len(names)} of the tensors that its config.json describes, such as "
                f"{names[0]}; weights and config are not of one model, or the download is not complete"
            )
    return model


def check_config(path: str, trust_remote_code: bool) -> None:
    """Demand a config.json that transformers can read, before other files are blamed for it. Raises `UserError`."""
    with clear_errors(path):
        AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def read_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """Raises `UserError` where there is none, or none that can be read."""
    with clear_errors(path, "the tokenizer of target", "copy its tokenizer files (tokenizer.json) from the published model"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


@contextmanager
def clear_errors(path: str, what: str = "target", remedy: str = "") -> Iterator[None]:
    """Within this, what transformers raises for files that it cannot read becomes a `UserError`, and what it
    prints about them is not printed."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise UserError(f"cannot load {what} {path!r}: {reason_of(error)}{'; ' + remedy if remedy else ''}") from error
    except (SafetensorError, StrictDataclassError) as error:
        raise UserError(f"cannot load {what} {path!r}: {reason_of(error)}{'; ' + remedy if remedy else ''}") from error
    finally:
        transformers_logging.set_verbosity(before)


def reason_of(error: Exception) -> str:
    """What a library says of files that it cannot read, in a line that makes sense without the rest of its message."""
    reason = first_line(error)
    if isinstance(error, KeyError):
        return f"one of its files lacks {reason}"
    if isinstance(error, StrictDataclassError):
        return f"its config.json contradicts itself ({str(error).strip().splitlines()[-1].strip()})"
    if "ignore_mismatched_sizes" in reason:
        return "its files hold tensors of other shapes than its config.json describes; they are not of one model"
    if "Unrecognized configuration class" in reason:
        return "it is no causal language model that transformers knows"
    if "custom code" in reason:
        return "it comes with code of its own; if you trust its source, give --target.trust-remote-code"
    if "backend tokenizer" in reason:
        return "there is no tokenizer that can be read"
    return reason


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def merge_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """`model` with the LoRA adapter in folder `adapter` merged into its weights. Raises `UserError`."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UserError("a LoRA adapter needs peft; install it with: pip install 'draftsmith[lora]'") from error
    try:
        return cast(Any, PeftModel.from_pretrained(cast(Any, model), adapter)).merge_and_unload()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"cannot merge adapter {adapter!r}: {str(error).strip().splitlines()[0]}") from error
