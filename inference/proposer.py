"""What the decode loop asks of a drafter at work, and how one is named and loaded.

Shapes: B batch, S prompt positions (padded on the right), N tree nodes with the root, A accepted
nodes with the root, H hidden size.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from ..heads.artifact import OWN_FILE, Artifact
from ..heads.errors import UserError
from ..heads.layout import place
from .cache import TreeCache
from .sampling import Draws
from .target import Hidden, Target
from .tree import DraftTree, TreeShape


@dataclass
class Prompts:
    """A batch after its prefill. Rows past a prompt's own length hold nothing of meaning."""

    tokens: list[list[int]]
    """Each prompt with the token that the target chose after it: the first root."""
    ids: Tensor
    """[B, S]: the prompts."""
    lengths: Tensor
    """[B]: their lengths."""
    hidden: Hidden
    """Features of all prompt positions `[B, S, H]`."""
    cache: TreeCache
    """The target's cache, for drafters that run the target's own layers."""


@dataclass
class Accepted:
    """What a round decided. Row b has `counts[b]` nodes; places past that repeat the root and mean
    nothing."""

    tokens: list[list[int]]
    """Each row's accepted drafts and the target's own token after them: the next root, last."""
    nodes: list[list[int]]
    """Each row's accepted node ids, the root's (0) first."""
    path: Tensor
    """[B, A], device: `nodes`, padded with the root's id."""
    ids: Tensor
    """[B, A]: the last root and the drafts accepted after it, which are what the target's cache has
    gained."""
    counts: Tensor
    """[B], device; equal to the lengths of `nodes`."""
    hidden: Hidden
    """Features of just these `[B, A, H]`."""
    choices: list[list[int]] | None = None
    """The target's token after every node of the tree `[B][N]`, from the rules that know it."""


