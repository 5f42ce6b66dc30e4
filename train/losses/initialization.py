"""Initial weights of a drafter: what several methods share, and the start from a trained one.

Shapes: n random states, H hidden size, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...heads.exchange.exporter import load_without_target
from ...heads.vocabulary import most_frequent
from ...inference.targets.target import TargetSource
from ..data.batches import Batches

log = logging.getLogger(__name__)

STATES = 64  # random states by which an untrained drafter's logits are judged


def check_gradients_pass(target: TargetSource) -> None:
    """Raise `UserError` for a target through whose head a drafter cannot learn."""
    if target.dtype == torch.float16:
        raise UserError(
            "the drafter learns through the target's head, and float16 loses its gradients; give "
            "--target.dtype bfloat16 or float32"
        )


def is_centred(norm: nn.Module) -> bool:
    """Return whether an RMS norm multiplies by 1 + weight instead of by its weight."""
    weight = norm.get_parameter("weight")
    return not torch.allclose(norm(torch.ones_like(weight)), weight, atol=1e-3)


@torch.no_grad()
def shrink_logits(norm: nn.Module, logits: Tensor, spread: float = 1.0) -> None:
    """Scale an untrained drafter's final norm down until its logits are small.

    `logits` `[..., V]` are a sample of what the drafter computes so far; afterwards their standard
    deviation over the vocabulary is at most `spread`. With the target's norm as it is the first
    states of a drafter make logits as large as the target's, and wrong: with SmolLM2 the loss began
    at 36, far above log V, and the first hundred steps had to unlearn that.
    """
    deviation = logits.float().std(-1).square().mean().sqrt()
    # Only down: small logits do not harm an untrained drafter.
    weight, offset = norm.get_parameter("weight"), float(is_centred(norm))
    factor = (spread / deviation).clamp(max=1.0).to(weight)
    weight.copy_((weight + offset) * factor - offset)


def random_states(hidden_size: int, seed: int) -> Tensor:
    """Return random states `[n, H]`, like those that an untrained layer computes."""
    return torch.randn(STATES, hidden_size, generator=torch.Generator().manual_seed(seed))


def draft_vocabulary(size: int, target: TargetSource, batches: Batches) -> Tensor | None:
    """Return the ascending target ids `[Vd]` of a draft vocabulary of `size` tokens.

    They are the special tokens, without which no draft ends a reply, and those that the target
    writes most often in the data. None stands for all tokens of the target. Raises `UserError` for
    too small a size.
    """
    if size >= target.vocab_size:
        return None
    special = set(target.eos_ids)
    if (tokenizer := target.tokenizer) is not None:
        tokens = [*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()]
        # A tokenizer may have more tokens than the target's embedding has rows.
        special |= {token for token in tokens if token < target.vocab_size}
    return most_frequent(batches.token_counts(target.vocab_size), size, special)


def apply_init_from(run: Any) -> None:
    """Set `run.heads` to those of the drafter that the run begins with, if it names one.

    Which features are read follows from them. Raises `UserError` for a folder without a drafter,
    and if the run asks for other heads than the drafter has.
    """
    if run.init_from is None or not hasattr(run, "heads"):
        return
    options = type(run.heads)
    stored = load_without_target(run.init_from).drafter.chosen(options)
    defaults = asdict(options())
    for name, value in asdict(run.heads).items():
        # An option given as its default cannot be distinguished from one that was left out.
        if value not in (defaults[name], stored[name]):
            # A recipe's key cannot be left out, so what it has to be is said.
            right = "null" if stored[name] is None else str(stored[name])
            if defaults[name] is None:
                right = "null, which takes the drafter's"
            raise UserError(
                f"init_from {run.init_from} has {name} {stored[name]}, heads.{name} says {value}; "
                f"set heads.{name} to {right}"
            )
    run.heads = options(**stored)


def kept_shape(run: Any, before: Artifact, expected: Any) -> Any:
    """Return the shape of the drafter `before`, with which the run begins.

    Differences from the shape `expected`, which a new drafter of the run would have, are logged as
    warnings.
    """
    shape = before.drafter.shape
    listed = ", ".join(f"{name} {value}" for name, value in asdict(run.heads).items())
    log.info("continuing from %s: %s", run.init_from, listed)
    for name, value in asdict(shape).items():
        if (now := getattr(expected, name)) != value:
            log.warning("the drafter keeps %s %s, though the target has %s", name, value, now)
    return shape
