"""Proposer of an MTP layer, which drafts as an EAGLE layer does: a chain, or a dynamic tree."""

from __future__ import annotations

from ...heads.artifact import Artifact
from ..drafters import Kind
from ..tree_settings import TreeSettings
from .eagle import KIND as EAGLE
from .eagle import EagleProposer
from .eagle import make_proposer as make_eagle_proposer
from .tree_plan import DEFAULT_TREE

KIND = Kind("mtp", tree=EAGLE.tree, lookups=True)


def make_proposer(artifact: Artifact, settings: TreeSettings = DEFAULT_TREE) -> EagleProposer:
    """Return the proposer of an MTP layer from disk; see `eagle.make_proposer`."""
    return make_eagle_proposer(artifact, settings)
