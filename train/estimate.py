"""Cost of a run, and the engines that can serve its drafter, from configs alone.

The cost, in GPU memory, bytes and operations, is arithmetic on shapes: target and drafter are built
on the meta device, without weights. The speeds of GPUs are in `inference/base/costs.py`.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch

from ..command_line.process import is_main_rank
from ..heads.errors import UserError
from ..heads.exchange.engines import drafter_facts, engine_remarks, refusal
from ..heads.exchange.engines.engine import DrafterFacts
from ..heads.exchange.exporter import load_without_target
from ..heads.files import check_space
from ..heads.fingerprint import output_settings
from ..heads.pretrained import make_causal_lm
from ..inference.base.console import size
from ..inference.base.costs import TARGET_BYTES
from ..inference.targets.target import resolve_device
from .config import RunConfig, divided
from .method import AnyMethod
from .optimizer import hidden_matrices
from .outline import (
    MetaTarget,
    StepWork,
    active_numbers,
    config_at,
    meta_outline,
    target_of_run,
    widths,
)

log = logging.getLogger(__name__)

WEIGHT_BYTES = 4  # of a parameter of the drafter, and of its gradient, in float32
MOMENT_BYTES = 8  # of a trained parameter: AdamW's two moments in float32
MUON_BYTES = 4  # of a parameter that Muon trains: one moment
# Bytes that are kept for the backward pass for each input and output of a matrix, including the
# states of norms, rotary positions and attention between them. They were fitted to the tensors that
# steps of all methods hold with a GPU's attention kernels, whose peaks they predict within 17%.
KEPT_BYTES = {"no": 6.0, "bf16": 4.3}
LOGIT_TABLES = 4  # float32 tables of a chunk: logits, q, p, and their minima or a gradient
LAYER_PART = re.compile(r".*?\.\d+\.\w+(?=\.)")  # such as model.layers.0.mlp

MOST_MEMORY = 2.0  # memory a run may need, as a multiple of the machine's: the estimate is rough


@dataclass(frozen=True)
class RunSizes(StepWork):
    """Sizes of a target and its drafter, and the work to train it."""

    hidden: int
    """Hidden size of the target."""
    target_params: int
    active_params: int
    """Parameters of the target that are used for one token."""
    vocab: int
    drafter_params: int
    taps: int
    """Number of taps that the drafter reads."""
    all_last: bool
    """True if the last state is read at every position, and not only in replies."""
    target_layers: int = 1
    frozen_params: int = 0
    """Parameters of the drafter that are not trained."""
    muon_params: int = 0
    """Parameters of the drafter that Muon trains."""
    embedding_and_head_params: int = 0
    """Parameters of the target's embedding and head."""
    widest: float = 0.0
    """Inputs and outputs of the matrices in the widest part of a layer of the target."""
    mask_bytes: int = 0
    """Bytes of the target's mask for each pair of positions of a packed row."""

    @property
    def trained_params(self) -> int:
        return self.drafter_params - self.frozen_params

    @property
    def moment_bytes(self) -> int:
        """Bytes of the optimiser's state."""
        return MOMENT_BYTES * (self.trained_params - self.muon_params) + (
            MUON_BYTES * self.muon_params
        )

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint: weights and the optimiser's state."""
        return WEIGHT_BYTES * self.drafter_params + self.moment_bytes


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a GPU that holds a whole target and a whole drafter, in a step with full rows.

    Fragmentation, CUDA's context (about 0.5 GB) and NCCL's buffers are not counted.
    """

    target: int
    """Weights of the target in bf16; only its embedding and head in a run from a feature store or a
    server."""
    drafter: int
    """Weights of the drafter in float32."""
    moments: int
    """The optimiser's state."""
    gradients: int
    """Gradients of the drafter in float32; part of `step`."""
    features: int
    """Hidden states of one batch, in bf16."""
    extraction: int
    """Peak of the target's forward pass; 0 if the target does not run here."""
    activations: int
    """Activations of the drafter that are kept for its backward pass; part of `step`."""
    step: int
    """Peak of both passes of the drafter, without weights, moments and features."""

    @property
    def state(self) -> int:
        """Bytes of the drafter's weights, their gradients and the optimiser's state."""
        return self.drafter + self.gradients + self.moments

    @property
    def transient(self) -> int:
        """Bytes of a step's features, activations and logits."""
        return self.features + self.step - self.gradients

    @property
    def resident(self) -> int:
        """Bytes between two steps."""
        return self.target + self.drafter + self.moments

    @property
    def peak(self) -> int:
        return self.resident + max(self.extraction, self.features + self.step)


