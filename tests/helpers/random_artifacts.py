"""Drafters with random weights of every kind, for one target, and orders of their exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.eagle import drafter_of
from draftsmith.heads.exchange.engines import ENGINES, EngineName, compatible_engines, drafter_facts
from draftsmith.heads.exchange.engines.engine import ExportRequest
from draftsmith.heads.exchange.foreign import TargetParts
from draftsmith.inference.targets.target import Target
from tests.conftest import random_heads, tiny_target
from tests.helpers.random_blocks import random_block
from tests.helpers.random_eagles import KINDS, random_eagle

TARGET = tiny_target(num_hidden_layers=8)
TAPS = [2, 4, 5]
PLAIN: dict[str, Any] = {"taps": TAPS}


def side(target: Target) -> TargetParts:
    embedding = target.model.get_input_embeddings().weight
    return TargetParts(
        target.num_layers,
        target.hidden_size,
        target.vocab_size,
        target.embedding_and_head,
        embedding,
        target.head_weight,
    )


def eagle(kind: str = "eagle3", **shape: Any) -> Artifact:
    """A random drafter; `shape` may hold what training does not make."""
    more = {} if KINDS[kind].get("version") == 1 else PLAIN
    drafter = random_eagle(TARGET, kind, **more)
    if shape:
        torch.manual_seed(3)
        drafter = drafter_of(replace(drafter.shape, **shape), TARGET.embedding_and_head)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        drafter.eval().requires_grad_(False)
    return Artifact(drafter, TARGET.fingerprint(), {"width": 8}, {"command": ["train"]})


def heads(**config: Any) -> Artifact:
    drafter = random_heads(TARGET)
    if config:
        torch.manual_seed(3)
        drafter = type(drafter)(
            replace(drafter.config, **config),
            TARGET.hidden_size,
            TARGET.vocab_size,
            TARGET.embedding_and_head,
        )
        if drafter.d2t is not None:
            drafter.set_maps(torch.randperm(TARGET.vocab_size)[: drafter.drafted].sort().values)
    return Artifact(drafter.eval().requires_grad_(False), TARGET.fingerprint())


def block(kind: str = "dflash", **shape: Any) -> Artifact:
    """The same of a block drafter."""
    drafter = random_block(TARGET, kind, taps=TAPS)
    if shape:
        torch.manual_seed(3)
        drafter = type(drafter)(replace(drafter.shape, **shape), TARGET.embedding_and_head)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        drafter.eval().requires_grad_(False)
    return Artifact(drafter, TARGET.fingerprint())


def order(
    engine: EngineName, out: Path, dtype: torch.dtype = torch.float32, drafts: int = 3
) -> ExportRequest:
    return ExportRequest(engine, str(out), "the/target", drafts, dtype)


def also_read_by(engine: str, artifact: Artifact) -> list[str]:
    """The names of the other engines that read the very same files."""
    facts = drafter_facts(artifact)
    layouts = {name: ENGINES[name].recipes[facts.kind].layout for name in compatible_engines(facts)}
    return [name for name in layouts if name != engine and layouts[name] is layouts[engine]]
