"""Outline of a run from its configs alone: a drafter without weights, and the work to train it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.layout import EmbeddingAndHead, usual_scale
from ..heads.pretrained import as_user_errors, read_config
from ..inference.base.settings import TargetConfig
from ..inference.targets.model_head import ConfigFacts
from ..inference.targets.target_files import base_and_adapter
from .config import RunConfig

# Floating point operations of a training step for each number of a matrix and each of its rows: two
# in the forward pass, two for the gradient of the matrix, two for the gradient of its input.
TRAINED = 6
FROZEN = 4  # of a matrix that only passes gradients on to its input
ON_FEATURES = 4  # of a trained matrix whose input is frozen and needs no gradient
FORWARD = 2  # once more, where the forward pass is repeated
LEFT_OF_A_PASS, LEFT_OF_A_LAYER = 3.0, 0.7  # states that stay where the others are recomputed


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Amount of work in training a drafter, and what its passes keep in memory.

    Operations are those of the matrices. Attention is left out, as usual; the logits of the target,
    which an objective makes too, are counted with the target's forward pass.
    """

    operations: float = 0.0
    """Operations of a training step for each position."""
    head_operations: float = 0.0
    """Those of the heads, which run for roots only: for each root."""
    most_roots: float = 1.0
    """Largest share of the positions that are roots, however much of a text is reply."""
    passes: float = 1.0
    """Average number of passes of the drafter over a position, in a step."""
    layers: int = 1
    """Number of layers, whose gradients are made one layer after another."""
    kept: float = 0.0
    """Inputs and outputs of matrices that wait for the backward pass, for each position."""
    recomputed: float = 0.0
    """Those that exist for a time in the backward pass besides, for each position."""
    logit_rows: int = 1024
    """Number of rows of logits of all tokens that exist at one time in the objective."""

    def training_operations(self, reply_share: float) -> float:
        """Return the operations of the drafter in a step, for each position.

        `reply_share` is the share of the positions that the target wrote: roots are among them.
        """
        return self.operations + self.head_operations * min(reply_share, self.most_roots)


@dataclass(frozen=True)
class Outline(StepWork):
    """Drafter of a run on the meta device, and the amount of work in training it."""

    drafter: nn.Module


class MetaTarget(ConfigFacts):
    """Config of a target, under the attributes of a target that methods read."""

    def __init__(self, config: Any) -> None:
        self.config = config.get_text_config()
        # One id, a list of ids, or None.
        eos = getattr(config, "eos_token_id", None)
        self.eos_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        # Never called: a drafter is only built with it.
        scale = usual_scale(self.config.model_type, self.config.hidden_size)
        self.embedding_and_head = EmbeddingAndHead(
            lambda ids: ids, lambda last: last, self.vocab_size, scale=scale
        )


def meta_outline(method: Any, config: Any, target: MetaTarget) -> Outline:
    """Return the run's drafter on the meta device, and the amount of its work in training.

    Raises `UserError` for heads that do not fit the target.
    """
    with torch.device("meta"):
        return method.outline(config, target)


def matrix_numbers(*modules: nn.Module) -> int:
    """Return how many numbers the matrices of modules have; norms and biases are left out."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.ndim > 1)


def widths(named: Iterable[tuple[str, Tensor]], config: Any = None) -> float:
    """Return the inputs and outputs of matrices for a token that passes through them.

    `named` are parameters with their names; `config` is the configuration of their model, which
    says how many of its experts a token passes through.
    """
    total = 0.0
    for parameter, count in active_numbers(named, config):
        if parameter.ndim > 1:
            rows, columns = parameter.shape[-2:]
            total += count / (rows * columns) * (rows + columns)
    return total


def work_of(
    layers: nn.ModuleList,
    once: nn.Module | None,
    hidden: int,
    recompute: bool,
    passes: float = 1.0,
    repeated: int = 1,
    config: Any = None,
) -> dict[str, Any]:
    """Return those values of `StepWork` that follow from the matrices of a drafter's `layers`.

    They run over the positions `repeated` times, each time over `passes` rows for one position;
    `once` reads the features before that. With `recompute` some states of `hidden` numbers are left
    of a pass.
    """
    whole = widths(layers.named_parameters(), config)
    left = hidden * max(LEFT_OF_A_PASS, LEFT_OF_A_LAYER * len(layers)) if recompute else whole
    each = sum(
        count * ((TRAINED if parameter.requires_grad else FROZEN) + FORWARD * recompute)
        for parameter, count in active_numbers(layers.named_parameters(), config)
        if parameter.ndim > 1
    )
    features = [] if once is None else [*once.named_parameters()]
    fused = sum(parameter.numel() for _, parameter in features if parameter.ndim > 1)
    return {
        "operations": each * passes * repeated + ON_FEATURES * fused,
        "passes": passes * repeated,
        "layers": len(layers),
        "kept": passes * repeated * left + widths(features),
        # The gradients of a layer's states, and the states too where they are computed again.
        "recomputed": passes * whole / len(layers) * (1.0 if recompute else 0.5),
    }


def active_numbers(
    named: Iterable[tuple[str, Tensor]], config: Any
) -> Iterator[tuple[Tensor, float]]:
    """Yield parameters, each with how many of its numbers a token passes through.

    That is all of them but for experts, of which it passes through some. `named` are parameters
    with their names, `config` is the configuration of their model.
    """
    used = getattr(config, "num_experts_per_tok", None)
    # Architectures name the number of experts in three ways.
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next(filter(None, (getattr(config, name, None) for name in names)), None)
    share = used / experts if used and experts else 1.0
    for name, parameter in named:
        yield parameter, parameter.numel() * (share if ".experts." in name else 1.0)


def config_at(path: str, trust: bool = False) -> Any:
    """Return the config of a model on the hub or in a folder; `trust`: code next to it may be run.

    Of an adapter's folder it is that of the base model. Raises `UserError` without one.
    """
    path, _ = base_and_adapter(TargetConfig(path))
    with as_user_errors(path, "the config of", "a folder with its config.json is enough"):
        return read_config(path, trust)


def target_of_run(run: RunConfig) -> MetaTarget:
    """Return the config of a run's target, or of its feature store. Raises `UserError`."""
    path, store = run.target.path, run.features.store
    where = path if store is None else str(Path(store, "target"))
    return MetaTarget(config_at(where, run.target.trust_remote_code))
