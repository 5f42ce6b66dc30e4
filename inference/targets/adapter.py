"""Merging of an adapter of peft into a target, so that its text is that of peft's own model."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...heads.errors import UserError, first_line
from ...heads.pretrained import as_user_errors
from ...heads.vocabulary import spread_ids
from .causal_model import relative_error
from .target_files import ADAPTER_WEIGHTS

log = logging.getLogger(__name__)
MEGATRON = "megatron.core"
TRIAL_TOKENS = 32
TRAINED_TOKENS = 16  # of those that an adapter trains one by one, how many are in a trial


def merge_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """Return `model` with the adapter in the folder `adapter` merged into its weights.

    Embedding and head that are one matrix are two matrices afterwards if the adapter makes them
    differ, as they do in peft's own model. No random numbers are used up. Raises `UserError`, also
    for an adapter that cannot be merged, or whose merged model differs from peft's own.
    """
    devices = {parameter.device for parameter in model.parameters()}
    # peft fills the matrices of an adapter with random numbers before it reads them.
    cuda = [device for device in devices if device.type == "cuda"]
    # What peft warns of is dealt with here: tied matrices, and tensors that are not found.
    with torch.random.fork_rng(cuda), warnings.catch_warnings(action="ignore"):
        return _merged(model, adapter, _config_of(adapter))


def _config_of(adapter: str) -> Any:
    """Return peft's configuration of an adapter. Raises `UserError` for one that is refused."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            "an adapter needs peft; in the checkout: pip install -c constraints.txt -e '.[lora]'"
        ) from error
    if Path(adapter).is_dir() and not Path(adapter, ADAPTER_WEIGHTS).is_file():
        raise UserError(
            f"adapter {adapter} has no {ADAPTER_WEIGHTS}; save it again: pickled weights can run "
            "code"
        )
    with as_user_errors(adapter, "adapter"):
        try:
            found = peft.PeftConfig.from_pretrained(adapter)
        except KeyError as error:  # of the table of kinds
            raise UserError(
                f"adapter {adapter} is of the kind {error.args[0]}, which peft {peft.__version__} "
                "does not have; install a newer peft"
            ) from error
    # peft imports a module of this name; its default is written by every adapter, and not used.
    if getattr(found, "megatron_config", None) or (
        getattr(found, "megatron_core", None) not in (None, MEGATRON)
    ):
        raise UserError(
            f"adapter {adapter} names a module to import (megatron_core), which is refused; save "
            "it again without megatron_config and megatron_core"
        )
    why = ""
    if found.is_prompt_learning or found.is_adaption_prompt:
        why = "it adds positions or attention to a prompt, which are no change of weights"
    elif getattr(found, "alora_invocation_tokens", None):
        why = "it is active from certain tokens on only (alora_invocation_tokens)"
    if why:
        raise UserError(f"{_called(adapter, found)} cannot be merged: {why}; {REMEDY}")
    return found


REMEDY = "decode with peft's own model, or train an adapter of weights, such as LoRA"


def _called(adapter: str, config: Any) -> str:
    kind = config.peft_type
    return f"adapter {adapter} (of the kind {getattr(kind, 'value', kind)})"


def _merged(model: Any, adapter: str, config: Any) -> nn.Module:
    """Return `model` with an adapter merged and compared with peft's own model before it was."""
    from peft import PeftModel

    called = _called(adapter, config)
    shared = model.get_input_embeddings().weight
    tied = shared is getattr(model.get_output_embeddings(), "weight", None)
    ids = _trial_ids(model, config)
    with as_user_errors(adapter, "adapter"):
        tuned: Any = PeftModel.from_pretrained(model, adapter, config=config)
        # Read once more into what is there already: this says which tensors were found.
        names = tuned.load_adapter(adapter, "default")
    for is_wrong, found in (
        ("lacks {} of its tensors", names.missing_keys),
        ("has {} tensors for which the target has no place", names.unexpected_keys),
    ):
        if found:
            raise UserError(
                f"{called} {is_wrong.format(len(found))}, such as {min(found)}; name the model "
                "that it was trained for as --target"
            )
    try:
        expected = _logits(tuned.eval(), ids)
        if tied:
            _untie(tuned, shared)
        merged = tuned.merge_and_unload()
        error = relative_error(_logits(merged, ids), expected)
    except Exception as error:  # every kind fails in its own way
        raise UserError(f"{called} cannot be merged: {first_line(error)}; {REMEDY}") from error
    tolerance = 1e-4 if model.dtype in (torch.float32, torch.float64) else 0.1
    # Weights of a quantised target are quantised once more when an adapter is merged into them.
    if not error <= tolerance and not getattr(model, "is_quantized", False):
        raise UserError(
            f"{called} cannot be merged: the merged model's logits differ from peft's own "
            f"(relative difference {error:.1e}); {REMEDY}"
        )
    if tied:
        _tie_equal(merged, adapter)
    return merged


def _trial_ids(model: Any, config: Any) -> Tensor:
    """Return the tokens `[1, S]` of a trial: some of all, and those trained one by one."""
    trained = getattr(config, "trainable_token_indices", None) or []
    trained = getattr(config, "token_indices", None) or trained
    lists = trained.values() if isinstance(trained, dict) else [trained]
    single = sorted({token for tokens in lists for token in tokens})[:TRAINED_TOKENS]
    weight = model.get_input_embeddings().weight
    spread = spread_ids(len(weight), TRIAL_TOKENS).tolist()
    return torch.tensor([[*spread, *single]], device=weight.device)


@torch.no_grad()
def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits.float()


def _untie(tuned: nn.Module, shared: Tensor) -> None:
    """Give every module of `tuned` that holds the parameter `shared` a copy of its own, but one."""
    owners = [
        (module, name)
        for module in tuned.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter is shared
    ]
    for module, name in owners[1:]:
        setattr(module, name, nn.Parameter(shared.detach().clone(), shared.requires_grad))


def _tie_equal(model: Any, adapter: str) -> None:
    """Make the embedding and the head of `model` one matrix again, or say that they are two."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    equal = torch.equal(embedding.weight, head.weight)
    # Whoever loads or copies the model ties them again where a configuration says so.
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = equal
    if equal:
        head.weight = embedding.weight
        return
    log.warning(
        "adapter %s changes the embedding and the head of a target whose two are one matrix: the "
        "merged target has both, and takes %.2f GB more",
        adapter, head.weight.nbytes / 1e9,
    )  # fmt: skip
