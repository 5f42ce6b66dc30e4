"""Costs of a round on this machine, and the tokens per second that they predict for a candidate.

Verification is timed by batch, nodes and context; everything else is fitted to the shape of what is
drafted. Both are measured in the decode loop itself, where caches are as cold and the host is as
busy as in real decoding.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy
import torch
from torch import Tensor

from ....heads.errors import UserError
from ....heads.files import JsonObject
from ....heads.vocabulary import spread_ids
from ...decode import Request, Round, decode
from ...proposer import Prompts, Proposer
from ...proposers.plain import PlainDecoding
from ...replay import replay
from ...rounds.sampling import Draws
from ...rounds.tree import NO_NODE, DraftTree, TreeShape
from ...settings import GREEDY, Sampling
from ...targets.target import Target
from .budget import FEWEST_ROUNDS, Timings
from .candidates import Candidate
from .replay_roots import KnownText

NODES = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # drafted nodes of which verification is timed
SHORTEST = 16  # tokens of a prompt
CONTEXT = 64  # positions at which a pass over four tokens is timed
FOUR_TOKENS = 9  # samples of it
SETTLE = 2  # rounds of a run that are not counted: the first ones after a prefill are slower


class FixedSizes(Proposer):
    """Proposer whose drafts are never right and cost nothing to make.

    Each round has a tree of another size, and emits exactly one token.
    """

    name = "fixed sizes"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.max_drafted = max(sizes)
        # Every node has three children: a tree of ordinary width and depth.
        # Draft i is node i + 1: the drafts 0, 1, 2 are children of node 0, 3, 4, 5 of node 1.
        parents = [draft // 3 for draft in range(max(sizes))]
        self._shapes = [TreeShape((NO_NODE, *parents[:size])) for size in sizes]
        self._round = 0

    def prefill(self, prompts: Prompts) -> None:
        self._round = 0

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        shape = self._shapes[self._round % len(self._shapes)]
        self._round += 1
        tokens = torch.full((len(root), shape.nodes), NO_NODE, device=root.device)
        tokens[:, 0] = root
        return DraftTree(tokens, shape)


Table = dict[int, dict[float, dict[int, float]]]
"""Median seconds of a verification, `table[batch][context][nodes]`, of drafted nodes without the
root."""


@dataclass
class VerifyCosts:
    """Seconds of a verification at any number of nodes and context."""

    table: Table

    def seconds(self, batch: int, nodes: int, context: float) -> float:
        """Return the seconds of a verification of `nodes` drafts in each of `batch` rows.

        They are interpolated linearly in nodes and in context, and constant outside of what was
        measured. `batch` must have been measured.
        """
        contexts = self.table[batch].items()
        return between({at: between(sizes, nodes) for at, sizes in contexts}, context)


def stored_costs(table: JsonObject | None) -> VerifyCosts:
    """Return `VerifyCosts` from their table as a journal gives it back; empty ones for None."""
    # Not strict, since JSON has texts for the keys.
    return VerifyCosts(msgspec.convert(table or {}, Table, strict=False))


def between(points: dict[Any, float], at: float) -> float:
    """Return the linear interpolation through `points` at `at`; the nearest one outside of them."""
    known = sorted(points)
    return float(numpy.interp(at, known, [points[size] for size in known]))


def verification(
    target: Target,
    batches: Sequence[int],
    contexts: Sequence[int],
    text: Sequence[int],
    tick: Callable[[str], None],
    samples: int,
    seconds: float,
) -> VerifyCosts:
    """Return the times of verifying trees of all sizes at each batch size and context.

    `text` is repeated and cut to make the prompts. Sizes take turns, round by round. `samples`:
    rounds per median, fewer where the target's positions are few. `seconds`: the time for
    all of it, in equal shares; with less time there are fewer samples, and contexts whose prompts
    alone would take more than a share are left out, except for the first one of a batch size.

    Contexts are rounded to what fits; each row of the table names the context that its rounds had
    on average. Raises `UserError` for a target with too few positions.
    """
    # Every round emits one token, so a sweep over all sizes takes as many positions as there are
    # sizes.
    samples = min(samples, (target.max_positions - max(NODES) - SHORTEST) // len(NODES) - 1)
    if samples < FEWEST_ROUNDS:
        raise UserError(
            f"{target.name} has {target.max_positions} positions, too few to time verification of "
            f"{max(NODES)} drafts"
        )
    rounds = samples * len(NODES) + SETTLE
    # The rounds and the first sweep emit a token each, and the largest tree has to fit after the
    # last of them, with its root.
    room = target.max_positions - rounds - len(NODES) - max(NODES) - 1
    # The uncounted rounds, the uncounted sweep, and `FEWEST_ROUNDS` sweeps for the medians.
    fewest = SETTLE + len(NODES) * (1 + FEWEST_ROUNDS)
    table: Table = {}
    # A run adds one token a round. Its prompt is shorter by half of them, so that the context asked
    # for is the mean one.
    lengths = sorted({max(1, min(context - rounds // 2, room)) for context in contexts})
    share = seconds / (len(batches) * len(lengths))
    for batch in batches:
        table[batch] = {}
        for length in lengths:
            if table[batch] and length * batch * _token_seconds(table) > share:
                tick(
                    f"verification, batch {batch}, context {length + rounds // 2} is left out: it "
                    "takes too long"
                )
                continue
            tick(f"verification, batch {batch}, context {length + rounds // 2}")
            prompt = [text[i % len(text)] for i in range(length)]
            until = time.monotonic() + share, fewest
            records = run(
                target, FixedSizes(NODES), [prompt] * batch, rounds + len(NODES), GREEDY, until
            )
            table[batch][length + len(records) / 2] = _median_by_size(records)
    return VerifyCosts(table)


def four_tokens(target: Target) -> float | None:
    """Return the time of a pass over four tokens as a multiple of one over one token.

    It is a median over rounds of both kinds in turn, one request, `CONTEXT` positions; None for a
    target with fewer, for a compiled one, whose compiler would take minutes, or on a device that
    has not reported its times. It takes a second, or ten of a slow target.
    """
    sizes = (0, 3)
    rounds = SETTLE + len(sizes) * (1 + FOUR_TOKENS)
    if target.compiled or target.max_positions < CONTEXT + rounds + 4:
        return None
    prompt = spread_ids(target.vocab_size, CONTEXT).tolist()
    until = time.monotonic() + 10, SETTLE + len(sizes) * (1 + FEWEST_ROUNDS)
    records = run(target, FixedSizes(sizes), [prompt], rounds, GREEDY, until)
    times = _median_by_size(records, sizes)
    return times[3] / times[0] if times.keys() == {*sizes} else None


def _median_by_size(records: Sequence[Round], nodes: Sequence[int] = NODES) -> dict[int, float]:
    """Return the median verification time of each of `nodes`, from a run of `FixedSizes(nodes)`."""
    sizes: dict[int, list[float]] = {size: [] for size in nodes}
    for number, record in enumerate(records):
        # The first sweep is not counted: each size is slower when it runs for the first time. A
        # time is 0 where a device has not reported it yet.
        if number >= SETTLE + len(nodes) and record.t_verify_s:
            sizes[nodes[number % len(nodes)]].append(record.t_verify_s)
    return {size: statistics.median(times) for size, times in sizes.items() if times}


def _token_seconds(table: Table) -> float:
    """Return a rough estimate of the seconds that one token of a prompt takes.

    It is the time of one node of the largest tree, at the first batch size and context timed.
    """
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
    """Return the records of the first `rounds` rounds of a batch that no end token ends.

    There are fewer where the target's positions end, and after the moment `until[0]` (of
    `time.monotonic`) once there are `until[1]` of them. Each record is of one row; its `drafted` is
    set to the largest of all rows, which is the size that was verified.
    """
    records: list[Round] = []
    requests = [Request(prompt, i) for i, prompt in enumerate(prompts)]
    steps = decode(target, proposer, requests, target.max_positions, sampling, frozenset())
    for done in steps:
        record = done[0][1]
        if record.drafted is None:  # the prefill
            continue
        # Rounds of a smaller batch would be cheaper.
        if record.rows < len(requests):
            break
        record.drafted = max(step.drafted or 0 for _, step, _ in done)
        records.append(record)
        if len(records) == rounds or (len(records) >= until[1] and time.monotonic() > until[0]):
            break
    # The loop is left in the middle: `close` runs the `finally` of `decode`, which ends the
    # proposer's batch.
    steps.close()
    return records


@dataclass
class DraftCosts:
    """Costs of one drafter's rounds besides verification, by batch size."""

    weights: dict[int, list[float]]
    """Seconds for each of `features`, fitted by least squares over the probes."""
    verify_ratio: dict[int, float]
    """Time of a verification in this drafter's rounds, relative to `VerifyCosts`: larger where taps
    are read, or where drafting has displaced the target's data from the processor's caches."""
    error: float
    """Median relative error of the fit over the probes."""

    def overhead(self, batch: int, candidate: Candidate) -> float:
        """Return the seconds of a round without its verification."""
        weighted = zip(self.weights[batch], features(candidate), strict=True)
        return max(sum(w * x for w, x in weighted), 0.0)


