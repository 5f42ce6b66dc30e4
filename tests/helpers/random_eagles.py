"""EAGLE drafters for the tests: random ones of every kind, and the committed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.eagle import EagleDrafter, drafter_of
from draftsmith.heads.vocabulary import most_frequent
from draftsmith.inference.targets.target import Target
from draftsmith.train.methods.eagle.config import EagleConfig
from draftsmith.train.methods.eagle.method import first_weights, shape_for
from tests.conftest import ROOT

PUBLISHED = {"norm_taps": False, "norm_output": False}
"""EAGLE-3 as in its paper, without the norms of 3.1."""
KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"version": 1},
    "eagle3": PUBLISHED,
    "eagle3 draft vocabulary": PUBLISHED | {"draft_vocab_size": 60},
    "eagle3 shared head": PUBLISHED | {"draft_vocab_size": 60, "shared_head": True},
    "eagle3.1": {},
    "eagle3 two layers, q/k norms": PUBLISHED | {"num_layers": 2, "qk_norm": True},
    "eagle3 of another width": PUBLISHED | {"hidden_size": 64},
    "eagle1 two layers": {"version": 1, "num_layers": 2},
}


def taps_for(target: Target, config: dict[str, Any]) -> dict[str, Any]:
    """Any taps: the targets of the tests have too few layers for the default ones."""
    return (
        config
        if config.get("version") == 1
        else {"taps": list(range(min(target.num_layers, 3))), **config}
    )


def random_eagle(target: Target, kind: str = "eagle3", seed: int = 0, **more: Any) -> Any:
    """An untrained drafter with weights away from their start, norms included."""
    torch.manual_seed(seed)
    shape = shape_for(EagleConfig(**taps_for(target, KINDS[kind] | more)), target.config)
    drafter = drafter_of(shape, target.embedding_and_head)
    ids = None
    if shape.draft_vocab_size < shape.vocab_size:
        ids = most_frequent(
            torch.randint(0, 50, (shape.vocab_size,)), shape.draft_vocab_size, target.eos_ids
        )
    first_weights(drafter, target.head_weight.float(), target.final_norm_weight(), ids)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "lm_head" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return drafter.to(target.dtype).eval().requires_grad_(False)


def committed(name: str, target: Target) -> Artifact:
    """A drafter that stands in scripts/quickstart/drafters, in the target's dtype."""
    artifact = Artifact.load(
        ROOT / "scripts" / "quickstart" / "drafters" / name,
        target.fingerprint(),
        target.embedding_and_head,
        pytest.fail,
    )
    artifact.drafter.to(target.dtype)
    return artifact


def changed(target: Target, change: Callable[[EagleDrafter], None], **shape: Any) -> Artifact:
    """The committed plain EAGLE-3 with another shape; what it has no weights for is made up, and
    small."""
    before = committed("eagle3_plain", target)
    torch.manual_seed(1)
    drafter = drafter_of(replace(before.drafter.shape, **shape), target.embedding_and_head)
    for name, parameter in drafter.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(
            parameter, std=0.02
        )
    drafter.load_state_dict(before.drafter.state_dict(), strict=False)
    change(drafter)
    return Artifact(drafter.eval().requires_grad_(False), before.fingerprint, before.calibration)


def vary(*names: str) -> Callable[[EagleDrafter], None]:
    """Move the norms of these names away from one."""

    def change(drafter: EagleDrafter) -> None:
        for name, parameter in drafter.named_parameters():
            if any(part in name for part in names):
                torch.nn.init.uniform_(parameter, 0.7, 1.4)

    return change


def all_tokens(target: Target) -> Artifact:
    """The committed plain EAGLE-3 with a row of its head for every token: the target's where it had
    none."""
    before = committed("eagle3_plain", target)
    shape, state = before.drafter.shape, before.drafter.state_dict()
    state["lm_head.weight"] = target.head_weight.index_copy(
        0, before.drafter.draft_vocab_ids, state["lm_head.weight"]
    )
    drafter = drafter_of(
        replace(shape, draft_vocab_size=shape.vocab_size), target.embedding_and_head
    )
    drafter.load_state_dict(
        {name: tensor for name, tensor in state.items() if name not in ("d2t", "t2d")}
    )
    return Artifact(drafter.eval().requires_grad_(False), before.fingerprint, before.calibration)


@torch.no_grad()
def widened(target: Target, hidden: int) -> Artifact:
    """The committed plain EAGLE-3 in the first rows and columns of a wider one, which has an
    embedding of its own."""
    before = committed("eagle3_plain", target)
    narrow, state = before.drafter.shape.hidden_size, before.drafter.state_dict()
    torch.manual_seed(1)
    drafter = drafter_of(
        replace(before.drafter.shape, hidden_size=hidden), target.embedding_and_head
    )
    for name, parameter in drafter.named_parameters():
        old = (
            target.model.get_input_embeddings().weight
            if name == "embedding.weight"
            else state[name]
        )
        torch.nn.init.normal_(parameter, std=0.01)
        if "norm" in name:
            parameter[:narrow] = old * (narrow / hidden) ** 0.5
        elif name == "layers.0.qkv.weight":  # what comes in is a token beside a state
            parameter.unflatten(1, (2, -1))[:, :, :narrow] = old.unflatten(1, (2, -1))
        else:
            parameter[: old.shape[0], : old.shape[1]] = old
    drafter.load_state_dict({name: state[name] for name in ("d2t", "t2d")}, strict=False)
    return Artifact(drafter.eval().requires_grad_(False), before.fingerprint, before.calibration)
