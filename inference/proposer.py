"""What the decode loop asks of a drafter at work, and the proposer that proposes nothing.

Shapes: B batch, N tree nodes with the root, S prompt tokens, A accepted nodes with the root.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ..heads.artifact import Artifact
from .target import Hidden, Target
from .tree import DraftTree, TreeShape


class Proposer(Protocol):
    """A drafter at work on one batch; it owns the drafter's state.

    The root is the token that the target chose last. It has not been run through the target yet, so features exist for every
    position before it and for none after (drafter-recipes 0.2).
    """

    name: str
    taps: tuple[int, ...]
    """Which hidden states of the target `prefill` and `commit` want to see."""
    max_drafted: int
    """Most nodes, without the root, that `propose` may return."""

    def prefill(self, ids: Tensor, hidden: Hidden) -> None:
        """Start on a prompt `[B, S]` with the target's features of all its positions."""
        ...

    def propose(self, root: Tensor) -> DraftTree:
        """Guess what follows `root` `[B]`."""
        ...

    def commit(self, ids: Tensor, hidden: Hidden) -> None:
        """The last root and the drafts accepted after it `[B, A]`, with the target's features of just these."""
        ...


class PlainDecoding:
    """No drafts: the same loop becomes plain decoding, one token a round."""

    name = "plain"
    taps: tuple[int, ...] = ()
    max_drafted = 0
    _shape = TreeShape.chain(0)

    def prefill(self, ids: Tensor, hidden: Hidden) -> None: ...

    def propose(self, root: Tensor) -> DraftTree:
        return DraftTree(self._shape, root[:, None])

    def commit(self, ids: Tensor, hidden: Hidden) -> None: ...


def load_proposer(directory: str | Path, target: Target, warn: Callable[[str], None], **options: Any) -> Proposer:
    """The drafter in `directory`, ready to work on `target`. Raises `UserError` as `Artifact.load` does."""
    artifact = Artifact.load(directory, target.fingerprint(), target.head, warn)
    artifact.drafter.to(target.device, target.dtype)
    module = importlib.import_module(f".{artifact.method}", __package__)
    return module.make_proposer(artifact, name=artifact.method, **options)
