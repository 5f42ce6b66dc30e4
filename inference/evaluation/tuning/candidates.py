"""Candidates of `draftsmith tune`: chains and trees, and what each would accept on known texts.

There are three kinds: chains; fixed shapes, which are the best of their size by the measured
acceptance of each depth and rank (`shapes.grow`, which finds the same trees as Sequoia's dynamic
programme, arXiv 2402.12374); and dynamic trees, which follow the drafter's confidence, cut to a
number of nodes, at a fitted score temperature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....heads.errors import UserError
from ....heads.files import JsonObject
from ...drafters import load_proposer
from ...proposer import Proposer
from ...proposers.ngram import LookupProposer
from ...proposers.shapes import grow
from ...proposers.tree_plan import Planned, TreePlan
from ...proposers.with_lookup import WithLookup
from ...replay import RANKS
from ...rounds.tree import DraftTree
from ...settings import Sampling
from ...tree_settings import MOST, Ranks, TreeSettings
from .replay_roots import BEST, KnownPath, KnownTexts, nodes_needed, replay_roots

# Lengths of chains; most levels of a tree; children of a node in a dynamic tree.
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
LEVELS = 8
WIDTHS = (2, 4, 8)
SCORE_TEMPERATURES = (0.3, 0.5, 0.7, 1.0, 1.4)
MIDDLING = (5, 16)  # levels and nodes of the tree that the score temperature is fitted on
BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafted nodes of a tree
Counts = list[list[int]]
"""A number for each root of each text: `counts[text][root]`."""
Pool = Sequence[Sequence[Sequence[Sequence[int]]]]
"""Nodes that a tree needs for the path of the true tokens.

