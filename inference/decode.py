"""The decode loop: prefill -> [propose -> verify -> accept -> commit]* -> tokens, and one record a
round.

It knows no method: a new drafter is a new proposer. Shapes: B batch, N tree nodes with the root, D
levels, A accepted nodes with the root, V vocabulary.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import StopStringCriteria

from ..heads.errors import UserError
from .accept import Verdict, judge
from .cache import TreeCache
from .clock import Clock
from .device import send
from .noise import row_keys
from .proposer import Accepted, Prompts, Proposer
from .sampling import Draws
from .settings import GREEDY, Sampling
from .target import Hidden, Target
from .tree import DraftTree

FIRST_CAPACITY = 256  # new positions that a cache has room for before it doubles


@dataclass(frozen=True)
class Request:
    """A prompt, and the name under which its noise is drawn: the same name, seed and prompt give
    the same text in any batch."""

    prompt_ids: Sequence[int]
    id: int = 0
    sample: int = 0


@dataclass
class Round:
    """What one step of the loop did for one request. The step that follows the prefill is not a
    round: its `drafted` is None.

    Times are of the whole batch's round.
    """

    tokens: list[int]
    """Tokens kept, at most `accepted + 1`: nothing past an end token, a stop string or the
    limit."""
    drafted: int | None = None
    """Nodes verified, without the root and without missing ones."""
    accepted: int = 0
    """Drafts on the accepted path, before anything was cut."""
    offered: int = 0
    """`accepted`, and one more if a draft stood after the last of them and was refused."""
    rule: str = ""
    """What decided: see `accept.Verdict`."""
    rows: int = 1
    """Requests in the batch during this round."""
    expected: float | None = None
    """Tokens of this round in expectation over the target's randomness (`accept.expected_tokens`),
    where that is defined."""
    overlap: list[float] | None = None
    """sum of min(p, q) at each node of the accepted path where drafts were offered; rules that
    compare distributions only."""
    t_draft_s: float = 0.0
    t_verify_s: float = 0.0
    t_accept_s: float = 0.0
    t_kv_s: float = 0.0
    t_round_s: float = 0.0
    """Wall time; what the parts leave of it is the host's."""


@dataclass
class Generation:
    """A finished request: its tokens, its rounds and why it ended (eos, stop, length, or context:
    the target's positions)."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""
    ttft_s: float = 0.0
    decode_s: float = 0.0

    @property
    def lossless(self) -> bool:
        """Whether every round was decided by a rule that keeps the target's distribution."""
        return all(round_.rule != "typical" for round_ in self.rounds)


