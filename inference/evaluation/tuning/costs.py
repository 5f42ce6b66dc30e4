"""What rounds cost on this machine: verification by batch, nodes and context; everything else by
what is drafted.

Measured in the decode loop itself, where a round really runs: caches are as cold, and the host as
busy, as they will be.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from ....heads.errors import UserError
from ...decode import Request, Round, decode
from ...proposer import Accepted, PlainDecoding, Prompts, Proposer
from ...sampling import Draws
from ...settings import GREEDY, Sampling
from ...target import Target
from ...tree import NO_NODE, DraftTree, TreeShape
from ..options import SAMPLES, SWEEPS
from .candidates import Candidate

NODES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
FEWEST = 3  # samples that a median needs
SHORTEST = 16  # prompts
SETTLE = 2  # rounds of a run that are not counted: the first ones after a prefill are slower


class Filler:
    """Drafts that are never right and cost nothing to make, of another size each round: what
    verifying them takes."""

    name = "filler"

    def __init__(self, sizes: Sequence[int], taps: tuple[int, ...] = ()) -> None:
        self.taps, self.max_drafted = taps, max(sizes)
        self._shapes = [TreeShape((NO_NODE, *(i // 3 for i in range(size)))) for size in sizes]
        self._round = 0

    def prefill(self, prompts: Prompts) -> None:
        self._round = 0

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        shape = self._shapes[self._round % len(self._shapes)]
        self._round += 1
        tokens = torch.full((len(root), shape.nodes), NO_NODE, device=root.device)
        tokens[:, 0] = root
        return DraftTree(tokens, shape)

    def commit(self, accepted: Accepted) -> None: ...

    def keep(self, rows: list[int]) -> None: ...

    def finish(self) -> None: ...


@dataclass
class VerifyCosts:
    """Median seconds of a verification: `table[batch][context][nodes]`, drafted nodes without the
    root."""

    table: dict[int, dict[float, dict[int, float]]]

    def seconds(self, batch: int, nodes: int, context: float) -> float:
        """Linear between what was measured, in nodes and in context; at the ends, as there. `batch`
        must have been measured."""
        by_context = self.table[batch]
        return between({c: between(sizes, nodes) for c, sizes in by_context.items()}, context)


def between(points: dict[Any, float], at: float) -> float:
    """Linear interpolation through `points`; the nearest one outside of them."""
    places = sorted(points)
    if at <= places[0]:
        return points[places[0]]
    for low, high in pairwise(places):
        if at <= high:
            return points[low] + (points[high] - points[low]) * (at - low) / (high - low)
    return points[places[-1]]


def verification(
    target: Target,
    batches: Sequence[int],
    contexts: Sequence[int],
    text: Sequence[int],
    tick: Callable[[str], None],
    samples: int = SAMPLES,
    seconds: float = math.inf,
) -> VerifyCosts:
    """Time verification of every size at each batch and context; `text` is cut to prompts. Sizes
    take turns, round by round. `samples`: rounds behind every median, fewer where positions are
    few. `seconds`: the time for all; then there are fewer samples, and long contexts whose prompts
    alone would take their part of it are left out.

    Contexts are rounded to what fits; each row of the table names the context that its rounds had
    on average.
    """
    samples = min(samples, (target.max_positions - max(NODES) - SHORTEST) // len(NODES) - 1)
    if samples < FEWEST:
        raise UserError(
            f"{target.name} has {target.max_positions} positions, too few to time verification of "
            f"{max(NODES)} drafts"
        )
    rounds = samples * len(NODES) + SETTLE
    room = target.max_positions - rounds - len(NODES) - max(NODES) - 1
    fewest = SETTLE + len(NODES) * (1 + FEWEST)
    table: dict[int, dict[float, dict[int, float]]] = {}
    lengths = sorted({max(1, min(context - rounds // 2, room)) for context in contexts})
    part = seconds / (len(batches) * len(lengths))
    for batch in batches:
        table[batch] = {}
        for length in lengths:
            if table[batch] and length * batch * _token_seconds(table) > part:
                tick(
                    f"verification, batch {batch}, context {length + rounds // 2} is left out: it "
                    "takes too long"
                )
                continue
            tick(f"verification, batch {batch}, context {length + rounds // 2}")
            prompt = [text[i % len(text)] for i in range(length)]
            until = time.monotonic() + part, fewest
            found = run(target, Filler(NODES), [prompt] * batch, rounds + len(NODES), GREEDY, until)
            sizes: dict[int, list[float]] = {size: [] for size in NODES}
            for number, record in enumerate(found):
                if number >= SETTLE + len(NODES) and record.t_verify_s:
                    sizes[NODES[number % len(NODES)]].append(record.t_verify_s)
            table[batch][length + len(found) / 2] = {
                size: statistics.median(times) for size, times in sizes.items()
            }
    return VerifyCosts(table)


def _token_seconds(table: dict[int, dict[float, dict[int, float]]]) -> float:
    """About the seconds that a token of a prompt takes: those of a node of the largest tree at the
    first context timed."""
    sizes = next(iter(next(iter(table.values())).values()))
    return sizes[max(NODES)] / (max(NODES) + 1)


def run(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    rounds: int,
    sampling: Sampling,
    until: tuple[float, int] = (math.inf, 0),
) -> list[Round]:
    """The first `rounds` rounds of a batch that never ends; fewer where the target's positions do,
    and (but for so many) after the moment `until`, of `time.monotonic`.

    A record's `drafted` is the most of any row.
    """
    found: list[Round] = []
    requests = [Request(prompt, i) for i, prompt in enumerate(prompts)]
    steps = decode(target, proposer, requests, target.max_positions, sampling, frozenset())
    for done in steps:
        record = done[0][1]
        if record.drafted is None:
            continue
        if record.rows < len(requests):
            break
        record.drafted = max(step.drafted or 0 for _, step, _ in done)
        found.append(record)
        if len(found) == rounds or (len(found) >= until[1] and time.monotonic() > until[0]):
            break
    steps.close()
    return found


@dataclass
class DraftCosts:
    """What rounds of one drafter cost beside verification, by batch."""

    weights: dict[int, list[float]]
    """Of `features`, by least squares over probes."""
    verify_ratio: dict[int, float]
    """A verification in this drafter's rounds over `VerifyCosts`': its taps, and a cache that the
    drafter has emptied."""
    error: float
    """Median relative error of the fit over the probes."""

    def overhead(self, batch: int, candidate: Candidate) -> float:
        """Seconds of a round without its verification."""
        return max(
            sum(w * x for w, x in zip(self.weights[batch], features(candidate), strict=True)), 0.0
        )


def features(candidate: Candidate) -> list[float]:
    """What the time of a draft is linear in: levels, nodes that the drafter continues, nodes to
    judge; for trees of either kind also what their bookkeeping adds, once and for each level."""
    levels = len(candidate.draft)
    dynamic, fixed = candidate.kind == "dynamic", candidate.kind == "fixed"
    return [
        1.0,
        levels,
        sum(candidate.draft),
        candidate.nodes,
        dynamic,
        dynamic * levels,
        fixed,
        fixed * levels,
    ]


PLAIN = Candidate("plain decoding", {}, PlainDecoding, [], 0, ())


def drafting(
    target: Target,
    probes: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    verify: VerifyCosts,
    sampling: Sampling,
    tick: Callable[[str], None],
    samples: int = SAMPLES,
) -> tuple[DraftCosts, DraftCosts]:
    """Time rounds of some candidates and of plain decoding, all taking turns, and fit what all
    other candidates would take.

    The costs of the drafter's rounds, and of plain ones at the same moments: what the one takes in
    units of the other outlasts a machine that slows down.
    """
    drafter, plain = DraftCosts({}, {}, 0.0), DraftCosts({}, {}, 0.0)
    errors: list[float] = []
    for batch in batches:
        tick(f"drafting, batch {batch}")
        longest = SETTLE + samples // SWEEPS + 1
        room = (
            target.max_positions
            - longest * (1 + max(len(probe.draft) + 1 for probe in probes))
            - max(NODES)
        )
        together = [prompts[i % len(prompts)][-max(room, 1) :] for i in range(batch)]
        context = statistics.mean(map(len, together)) + samples
        records = _sweeps(target, probes, together, sampling, samples)
        rest = [statistics.median(r.t_round_s - r.t_verify_s for r in found) for found in records]
        slower = [  # than in the table
            [r.t_verify_s / verify.seconds(batch, r.drafted or 0, context) for r in found]
            for found in records
        ]
        plain.weights[batch] = [rest[0], *[0.0] * (len(features(PLAIN)) - 1)]
        plain.verify_ratio[batch] = statistics.median(slower[0])
        drafter.weights[batch], wrong = _fit([features(probe) for probe in probes], rest[1:])
        drafter.verify_ratio[batch] = statistics.median(chain.from_iterable(slower[1:]))
        errors += wrong
    drafter.error = statistics.median(errors)
    return drafter, plain


def _sweeps(
    target: Target,
    probes: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    samples: int,
) -> list[list[Round]]:
    """Rounds of plain decoding and of each probe, taking turns; every sweep's times are scaled to
    make plain rounds alike."""
    records: list[list[Round]] = [[] for _ in (PLAIN, *probes)]
    paces = []
    for _ in range(SWEEPS):
        rounds = SETTLE + samples // SWEEPS
        found = [
            run(target, p.make(), prompts, rounds, sampling)[SETTLE:] for p in (PLAIN, *probes)
        ]
        # a device may not have reported the last rounds yet
        found = [[r for r in own if r.t_verify_s] for own in found]
        if not all(found):
            raise UserError(
                f"{target.name} has {target.max_positions} positions, too few to time rounds of "
                f"{max(NODES)} drafts"
            )
        paces.append(statistics.median(r.t_round_s for r in found[0]))
        for own, new in zip(records, found, strict=True):
            for record in new:
                record.t_verify_s, record.t_round_s = (
                    record.t_verify_s / paces[-1],
                    record.t_round_s / paces[-1],
                )
            own += new
    usual = statistics.median(paces)
    for record in chain.from_iterable(records):
        record.t_verify_s, record.t_round_s = record.t_verify_s * usual, record.t_round_s * usual
    return records


def _fit(rows: list[list[float]], seconds: list[float]) -> tuple[list[float], list[float]]:
    """Weights of least relative error, and the errors; a slight pull to 0 settles what the rows
    leave open."""
    x = torch.tensor(rows, dtype=torch.float64)
    y = torch.tensor(seconds, dtype=torch.float64)
    relative = x / y[:, None]
    pull = 1e-3 * torch.diag(relative.square().mean(0).sqrt().clamp(min=1e-9))
    goal = torch.cat([torch.ones_like(y), torch.zeros(len(pull), dtype=torch.float64)])
    weights = torch.linalg.lstsq(torch.cat([relative, pull]), goal).solution
    return weights.tolist(), (relative @ weights - 1).abs().tolist()