class Proposer(Protocol):
    """A drafter at work on one batch; it owns the drafter's state.

    The root is the token that the target chose last. It has not been run through the target yet, so
    features exist for every position before it and for none after (drafter-recipes 0.2).
    """

    name: str
    taps: tuple[int, ...]
    """Which hidden states of the target `prefill` and `commit` want to see."""
    max_drafted: int
    """Most nodes, without the root, that `propose` may return, or put into the target's cache while
    it drafts."""

    def prefill(self, prompts: Prompts) -> None:
        """Start on a batch; whatever was there before is forgotten."""
        ...

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Guess what follows `root` `[B]`."""
        ...

    def commit(self, accepted: Accepted) -> None:
        """Take over what the target decided of the last proposal."""
        ...

    def keep(self, rows: list[int]) -> None:
        """Drop every batch row but `rows`: the others have finished."""
        ...

    def finish(self) -> None:
        """The batch has ended, or was given up: let go of its state."""
        ...


class PlainDecoding:
    """No drafts: the same loop becomes plain decoding, one token a round."""

    name = "plain"
    taps: tuple[int, ...] = ()
    max_drafted = 0
    _shape = TreeShape.chain(0)

    def prefill(self, prompts: Prompts) -> None: ...

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        return DraftTree(root[:, None], self._shape)

    def commit(self, accepted: Accepted) -> None: ...

    def keep(self, rows: list[int]) -> None: ...

    def finish(self) -> None: ...


# Proposers that need no training, by the name that a user gives: module and class.
UNTRAINED = {
    "none": ("proposer", "PlainDecoding"),
    "ngram": ("proposers.ngram", "NgramLookup"),
    "suffix": ("proposers.suffix", "SuffixLookup"),
    "lookahead": ("proposers.lookahead", "Lookahead"),
    "early-exit": ("proposers.early_exit", "EarlyExit"),
}
MOST = 1024  # drafted nodes, and whatever they are made of
SPELLING = (
    "a drafter's folder, a small model's folder, or one of "
    + ", ".join(UNTRAINED)
    + "; settings follow a colon: ngram:length=8"
)


NUMBERS: tuple[tuple[Callable[[str], Any], str], ...] = (
    (int, r"-?[0-9]+"),
    (float, r"-?[0-9]*\.[0-9]+"),
)


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """`name[:key=value,...]` -> name and settings. Raises `UserError` for a malformed setting."""
    name, colon, rest = spec.rpartition(":")
    if not colon or "=" not in rest or "/" in rest:
        return spec, {}
    settings: dict[str, Any] = {}
    for part in rest.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise UserError(f"drafter {spec!r}: {part!r} is not key=value")
        key = key.strip().replace("-", "_")
        if key in settings:
            raise UserError(f"drafter {spec!r}: {key} is given twice; give it once")
        settings[key] = next(
            (kind(value) for kind, form in NUMBERS if re.fullmatch(form, value.strip())),
            value.strip(),
        )
    return name, settings


TREE_SETTINGS = (
    "length",
    "width",
    "nodes",
    "tree",
    "threshold",
    "cost",
    "score_temperature",
    "shape",
)
"""What says how far and how wide to draft; the other settings of a drafter say what it is."""


def without_tree(spec: str | Path) -> str:
    """`spec` with only the settings that are not about its tree: `ngram:longest=5,length=9` ->
    `ngram:longest=5`."""
    name, settings = parse_spec(str(spec))
    kept = ",".join(f"{key}={value}" for key, value in settings.items() if key not in TREE_SETTINGS)
    return f"{name}:{kept}" if kept else name


def check_spec(spec: str | Path) -> tuple[str, dict[str, Any]]:
    """`parse_spec`, and that the name is a drafter's as far as one can see without a target. Raises
    `UserError`."""
    name, settings = parse_spec(str(spec))
    if name not in UNTRAINED and not Path(name).is_dir():
        near = difflib.get_close_matches(name.lower().replace("_", "-"), UNTRAINED, 1, 0.7)
        meant = f"did you mean {near[0]}? Give" if near else "give"
        raise UserError(f"{name} is not a drafter: there is no such folder; {meant} {SPELLING}")
    return name, settings


def load_proposer(
    spec: str | Path,
    target: Target,
    warn: Callable[[str], None],
    tuned: dict[str, Any] | None = None,
) -> Proposer:
    """The drafter that `spec` names (see `SPELLING`), ready to work on `target`; with the tree
    `tuned` instead of its own.

    Raises `UserError`.
    """
    name, settings = check_spec(spec if tuned is None else without_tree(spec))
    settings |= tuned or {}
    if name in UNTRAINED:
        module, cls = UNTRAINED[name]
        make = getattr(importlib.import_module(f".{module}", __package__), cls)
        arguments: Sequence[Any] = (target,) if name == "early-exit" else ()
    elif Path(name, OWN_FILE).is_file() or not Path(name, "config.json").is_file():
        artifact = Artifact.load(name, target.fingerprint(), target.embedding_and_head, warn)
        place(artifact.drafter, target.device, target.dtype)
        make = method_module(artifact.method).make_proposer
        arguments = (artifact,)
    else:
        make = importlib.import_module(".proposers.draft_model", __package__).load_draft_model
        arguments = (name, target)
    known = [
        p
        for p in inspect.signature(make).parameters
        if p not in ("self", "target", "artifact", "folder", "name")
    ]
    if unknown := sorted(settings.keys() - set(known)):
        raise UserError(
            f"drafter {name} has no setting {unknown[0]!r}; there are: "
            f"{', '.join(known) or 'no settings'}"
        )
    proposer = make(*arguments, **settings)
    if tuned is not None:
        proposer.name += ":tuned"
    elif settings:
        proposer.name += ":" + ",".join(f"{key}={value}" for key, value in settings.items())
    return proposer


def weight_bytes(proposer: Proposer, target: Target) -> int:
    """What a drafter's own weights take; those of the target, which some use, are not counted."""
    own = {id(p): p for part in vars(proposer).values() for p in _weights(part)}
    theirs = {id(p) for p in target.model.parameters()}
    return sum(p.numel() * p.element_size() for key, p in own.items() if key not in theirs)


def _weights(part: Any) -> Iterable[Tensor]:
    if isinstance(part, Target):  # a draft model runs behind a target's interface
        return part.model.parameters()
    return part.parameters() if isinstance(part, nn.Module) else ()


def method_module(method: str) -> ModuleType:
    """The file of a method in `proposers/`: how it drafts."""
    return importlib.import_module(f".proposers.{method}", __package__)


def positive(name: str, value: Any, least: int = 1) -> int:
    """`value` as a setting that must be a whole number between `least` and `MOST`. Raises
    `UserError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")
    if value > MOST:
        raise UserError(
            f"{name} can be {MOST} at most, not {value}: every drafted token is verified"
        )
    return value