def generate(
    target: Target,
    proposer: Proposer,
    requests: Sequence[Request | Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_ids: frozenset[int] | None = None,
    stop: Sequence[str] = (),
) -> list[Generation]:
    """Decode a batch of requests to their ends; see `decode`. Token lists become requests numbered
    from 0."""
    named = [r if isinstance(r, Request) else Request(r, i) for i, r in enumerate(requests)]
    results = [Generation(list(request.prompt_ids)) for request in named]
    started = time.perf_counter()
    for steps in decode(target, proposer, named, max_new_tokens, sampling, eos_ids, stop):
        now = time.perf_counter() - started
        for index, step, reason in steps:
            result = results[index]
            if step.drafted is None:
                result.ttft_s = now
            else:
                result.rounds.append(step)
            result.token_ids.extend(step.tokens)
            result.finish_reason = reason or ""
            result.decode_s = now - result.ttft_s
    return results


def generate_one(
    target: Target,
    proposer: Proposer,
    request: Request | Sequence[int],
    max_new_tokens: int,
    **options: Any,
) -> Generation:
    """`generate` for a single request."""
    return generate(target, proposer, [request], max_new_tokens, **options)[0]


_AT_WORK: WeakSet[Proposer] = WeakSet()
"""Drafters with a batch: their state belongs to it, so a second one at the same time is refused."""

Step = tuple[int, Round, str | None]
"""Place of a request in the call, what was decided for it, and why it has ended (None: it goes
on)."""


@torch.inference_mode()
def decode(
    target: Target,
    proposer: Proposer,
    requests: Sequence[Request],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_ids: frozenset[int] | None = None,
    stop: Sequence[str] = (),
) -> Generator[list[Step], None, None]:
    """Yield the target's own continuation of all prompts, round by round, as it is verified.

    A row ends at an end token or with the token that completes a stop string (both are yielded),
    after `max_new_tokens`, or where the target's positions end, and then leaves the batch. Raises
    `UserError` for an empty prompt and for one that leaves no room.
    """
    if not all(isinstance(text, str) and text for text in stop):
        raise UserError("a stop string must be a text of at least one character")
    if proposer in _AT_WORK:
        raise UserError(
            "this drafter is at work on another batch; end or close that one first, or load a "
            "second drafter"
        )
    batch = _Batch(
        target,
        proposer,
        requests,
        max_new_tokens,
        sampling,
        target.eos_ids if eos_ids is None else eos_ids,
        stop,
    )
    _AT_WORK.add(proposer)
    try:
        yield batch.start()
        while batch.rows:
            yield batch.round()
        batch.clock.settle(wait=True)
    finally:
        _AT_WORK.discard(proposer)
        proposer.finish()


class _Batch:
    """The requests still running, one a row."""

    def __init__(
        self,
        target: Target,
        proposer: Proposer,
        requests: Sequence[Request],
        max_new_tokens: int,
        sampling: Sampling,
        eos_ids: frozenset[int],
        stop: Sequence[str],
    ) -> None:
        _check(target, requests, max_new_tokens)
        sampling = sampling.resolved(target.repetition_penalty)
        self.target, self.proposer, self.sampling, self.eos_ids = (
            target,
            proposer,
            sampling,
            eos_ids,
        )
        self.rows = list(range(len(requests)))
        self.texts = [list(request.prompt_ids) for request in requests]
        self.requests = requests
        self.wanted = max_new_tokens
        self.left = [min(max_new_tokens, target.max_positions - len(text)) for text in self.texts]
        self.stop = StopStringCriteria(target.tokenizer, list(stop)) if stop else None
        self.clock = Clock(target.device)
        self.cache = self._new_cache()

    def _new_cache(self) -> TreeCache:
        prompt, new = max(map(len, self.texts)), max(self.left)
        # undecided slots past the last position that can be kept
        beyond = self.proposer.max_drafted + 1
        static = self.target.compiled
        capacity = prompt + (new if static else min(new, FIRST_CAPACITY)) + beyond
        if static:
            # few capacities, so that few shapes are compiled
            capacity = 1 << (capacity - 1).bit_length()
        return TreeCache(
            len(self.texts),
            capacity,
            self.target.device,
            self.target.max_positions + beyond,
            static,
        )

    def start(self) -> list[Step]:
        """Prefill all prompts; the target's first token of each."""
        device, target = self.target.device, self.target
        lengths = [len(text) for text in self.texts]
        ids = torch.tensor(
            [text + [0] * (max(lengths) - len(text)) for text in self.texts], device=device
        )
        hidden = target.prefill(ids, self.cache, self.proposer.taps)
        self.cache.lengths = list(lengths)
        row_lengths = torch.tensor(lengths, device=device)
        rows = torch.arange(len(lengths), device=device)
        text = torch.where(
            torch.arange(ids.shape[1], device=device) < row_lengths[:, None], ids, ids[:, :1]
        )
        keys = row_keys(self.sampling.seed, [(r.id, r.sample) for r in self.requests], device)
        # the last prompt token is the root of the first choice
        self.draws = Draws(self.sampling, keys, text, row_lengths - 1)
        before = ids[rows, row_lengths - 1][:, None]
        logits = target.head(hidden.last[rows, row_lengths - 1])[:, None]
        self.root = self.draws.choices(self.draws.scores(logits, before[:, None]), 0)[:, 0]
        self.draws.extend(before, torch.ones_like(row_lengths))
        first = self.root.tolist()
        self.proposer.prefill(
            Prompts(
                [[*t, f] for t, f in zip(self.texts, first, strict=True)],
                ids,
                row_lengths,
                hidden,
                self.cache,
            )
        )
        return self._take([[token] for token in first], [Round([]) for _ in first])

    def round(self) -> list[Step]:
        started = time.perf_counter()
        clock = self.clock
        clock.mark()
        tree = self.proposer.propose(self.root, self.draws)
        clock.mark()
        tables = tree.tables
        hidden = self.target.forward_tree(
            tree.tokens,
            tables.ancestors,
            tables.depths,
            tables.depths,
            self.cache,
            self.proposer.taps,
        )
        logits = self.target.head(hidden.last)
        clock.mark()
        decided = decide(tree, judge(tree, logits, self.draws))
        clock.mark()
        self._commit(tree, decided, hidden)
        clock.mark()
        counts = zip(decided.drafted, decided.nodes, decided.refused, strict=True)
        records = [
            Round([], n, len(nodes) - 1, len(nodes) - 1 + refused, decided.rule, len(self.rows))
            for n, nodes, refused in counts
        ]
        for row, record in enumerate(records):
            record.expected = decided.expected[row] if decided.expected is not None else None
            record.overlap = decided.overlap[row] if decided.overlap is not None else None
        steps = self._take(decided.tokens, records)
        for record in records:
            record.t_round_s = time.perf_counter() - started
        clock.close(records)
        return steps

    def _commit(self, tree: DraftTree, decided: Decided, hidden: Hidden) -> None:
        counts = [len(nodes) for nodes in decided.nodes]
        width = max(counts)
        path = decided.path[:, :width].clamp(min=0)
        in_place = all(nodes == list(range(len(nodes))) for nodes in decided.nodes)
        self.cache.commit(counts, None if in_place else path)
        accepted = Accepted(
            decided.tokens,
            decided.nodes,
            path,
            tree.tokens.gather(1, path),
            decided.counts,
            Hidden(_rows(hidden.last, path), tuple(_rows(tap, path) for tap in hidden.taps)),
            decided.choices,
        )
        self.draws.reserve(self.cache.longest + width)
        self.draws.extend(accepted.ids, accepted.counts)
        self.root = decided.last
        self.proposer.commit(accepted)

    def _take(self, tokens: list[list[int]], records: list[Round]) -> list[Step]:
        """Cut each row's tokens where it ends, and let finished rows leave."""
        steps: list[Step] = []
        going: list[int] = []
        for row, (new, record) in enumerate(zip(tokens, records, strict=True)):
            index = self.rows[row]
            record.tokens, reason = self._cut(index, new)
            if reason is None:
                going.append(row)
            steps.append((index, record, reason))
        if len(going) < len(self.rows):
            self.rows = [self.rows[row] for row in going]
            if going:
                kept = send(going, self.root.device)
                self.root = self.root[kept]
                self.draws.keep(kept)
                self.cache.keep(going)
                self.proposer.keep(going)
        return steps

    def _cut(self, index: int, tokens: list[int]) -> tuple[list[int], str | None]:
        text = self.texts[index]
        kept: list[int] = []
        for token in tokens:
            text.append(token)
            kept.append(token)
            self.left[index] -= 1
            if token in self.eos_ids:
                return kept, "eos"
            if self.stop is not None and self._stops(text):
                return kept, "stop"
            if self.left[index] == 0:
                written = len(text) - len(self.requests[index].prompt_ids)
                return kept, "length" if written == self.wanted else "context"
        return kept, None

    def _stops(self, text: list[int]) -> bool:
        assert self.stop is not None
        tail: Any = torch.tensor([text[-self.stop.maximum_token_len :]])
        return bool(self.stop(tail, None).any())


def _check(target: Target, requests: Sequence[Request], max_new_tokens: int) -> None:
    if not requests:
        raise UserError("there is no prompt; give at least one")
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise UserError(
            f"max_new_tokens must be a whole number of at least 1, not {max_new_tokens!r}"
        )
    for request in requests:
        length = len(request.prompt_ids)
        if not length:
            raise UserError("the prompt is empty; give at least one token")
        if not all(
            isinstance(token, int) and 0 <= token < target.vocab_size
            for token in request.prompt_ids
        ):
            raise UserError(
                f"a prompt holds something that is no token id of {target.name} (0 to "
                f"{target.vocab_size - 1})"
            )
        if length >= target.max_positions:
            raise UserError(
                f"a prompt of {length} tokens leaves no room in {target.max_positions} positions; "
                "shorten it"
            )


def _rows(states: Tensor, path: Tensor) -> Tensor:
    """Features `[B, N, H]` -> those of the nodes `path` `[B, A]`."""
    if len(states) == 1:
        return states[:, path[0]]
    return states.gather(1, path[..., None].expand(-1, -1, states.shape[-1]))


@dataclass
class Decided:
    """A round's verdict on the host, with what the device goes on with."""

    nodes: list[list[int]]
    tokens: list[list[int]]
    drafted: list[int]
    refused: list[bool]
    """Whether a draft stood after the last accepted node."""
    rule: str
    choices: list[list[int]] | None
    expected: list[float] | None
    overlap: list[list[float]] | None
    path: Tensor
    """[B, D + 1], padded with NO_NODE."""
    counts: Tensor
    last: Tensor


def decide(tree: DraftTree, verdict: Verdict) -> Decided:
    """Bring a verdict to the host. The single device-to-host synchronisation of a round is here,
    one packed tensor."""
    batch = len(verdict.node)
    tables = tree.tables
    paths = tables.paths.expand(batch, -1, -1)
    path = paths[torch.arange(batch, device=paths.device), verdict.node]
    counts = (path >= 0).sum(-1)
    parts = [path, tree.tokens.gather(1, path.clamp(min=0)), counts[:, None], verdict.last[:, None]]
    there = tree.tokens[:, 1:] >= 0
    parts.append(there.sum(-1, keepdim=True))
    parts.append((there & (tables.parents[:, 1:] == verdict.node[:, None])).any(-1, keepdim=True))
    if verdict.choices is not None:
        parts.append(verdict.choices)
    if verdict.expected is not None:
        parts.append(_bits(verdict.expected[:, None]))
    if verdict.overlap is not None:
        parts.append(_bits(verdict.overlap))
    columns = iter(_split(torch.cat(parts, dim=1).tolist(), [part.shape[1] for part in parts]))
    node_rows, token_rows, count_rows, last_rows, drafted_rows, refused_rows = (
        next(columns) for _ in range(6)
    )
    nodes = [row[:count] for row, (count,) in zip(node_rows, count_rows, strict=True)]
    tokens = [
        [*row[1 : len(taken)], *last]
        for row, taken, last in zip(token_rows, nodes, last_rows, strict=True)
    ]
    choices = next(columns) if verdict.choices is not None else None
    expected = [_floats(row)[0] for row in next(columns)] if verdict.expected is not None else None
    overlap = None
    if verdict.overlap is not None:
        shape = tree.shape
        assert shape is not None
        at_nodes = [_floats(row) for row in next(columns)]
        overlap = [
            [row[n] for n in taken if shape.children[n]]
            for row, taken in zip(at_nodes, nodes, strict=True)
        ]
    drafted = [count for (count,) in drafted_rows]
    refused = [bool(flag) for (flag,) in refused_rows]
    return Decided(
        nodes,
        tokens,
        drafted,
        refused,
        verdict.rule,
        choices,
        expected,
        overlap,
        path,
        counts,
        verdict.last,
    )


def _split(rows: list[list[int]], widths: list[int]) -> Iterator[list[list[int]]]:
    start = 0
    for width in widths:
        yield [row[start : start + width] for row in rows]
        start += width


def _bits(values: Tensor) -> Tensor:
    """float32 bit patterns, so that floats travel with integers in one transfer."""
    return values.float().contiguous().view(torch.int32).long()


def _floats(bits: list[int]) -> list[float]:
    return list(struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits)))
