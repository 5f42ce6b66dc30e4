"""Reading of a target's files. Everything that may be wrong with them is an error of one line."""

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
# name of a tensor that belongs to a decoder layer; the group is the layer's number
LAYER = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_there(path: str) -> None:
    """Raise `UserError` unless `path` is a model folder, or a name that the hub or its cache knows.

    The loaders of transformers would find that out as well, but after a minute of retries.
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
    # What remains may be the name of a model on the hub. The cache is asked first, so that a model
    # that was downloaded before loads without a network.
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
    """Raise `UserError` unless a folder looks like a model's, or like a LoRA adapter's."""
    drafter_file = folder / DRAFTER_FILE
    method = method_in(drafter_file) if drafter_file.is_file() else None
    # a distilled draft model is a whole model, which may serve as a target
    if method not in (None, "draft_model"):
        raise UserError(
            f"{folder} is a drafter ({method}), not a target; give it as --drafter, and its "
            "target as --target"
        )
    if (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file():
        return
    kind = "no config.json"
    if any(folder.glob("*.gguf")):
        kind = "a GGUF file, which has to be turned into a Hugging Face folder first"
    raise UserError(f"target folder {folder} holds {kind}; name the folder of a Hugging Face model")


def method_in(own: Path) -> Any:
    """Return the method that a drafter's `draftsmith.json` names, None if it names none.

    `own` is the path of that file. A former name of a method is replaced by its present one. Raises
    `UserError` for a file that is not JSON.
    """
    facts = read_json(own)
    method = facts.get("method") if isinstance(facts, dict) else None
    return FORMER_METHODS.get(method, method) if isinstance(method, str) else method


def read_model(path: str, options: dict[str, Any]) -> nn.Module:
    """Load the causal language model in a folder or of a hub name, with all weights from its files.

    `options` are those of `from_pretrained`. Raises `UserError`, also if the files lack a tensor of
    the model, have it in another shape, or hold decoder layers that the model does not have.
    transformers itself would warn of missing tensors and fill them with random numbers.
    """
    with clear_errors(path):
        loaded = pretrained.read_causal_lm(path, output_loading_info=True, **options)
    model, info = loaded
    for what, names in (
        ("lack", info["missing_keys"]),
        ("have in another shape", info.get("mismatched_keys", ())),
    ):
        if names:
            # a mismatched key is a tuple of a name and two shapes
            names = sorted(name if isinstance(name, str) else name[0] for name in names)
            raise UserError(
                f"target {path}: its files {what} {len(names)} of the tensors that its "
                f"config.json describes, such as {names[0]}; weights and config are not of one "
                "model, or the download is not complete"
            )
    surplus = set()
    for name in info.get("unexpected_keys", ()):
        if (match := LAYER.match(name)) is not None:
            surplus.add(int(match[1]))
    # Layers of multi-token prediction stand behind the others in the files of some models, and
    # transformers leaves them out by design.
    if len(surplus) > (getattr(model.config, "num_nextn_predict_layers", None) or 0):
        raise UserError(
            f"target {path}: its files hold {len(surplus)} decoder layers that its config.json "
            "does not describe; weights and config are not of one model"
        )
    return model


def check_config(path: str, trust_remote_code: bool) -> None:
    """Raise `UserError` unless transformers can read the model's config.json.

    Reading the tokenizer reads it too, and would blame a tokenizer file for it.
    """
    with clear_errors(path):
        pretrained.read_config(path, trust_remote_code)


def read_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a target. Raises `UserError` if there is none that can be read."""
    with clear_errors(
        path,
        "the tokenizer of target",
        "copy its tokenizer files (tokenizer.json) from the published model",
    ):
        return pretrained.read_tokenizer(path, trust_remote_code)


def base_and_adapter(config: TargetConfig) -> tuple[str, str | None]:
    """Return the path of the model that `config` names, and of the LoRA adapter to merge into it.

    `config.path` may be an adapter's folder; its own config then names the model. The adapter is
    None if there is none. Raises `UserError`.
    """
    check_there(config.path)
    adapter_config = Path(config.path, ADAPTER_CONFIG)
    if config.adapter is not None or not adapter_config.is_file():
        return config.path, config.adapter
    adapter, _ = read_document(adapter_config, AdapterFile, "save or copy the adapter again")
    base = adapter.base_model_name_or_path
    if not base:
        raise UserError(
            f"{adapter_config} names no base model; give it as --target, and the adapter as "
            "--target.adapter"
        )
    # A relative path names another folder wherever the command is run, so an adapter from elsewhere
    # could lead to a model that the user has not named.
    if not Path(base).is_absolute() and (
        Path(base).exists() or ".." in Path(base).parts or base.startswith((".", "~"))
    ):
        raise UserError(
            f"{adapter_config} names {base}, a folder outside of its own; if that is the model, "
            "give it as --target, and the adapter as --target.adapter"
        )
    check_there(base)
    return base, config.path


def merge_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """Merge the LoRA adapter in the folder `adapter` into the weights of `model`, and return it.

    Raises `UserError`, also if peft is not installed.
    """
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
