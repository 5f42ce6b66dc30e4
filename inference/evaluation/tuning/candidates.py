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
from itertools import chain
from typing import Any

from ....heads.errors import UserError
from ...drafters import load_proposer
from ...proposer import Proposer
from ...proposers.lookup import LookupProposer
from ...proposers.shapes import grow
from ...proposers.tree_plan import Planned, TreePlan
from ...proposers.with_lookup import WithLookup
from ...replay import RANKS
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
Pool = list[list[list[list[int]]]]
"""Nodes that a tree needs for the path of the true tokens.

`pool[text][root][levels - 1][depth - 1]` is the number of nodes with which a tree of so many levels
holds that path to that depth."""


Maker = Callable[..., Callable[[], Proposer]]
"""Takes the settings of a `TreePlan`, and returns a function that makes a proposer draft by it."""


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

    The default is what a user gets without a profile (`proposers.default_tree`). The measurements
    are the acceptance of each depth and rank, the accepted drafts at each score temperature, and
    the best score temperature; there are none for lookups. `tick` is called with a name before each
    pass over the texts.

    Raises `UserError` for drafters that cannot be replayed along a text.
    """
    proposer = load_proposer(spec, known.target, silent, choose=True, inform=silent)
    check_tunable(proposer, spec)
    if isinstance(proposer, Planned):
        return _planned(known, proposer, sampling, tick)
    return _lookups(known, spec, sampling, tick)


def silent(message: str) -> None:
    """Drop a notice that was shown when the drafter was first loaded."""


def check_tunable(proposer: Proposer, spec: str) -> None:
    """Raise `UserError` for a drafter that cannot be tuned.

    These are drafters that cannot be replayed along a text, and chains with a threshold, which
    choose their length themselves.
    """
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

    def make(**setting: Any) -> Callable[[], Proposer]:
        # All candidates share one proposer and its weights: the plan is set when a turn begins.
        def ready() -> Proposer:
            proposer.replan(TreePlan(TreeSettings(**setting).or_else(length=1, width=1)))
            return proposer

        return ready

    tick("acceptance by depth and rank")
    wanted_lengths = {*LENGTHS}
    if default_plan.width == 1:
        wanted_lengths.add(default_plan.length)
    lengths = sorted({min(length, proposer.longest) for length in wanted_lengths})
    path = KnownPath(max(lengths[-1], default_plan.length))
    ranks = _ranks(known, proposer, sampling, path)
    table = rank_table(ranks)
    ways = _chains_and_shapes(ranks, table, lengths, make)
    if default_plan.fixed is not None and default_plan.width > 1:
        ways.append(_fixed(ranks, default_plan.fixed, make))
    most_levels = max(LEVELS, default_plan.length if default_plan.width > 1 else 0)
    levels = min(most_levels, proposer.longest)
    pools = _Pools(known, proposer, sampling, levels, tick)

    def pool_at(score_temperature: float) -> Pool:
        return pools.of(WIDTHS[1], score_temperature)

    score_temperature, accepted_at = fitted_score_temperature(pool_at)
    ways += _dynamic(pools, default_plan, score_temperature, make)
    return first_of(ways, _setting_of(default_plan)), {
        "rank_acceptance": table,
        "accepted_by_score_temperature": accepted_at,
        "score_temperature": score_temperature,
    }


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
    ranks: list[list[list[int]]], table: list[list[float]], lengths: list[int], make: Maker
) -> list[Candidate]:
    """Return the chains of these `lengths`, and the best fixed shape of each size.

    `ranks`: the true tokens' ranks, for each text and root. `table`: their `rank_table`.
    """
    ways = []
    for length in lengths:
        setting = {"length": length, "width": 1}
        accepted = runs(ranks, length)
        ways.append(
            # one node is continued on each level after the first
            Candidate("chain", setting, make(length=length), accepted, length, (1,) * (length - 1))
        )
    for count in BUDGETS:
        shape = grow(table[:LEVELS], count)
        # `grow` leaves out nodes that were never right, so a shape may be smaller than asked for;
        # a shape of best tokens only is a chain, and those are candidates already.
        if len(shape) == count and max(node[-1] for node in shape):
            ways.append(_fixed(ranks, shape, make))
    return ways


def _fixed(ranks: list[list[list[int]]], shape: Sequence[Ranks], make: Maker) -> Candidate:
    """Return the fixed tree `shape` as a candidate; `ranks` as in `_chains_and_shapes`."""
    accepted, inner = along(ranks, shape), tuple(_inner(shape))
    setting = {"shape": list(shape)}
    return Candidate("fixed", setting, make(**setting), accepted, len(shape), inner)


def _dynamic(pools: _Pools, default_plan: TreePlan, fitted: float, make: Maker) -> list[Candidate]:
    """Return the dynamic trees of all sizes, at each width and the score temperature `fitted`."""
    # And at those of the default tree, which has to be one of the candidates.
    kinds = {(width, fitted) for width in WIDTHS}
    if default_plan.width > 1:
        kinds.add((default_plan.width, default_plan.score_temperature))
    ways = []
    for width, score_temperature in sorted(kinds):
        pool = pools.of(width, score_temperature)
        for levels in range(1, pools.levels + 1):
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
                accepted = cut(pool, levels, nodes)
                continued = (width,) * (levels - 1)
                ways.append(
                    Candidate("dynamic", setting, make(**setting), accepted, nodes, continued)
                )
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


class _Pools:
    """Pools of trees of each width and score temperature, replayed when first asked for."""

    def __init__(
        self,
        known: KnownTexts,
        proposer: Any,
        sampling: Sampling,
        levels: int,
        tick: Callable[[str], None],
    ) -> None:
        self.levels = levels
        self._about = known, proposer, sampling
        self._tick = tick
        self._found: dict[tuple[int, float], Pool] = {}

    def of(self, width: int, score_temperature: float) -> Pool:
        """Return the pool of trees with up to `width` children a node and `levels` levels."""
        if (width, score_temperature) not in self._found:
            self._tick(f"trees {width} wide, score temperature {score_temperature:g}")
            known, proposer, sampling = self._about
            nodes = min(width + (self.levels - 1) * width**2, MOST)
            settings = TreeSettings(
                length=self.levels, width=width, nodes=nodes, score_temperature=score_temperature
            )
            # All candidate nodes are given, so that `cut` can take any smaller tree from them.
            proposer.replan(TreePlan(settings, give_all=True))
            self._found[width, score_temperature] = _needs(known, proposer, sampling)
        return self._found[width, score_temperature]


def _lookups(
    known: KnownTexts, spec: str, sampling: Sampling, tick: Callable[[str], None]
) -> tuple[list[Candidate], dict[str, Any]]:
    """Return `candidates` of a lookup: chains of each length."""
    tick("guesses")
    target = known.target
    default: Any = load_proposer(spec, target, print)
    lengths = sorted({*LENGTHS, default.max_drafted})
    longest = load_proposer(spec, target, print, {"length": lengths[-1]})
    # A lookup has one token a position, so a right draft has rank 0; a wrong or missing one is
    # noted as 1, which is all that `runs` has to know.
    ranks: list[list[list[int]]] = [[] for _ in known.texts]
    found_counts: list[list[int]] = [[] for _ in known.texts]
    for rows, tree, true_tokens in replay_roots(known, longest, sampling):
        drafts = tree.tokens[:, 1:]
        wrong = (drafts != true_tokens).long()
        for row, values, tokens in zip(rows, wrong.tolist(), drafts.tolist(), strict=True):
            ranks[row].append(values)
            # Missing drafts are `NO_NODE`, which is negative.
            found_counts[row].append(sum(token >= 0 for token in tokens))
    ways = []
    for length in lengths:
        # A default value is taken now; in the body `length` would be the last one of the loop.
        def make(length=length):
            return load_proposer(spec, target, print, {"length": length})

        accepted = runs(ranks, length)
        drafted = []
        for counts in found_counts:
            drafted.append([min(count, length) for count in counts])
        ways.append(Candidate("chain", {"length": length}, make, accepted, length, (), drafted))
    return first_of(ways, {"length": default.max_drafted}), {}


def first_of(found: list[Candidate], setting: dict[str, Any]) -> list[Candidate]:
    """Return `found` with the candidate of this `setting` first, the others in their order."""
    assert any(candidate.setting == setting for candidate in found), (
        "the drafter's own tree is one of the candidates"
    )
    # False sorts before True, and `sorted` keeps the order of equals.
    return sorted(found, key=lambda candidate: candidate.setting != setting)


def _ranks(
    known: KnownTexts, proposer: Any, sampling: Sampling, path: KnownPath
) -> list[list[list[int]]]:
    """Return the ranks of the true next tokens, given those before them, for each text and root."""
    proposer.replan(path)
    ranks_of_texts: list[list[list[int]]] = [[] for _ in known.texts]
    for rows, _, _ in replay_roots(known, proposer, sampling):
        for row, ranks in zip(rows, path.ranks.tolist(), strict=True):
            ranks_of_texts[row].append(ranks)
    return ranks_of_texts


def _needs(known: KnownTexts, proposer: Proposer, sampling: Sampling) -> Pool:
    """Return the pool of what `proposer` drafts: `nodes_needed` at each root."""
    pool: Pool = [[] for _ in known.texts]
    for rows, tree, true_tokens in replay_roots(known, proposer, sampling):
        # One [rows][depths] table for each number of levels.
        tables = [table.tolist() for table in nodes_needed(tree, true_tokens)]
        for index, row in enumerate(rows):
            pool[row].append([table[index] for table in tables])
    return pool


def cut(pool: Pool, levels: int, nodes: int) -> Counts:
    """Return the accepted drafts of trees of the best `nodes` nodes in at most `levels` levels."""

    def accepted_at(needed_by_levels: list[list[int]]) -> int:
        # The last table is of all levels that there are, and stands for any larger number of them.
        needed = needed_by_levels[min(levels, len(needed_by_levels)) - 1]
        # The needed number rises with depth, so the depths that fit are the first ones.
        return sum(need <= nodes for need in needed)

    return [list(map(accepted_at, text)) for text in pool]


def runs(ranks: Iterable[Iterable[Sequence[int]]], length: int) -> Counts:
    """Return the accepted drafts of chains: each root's leading zero ranks, `length` at most."""

    def leading_zeros(root: Sequence[int]) -> int:
        most, count = min(len(root), length), 0
        while count < most and root[count] == 0:
            count += 1
        return count

    return [list(map(leading_zeros, text)) for text in ranks]