def run_sizes(method: AnyMethod, config: RunConfig) -> RunSizes:
    """Return the sizes of the run's target and drafter.

    Raises `UserError` if the target's config cannot be read.
    """
    model_config = config_at(config.target.path, config.target.trust_remote_code)
    target = MetaTarget(model_config)
    with torch.device("meta"):
        model = make_causal_lm(model_config)
    parts: defaultdict[str, float] = defaultdict(float)
    for name, parameter in model.named_parameters():
        if found := LAYER_PART.match(name):
            parts[found[0]] += widths([(name, parameter)], target.config)
    both = torch.nn.ModuleList([model.get_input_embeddings(), model.get_output_embeddings()])
    taps, all_last = method.features_of(config, target)
    outline = meta_outline(method, config, target)
    parameters = list(outline.drafter.parameters())
    muon = hidden_matrices(outline.drafter) if config.optim.optimizer == "muon" else []
    return RunSizes(
        target.config.hidden_size,
        count_of(model.parameters()),
        round(sum(n for _, n in active_numbers(model.named_parameters(), target.config))),
        target.vocab_size, count_of(parameters), len(taps), all_last, target.num_layers,
        frozen_params=count_of(p for p in parameters if not p.requires_grad),
        muon_params=count_of(muon),
        # `parameters` yields a tied matrix once.
        embedding_and_head_params=count_of(both.parameters()),
        widest=max(parts.values(), default=0),
        mask_bytes=TARGET_BYTES if has_window(target.config) else 0,
        **{f.name: getattr(outline, f.name) for f in fields(StepWork)},
    )  # fmt: skip


def count_of(parameters: Iterable[torch.Tensor]) -> int:
    return sum(p.numel() for p in parameters)


def has_window(config: Any) -> bool:
    """Return whether a target has layers with a sliding window, which need masks of packed rows."""
    if kinds := getattr(config, "layer_types", None):
        return "sliding_attention" in kinds
    return bool(getattr(config, "sliding_window", None)) and getattr(
        config, "use_sliding_window", True
    )


def memory_of_step(shape: RunSizes, config: RunConfig, gpus: int = 1) -> StepMemory:
    """Return the memory of a step on one of `gpus` GPUs."""
    live, length = config.features.live, config.data.max_length
    rows = divided(config, gpus).rows
    positions = rows * length
    state = positions * shape.hidden * TARGET_BYTES
    features = state * (shape.taps + 1)
    passing = positions * shape.widest * TARGET_BYTES + rows * length**2 * shape.mask_bytes
    bytes_ = KEPT_BYTES[config.precision]
    activations = positions * shape.kept * bytes_
    logits = LOGIT_TABLES * shape.logit_rows * shape.vocab * 4
    gradients = WEIGHT_BYTES * shape.trained_params
    if not shape.kept:  # each chunk's gradients are added to those of the chunks before it
        logits += gradients
    # A layer's gradients are computed when the states of later layers are already freed.
    waiting = max(activations + gradients / shape.layers, gradients + activations / shape.layers)
    # The logits are freed before the layers' backward pass begins.
    most = max(logits, positions * shape.recomputed * bytes_)
    return StepMemory(
        target=TARGET_BYTES * (shape.target_params if live else shape.embedding_and_head_params),
        drafter=WEIGHT_BYTES * shape.drafter_params,
        moments=shape.moment_bytes,
        gradients=gradients,
        features=features,
        extraction=round(features + passing) if live else 0,
        activations=round(activations),
        step=round(waiting + most),
    )


def check_affordable(run: RunConfig, method: AnyMethod, ranks: int) -> None:
    """Raise `UserError` if `run` needs far more memory or disk space than this machine has.

    `ranks` share the memory. A run from a feature store is not checked, since its target may not be
    on this machine; nor is one with `init_from`, whose drafter's shape is not in the config.
    """
    if run.features.store is not None or run.init_from is not None:
        return
    shape = run_sizes(method, run)
    memory = memory_of_step(shape, run, ranks)
    remedy = "name another --out: one checkpoint takes as much"
    check_space(Path(run.out), shape.checkpoint_bytes, remedy)
    needed = memory.state / ranks + memory.transient
    available = float(psutil.virtual_memory().total)
    if (device := resolve_device(run.target.device)).type == "cuda":
        available = float(torch.cuda.get_device_properties(device).total_memory)
    if needed > MOST_MEMORY * available:
        raise UserError(
            f"training needs about {size(needed)} besides the target, and this machine has "
            f"{size(available)} (see draftsmith data plan); lower the sizes of the drafter and its "
            "objective, batch_rows or data.max_length"
        )


def log_serving_engines(run: RunConfig, method: AnyMethod) -> None:
    """Log which engines will support the drafter of a run, in the sentences of `draftsmith export`.

    Raises `UserError` as `check_engines` does.
    """
    if not run.for_ and not is_main_rank():  # only the main rank logs, and nothing is to be checked
        return
    for line in engine_remarks(check_engines(run, method)):
        log.info("%s", line)


def check_engines(run: RunConfig, method: AnyMethod) -> DrafterFacts:
    """Return the drafter that a run will produce, as engines see it, from configs alone.

    Raises `UserError` if an engine of `run.for_` will not support it, if the target's config cannot
    be read, and for heads that do not fit the target.
    """
    if run.init_from is not None:
        facts = drafter_facts(load_without_target(run.init_from))
    else:
        target = target_of_run(run)
        drafter = meta_outline(method, run, target).drafter
        facts = DrafterFacts(
            drafter, target.config.model_type, target.vocab_size, output_settings(target.config)
        )
    for name in run.for_:
        if (reason := refusal(name, facts)) is not None:
            raise UserError(f"{reason} (--for {name})")
    return facts
