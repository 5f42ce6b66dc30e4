"""Draft models before training: cut from a target, of which some layers are kept, or read.

Shapes: S positions of a text, H hidden size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.draft_model import DraftModel
from ..heads.errors import UserError, first_line, out_of_memory
from ..heads.layout import dtype_name
from ..heads.pretrained import make_causal_lm
from ..inference.targets.causal_model import CausalModel
from ..inference.targets.spread import decoder_layers
from ..inference.targets.target import Target, TargetSource
from ..inference.targets.target_files import check_target_exists
from .divergences import divergence, log_probs
from .settings import DraftModelConfig

FACTORS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
"""Factors by which the logits of a cut may be scaled before training."""
CALIBRATION_TEXTS, CALIBRATION_LENGTH = 8, 128  # texts, and positions of each


def size_and_cost(draft_model: nn.Module, target: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return two lines for the log; `dtype` is the type that the weights will be stored in.

    The cost is the share of weights that a forward pass of the draft model reads of those that one
    of the target reads: the cost of a draft in target passes while memory limits both.
    """
    (count, read), (target_count, target_read) = _counted(draft_model), _counted(target)
    return [
        f"draft model: {count / 1e6:.2f}M parameters, {count * dtype.itemsize / 1e6:.1f} MB in "
        f"{dtype_name(dtype)}, {count / target_count:.1%} of the target's "
        f"{target_count / 1e6:.2f}M",
        f"a draft reads {read / target_read:.1%} of what a target pass reads; it pays if more "
        "drafts than that are accepted",
    ]


def _counted(model: Any) -> tuple[int, int]:
    """Return the number of a model's weights, and of those that a pass of one token reads.

    Of the embedding it reads one row, which is not counted. A tied embedding is read as the head.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(p.numel() for p in model.parameters())
    return weights, weights if embedding is head else weights - embedding.numel()


def make_draft_model(
    config: DraftModelConfig, target: TargetSource, texts: Callable[[], Sequence[Tensor]]
) -> DraftModel:
    """Return the draft model that `config` asks for, in float32 on the target's device.

    `texts` returns token ids `[S]` each, by which a cut is calibrated; it is called only if needed.
    Raises `UserError`.
    """
    if config.path is not None:
        check_target_exists(config.path)
        draft_model = DraftModel.load(Path(config.path), torch.float32, target.embedding_and_head)
    else:
        assert isinstance(target, Target), "layers are cut from a target that has them"
        draft_model = DraftModel(_cut(config, target, texts), target.tokenizer, target.vocab_size)
    model = draft_model.model.to(target.device)
    # Engines read the end tokens from it.
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return draft_model.requires_grad_(True)


def default_layers(total: int) -> int:
    """Return how many of a target's layers a cut keeps if its config does not say it."""
    return max(total // 8, 1)


def chosen_layers(config: DraftModelConfig, total: int) -> list[int]:
    """Return the target's layers that a cut keeps, ascending. Raises `UserError`.

    `total` is the number of the target's layers.
    """
    if isinstance(config.layers, list):
        ascending = bool(config.layers) and sorted(set(config.layers)) == config.layers
        if not ascending or not all(0 <= i < total for i in config.layers):
            raise UserError(
                f"draft_model.layers {config.layers} must be ascending, distinct and between 0 and "
                f"{total - 1}"
            )
        return config.layers
    count = config.layers if config.layers is not None else default_layers(total)
    if not 1 <= count <= total:
        raise UserError(
            f"draft_model.layers must be between 1 and the target's {total}, not {count}"
        )
    if count == 1:
        return [0]
    # The first layer, the last one, and those between at equal distances.
    # Four of 30: 0 10 19 29.
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]


def layers_of(target: Target) -> tuple[str, nn.ModuleList]:
    """Return the name, within the decoder, and the list of its layers. Raises `UserError`."""
    try:
        return decoder_layers(target.decoder, target.num_layers)
    except UserError as error:
        raise UserError(f"{error}; give draft_model.path") from error