def along(ranks: Iterable[Iterable[Sequence[int]]], shape: Sequence[Ranks]) -> Counts:
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


def rank_table(
    ranks: Iterable[Iterable[Sequence[int]]],
) -> list[list[float]]:
    """Return the share of roots at which the draft of each depth and rank is right, `[D][RANKS]`.

    A depth counts only the roots at which all tokens before it were among the
    `BEST` ranks. The shares of a depth never rise with the rank, because a tree offers better
    siblings first.
    """
    roots = list(chain.from_iterable(ranks))
    reached = roots
    table = []
    for depth in range(len(roots[0]) if roots else 0):
        if depth:
            # The roots that reached the depth above, less those whose token there was not among
            # the `BEST`.
            reached = [root for root in reached if root[depth - 1] < BEST]
        counts = Counter(root[depth] for root in reached)
        shares = [counts[rank] / max(len(reached), 1) for rank in range(RANKS)]
        # A rank that was right more often than a better one, by chance, raises the better one.
        table.append([max(shares[rank:]) for rank in range(RANKS)])
    return table


def _inner(shape: Sequence[Ranks]) -> list[int]:
    """Return the number of nodes with children at each level of `shape` but the last."""
    parents = {node[:-1] for node in shape if len(node) > 1}
    # A node's rank tuple is as long as its depth.
    parents_at = Counter(map(len, parents))
    return [parents_at[level] for level in range(1, max(map(len, shape)))]
