"""Reading of a target's files: errors of one line, and the memory that its weights will take."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from torch import nn

from ...heads import pretrained
from ...heads.artifact import OWN_FILE, drafter_class
from ...heads.documents import AdapterFile, read_document
from ...heads.errors import UserError, first_line
from ...heads.exchange.hub import hub_remedy
from ...heads.files import read_json
from ...heads.layout import dtype_name
from ...heads.pretrained import clear_errors
from ...heads.stored_tensors import header
from ..settings import TargetConfig

HUB = "https://huggingface.co/"
# name of a tensor that belongs to a decoder layer; the group is the layer's number
LAYER = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.")
A_FOLDER = (
    "name the folder of a Hugging Face model, with config.json, weights in safetensors and "
    "tokenizer (of a GGUF file: the published model that it was made of)"
)
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
        raise UserError(f"target {path} is a file; {A_FOLDER}")
    if path.startswith(HUB):
        name = "/".join(path.removeprefix(HUB).split("/")[:2])
        raise UserError(f"target {path} is an address; give the model's name, {name}")
    if names_a_folder(path) or folder.suffix == ".gguf":
        raise UserError(f"target {path} does not exist; check the path")
    if folder.parent.is_dir() and folder.parent != Path("."):
        names = [one.name for one in folder.parent.iterdir() if one.is_dir()]
        if meant := difflib.get_close_matches(folder.name, names, 1):
            raise UserError(
                f"target {path} does not exist; did you mean {folder.parent / meant[0]}?"
            )
    # What remains may be the name of a model on the hub. The cache is asked first, so that a model
    # that was downloaded before loads without a network.
    try:
        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            HfApi().model_info(path, timeout=10)
    except Exception as error:
        raise UserError(
            f"target {path!r} is no folder here, and the hub cannot give it ({first_line(error)}); "
            f"{hub_remedy(error)}"
        ) from error


def names_a_folder(path: str) -> bool:
    """Return whether `path` can only be a folder: models on the hub are NAME or OWNER/NAME."""
    return Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") > 1


def check_folder(folder: Path) -> None:
    """Raise `UserError` unless a folder looks like a model's, or like a LoRA adapter's."""
    facts = read_json(folder / OWN_FILE) if (folder / OWN_FILE).is_file() else None
    method = facts.get("method") if isinstance(facts, dict) else None
    if method is not None and not drafter_class(str(method)).whole_model:
        raise UserError(
            f"{folder} is a drafter ({method}), not a target; give it as --drafter, and its "
            "target as --target"
        )
    if (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file():
        return
    raise UserError(f"target folder {folder} holds no config.json; {A_FOLDER}")


def read_model(path: str, options: dict[str, Any]) -> nn.Module:
    """Load the causal language model in a folder or of a hub name, with all weights from its files.

    `options` are those of `from_pretrained`. Raises `UserError`, also if the files lack a tensor of
    the model, have it in another shape, or hold decoder layers that the model does not have.
    transformers itself would warn of missing tensors and fill them with random numbers.
    """
    with clear_errors(path):
        model, info = pretrained.read_causal_lm(path, output_loading_info=True, **options)
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
    matches = map(LAYER.match, info.get("unexpected_keys", ()))
    surplus = {int(match[1]) for match in matches if match is not None}
    # Layers of multi-token prediction come after the others in the files of some models, and
    # transformers leaves them out by design.
    if len(surplus) > (getattr(model.config, "num_nextn_predict_layers", None) or 0):
        raise UserError(
            f"target {path}: its files hold {len(surplus)} decoder layers that its config.json "
            "does not describe; weights and config are not of one model"
        )
    return model


def check_config(path: str, trust_remote_code: bool) -> None:
    """Raise `UserError` for an unreadable config.json, for which a tokenizer would be blamed."""
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
    """Return the path of the model that `config` names, and of the LoRA adapter to merge, or None.

    `config.path` may be an adapter's folder; its own config then names the model. Raises
    `UserError`.
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


FLOATS = ("F64", "F32", "BF16", "F16")
"""Types that loading converts, by the names of safetensors."""


@dataclass(frozen=True)
class Footprint:
    """Sizes of the weights in a folder's safetensors files."""

    floats: int
    """Number of elements that loading converts to the type asked for."""
    stored_bytes: int
    """Bytes of all tensors as they are stored."""
    other_bytes: int
    """Bytes of the tensors that loading leaves as they are, such as quantised ones."""

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the weights in memory, in `dtype`."""
        return self.floats * dtype.itemsize + self.other_bytes


def footprint(folder: str | Path) -> Footprint | None:
    """Return the footprint of the model in a folder; None of one without safetensors files.

    Raises `UserError` for a file whose header cannot be read.
    """
    floats = stored_bytes = other_bytes = 0
    files = sorted(Path(folder).glob("*.safetensors"))
    for file in files:
        for tensor in header(file).values():
            start, end = tensor.data_offsets
            stored_bytes += end - start
            if tensor.dtype in FLOATS:
                floats += prod(tensor.shape)
            else:
                other_bytes += end - start
    return Footprint(floats, stored_bytes, other_bytes) if files else None


def check_fits(path: str, dtype: torch.dtype | str, device: torch.device) -> None:
    """Raise `UserError` for a target on a CPU whose weights exceed all memory of this machine.

    The system would kill the process without a message. Nothing is checked for a GPU (its allocator
    raises an error), for a name on the hub, and for a `dtype` that is known only after loading.
    """
    weights = footprint(path)
    if weights is None or device.type != "cpu" or not isinstance(dtype, torch.dtype):
        return
    needed, installed = weights.loaded_bytes(dtype), psutil.virtual_memory().total
    if needed > installed:
        raise UserError(f"target {path} needs {too_large(weights, dtype, needed, installed)}")


def too_large(found: Footprint, dtype: torch.dtype, needed: int, there: int) -> str:
    """Return a phrase on `needed` bytes of weights in `dtype`, of `there` bytes, with a remedy."""
    remedy = "use a machine with more memory, or share it between ranks with target.spread=fsdp"
    halved = found.loaded_bytes(torch.bfloat16)
    if dtype.itemsize > 2 and halved < there:
        remedy = f"give --target.dtype bfloat16, which needs {gigabytes(halved)}"
    name = dtype_name(dtype)
    return f"{gigabytes(needed)} in {name}, of {gigabytes(there)} that there are; {remedy}"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