def _cut(
    config: DraftModelConfig, target: Target, texts: Callable[[], Sequence[Tensor]]
) -> nn.Module:
    """Return a smaller model that starts from the target's weights. Raises `UserError`."""
    if getattr(target.model, "is_quantized", False):
        raise UserError(
            "the target's weights are quantised, a draft model cannot be cut from them; give "
            "draft_model.path"
        )
    kept = chosen_layers(config, target.num_layers)
    small = cut_config(target, kept)
    try:
        draft_model: Any = make_causal_lm(small, dtype=torch.float32)
        _copy_weights(target, draft_model, kept)
        # At once: kernels that transformers finds for recurrent layers may run on a GPU only.
        draft_model.to(target.device)
        runner = CausalModel(draft_model, target.tokenizer, "the draft model", frozen=False)
        calibrate_final_norm(runner, target, texts())
    except UserError:
        raise
    # Each architecture demands other things of its config, and raises errors of its own.
    except Exception as error:
        if out_of_memory(error):
            raise
        raise UserError(
            f"cannot cut layers {kept} of {target.config.model_type} ({first_line(error)}); choose "
            "others, or give draft_model.path"
        ) from error
    return draft_model


@torch.no_grad()
def calibrate_final_norm(draft_model: CausalModel, target: Target, texts: Sequence[Tensor]) -> None:
    """Scale the final norm of a cut of `target`, so that its confidence matches the target's.

    A few of many layers leave a state that is far from what the head expects, and logits as large
    as the target's, mostly wrong: with three of SmolLM2's thirty the loss began at 16. The factor
    is the one of `FACTORS` with which the cut's distributions are nearest to the target's (KL) on
    some of the texts. A norm of unknown form stays as it is.
    """
    norm = draft_model.final_norm()
    if norm is None:
        return
    losses = torch.zeros(len(FACTORS), dtype=torch.float64)
    for text in texts[:CALIBRATION_TEXTS]:
        ids = text[None, :CALIBRATION_LENGTH].to(target.device)
        target_last = target.forward(ids).last[0]
        last = draft_model.forward(ids).last[0]
        log_p = log_probs(target.head(target_last))
        for i, factor in enumerate(FACTORS):
            log_q = log_probs(draft_model.head(last * factor))
            losses[i] += divergence("kl", log_q, log_p, ids[0]).double().sum().cpu()
    factor = FACTORS[int(losses.argmin())]
    if factor != 1.0:
        scale_norm(norm, factor, draft_model.hidden_size)


@torch.no_grad()
def scale_norm(norm: nn.Module, factor: float, size: int) -> bool:
    """Multiply a final norm's output by `factor`, by way of its parameters.

    Returns false, and changes nothing, if its form is unknown. Known are x * w, x * w + b and
    x * (1 + w), which are distinguished by trying. `size` is the hidden size H.
    """
    parameters = dict(norm.named_parameters())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    first = next(iter(parameters.values()))
    x = torch.linspace(-3, 4, size, device=first.device, dtype=first.dtype)[None]
    wanted = norm(x) * factor
    # Offset 0 multiplies w and b by the factor; offset 1 makes 1 + w the factor times what it was.
    for offset in (0.0, 1.0):
        for parameter in parameters.values():
            parameter.mul_(factor).add_(offset * (factor - 1))
        if torch.allclose(norm(x), wanted, rtol=1e-3, atol=1e-4):
            return True
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
    return False


def cut_config(target: Target, kept: list[int]) -> Any:
    """Return the config of a cut with the target's layers `kept`."""
    small: Any = copy.deepcopy(target.config)
    small.num_hidden_layers = len(kept)
    # Lists with an entry for each layer, such as layer_types and no_rope_layers.
    for name, value in small.to_dict().items():
        if isinstance(value, list) and len(value) == target.num_layers:
            setattr(small, name, [value[i] for i in kept])
    # Numbers of the layers that have attention.
    if (numbers := getattr(target.config, "attn_layer_indices", None)) is not None:
        small.attn_layer_indices = [new for new, i in enumerate(kept) if i in numbers]
    return small


@torch.no_grad()
def _copy_weights(target: Target, draft_model: Any, kept: list[int]) -> None:
    prefix, _ = layers_of(target)
    layer = re.compile(rf"{re.escape(prefix)}\.(\d+)\.")
    target_state = target.decoder.state_dict()
    # A state dictionary has the parameters' own memory, so `copy_` fills the model.
    for name, tensor in draft_model.get_decoder().state_dict().items():
        in_target = layer.sub(lambda found: f"{prefix}.{kept[int(found[1])]}.", name, count=1)
        tensor.copy_(target_state[in_target])
    draft_model.tie_weights()
    head_state = target.model.get_output_embeddings().state_dict()
    for name, tensor in draft_model.get_output_embeddings().state_dict().items():
        tensor.copy_(head_state[name])
