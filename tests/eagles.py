"""EAGLE drafters for the tests: random ones of every kind, and the committed ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.eagle import EagleConfig, EagleDrafter, shape_for
from draftsmith.heads.vocabulary import most_frequent
from draftsmith.inference.target import Target

from tests.conftest import ROOT

KINDS: dict[str, dict[str, Any]] = {
    "eagle1": {"version": 1},
    "eagle3": {},
    "eagle3 draft vocabulary": {"draft_vocab_size": 60},
    "eagle3.1": {"norm_taps": True, "norm_output": True},
    "eagle3 two layers, q/k norms": {"num_layers": 2, "qk_norm": True},
    "eagle3 of another width": {"hidden_size": 64},
    "eagle1 two layers": {"version": 1, "num_layers": 2},
}


def taps_for(target: Target, config: dict[str, Any]) -> dict[str, Any]:
    """Any taps: the targets of the tests have too few layers for the default ones."""
    return config if config.get("version") == 1 else {"taps": list(range(min(target.num_layers, 3))), **config}


def random_eagle(target: Target, kind: str = "eagle3", seed: int = 0, **more: Any) -> EagleDrafter:
    """An untrained drafter with weights away from their start, norms included."""
    torch.manual_seed(seed)
    shape = shape_for(EagleConfig(**taps_for(target, KINDS[kind] | more)), target.config)
    drafter = EagleDrafter(shape, target.ends)
    ids = None
    if shape.draft_vocab_size < shape.vocab_size:
        ids = most_frequent(torch.randint(0, 50, (shape.vocab_size,)), shape.draft_vocab_size, target.eos_ids)
    drafter.start_from(target.head_weight.float(), target.final_norm_weight(), ids)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "lm_head" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return drafter.to(target.dtype).eval().requires_grad_(False)


def committed(name: str, target: Target) -> Artifact:
    """A drafter that stands in scripts/quickstart/drafters, in the target's dtype."""
    artifact = Artifact.load(ROOT / "scripts" / "quickstart" / "drafters" / name, target.fingerprint(), target.ends, pytest.fail)
    artifact.drafter.to(target.dtype)
    return artifact