def features(candidate: Candidate) -> list[float]:
    """Return the quantities in which the time of a draft is linear.

    They are a constant, the levels after the first, the nodes that the drafter continues, and the
    drafted nodes; for fixed and for dynamic trees also a constant and the levels once more, for the
    work of building the tree.
    """
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


def probes_of(found: Sequence[Candidate], few: bool = False) -> list[Candidate]:
    """Return the candidates that are timed, from small to large, to fit the costs of all others.

    They are up to four of each kind and, for dynamic trees, of each width; the smallest and the
    largest if `few`.
    """
    probes: list[Candidate] = []
    for kind in ("chain", "fixed", "dynamic"):
        groups: dict[int, list[Candidate]] = {}
        for candidate in found:
            if candidate.kind == kind:
                width = max(candidate.draft, default=0) if kind == "dynamic" else 0
                groups.setdefault(width, []).append(candidate)
        for _, group in sorted(groups.items()):
            group.sort(key=lambda candidate: (len(candidate.draft), candidate.nodes))
            last = len(group) - 1
            inner = set() if few else {len(group) // 3, 2 * len(group) // 3}
            for index in sorted({0, last} | inner):
                probes.append(group[index])
    return probes


def drafting(
    target: Target,
    probes: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    batches: Sequence[int],
    verify: VerifyCosts,
    sampling: Sampling,
    tick: Callable[[str], None],
    timings: Timings,
) -> tuple[DraftCosts, DraftCosts]:
    """Return the costs of the drafter's rounds and of plain rounds, at the same moments.

    Rounds of some candidates, the `probes`, and of plain decoding are timed alternately, and costs
    for all other candidates are fitted to them. The ratio of the two costs remains true on a
    machine that slows down later. Raises `UserError` for a target with too few positions.
    """
    drafter, plain = DraftCosts({}, {}, 0.0), DraftCosts({}, {}, 0.0)
    errors: list[float] = []
    for batch in batches:
        tick(f"drafting, batch {batch}")
        # Prompts are cut so that every round of a sweep may accept all of its drafts.
        longest = SETTLE + timings.rounds + 1
        room = (
            target.max_positions
            - longest * (1 + max(len(probe.draft) + 1 for probe in probes))
            - max(NODES)
        )
        length = max(min(room, timings.tokens or room), 1)
        together = [prompts[i % len(prompts)][-length:] for i in range(batch)]
        context = statistics.mean(map(len, together)) + timings.rounds * timings.turns
        records_of = _sweeps(target, probes, together, sampling, timings)
        rest = []
        slowdowns = []  # of each verification, relative to the table
        for records in records_of:
            rest.append(statistics.median(r.t_round_s - r.t_verify_s for r in records))
            slowdowns.append([
                r.t_verify_s / verify.seconds(batch, r.drafted or 0, context) for r in records
            ])  # fmt: skip
        # Plain decoding has no drafts, so the constant is all that its rounds cost.
        plain.weights[batch] = [rest[0], *[0.0] * (len(features(PLAIN)) - 1)]
        plain.verify_ratio[batch] = statistics.median(slowdowns[0])
        drafter.weights[batch], fit_errors = _fit([features(probe) for probe in probes], rest[1:])
        # The first one is plain decoding's.
        drafter.verify_ratio[batch] = statistics.median(chain.from_iterable(slowdowns[1:]))
        errors += fit_errors
    drafter.error = statistics.median(errors)
    return drafter, plain


def _sweeps(
    target: Target,
    probes: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    timings: Timings,
) -> list[list[Round]]:
    """Return the rounds of plain decoding and of each probe, in this order, timed alternately.

    A machine may be faster in one sweep than in another, so the times of every sweep are scaled to
    give plain rounds the same median in all of them. Raises `UserError` where a run has no round.
    """
    records_of: list[list[Round]] = [[] for _ in (PLAIN, *probes)]
    paces = []
    for _ in range(timings.turns):
        rounds = SETTLE + timings.rounds
        sweep = []
        for way in (PLAIN, *probes):
            records = run(target, way.make(), prompts, rounds, sampling)[SETTLE:]
            # A device may not have reported the last rounds yet; their times are still 0.
            sweep.append([record for record in records if record.t_verify_s])
        if not all(sweep):
            raise UserError(
                f"{target.name} has {target.max_positions} positions, too few to time rounds of "
                f"{max(NODES)} drafts"
            )
        pace = statistics.median(record.t_round_s for record in sweep[0])
        paces.append(pace)
        for so_far, new in zip(records_of, sweep, strict=True):
            for record in new:
                record.t_verify_s /= pace
                record.t_round_s /= pace
            so_far += new
    # Times are in plain rounds of their own sweep now; the usual plain round makes them seconds.
    usual = statistics.median(paces)
    for record in chain.from_iterable(records_of):
        record.t_verify_s *= usual
        record.t_round_s *= usual
    return records_of


def _fit(rows: list[list[float]], seconds: list[float]) -> tuple[list[float], list[float]]:
    """Return weights of least squared relative error, and the relative error of each row.

    `rows` are the features of each probe, `seconds` its time. A slight pull towards 0 settles
    weights that the rows leave open, as when all probes are of one kind.
    """
    x = torch.tensor(rows, dtype=torch.float64)
    y = torch.tensor(seconds, dtype=torch.float64)
    # Dividing both sides by the time makes the residuals relative: every row should give 1.
    relative = x / y[:, None]
    # In proportion to the size of each column, so that units do not matter; a column of zeros still
    # gets a pull, or its weight would be undefined.
    pull = 1e-3 * torch.diag(relative.square().mean(0).sqrt().clamp(min=1e-9))
    goal = torch.cat([torch.ones_like(y), torch.zeros(len(pull), dtype=torch.float64)])
    # gelsd, by singular values, bears columns of zeros; torch's default on a CPU does not.
    both = torch.cat([relative, pull])
    weights = torch.linalg.lstsq(both, goal, driver="gelsd").solution
    return weights.tolist(), (relative @ weights - 1).abs().tolist()


def predicted(
    candidate: Candidate,
    texts: Sequence[KnownText],
    batch: int,
    verify: VerifyCosts,
    costs: DraftCosts,
) -> dict[str, float]:
    """Return tau and tokens per second of decoding `texts` in batches of `batch`.

    Each round is priced with the rows that are still running. Both are NaN where there is no round.
    """
    rounds = [_rounds(candidate, text, index) for index, text in enumerate(texts)]
    seconds, prices = 0.0, {}
    for start in range(0, len(texts), batch):
        together = rounds[start : start + batch]
        for number in range(max(map(len, together))):
            running = [row[number] for row in together if number < len(row)]
            # A batch is verified with as many nodes as its largest tree has.
            nodes = max(drafted for _, drafted, _ in running)
            context = sum(root for *_, root in running) / len(running)
            # The price changes slowly with the context: rounds of 32 positions share one.
            key = (len(running), nodes, context // 32)
            if key not in prices:
                prices[key] = _round_seconds(candidate, *key, verify, costs)
            seconds += prices[key]
    tokens = sum(emitted for emitted, *_ in chain.from_iterable(rounds))
    count = sum(map(len, rounds))
    return {
        "tau": tokens / count if count else float("nan"),
        "tokens_s": tokens / seconds if seconds else float("nan"),
    }


def _rounds(candidate: Candidate, text: KnownText, place: int) -> list[tuple[int, int, int]]:
    """Return emitted tokens, drafted nodes and position of the root of each round over `text`.

    `place` is the index of the text in the candidate's counts.
    """
    accepted, drafted = candidate.accepted[place], candidate.drafted
    rounds, root = [], text.start
    for emitted in replay([0] * text.start + accepted, text.start, len(text.ids)):
        nodes = candidate.nodes if drafted is None else drafted[place][root - text.start]
        rounds.append((emitted, nodes, root))
        root += emitted
    return rounds


def _round_seconds(
    candidate: Candidate,
    rows: int,
    nodes: int,
    bucket: float,
    verify: VerifyCosts,
    costs: DraftCosts,
) -> float:
    """Return the seconds of a round of `rows` requests, between the batch sizes measured.

    `bucket` is the context in units of 32 positions, rounded down; its middle is priced.
    """
    context = 32 * bucket + 16
    by_batch = {}
    for batch, ratio in costs.verify_ratio.items():
        verifying = ratio * verify.seconds(batch, nodes, context)
        by_batch[batch] = costs.overhead(batch, candidate) + verifying
    return between(by_batch, rows)
