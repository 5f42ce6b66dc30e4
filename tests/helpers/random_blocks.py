"""Block drafters for the tests: random ones of every kind, and the committed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.dflash import DFlashDrafter
from draftsmith.heads.dspark import DSparkDrafter
from draftsmith.heads.vocabulary import most_frequent
from draftsmith.inference.base.tree_settings import TREE_SETTINGS, TreeSettings
from draftsmith.inference.proposers.dflash import DFlashProposer
from draftsmith.inference.proposers.dspark import DSparkProposer
from draftsmith.inference.targets.target import Target
from draftsmith.train.methods.dflash import method as dflash
from draftsmith.train.methods.dflash.config import DFlashConfig
from draftsmith.train.methods.dspark import method as dspark
from draftsmith.train.methods.dspark.config import DSparkConfig
from tests.helpers.random_eagles import committed

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {"num_layers": 2, "block_size": 5},
    "dflash one layer": {"num_layers": 1, "block_size": 4, "intermediate_size": 48},
    "dspark": {"num_layers": 2, "block_size": 4, "markov_rank": 6},
    "dflash draft vocabulary": {"num_layers": 1, "block_size": 4, "draft_vocab_size": 60},
    "dspark draft vocabulary": {
        "num_layers": 1,
        "block_size": 3,
        "markov_rank": 6,
        "draft_vocab_size": 60,
    },
}


def random_block(target: Target, kind: str = "dflash", seed: int = 0, **more: Any) -> Any:
    """An untrained drafter with weights away from their start, norms included."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "taps": list(range(1, target.num_layers))[:2],
        **KINDS[kind],
        **more,
    }
    mask = target.vocab_size - 1
    if kind.startswith("dspark"):
        drafter: DFlashDrafter = DSparkDrafter(
            dspark.METHOD.shape_for(DSparkConfig(**settings), target, mask),
            target.embedding_and_head,
        )
    else:
        drafter = DFlashDrafter(
            dflash.METHOD.shape_for(DFlashConfig(**settings), target, mask),
            target.embedding_and_head,
        )
    ids = None
    if (size := drafter.shape.draft_vocab_size) is not None:
        counts = torch.randint(0, 50, (target.vocab_size,))
        ids = most_frequent(counts, size, target.eos_ids)
    if ids is not None:
        drafter.set_maps(ids)
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3 if "transition" in name else 0.15)
    return drafter.to(target.dtype).eval().requires_grad_(False)


def proposer_of(drafter: Any, **settings: Any) -> DFlashProposer:
    """The drafter at work; `settings` of its tree, or its own."""
    tree = {name: settings.pop(name) for name in TREE_SETTINGS if name in settings}
    kind = DSparkProposer if drafter.method == "dspark" else DFlashProposer
    return kind(drafter, TreeSettings(**tree), **settings)


def changed_block(
    target: Target, kind: str, change: Callable[[Any], Any] = lambda drafter: None, **shape: Any
) -> Artifact:
    """The committed drafter of this kind with another shape; what it has no weights for is made up,
    and small."""
    before = committed(kind, target)
    torch.manual_seed(1)
    drafter = type(before.drafter)(
        replace(before.drafter.shape, **shape), target.embedding_and_head
    )
    for name, parameter in drafter.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(
            parameter, std=0.02
        )
    drafter.load_state_dict(before.drafter.state_dict(), strict=False)
    change(drafter)
    return Artifact(drafter.eval().requires_grad_(False), before.fingerprint, before.calibration)


def share_key_norms(drafter: Any) -> None:
    """Every layer's norm of the keys is the first one's: the only one that a vLLM for CPUs applies
    to the context."""
    for layer in drafter.layers:
        layer.k_norm.weight.data.copy_(drafter.layers[0].k_norm.weight)
