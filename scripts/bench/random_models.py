"""Targets and drafters of known sizes with random weights, and training steps of them.

What a round or a step costs does not depend on the weights, but for the drafts that are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.heads.dflash import DFlashDrafter
from draftsmith.heads.dspark import DSparkDrafter
from draftsmith.heads.eagle import drafter_of
from draftsmith.heads.medusa import MedusaHeads, MedusaShape
from draftsmith.inference.targets.target import Target
from draftsmith.train.config import TargetConfig
from draftsmith.train.data.batches import Batch, collate
from draftsmith.train.data.config import Data, Source
from draftsmith.train.data.features import Features
from draftsmith.train.methods.dflash import method as dflash
from draftsmith.train.methods.dflash.config import DFlashConfig
from draftsmith.train.methods.dspark import method as dspark
from draftsmith.train.methods.dspark.config import DSparkConfig
from draftsmith.train.methods.eagle.config import EagleConfig
from draftsmith.train.methods.eagle.method import first_weights, shape_for
from draftsmith.train.methods.registry import method_named
from draftsmith.train.objectives import TrainingModule
from draftsmith.train.outline import MetaTarget

CONFIGS = Path(__file__).parents[2] / "draftsmith" / "commands" / "targets"
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 8, "vocab_size": 512,
}  # fmt: skip


def random_target(
    shape: str, device: torch.device, dtype: torch.dtype, layers: int | None = None
) -> Target:
    """Return a target of the sizes of the folder `shape` in `CONFIGS`, or of its first layers.

    The shape "tiny" is a model of the same kind for tests on a CPU.
    """
    folder = CONFIGS / ("qwen3-8b" if shape == "tiny" else shape)
    values = json.loads((folder / "config.json").read_text())
    values.pop("torch_dtype", None)
    values |= TINY if shape == "tiny" else {}
    if layers is not None:
        values["num_hidden_layers"] = min(layers, values["num_hidden_layers"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Target(model, None, f"random {shape}")


def random_drafter(method: str, target: Target, **settings: Any) -> Any:
    """Return an untrained drafter with random weights, in float32 on the target's device.

    `settings` are those of the drafter's config. EAGLE drafts among a fifth of the vocabulary.
    """
    middle, last = target.num_layers // 2, target.num_layers - 3
    borrowed = target.embedding_and_head
    with torch.device(target.device):
        if method == "medusa":
            config = MedusaShape(**{"shared_head": True, **settings})
            heads = MedusaHeads(config, target.hidden_size, target.vocab_size, borrowed)
            return drawn(heads)
        settings = {"taps": [2, middle, last], **settings}
        if method == "eagle":
            # CUDA's matrix products are slow where a size is not a multiple of 8.
            kept = target.vocab_size // 5 // 8 * 8
            eagle = EagleConfig(**{"draft_vocab_size": kept, **settings})
            drafter: Any = drafter_of(shape_for(eagle, target.config), borrowed)
            drawn(drafter)
            first_weights(drafter, target.head_weight.float(), None, torch.arange(kept) * 5)
            return drafter
        mask = target.vocab_size - 1
        if method == "dspark":
            block = dspark.METHOD.shape_for(DSparkConfig(**settings), target, mask)
            return drawn(DSparkDrafter(block, borrowed))
        block = dflash.METHOD.shape_for(DFlashConfig(**settings), target, mask)
        return drawn(DFlashDrafter(block, borrowed))


def drawn(module: nn.Module) -> nn.Module:
    """Draw the weights of a module as most models do; norms are one and biases zero."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return module


def packed_rows(rows: int, length: int, vocab: int, longest: int, seed: int = 0) -> Batch:
    """Return packed rows of documents of `longest` / 4 to `longest` tokens, the last third of each
    written by the target."""
    import numpy as np

    generator = np.random.default_rng(seed)
    packed = []
    for _ in range(rows):
        documents, left = [], length
        while left > 0:
            count = min(left, int(generator.integers(max(longest // 4, 2), longest + 1)))
            written = np.arange(count) >= count // 3
            documents.append((generator.integers(0, vocab, count), written))
            left -= count
        packed.append(documents)
    return collate(packed)


def random_features(target: Target, batch: Batch, taps: Sequence[int]) -> Features:
    """Return features of a batch in the target's dtype, of size one."""
    like: dict[str, Any] = {"device": target.device, "dtype": target.dtype}
    states: list[Tensor] = []
    for _ in range(len(taps) + 1):
        states.append(torch.randn(*batch.ids.shape, target.hidden_size, **like))
    return Features(batch, states[0], tuple(states[1:]))


def training_operations(method: str, target: Target, drafter: Any, batch: Batch) -> float:
    """Return the floating-point operations of a training step, by the formula of
    `draftsmith data plan`: those of the matrices, without attention."""
    known = method_named(method)  # type: ignore[arg-type]
    run = run_of(known)
    if method == "medusa":
        run.heads.shared_head = drafter.config.shared_head
    else:
        for name, value in drafter.chosen(type(run.heads)).items():
            setattr(run.heads, name, value)
    work = known.outline(run, MetaTarget(target.config))
    written = float(batch.mask.float().mean())
    return batch.ids.numel() * work.training_operations(written)


def run_of(known: Any) -> Any:
    """Return a run's configuration, of which only the method's own part is read."""
    return known.run_class(out="-", target=TargetConfig(path="-"), data=Data(sources=[Source("-")]))


def training_step(
    method: str,
    target: Target,
    drafter: Any,
    features: Callable[[], Features],
    batch: Batch,
    bf16: bool,
    **objective_options: Any,
) -> Callable[[], Tensor]:
    """Return a function that takes one optimiser step, and returns its loss."""
    known = method_named(method)  # type: ignore[arg-type]
    run = run_of(known)
    for option, value in objective_options.items():
        setattr(run.objective, option, value)
    objective = known.make_objective(run, target, drafter)
    module = TrainingModule(drafter, objective, bf16)
    denominators = objective.weights(batch)
    learning = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-5, fused=target.device.type == "cuda")

    def step() -> Tensor:
        loss, _ = module(features(), denominators)
        loss.backward()
        nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
