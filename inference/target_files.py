"""Reading a target's files: what may be wrong with them, in one clear line each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

from huggingface_hub import HfApi, try_to_load_from_cache
from torch import nn

from ..heads import pretrained
from ..heads.documents import FORMER_METHODS, AdapterFile, read_document
from ..heads.errors import UserError, first_line
from ..heads.files import read_json
from ..heads.pretrained import clear_errors
from .settings import TargetConfig

HUB = "https://huggingface.co/"
DRAFTER_FILE = "draftsmith.json"
# a tensor of a decoder layer
LAYER = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_there(path: str) -> None:
    """Demand a model folder, or a name that the hub or its local cache knows; the loaders would
    retry for a minute first.

    Raises `UserError`, also for a folder or file that is something else.
    """
    if not path:
        raise UserError("name a target: --target FOLDER, or target.path in the config")
    folder = Path(path)
    if folder.is_dir():
        return check_folder(folder)
    if folder.is_file():
        raise UserError(
            f"target {path} is a file; name a model's folder, with config.json, weights in "
            "safetensors and tokenizer"
        )
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
        raise UserError(
            f"target {path!r} is no folder here, and the hub cannot give it ({reason}); check the "
            "path"
        ) from error


def check_folder(folder: Path) -> None:
    """Demand that a folder looks like a model's, or like a LoRA adapter's. Raises `UserError`."""
    method = method_in(own) if (own := folder / DRAFTER_FILE).is_file() else None
    if method not in (None, "draft_model"):
        raise UserError(
            f"{folder} is a drafter ({method}), not a target; give it as --drafter, and its "
            "target as --target"
        )
    if (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file():
        return
    kind = (
        "a GGUF file, which has to be turned into a Hugging Face folder first"
        if any(folder.glob("*.gguf"))
        else "no config.json"
    )
    raise UserError(f"target folder {folder} holds {kind}; name the folder of a Hugging Face model")


def method_in(own: Path) -> Any:
    """What a drafter's `draftsmith.json` calls its method, None if it says nothing. Raises
    `UserError` for what is no JSON."""
    facts = read_json(own)
    method = facts.get("method") if isinstance(facts, dict) else None
    return FORMER_METHODS.get(method, method) if isinstance(method, str) else method


def read_model(path: str, options: dict[str, Any]) -> nn.Module:
    """The causal language model in a folder or of a name, with every weight from its files. Raises
    `UserError`."""
    with clear_errors(path):
        loaded = pretrained.read_causal_lm(path, output_loading_info=True, **options)
    model, found = loaded
    for what, names in (
        ("lack", found["missing_keys"]),
        ("have in another shape", found.get("mismatched_keys", ())),
    ):
        if names:
            names = sorted(name if isinstance(name, str) else name[0] for name in names)
            raise UserError(
                f"target {path}: its files {what} {len(names)} of the tensors that its "
                "config.json describes, such as "
                f"{names[0]}; weights and config are not of one model, or the download is not "
                "complete"
            )
    surplus = {
        int(place[1]) for name in found.get("unexpected_keys", ()) if (place := LAYER.match(name))
    }
    if len(surplus) > (getattr(model.config, "num_nextn_predict_layers", None) or 0):
        raise UserError(
            f"target {path}: its files hold {len(surplus)} decoder layers that its config.json "
            "does not describe; weights and "
            "config are not of one model"
        )
    return model


def check_config(path: str, trust_remote_code: bool) -> None:
    """Demand a config.json that transformers can read, before other files are blamed for it. Raises
    `UserError`."""
    with clear_errors(path):
        pretrained.read_config(path, trust_remote_code)


def read_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """Raises `UserError` where there is none, or none that can be read."""
    with clear_errors(
        path,
        "the tokenizer of target",
        "copy its tokenizer files (tokenizer.json) from the published model",
    ):
        return pretrained.read_tokenizer(path, trust_remote_code)


def base_and_adapter(config: TargetConfig) -> tuple[str, str | None]:
    """The model that a target's option names, and the LoRA adapter to merge into it: its path may
    name an adapter's folder, whose own config says which model it is for. Raises `UserError`."""
    check_there(config.path)
    own = Path(config.path, ADAPTER_CONFIG)
    if config.adapter is not None or not own.is_file():
        return config.path, config.adapter
    base = read_document(own, AdapterFile, "save or copy the adapter again")[
        0
    ].base_model_name_or_path
    if not base:
        raise UserError(
            f"{own} names no base model; give it as --target, and the adapter as --target.adapter"
        )
    if not Path(base).is_absolute() and (
        Path(base).exists() or ".." in Path(base).parts or base.startswith((".", "~"))
    ):
        raise UserError(
            f"{own} names {base}, a folder outside of its own; if that is the model, give it as "
            "--target, "
            "and the adapter as --target.adapter"
        )
    check_there(base)
    return base, config.path


def merge_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """`model` with the LoRA adapter in folder `adapter` merged into its weights. Raises
    `UserError`."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UserError(
            "a LoRA adapter needs peft; install it with: pip install 'draftsmith[lora]'"
        ) from error
    if Path(adapter).is_dir() and not Path(adapter, ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"adapter {adapter} has no {ADAPTER_WEIGHTS}; save it again: pickled weights can run "
            "code"
        )
    with clear_errors(adapter, "adapter"):
        return cast(Any, PeftModel.from_pretrained(cast(Any, model), adapter)).merge_and_unload()