`pool[text][root][levels - 1][depth - 1]` is the number of nodes with which a tree of so many levels
holds that path to that depth."""
RootRanks = Iterable[Iterable[Sequence[int]]]
"""Ranks of the true tokens after each root of each text: `ranks[text][root][depth - 1]`."""
T = TypeVar("T")


@dataclass
class Candidate:
    """One way to draft."""

    kind: str
    """chain, fixed or dynamic."""
    setting: dict[str, Any]
    """Settings with which `load_proposer` makes this proposer."""
    make: Callable[[], Proposer]
    accepted: Counts
    """Accepted drafts at each root."""
    nodes: int
    """Drafted nodes, at most."""
    draft: tuple[int, ...]
    """Nodes that are continued to make each level after the first, which is what drafting costs;
    empty for lookups."""
    drafted: Counts | None = None
    """Drafted nodes at each root, for drafters that do not always draft `nodes` of them."""

    @property
    def label(self) -> str:
        """Return the name that tables show: the kind and the settings."""
        setting = dict(self.setting)
        if "shape" in setting:
            shape = setting.pop("shape")
            setting |= {"length": max(map(len, shape)), "nodes": len(shape)}
        if self.kind == "chain":
            setting.pop("width", None)
        return " ".join([self.kind, *(f"{key}={value}" for key, value in setting.items())])


def candidates(
    spec: str, known: KnownTexts, sampling: Sampling, tick: Callable[[str], None]
) -> tuple[list[Candidate], dict[str, Any]]:
    """Return all candidates of the drafter `spec`, the default one first, and what was measured.

    The default is what a user gets without a profile (`proposers.default_tree`). What was measured
    is the acceptance of each depth and rank, the accepted drafts at each score temperature, and the
    best of these; nothing for lookups. `tick` is called with a name before each pass over the
    texts. Raises `UserError` as `check_tunable` does.
    """

    def silent(message):
        pass  # it was shown when the drafter was first loaded

    proposer = load_proposer(spec, known.target, silent, choose=True, inform=silent)
    check_tunable(proposer, spec)
    if isinstance(proposer, Planned):
        return _planned(known, proposer, sampling, tick)
    return _lookups(known, spec, sampling, tick)


def check_tunable(proposer: Proposer, spec: str) -> None:
    """Raise `UserError` for drafters that no text can be replayed with, and adaptive chains."""
    if isinstance(proposer, Planned):
        if proposer.plan.threshold:
            raise UserError("tune chooses a chain's length itself; leave out threshold")
        return
    if isinstance(proposer, LookupProposer):
        return
    if isinstance(proposer, WithLookup):
        raise UserError(f"tune chooses the trees of a drafter alone; leave out lookup of {spec}")
    raise UserError(
        f"{spec} cannot be tuned: it does not draft by a plan of trees; tune another trained "
        "drafter, or a lookup"
    )


def _planned(
    known: KnownTexts, proposer: Any, sampling: Sampling, tick: Callable[[str], None]
) -> tuple[list[Candidate], dict[str, Any]]:
    """Return `candidates` of a drafter that follows a `TreePlan`, such as EAGLE."""
    default_plan: TreePlan = proposer.plan
    tick("acceptance by depth and rank")
    wanted_lengths = {*LENGTHS}
    if default_plan.width == 1:
        wanted_lengths.add(default_plan.length)
    lengths = sorted({min(length, proposer.longest) for length in wanted_lengths})
    path = KnownPath(max(lengths[-1], default_plan.length))
    proposer.replan(path)
    ranks = _by_root(known, proposer, sampling, lambda tree, following: path.ranks.tolist())
    table = rank_table(ranks)
    ways = _chains_and_shapes(proposer, ranks, table, lengths)
    if default_plan.fixed is not None and default_plan.width > 1:
        ways.append(_fixed(proposer, ranks, default_plan.fixed))
    most_levels = max(LEVELS, default_plan.length if default_plan.width > 1 else 0)
    levels = min(most_levels, proposer.longest)

    @cache
    def pool_of(width: int, score_temperature: float) -> Pool:
        """Return the pool of trees with up to `width` children a node and `levels` levels."""
        tick(f"trees {width} wide, score temperature {score_temperature:g}")
        nodes = min(width + (levels - 1) * width**2, MOST)
        settings = TreeSettings(
            length=levels, width=width, nodes=nodes, score_temperature=score_temperature
        )
        # All candidate nodes are given, so that `cut` can take any smaller tree from them.
        proposer.replan(TreePlan(settings, give_all=True))
        return _by_root(known, proposer, sampling, _needs)

    score_temperature, accepted_at = fitted_score_temperature(partial(pool_of, WIDTHS[1]))
    ways += _dynamic(proposer, pool_of, levels, default_plan, score_temperature)
    return first_of(ways, _setting_of(default_plan)), {
        "rank_acceptance": table,
        "accepted_by_score_temperature": accepted_at,
        "score_temperature": score_temperature,
    }


def _follow(proposer: Any, setting: JsonObject) -> Proposer:
    """Return `proposer`, which drafts by the plan of `setting` from the next batch on.

    All candidates share it and its weights, so that it is set up when the turn of one begins.
    """
    proposer.replan(TreePlan(TreeSettings(**setting).or_else(length=1, width=1)))
    return proposer


def _setting_of(plan: TreePlan) -> dict[str, Any]:
    """Return the setting that the candidate of this plan has."""
    if plan.fixed is not None and plan.width > 1:
        return {"shape": plan.fixed}
    setting: dict[str, Any] = {"length": plan.length, "width": plan.width}
    if plan.width > 1:
        setting["nodes"] = plan.nodes
        if plan.score_temperature != 1:
            setting["score_temperature"] = plan.score_temperature
    return setting


def _chains_and_shapes(
    proposer: Any, ranks: RootRanks, table: list[list[float]], lengths: list[int]
) -> list[Candidate]:
    """Return the chains of these `lengths`, and the best fixed shape of each size.

    `table` is the `rank_table` of `ranks`.
    """
    ways = []
    for length in lengths:
        setting = {"length": length, "width": 1}
        # one node is continued on each level after the first
        continued = (1,) * (length - 1)
        make, accepted = partial(_follow, proposer, setting), runs(ranks, length)
        ways.append(Candidate("chain", setting, make, accepted, length, continued))
    for count in BUDGETS:
        shape = grow(table[:LEVELS], count)
        # `grow` leaves out nodes that were never right, so a shape may be smaller than asked for;
        # a shape of best tokens only is a chain, and those are candidates already.
        if len(shape) == count and max(node[-1] for node in shape):
            ways.append(_fixed(proposer, ranks, shape))
    return ways


def _fixed(proposer: Any, ranks: RootRanks, shape: Sequence[Ranks]) -> Candidate:
    """Return the fixed tree `shape` as a candidate."""
    setting = {"shape": list(shape)}
    make, accepted = partial(_follow, proposer, setting), along(ranks, shape)
    return Candidate("fixed", setting, make, accepted, len(shape), tuple(_inner(shape)))


def _dynamic(
    proposer: Any,
    pool_of: Callable[[int, float], Pool],
    most_levels: int,
    default_plan: TreePlan,
    fitted: float,
) -> list[Candidate]:
    """Return the dynamic trees of all sizes, at each width and the score temperature `fitted`.

    `pool_of` gives the pool of a width and a score temperature.
    """
    # And at those of the default tree, which has to be one of the candidates.
    kinds = {(width, fitted) for width in WIDTHS}
    if default_plan.width > 1:
        kinds.add((default_plan.width, default_plan.score_temperature))
    ways = []
    for width, score_temperature in sorted(kinds):
        pool = pool_of(width, score_temperature)
        for levels in range(1, most_levels + 1):
            # The first level offers `width` nodes; every further one offers `width` children of
            # each of the `width` nodes that are continued.
            # Width 4 and 3 levels: 4 + 2 * 16 = 36 nodes.
            most = width + (levels - 1) * width**2
            for nodes in sorted({*BUDGETS, default_plan.nodes}):
                if not levels <= nodes <= most:
                    continue
                setting: dict[str, Any] = {"length": levels, "width": width, "nodes": nodes}
                if score_temperature != 1:
                    setting["score_temperature"] = score_temperature
                make, accepted = partial(_follow, proposer, setting), cut(pool, levels, nodes)
                continued = (width,) * (levels - 1)
                ways.append(Candidate("dynamic", setting, make, accepted, nodes, continued))
    return ways


def fitted_score_temperature(pool_at: Callable[[float], Pool]) -> tuple[float, dict[str, int]]:
    """Return the best score temperature, and the number of accepted drafts at each of them.

    A tree of medium size is counted (docs/verification.md#score-temperature).
    """
    accepted = {}
    for score_temperature in SCORE_TEMPERATURES:
        counts = cut(pool_at(score_temperature), *MIDDLING)
        accepted[score_temperature] = sum(map(sum, counts))

    def preference(score_temperature: float) -> tuple[int, float]:
        # Among equals, prefer the one nearest to 1, which leaves the drafter's scores as they are.
        return accepted[score_temperature], -abs(score_temperature - 1)

    best = max(accepted, key=preference)
    return best, {str(score_temperature): count for score_temperature, count in accepted.items()}


def _lookups(
    known: KnownTexts, spec: str, sampling: Sampling, tick: Callable[[str], None]
) -> tuple[list[Candidate], dict[str, Any]]:
    """Return `candidates` of a lookup: chains of each length."""
    tick("guesses")
    target = known.target
    default: Any = load_proposer(spec, target, print)
    lengths = sorted({*LENGTHS, default.max_drafted})
    longest = load_proposer(spec, target, print, {"length": lengths[-1]})

    # A lookup has one token a position: a right draft has rank 0, and a wrong one is noted as 1.
    missing = 2  # of no draft, a rank that no chain reaches

    def ranks_at(tree: DraftTree, following: Tensor) -> list[list[int]]:
        drafts = tree.tokens[:, 1:]
        # Missing drafts are `NO_NODE`, which is negative.
        return torch.where(drafts < 0, missing, (drafts != following).long()).tolist()

    ranks = _by_root(known, longest, sampling, ranks_at)
    ways = []
    for length in lengths:
        setting = {"length": length}
        drafted = []
        for text in ranks:
            drafted.append([sum(rank < missing for rank in root[:length]) for root in text])
        make, accepted = partial(load_proposer, spec, target, print, setting), runs(ranks, length)
        ways.append(Candidate("chain", setting, make, accepted, length, (), drafted))
    return first_of(ways, {"length": default.max_drafted}), {}


def first_of(found: list[Candidate], setting: dict[str, Any]) -> list[Candidate]:
    """Return `found` with the candidate of this `setting` first, the others in their order."""
    assert any(candidate.setting == setting for candidate in found), (
        "the drafter's own tree is one of the candidates"
    )
    # False sorts before True, and `sorted` keeps the order of equals.
    return sorted(found, key=lambda candidate: candidate.setting != setting)


def _by_root(
    known: KnownTexts,
    proposer: Proposer,
    sampling: Sampling,
    at_roots: Callable[[DraftTree, Tensor], Iterable[T]],
) -> list[list[T]]:
    """Return what `at_roots` gives for each text and root.

    It is called with the trees drafted at a root of several texts, and the tokens that follow.
    """
    found: list[list[T]] = [[] for _ in known.texts]
    for rows, tree, following in replay_roots(known, proposer, sampling):
        for row, value in zip(rows, at_roots(tree, following), strict=True):
            found[row].append(value)
    return found


def _needs(tree: DraftTree, following: Tensor) -> Iterable[tuple[list[int], ...]]:
    """Return `nodes_needed` of each row, a list for each number of levels."""
    # There is one [rows][depths] table for each number of levels.
    return zip(*(table.tolist() for table in nodes_needed(tree, following)), strict=True)


def cut(pool: Pool, levels: int, nodes: int) -> Counts:
    """Return the accepted drafts of trees of the best `nodes` nodes in at most `levels` levels."""

    def accepted_at(needed_by_levels: Sequence[Sequence[int]]) -> int:
        # The last table is of all levels that there are.
        needed = needed_by_levels[min(levels, len(needed_by_levels)) - 1]
        # The needed number rises with depth, so the depths that fit are the first ones.
        return sum(need <= nodes for need in needed)

    return [list(map(accepted_at, text)) for text in pool]


def runs(ranks: RootRanks, length: int) -> Counts:
    """Return the accepted drafts of chains: each root's leading zero ranks, `length` at most."""
    return along(ranks, [(0,) * depth for depth in range(1, length + 1)])


def along(ranks: RootRanks, shape: Sequence[Ranks]) -> Counts:
    """Return the accepted drafts of a fixed shape.

    They are as many as the longest beginning of a root's ranks that is a node of the shape.
    """
    nodes = set(shape)

    def depth(root: Sequence[int]) -> int:
        reached = 0
        while reached < len(root) and tuple(root[: reached + 1]) in nodes:
            reached += 1
        return reached

    return [list(map(depth, text)) for text in ranks]


def rank_table(ranks: RootRanks) -> list[list[float]]:
    """Return the share of roots at which the draft of each depth and rank is right, `[D][RANKS]`.

    A depth counts only the roots at which all tokens before it were among the `BEST` ranks. The
    shares of a depth never rise with the rank, because a tree offers better siblings first.
    """
    reached = list(chain.from_iterable(ranks))
    table = []
    for depth in range(len(reached[0]) if reached else 0):
        counts = Counter(root[depth] for root in reached)
        shares = [counts[rank] / max(len(reached), 1) for rank in range(RANKS)]
        # A rank that was right more often than a better one, by chance, raises the better one.
        table.append([max(shares[rank:]) for rank in range(RANKS)])
        reached = [root for root in reached if root[depth] < BEST]
    return table


def _inner(shape: Sequence[Ranks]) -> list[int]:
    """Return the number of nodes with children at each level of `shape` but the last."""
    parents = {node[:-1] for node in shape if len(node) > 1}
    # A node's rank tuple is as long as its depth.
    parents_at = Counter(map(len, parents))
    return [parents_at[level] for level in range(1, max(map(len, shape)))]
