"""Kinds of drafters, as engines tell them apart: methods, and each version of EAGLE by itself."""

from __future__ import annotations

from collections.abc import Iterable

from ..artifact import Artifact
from .engines.engine import DrafterFacts

TITLES = {
    "eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark",
    "medusa": "Medusa heads",
    "draft_model": "a draft model",
}  # fmt: skip
PAPERS = {
    "eagle1": "arXiv 2401.15077", "eagle3": "arXiv 2503.01840", "dflash": "arXiv 2602.06036",
    "dspark": "arXiv 2607.05147", "medusa": "arXiv 2401.10774", "draft_model": "arXiv 2302.01318",
}  # fmt: skip


def facts_of(artifact: Artifact) -> DrafterFacts:
    """Return the artifact's drafter as engines see it."""
    drafter = artifact.drafter
    return DrafterFacts(drafter.kind, drafter, artifact.fingerprint.model_type)


def titles(kinds: Iterable[str], word: str = "or") -> str:
    """Return the titles of kinds as a list in a sentence, with `word` before the last."""
    *first, last = (TITLES.get(kind, kind) for kind in kinds)
    return f"{', '.join(first)} {word} {last}" if first else last
