"""Every tree that a drafter could draft, and what each would accept at every root of known texts.

Kinds: chains of K; fixed shapes, the best of their size by measured acceptance of each depth and
rank (`growth.grow`, which finds what Sequoia's dynamic programme does); trees that follow the
drafter's confidence, cut to a number of nodes, at a fitted score temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ....heads.errors import UserError
from ...proposer import MOST, Proposer, load_proposer
from ...proposers.autoregressive import Planned, TreePlan
from ...proposers.eagle import RANKS
from ...proposers.early_exit import EarlyExit
from ...proposers.growth import Ranks, grow
from ...proposers.lookup import LookupProposer
from ...proposers.medusa import MedusaProposer
from ...settings import Sampling
from ...target import Target
from .replay_roots import BEST, KnownPath, KnownText, nodes_needed, replay_roots

LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
LEVELS = 8
WIDTHS = (2, 4, 8)
SCORE_TEMPERATURES = (0.3, 0.5, 0.7, 1.0, 1.4)
MIDDLING = (5, 16)  # levels and nodes of the tree that the score temperature is fitted on
BUDGETS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
Counts = list[list[int]]
"""For each text, a number at each of its roots."""
Pool = list[list[list[list[int]]]]
"""For each text, root and number of levels: the nodes that a tree needs to hold the path that
comes, to each depth."""


@dataclass
class Candidate:
    """One way to draft."""

    kind: str
    """chain, fixed or dynamic."""
    setting: dict[str, Any]
    """What `load_proposer` takes to draft so."""
    make: Callable[[], Proposer]
    accepted: Counts
    nodes: int
    """Drafted nodes, at most."""
    draft: tuple[int, ...]
    """Nodes that the drafter continues at each level after the first: what drafting costs."""
    drafted: Counts | None = None
    """Nodes at each root, where that varies."""

    @property
    def label(self) -> str:
        """As a person would name it."""
        setting = dict(self.setting)
        if "shape" in setting:
            shape = setting.pop("shape")
            setting |= {"length": max(map(len, shape)), "nodes": len(shape)}
        if self.kind == "chain":
            setting.pop("width", None)
        return " ".join(
            [self.kind, *(f"{key}={value}" for key, value in setting.items() if key != "tree")]
        )


def candidates(
    target: Target,
    spec: str,
    texts: Sequence[KnownText],
    sampling: Sampling,
    tick: Callable[[str], None],
) -> tuple[list[Candidate], dict[str, Any]]:
    """All that `spec`'s drafter can do, the default first, and what was measured on the way:
    acceptance of each depth and rank, accepted drafts at each score temperature. `tick` is called
    with a name before each pass over the texts.

    Raises `UserError` for drafters that cannot be replayed along a text.
    """
    proposer = load_proposer(spec, target, lambda message: None)
    check_tunable(proposer, spec)
    if isinstance(proposer, Planned):
        return _planned(target, proposer, texts, sampling, tick)
    if isinstance(proposer, MedusaProposer):
        return _heads(target, proposer, texts, sampling, tick)
    return _lookups(target, spec, texts, sampling, tick)


def check_tunable(proposer: Proposer, spec: str) -> None:
    """Raises `UserError` for drafters that cannot be replayed along a text, and for chains that end
    by themselves."""
    if isinstance(proposer, Planned) and not isinstance(proposer, EarlyExit):
        if proposer.plan.threshold:
            raise UserError("tune chooses a chain's length itself; leave out threshold")
        return
    if isinstance(proposer, MedusaProposer | LookupProposer):
        return
    raise UserError(
        f"{spec} cannot be tuned: it drafts in the target's own cache, or not at all; tune "
        "trained drafters or lookups"
    )


def _planned(
    target: Target,
    proposer: Any,
    texts: Sequence[KnownText],
    sampling: Sampling,
    tick: Callable[[str], None],
) -> tuple[list[Candidate], dict[str, Any]]:
    own: TreePlan = proposer.plan

    def make(**setting: Any) -> Callable[[], Proposer]:
        def ready() -> Proposer:
            proposer.replan(TreePlan(**{"length": 1, "width": 1, "nodes": None, **setting}))
            return proposer

        return ready

    tick("acceptance by depth and rank")
    lengths = sorted(
        {min(k, proposer.longest) for k in ({*LENGTHS, own.length} if own.width == 1 else LENGTHS)}
    )
    ranks = _ranks(target, proposer, texts, sampling, KnownPath(max(lengths[-1], own.length)))
    table = rank_table(ranks)
    found = [
        Candidate(
            "chain", {"length": k, "width": 1}, make(length=k), runs(ranks, k), k, (1,) * (k - 1)
        )
        for k in lengths
    ]
    for count in BUDGETS:
        shape = grow(table[:LEVELS], count)
        if len(shape) == count and max(node[-1] for node in shape):
            made = make(shape=shape)
            found.append(
                Candidate(
                    "fixed",
                    {"shape": shape},
                    made,
                    along(ranks, shape),
                    count,
                    tuple(_inner(shape)),
                )
            )
    levels = min(max(LEVELS, own.length if own.width > 1 else 0), proposer.longest)
    pools = _Pools(target, proposer, texts, sampling, levels, tick)
    score_temperature, taken = fitted_score_temperature(lambda h: pools.of(WIDTHS[1], h))
    wanted = {(width, score_temperature) for width in WIDTHS} | (
        {(own.width, own.score_temperature)} if own.width > 1 else set()
    )
    for width, h in sorted(wanted):
        pool = pools.of(width, h)
        for levels in range(1, pools.levels + 1):
            for nodes in sorted({*BUDGETS, own.nodes}):
                if levels <= nodes <= width + (levels - 1) * width**2:
                    setting = {
                        "length": levels,
                        "width": width,
                        "nodes": nodes,
                        **({"score_temperature": h} if h != 1 else {}),
                    }
                    accepted = cut(pool, levels, nodes)
                    found.append(
                        Candidate(
                            "dynamic",
                            setting,
                            make(**setting),
                            accepted,
                            nodes,
                            (width,) * (levels - 1),
                        )
                    )
    default: dict[str, Any] = {"length": own.length, "width": own.width}
    if own.width > 1:
        default |= {
            "nodes": own.nodes,
            **({"score_temperature": own.score_temperature} if own.score_temperature != 1 else {}),
        }
    return first_of(found, default), {
        "rank_acceptance": table,
        "accepted_by_score_temperature": taken,
        "score_temperature": score_temperature,
    }


def fitted_score_temperature(pool_at: Callable[[float], Pool]) -> tuple[float, dict[str, int]]:
    """The score temperature at which a middling tree accepts most drafts, and what it accepts at
    each.

    One temperature serves all sizes: in verification-and-trees 8.8 the best one hardly moves with
    the number of nodes.
    """
    taken = {
        score_temperature: sum(map(sum, cut(pool_at(score_temperature), *MIDDLING)))
        for score_temperature in SCORE_TEMPERATURES
    }
    return max(
        taken, key=lambda score_temperature: (taken[score_temperature], -abs(score_temperature - 1))
    ), {str(score_temperature): count for score_temperature, count in taken.items()}


class _Pools:
    """The candidates of trees of each width and score temperature, replayed when first asked
    for."""

    def __init__(
        self,
        target: Target,
        proposer: Any,
        texts: Sequence[KnownText],
        sampling: Sampling,
        levels: int,
        tick: Callable[[str], None],
    ) -> None:
        self.levels = levels
        self._about = target, proposer, texts, sampling
        self._tick = tick
        self._found: dict[tuple[int, float], Pool] = {}

    def of(self, width: int, score_temperature: float) -> Pool:
        if (width, score_temperature) not in self._found:
            self._tick(f"trees {width} wide, score temperature {score_temperature:g}")
            target, proposer, texts, sampling = self._about
            plan = TreePlan(
                self.levels,
                width,
                min(width + (self.levels - 1) * width**2, MOST),
                score_temperature=score_temperature,
            )
            plan.whole = True
            proposer.replan(plan)
            self._found[width, score_temperature] = _needs(target, proposer, texts, sampling)
        return self._found[width, score_temperature]


def _heads(
    target: Target,
    proposer: MedusaProposer,
    texts: Sequence[KnownText],
    sampling: Sampling,
    tick: Callable[[str], None],
) -> tuple[list[Candidate], dict[str, Any]]:
    count = proposer.heads
    tick("acceptance by depth and rank")
    comb = [(0,) * depth + (rank,) for depth in range(count) for rank in range(BEST)]
    ranks: list[list[list[int]]] = [[] for _ in texts]
    for rows, tree, coming in replay_roots(target, proposer.with_tree(comb), texts, sampling):
        hit = tree.tokens[:, 1:].view(len(rows), count, BEST) == coming[:, :count, None]
        place = hit.int().argmax(-1).masked_fill(~hit.any(-1), BEST)
        for row, values in zip(rows, place.tolist(), strict=True):
            ranks[row].append(values)
    table = rank_table(ranks, conditional=False)
    found = [
        _static("chain", proposer, ranks, [(0,) * d for d in range(1, k + 1)])
        for k in range(1, count + 1)
    ]
    shapes = {len(shape): shape for n in BUDGETS if (shape := grow(table, n))}
    found += [_static("fixed", proposer, ranks, shape) for shape in shapes.values()]
    pools: dict[float, Pool] = {}

    def pool_at(score_temperature: float) -> Pool:
        if score_temperature not in pools:
            tick(f"trees, score temperature {score_temperature:g}")
            largest = max(*BUDGETS, proposer.max_drafted)
            pools[score_temperature] = _needs(
                target, proposer.with_tree(largest, score_temperature), texts, sampling
            )
        return pools[score_temperature]

    score_temperature, taken = fitted_score_temperature(pool_at)

    def best_first(nodes: int, score_temperature: float) -> Candidate:
        setting = {"tree": "best-first", "nodes": nodes, "score_temperature": score_temperature}

        def ready():
            return proposer.with_tree(nodes, score_temperature)

        return Candidate(
            "dynamic", setting, ready, cut(pool_at(score_temperature), count, nodes), nodes, ()
        )

    found += [best_first(nodes, score_temperature) for nodes in BUDGETS]
    ranked = proposer.ranks
    own = (
        _static("fixed", proposer, ranks, ranked)
        if ranked
        else best_first(proposer.max_drafted, proposer.score_temperature)
    )
    return [own, *found], {
        "rank_acceptance": table,
        "accepted_by_score_temperature": taken,
        "score_temperature": score_temperature,
    }


def _static(
    kind: str,
    proposer: MedusaProposer,
    ranks: Sequence[Sequence[Sequence[int]]],
    shape: Sequence[Ranks],
) -> Candidate:
    setting = {"shape": list(shape)} if kind == "fixed" else {"tree": "chain", "nodes": len(shape)}
    return Candidate(
        kind, setting, lambda: proposer.with_tree(shape), along(ranks, shape), len(shape), ()
    )


def _lookups(
    target: Target,
    spec: str,
    texts: Sequence[KnownText],
    sampling: Sampling,
    tick: Callable[[str], None],
) -> tuple[list[Candidate], dict[str, Any]]:
    tick("guesses")
    own: Any = load_proposer(spec, target, print)
    lengths = sorted({*LENGTHS, own.max_drafted})
    longest = lengths[-1]
    ranks: list[list[list[int]]] = [[] for _ in texts]
    there: list[list[int]] = [[] for _ in texts]
    for rows, tree, coming in replay_roots(
        target, load_proposer(spec, target, print, {"length": longest}), texts, sampling
    ):
        wrong = (tree.tokens[:, 1:] != coming).long()
        for row, values, tokens in zip(
            rows, wrong.tolist(), tree.tokens[:, 1:].tolist(), strict=True
        ):
            ranks[row].append(values)
            there[row].append(sum(token >= 0 for token in tokens))
    found = []
    for k in lengths:

        def make(k=k):
            return load_proposer(spec, target, print, {"length": k})

        drafted = [[min(count, k) for count in counts] for counts in there]
        found.append(Candidate("chain", {"length": k}, make, runs(ranks, k), k, (), drafted))
    return first_of(found, {"length": own.max_drafted}), {}


def first_of(found: list[Candidate], setting: dict[str, Any]) -> list[Candidate]:
    """`found` with the one of this setting first."""
    assert any(candidate.setting == setting for candidate in found), (
        "the drafter's own tree is one of the candidates"
    )
    return sorted(found, key=lambda candidate: candidate.setting != setting)


def _ranks(
    target: Target, proposer: Any, texts: Sequence[KnownText], sampling: Sampling, path: KnownPath
) -> list[list[list[int]]]:
    """For each text and root, the ranks of the tokens that come, each given those before it."""
    proposer.replan(path)
    found: list[list[list[int]]] = [[] for _ in texts]
    for rows, _, _ in replay_roots(target, proposer, texts, sampling):
        for row, ranks in zip(rows, path.ranks.tolist(), strict=True):
            found[row].append(ranks)
    return found


def _needs(
    target: Target, proposer: Proposer, texts: Sequence[KnownText], sampling: Sampling
) -> Pool:
    """For each text, root and number of levels, the nodes needed to each depth (`nodes_needed`)."""
    found: Pool = [[] for _ in texts]
    for rows, tree, coming in replay_roots(target, proposer, texts, sampling):
        needed = [part.tolist() for part in nodes_needed(tree, coming)]
        for place, row in enumerate(rows):
            found[row].append([part[place] for part in needed])
    return found


def cut(pool: Pool, levels: int, nodes: int) -> Counts:
    """What the best `nodes` of the candidates of at most `levels` levels accept."""
    return [
        [sum(need <= nodes for need in root[min(levels, len(root)) - 1]) for root in text]
        for text in pool
    ]


def runs(ranks: Iterable[Iterable[Sequence[int]]], length: int) -> Counts:
    """What a chain of best tokens accepts: the leading zeros of each root's ranks, `length` at
    most."""
    return [
        [sum(1 for _ in takewhile(lambda r: r == 0, root[:length])) for root in text]
        for text in ranks
    ]


def along(ranks: Iterable[Iterable[Sequence[int]]], shape: Sequence[Ranks]) -> Counts:
    """What a fixed shape accepts: the longest beginning of each root's ranks that is a node of
    it."""
    nodes = set(shape)

    def depth(root: Sequence[int]) -> int:
        return next((d for d in range(len(root)) if tuple(root[: d + 1]) not in nodes), len(root))

    return [[depth(root) for root in text] for text in ranks]


def rank_table(
    ranks: Iterable[Iterable[Sequence[int]]], conditional: bool = True
) -> list[list[float]]:
    """How often the rank-r draft of each depth is right; with `conditional`, where all before it
    were among the candidates.

    Never rising in rank, since a tree offers better siblings first.
    """
    roots = [root for text in ranks for root in text]
    table = []
    for depth in range(len(roots[0]) if roots else 0):
        reached = [
            root for root in roots if not conditional or all(rank < BEST for rank in root[:depth])
        ]
        counts = [sum(root[depth] == rank for root in reached) for rank in range(RANKS)]
        shares = [count / max(len(reached), 1) for count in counts]
        table.append([max(shares[rank:]) for rank in range(RANKS)])
    return table


def _inner(shape: Sequence[Ranks]) -> list[int]:
    """Nodes at each level that have children."""
    parents = {node[:-1] for node in shape if len(node) > 1}
    return [
        sum(len(parent) == level for parent in parents) for level in range(1, max(map(len, shape)))
    ]
