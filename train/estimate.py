"""Cost of a training run from its configs alone: bytes, GPU-hours and GPU memory.

Everything is arithmetic on shapes: the target and the drafter are built on the meta device, without
weights. A run of absurd cost is refused before anything is loaded. What a GPU reaches is in
`inference/costs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import psutil
import torch

from ..heads.errors import UserError
from ..heads.files import check_space
from ..heads.pretrained import make_causal_lm
from ..inference.targets.target import resolve_device
from .config import RunConfig
from .division import divided
from .method import AnyMethod
from .outline import ConfigOnly, Work, config_at, outlined, passed_through

STATE_BYTES = 16  # of a trained parameter in fp32: weight, gradient, two moments of AdamW
# Memory that a run may need, as a multiple of what there is: the estimate of the activations is an
# upper bound.
MOST_MEMORY = 2.0
# Work that training on a token may cost, as a multiple of the target's forward pass over it; common
# recipes stay below 10.
MOST_WORK = 100.0
# Options that count something of which a row of data has at most one for each token.
COUNTS = (
    ("heads", "num_heads"),
    ("heads", "block_size"),
    ("heads", "num_layers"),
    ("objective", "steps"),
)


@dataclass(frozen=True)
class RunSizes(Work):
    """Sizes of a target and its drafter that the arithmetic needs, and the work to train it."""

    hidden: int
    """Hidden size of the target."""
    target_params: int
    active_params: int
    """Parameters of the target that one token passes through; fewer than all in a mixture of
    experts."""
    vocab: int
    drafter_params: int
    taps: int
    """Number of taps that the drafter reads."""
    all_last: bool
    """True where the last state of every position is read, and not only of the replies'."""
    target_layers: int = 1
    frozen_params: int = 0
    """Parameters of the drafter that are not trained."""

    @property
    def drafter_bytes(self) -> float:
        """Bytes of the drafter's weights, their gradients and the optimiser's state."""
        weights = STATE_BYTES // 4 * self.drafter_params
        return float(weights + STATE_BYTES * 3 // 4 * (self.drafter_params - self.frozen_params))


def shape_of(method: AnyMethod, config: RunConfig) -> RunSizes:
    """Return the sizes of the run's target and drafter.

    Raises `UserError` where the target has no config that can be read.
    """
    model_config = config_at(config.target.path, config.target.trust_remote_code)
    target = ConfigOnly(model_config)
    with torch.device("meta"):
        model = make_causal_lm(model_config)
    total = sum(p.numel() for p in model.parameters())
    active = sum(count for _, count in passed_through(model.named_parameters(), target.config))
    taps, all_last = method.features_of(config, target)
    outline = outlined(method, config, target)
    parameters = list(outline.drafter.parameters())
    return RunSizes(
        target.config.hidden_size, total, round(active), target.vocab_size,
        sum(p.numel() for p in parameters), len(taps), all_last, target.num_layers,
        sum(p.numel() for p in parameters if not p.requires_grad),
        **{f.name: getattr(outline, f.name) for f in fields(Work)},
    )  # fmt: skip


def step_bytes(shape: RunSizes, config: RunConfig, ranks: int) -> float:
    """Return the bytes of features, activations and logits that a rank holds in a training step."""
    positions = divided(config, ranks).rows * config.data.max_length
    # A rank holds the features of its rows in bfloat16, with two more vectors a position; and for
    # the backward pass about 20 vectors in fp32 for each state of each layer.
    states = positions * shape.passes * shape.layers
    activations = positions * (shape.taps + 2) * shape.hidden * 2 + states * shape.hidden * 4 * 20
    # Three fp32 tables of logits: losses run over chunks, so there are never more rows.
    return float(activations + 3 * shape.logit_rows * shape.vocab * 4)


def check_affordable(run: RunConfig, method: AnyMethod, ranks: int) -> None:
    """Raise `UserError` where `run` asks for far more than makes sense on this machine.

    That is memory, work, or the size of a checkpoint on the disk; `ranks` share the memory. A run
    from a feature store is not checked, since its target may not be on this machine; nor is one
    that begins with a drafter, whose shape is that drafter's.
    """
    if run.features.store is not None or run.init_from is not None:
        return
    sizes = []
    for group, name in COUNTS:
        if not hasattr(section := getattr(run, group, None), name):
            continue
        sizes.append(f"{group}.{name}")
        if (value := getattr(section, name)) is not None and value > run.data.max_length:
            raise UserError(
                f"{sizes[-1]} is {value}, more than the {run.data.max_length} tokens of a row; "
                "lower it"
            )
    shape = shape_of(method, run)
    lower = f"lower {', '.join(sizes) or 'the size of the draft model'}"
    # A checkpoint holds weight and moments, three of the four parts of `STATE_BYTES`.
    checkpoint = shape.drafter_bytes * 3 / 4
    check_space(Path(run.out), checkpoint, "name another --out: one checkpoint takes as much")
    needed = shape.drafter_bytes / ranks + step_bytes(shape, run, ranks)
    available = float(psutil.virtual_memory().total)
    if (device := resolve_device(run.target.device)).type == "cuda":
        available = float(torch.cuda.get_device_properties(device).total_memory)
    if needed > MOST_MEMORY * available:
        raise UserError(
            f"training needs about {size(needed)} besides the target, and this machine has "
            f"{size(available)} (see draftsmith data plan); {lower} or batch_rows and "
            "data.max_length"
        )
    work = shape.training_operations(1.0) / (2 * shape.active_params)
    if work > MOST_WORK:
        raise UserError(
            f"training on a token would cost {work:,.0f} times the target's own forward pass over "
            f"it, {MOST_WORK:g} at most make sense (see draftsmith data plan); {lower}"
        )


def size(bytes_: float) -> str:
    return f"{bytes_ / 1e12:,.1f} TB" if bytes_ >= 1e12 else f"{bytes_ / 1e9:,.1f} GB"
