"""Candidates of `draftsmith tune`: the default, and the most promising chains and trees.

If the drafter's artifact holds its held-out accuracies by depth and rank, the cost model ranks them
for this device (`default_tree`, `base.costs`); for other drafters they cover the usual sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ...heads.artifact import OWN_FILE
from ...heads.errors import UserError
from ...heads.files import JsonObject, read_json
from ..base.costs import GPUS, gpu_named
from ..base.tree_settings import Ranks, TreeSettings
from ..proposers.contract import Proposer
from ..proposers.default_tree import chain_of, expected_gain
from ..proposers.ngram import LookupProposer, PlainDecoding
from ..proposers.registry import load_proposer, parse_spec
from ..proposers.tree_plan import Planned, TreePlan, grow
from ..proposers.with_lookup import WithLookup
from ..targets.target import Target

# Lengths of chains; levels, children of a node and drafted nodes of trees.
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
LEVELS = (1, 2, 3, 4, 5, 6, 8)
WIDTHS = (2, 4, 8)
NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64)
# Numbers of candidates of each kind, besides the default.
CHAINS, TREES, FIXED = 3, 4, 1
# Candidates for drafters of unknown accuracy.
USUAL_CHAINS = (1, 2, 3, 5, 8)
USUAL_TREES = ((2, 2, 4), (3, 4, 8), (5, 4, 16))
LOOKUPS = (1, 2, 4, 6, 8, 12, 16)


@dataclass
class Candidate:
    """One way to draft."""

    kind: str
    """chain, fixed or dynamic."""
    setting: dict[str, Any]
    """Settings with which `load_proposer` returns this proposer."""
    make: Callable[[], Proposer]

    @property
    def label(self) -> str:
        """The name in tables: the kind and the settings."""
        setting = dict(self.setting)
        if "shape" in setting:
            shape = setting.pop("shape")
            setting |= {"length": max(map(len, shape)), "nodes": len(shape)}
        if self.kind == "chain":
            setting.pop("width", None)
        return " ".join([self.kind, *(f"{key}={value}" for key, value in setting.items())])


PLAIN = Candidate("plain decoding", {}, PlainDecoding)


def candidates(spec: str, target: Target, batch: int) -> list[Candidate]:
    """Return the candidates of the drafter `spec`, the default one first.

    The default is what a user gets without a profile (`proposers.default_tree`). Raises `UserError`
    as `check_tunable` does.
    """

    def silent(message: str) -> None:
        pass  # the message was shown when the drafter was first loaded

    proposer: Any = load_proposer(spec, target, silent, choose=True, inform=silent)
    check_tunable(proposer, spec)
    if not isinstance(proposer, Planned):
        lengths = [proposer.max_drafted, *LOOKUPS]
        settings: list[JsonObject] = [{"length": length} for length in lengths]
        make: Any = partial(load_proposer, spec, target, silent)
    else:
        settings, make = _planned(proposer, spec, target, batch), partial(_follow, proposer)
    distinct: list[Candidate] = []
    for setting in settings:
        if all(setting != other.setting for other in distinct):
            distinct.append(Candidate(_kind_of(setting), setting, partial(make, setting)))
    if len(distinct) == 1:
        raise UserError(f"{spec} has no other tree than its default; there is nothing to tune")
    return distinct


def check_tunable(proposer: Proposer, spec: str) -> None:
    """Raise `UserError` for drafters without a chain or tree to choose."""
    if isinstance(proposer, Planned | LookupProposer):
        return
    if isinstance(proposer, WithLookup):
        raise UserError(f"tune cannot tune a drafter with a lookup; leave out lookup of {spec}")
    raise UserError(
        f"{spec} cannot be tuned: it does not draft by a plan of trees; tune another trained "
        "drafter, or a lookup"
    )


def _planned(proposer: Any, spec: str, target: Target, batch: int) -> list[JsonObject]:
    """Return the settings of a drafter that follows a `TreePlan`, such as EAGLE."""
    settings = [_setting_of(proposer.plan)]
    accuracies = _accuracies(spec)
    if not accuracies:
        for length in USUAL_CHAINS:
            settings.append({"length": min(length, proposer.longest), "width": 1})
        for levels, width, nodes in USUAL_TREES:
            if levels <= proposer.longest:
                settings.append({"length": levels, "width": width, "nodes": nodes})
        return settings
    gpu = None
    if target.device.type == "cuda":
        # For GPUs without a known data sheet the figures of an H100 are assumed.
        gpu = gpu_named(torch.cuda.get_device_name(target.device)) or GPUS["H100"]
    # Depths beyond those that training measured are assumed to be as accurate as the last of these.
    table = [*accuracies, *[accuracies[-1]] * (max(LENGTHS) - len(accuracies))]
    drafter, longest = proposer.drafter, proposer.longest

    found: dict[str, list[tuple[float, JsonObject]]] = {"chain": [], "dynamic": [], "fixed": []}

    def offer(setting: JsonObject, tree: list[Ranks], levels: int, width: int) -> None:
        gain = expected_gain(drafter, target, table, tree, levels, width, batch, gpu)
        found[_kind_of(setting)].append((gain, setting))

    for length in LENGTHS:
        if length <= longest:
            offer({"length": length, "width": 1}, chain_of(length), length, 1)
    for nodes, levels, width in product(NODES, LEVELS, WIDTHS):
        if levels <= min(longest, nodes) and nodes <= width + (levels - 1) * width**2:
            tree = grow([ranks[:width] for ranks in table[:levels]], nodes)
            offer({"length": levels, "width": width, "nodes": nodes}, tree, levels, width)
    for nodes in NODES:
        shape = grow(table[: min(longest, max(LEVELS))], nodes)
        width = max(map(max, shape)) + 1
        if width > 1:
            offer({"shape": shape}, shape, max(map(len, shape)), width)
    settings += _best(found["chain"], CHAINS)
    settings += _best(found["dynamic"], TREES, distinct="nodes")
    return settings + _best(found["fixed"], FIXED)


def _best(
    found: Sequence[tuple[float, JsonObject]], count: int, distinct: str = ""
) -> list[JsonObject]:
    """Return the `count` settings of the highest gain, only one for each value of `distinct`."""
    taken: dict[Any, JsonObject] = {}
    for number, (_, setting) in enumerate(sorted(found, key=lambda item: -item[0])):
        taken.setdefault(setting[distinct] if distinct else number, setting)
    return list(taken.values())[:count]


def _accuracies(spec: str) -> list[list[float]]:
    """Return the held-out accuracies by depth and rank in a drafter's artifact, or []."""
    file = Path(parse_spec(spec)[0], OWN_FILE)
    # The loader has validated it.
    return read_json(file)["calibration"].get("rank_accuracy", []) if file.is_file() else []


def _follow(proposer: Any, setting: JsonObject) -> Proposer:
    """Return `proposer`, which drafts by the plan of `setting` from the next batch on.

    All candidates share it and its weights, so it is set up again before each of them decodes.
    """
    proposer.replan(TreePlan(TreeSettings(**setting).or_else(length=1, width=1)))
    return proposer


def _setting_of(plan: TreePlan) -> JsonObject:
    """Return the setting of the candidate with this plan."""
    if plan.fixed is not None and plan.width > 1:
        return {"shape": plan.fixed}
    setting: JsonObject = {"length": plan.length, "width": plan.width}
    if plan.width > 1:
        setting["nodes"] = plan.nodes
    return setting


def _kind_of(setting: JsonObject) -> str:
    if "shape" in setting:
        return "fixed"
    return "chain" if setting.get("width", 1) == 1 else "dynamic"
