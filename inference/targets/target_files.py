"""Reading of a target's files: errors of one line, the memory that its weights will take, and the
settings of its generation_config that decoding here does not apply."""

from __future__ import annotations

import difflib
import re
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
from ...heads.pretrained import as_user_errors
from ...heads.stored_tensors import header
from ..base.settings import Sampling, TargetConfig

HUB = "https://huggingface.co/"
# name of a tensor that belongs to a decoder layer; the group is the layer's number
LAYER = re.compile(r"(?:model\.|transformer\.)?(?:layers|h)\.(\d+)\.")
A_FOLDER = (
    "name the folder of a Hugging Face model, with config.json, weights in safetensors and "
    "tokenizer (of a GGUF file: the published model that it was made of)"
)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def check_target_exists(path: str) -> None:
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
    with as_user_errors(path):
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
    with as_user_errors(path):
        pretrained.read_config(path, trust_remote_code)


def read_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a target. Raises `UserError` if it cannot be read."""
    with as_user_errors(
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
    check_target_exists(config.path)
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
    check_target_exists(base)
    return base, config.path


FLOATS = ("F64", "F32", "BF16", "F16")
"""Types that loading converts, by the names of safetensors."""


def loaded_bytes(folder: str | Path, dtype: torch.dtype) -> int:
    """Return the bytes in memory of the weights in a folder's safetensors files, in `dtype`.

    Quantised tensors stay as they are. Raises `UserError` for a file whose header cannot be read.
    """
    total = 0
    for file in sorted(Path(folder).glob("*.safetensors")):
        for tensor in header(file).values():
            start, end = tensor.data_offsets
            converted = tensor.dtype in FLOATS
            total += prod(tensor.shape) * dtype.itemsize if converted else end - start
    return total


def check_fits(path: str, dtype: torch.dtype | str, device: torch.device) -> None:
    """Raise `UserError` for a target on a CPU whose weights exceed all memory of this machine.

    The system would kill the process without a message. Nothing is checked for a GPU (its allocator
    raises an error), for a name on the hub, and for a `dtype` that is known only after loading.
    """
    if device.type != "cpu" or not isinstance(dtype, torch.dtype):
        return
    needed, installed = loaded_bytes(path, dtype), psutil.virtual_memory().total
    if needed <= installed:
        return
    remedy = "use a machine with more memory, or share it between ranks with target.spread=fsdp"
    halved = loaded_bytes(path, torch.bfloat16)
    if dtype.itemsize > 2 and halved < installed:
        remedy = f"give --target.dtype bfloat16, which needs {gigabytes(halved)}"
    raise UserError(
        f"target {path} needs {gigabytes(needed)} in {dtype_name(dtype)}, of "
        f"{gigabytes(installed)} that there are; {remedy}"
    )


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


APPLIED = {"eos_token_id", "repetition_penalty"}
"""Settings of a generation_config that decoding here applies."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Settings of sampling, which are given with every command, see `other_sampling`."""

WITHOUT_EFFECT = {
    # lengths: every command has one of its own
    *("max_length", "max_new_tokens"),
    # of beams and groups of them, which `num_beams` and `num_beam_groups` ask for
    *("early_stopping", "length_penalty", "diversity_penalty"),
    # how a token is computed
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
    *("prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    # drafts, which do not change the text
    *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    *("assistant_ensemble_weight", "target_lookbehind", "speculation_type"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    # what is returned next to the text, and how often
    *("num_return_sequences", "return_dict_in_generate", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits"),
    # scores that are finite, of which only the order or the softmax is taken
    *("remove_invalid_values", "renormalize_logits"),
    # tokens outside of the text, and of models with an encoder
    *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
    "transformers_version",
}
"""Settings that change no reply. A setting that is in no list here changes it: what a later version
of transformers adds is named, not passed over."""

OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("token_healing", "dola_layers"), (False,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), ([],)),
    **dict.fromkeys(("stop_strings", "force_words_ids", "constraints"), ([],)),
}
"""Values by which a setting changes nothing, besides the default of its class."""


def not_applied(config: Any) -> dict[str, Any]:
    """Return the settings of a `GenerationConfig` that change the text of `generate`, and not ours.

    Keys that the class does not have are left out: `generate` does not read them.
    """
    found = {}
    for name, default in vars(type(config)()).items():
        if name[0] == "_" or name in APPLIED or name in SAMPLING or name == "do_sample":
            continue
        value = getattr(config, name, default)
        if name not in WITHOUT_EFFECT and value not in (None, default, *OFF.get(name, ())):
            found[name] = value
    return found


def other_sampling(config: Any, sampling: Sampling) -> str:
    """Return a line on the sampling that a `GenerationConfig` asks for, "" if it is `sampling`.

    Model makers recommend it there, and servers take it where a request names none.
    """
    own = {name: getattr(config, name, None) for name in SAMPLING}
    different = [
        f"{name}={value}"
        for name, value in own.items()
        if value is not None and value != getattr(sampling, name)
    ]
    # Without `do_sample` transformers is greedy, and the others are left from its defaults.
    if not different or not getattr(config, "do_sample", False):
        return ""
    ours = ", ".join(f"{name}={getattr(sampling, name):g}" for name in SAMPLING)
    return (
        f"generation_config.json recommends sampling with {', '.join(different)}, which servers "
        f"take by default; here {ours} are taken unless others are given"
    )


def tokenizer_of(config: TargetConfig) -> Any:
    """Return the tokenizer of a target without loading its weights. Raises `UserError`."""
    path, _ = base_and_adapter(config)
    check_config(path, config.trust_remote_code)
    return read_tokenizer(path, config.trust_remote_code)
