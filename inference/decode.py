"""The decode loop: prefill -> [propose -> verify -> accept -> commit]* -> tokens and records.

The loop knows no drafting method: a new drafter is a new proposer.

Shapes: B rows of a batch, S prompt positions, N tree nodes with the root, A accepted nodes with the
root, H hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..heads.errors import UserError
from . import recorded
from .base.detokenize import StopStrings
from .base.settings import GREEDY, Sampling
from .proposers.contract import Prompts, Proposer, StaticProposer
from .proposers.custom_drafters import is_users, reported, wrong_tree
from .rounds.accept import judge
from .rounds.cache import TreeCache
from .rounds.device import Clock, send
from .rounds.noise import row_keys
from .rounds.outcome import Accepted, DeviceOutcome, Outcome
from .rounds.sampling import Draws
from .rounds.tree import DraftTree
from .targets.causal_model import CausalModel

FIRST_CAPACITY = 256  # new positions that a cache can hold before it doubles


@dataclass(frozen=True)
class Request:
    """Prompt, and the name under which its noise is drawn: `id` and `sample`.

    The same name, seed and prompt give the same text in any batch.
    """

    prompt_ids: Sequence[int]
    id: int = 0
    sample: int = 0
    """Number of the reply among those to the same prompt."""
    max_new_tokens: int | None = None
    """Limit of this reply's tokens; that of the batch if None."""
    seed: int | None = None
    """Seed of this reply's noise; that of the batch if None."""


@dataclass(kw_only=True)
class Round:
    """Record of one round for one request, or of the prefill, whose `drafted` is None.

    Times are those of the whole batch's round, in seconds.
    """

    tokens: list[int] = field(default_factory=list)
    """Emitted tokens, at most `accepted + 1`: nothing past an end token, a stop string or the
    limit."""
    drafted: int | None = None
    """Nodes verified, without the root and without missing nodes."""
    accepted: int = 0
    """Drafts on the accepted path, before the reply was cut."""
    offered: int = 0
    """`accepted`, and one more if a draft followed the last of them and was refused."""
    rule: str = ""
    """Rule that decided: see `accept.Verdict`."""
    rows: int = 1
    """Requests in the batch during this round."""
    overlap: list[float] | None = None
    """`Outcome.overlap` of this row; only from rules that compare distributions."""
    t_draft_s: float = 0.0
    t_verify_s: float = 0.0
    t_accept_s: float = 0.0
    t_kv_s: float = 0.0
    """Parts of the round, as docs/metrics.md#speed divides it."""
    t_round_s: float = 0.0
    """Wall time; what the four parts leave of it was spent on the host."""

    @classmethod
    def of(cls, outcome: Outcome, row: int, rows: int) -> Round:
        """Return the record of one row of a batch of `rows`, without its tokens and times."""
        accepted = len(outcome.nodes[row]) - 1
        return cls(
            drafted=outcome.drafted[row],
            accepted=accepted,
            offered=accepted + outcome.refused[row],
            rule=outcome.rule,
            rows=rows,
            overlap=None if outcome.overlap is None else outcome.overlap[row],
        )


@dataclass
class Generation:
    """Finished request: its tokens, its rounds, and the reason for its end."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = ""
    """One of eos, stop, length, and context (the target has no more positions)."""
    ttft_s: float = 0.0
    """Seconds until the first token."""
    decode_s: float = 0.0
    """Seconds from the first token to the last."""

    def take(self, step: Round, reason: str | None, elapsed: float) -> None:
        """Add a step of `decode`, which came `elapsed` seconds after the request was made."""
        if step.drafted is None:  # the prefill, which is not a round
            self.ttft_s = elapsed
        else:
            self.rounds.append(step)
        self.token_ids.extend(step.tokens)
        self.finish_reason = reason or ""
        self.decode_s = elapsed - self.ttft_s


def generate(
    target: CausalModel,
    proposer: Proposer,
    requests: Sequence[Request | Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_ids: frozenset[int] | None = None,
    stop: Sequence[str] = (),
) -> list[Generation]:
    """Decode a batch to its end, see `decode`; token lists become requests numbered from 0."""
    named = [r if isinstance(r, Request) else Request(r, i) for i, r in enumerate(requests)]
    results = [Generation(list(request.prompt_ids)) for request in named]
    started = time.perf_counter()
    for steps in decode(target, proposer, named, max_new_tokens, sampling, eos_ids, stop):
        now = time.perf_counter() - started
        for index, step, reason in steps:
            results[index].take(step, reason, now)
    return results


def generate_one(
    target: CausalModel,
    proposer: Proposer,
    request: Request | Sequence[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_ids: frozenset[int] | None = None,
    stop: Sequence[str] = (),
) -> Generation:
    """Decode a single request; see `generate`."""
    return generate(target, proposer, [request], max_new_tokens, sampling, eos_ids, stop)[0]


Step = tuple[int, Round, str | None]
"""Index of a request, record of its round, and why the reply has ended (None: it goes on)."""


@torch.inference_mode()
def decode(
    target: CausalModel,
    proposer: Proposer,
    requests: Sequence[Request],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_ids: frozenset[int] | None = None,
    stop: Sequence[str] = (),
) -> Generator[list[Step], Collection[int] | None, None]:
    """Yield the target's own continuation of all prompts, round by round, as it is verified.

    A row ends at an end token or with the token that completes a stop string (both are yielded),
    after `max_new_tokens`, or where the target's positions end, and then leaves the batch. So do
    requests whose indices are sent into the generator, before the next round; nothing more is
    yielded of them. Raises `UserError` for an empty prompt and for one that fills the target's
    positions.
    """
    if not all(isinstance(text, str) and text for text in stop):
        raise UserError("a stop string must be a text of at least one character")
    if proposer.in_use:
        raise UserError(
            "this drafter is in use for another batch; end or close that one first, or load a "
            "second drafter"
        )
    eos_ids = target.eos_ids if eos_ids is None else eos_ids
    ends = eos_ids, StopStrings(target.tokenizer, stop)
    batch = _RunningBatch(target, proposer, requests, max_new_tokens, sampling, ends)
    # After `_RunningBatch` was made: a prompt that it refuses must not leave the proposer marked.
    proposer.in_use = True
    with reported(type(proposer)):
        try:
            given_up = yield batch.start()
            rounds = batch.rounds()
            while batch.rows:
                if given_up:
                    batch.drop(given_up)
                given_up = (yield next(rounds)) if batch.rows else None
            # On a GPU the last rounds' times are known only when their events have happened.
            batch.clock.settle(wait=True)
        finally:
            proposer.in_use = False
            proposer.finish()
            if batch.static is not None:
                recorded.POOLS[target].put(batch.static.cache, batch.static)


def static_pays(device: torch.device, rows: int) -> bool:
    """Return True if static rounds are faster for a batch of `rows`."""
    # On a CPU a batch of 16 has 0.85 times the speed of rounds that are not static, since
    # attention goes over the whole buffer of every row.
    return device.type == "cuda" or rows == 1


def runs_ahead(device: torch.device) -> bool:
    """Return True if a round is launched before the host has read the one before it."""
    # A GPU would be idle otherwise. On a CPU nothing runs in parallel to the host, and the round
    # after the end of a reply would run for nothing.
    return device.type == "cuda"


EndConditions = tuple[frozenset[int], StopStrings]
"""End tokens and stop strings of a batch."""


class _RunningRow:
    """Running request: one row of the batch."""

    def __init__(self, index: int, request: Request, limit: int, max_positions: int) -> None:
        self.index, self.request = index, request
        self.place = index
        """Row of the batch's tensors."""
        self.tokens = list(request.prompt_ids)
        self.limit = limit
        self.left = min(limit, max_positions - len(self.tokens))
        """Tokens that may still be emitted."""

    def cut(self, tokens: list[int], ends: EndConditions) -> tuple[list[int], str | None]:
        """Append tokens up to the one that ends the reply; return them, and the reason or None."""
        eos_ids, stops = ends
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self.left -= 1
            if token in eos_ids:
                return tokens[:count], "eos"
            if stops.end_with(self.tokens):
                return tokens[:count], "stop"
            if self.left == 0:
                written = len(self.tokens) - len(self.request.prompt_ids)
                # The limit is named first where both are reached with the same token.
                return tokens[:count], "length" if written == self.limit else "context"
        return tokens, None


class _RunningBatch:
    """Requests that are still running, one per row."""

    def __init__(
        self,
        target: CausalModel,
        proposer: Proposer,
        requests: Sequence[Request],
        max_new_tokens: int,
        sampling: Sampling,
        ends: EndConditions,
    ) -> None:
        """Begin with all `requests`. Raises `UserError` if one of them cannot be decoded."""
        _check(target, requests, max_new_tokens)
        self.target, self.proposer, self.ends = target, proposer, ends
        self.sampling = sampling.resolved(target.repetition_penalty)
        self.rows = [
            _RunningRow(
                index, request, request.max_new_tokens or max_new_tokens, target.max_positions
            )
            for index, request in enumerate(requests)
        ]
        self.clock = Clock(target.device)
        # Trees of a user's own drafter are looked at, but for those of a recorded round.
        self._users = is_users(type(proposer)) and recorded.traced(proposer) is None
        self.static: recorded.StaticRounds | None = None
        """None where shapes of rounds follow what was accepted."""
        self.cache = self._empty_cache()

    def _empty_cache(self) -> TreeCache:
        """Return a cache that has, or can get, a slot for every position of the requests."""
        prompt = max(len(row.tokens) for row in self.rows)
        new = max(row.left for row in self.rows)
        # A round writes its whole tree after the last position that can still be emitted.
        beyond = self.proposer.max_drafted + 1
        batch, device = len(self.rows), self.target.device
        # A graph is of one device.
        whole = device.type != "cuda" or self.target.spread == "whole"
        if self.target.static and whole and static_pays(device, batch):
            # A row may end with a whole path more; a round that is launched ahead adds another, and
            # drafts after its tree. Powers of two: few capacities, so that few shapes are compiled
            # or recorded. 300 becomes 512, and 512 stays.
            more = (4 if runs_ahead(device) else 2) * beyond
            capacity = 1 << (prompt + new + more - 1).bit_length()
            self.static = recorded.take_rounds(self.target, batch, capacity)
            return self.static.cache
        # Nodes of a tree past the last position are dropped when the reply is cut.
        limit = self.target.max_positions + beyond
        return TreeCache(batch, prompt + min(new, FIRST_CAPACITY) + beyond, device, limit)

    def start(self) -> list[Step]:
        """Prefill all prompts; return the target's first token of each."""
        device, target = self.target.device, self.target
        prompts = [row.tokens for row in self.rows]
        lengths = [len(prompt) for prompt in prompts]
        # On the right: a token sees only what is before it, so no real one sees the padding,
        # and position and cache slot stay the same number.
        longest = max(lengths)
        padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
        ids = torch.tensor(padded, device=device)
        hidden = target.prefill(ids, lengths, self.cache, self.proposer.taps)

        row_lengths = torch.tensor(lengths, device=device)
        rows = torch.arange(len(lengths), device=device)
        self.draws = self._draws(ids, row_lengths)
        if self.static is not None:
            self.draws = self.static.place(self.draws)
        # It is where a round has its root: the first choice follows it.
        last_prompt_token = ids[rows, row_lengths - 1][:, None]
        logits = target.head(hidden.last[rows, row_lengths - 1])[:, None]
        scores = self.draws.scores(logits, last_prompt_token[:, None])
        self.root = self.draws.choices(scores, 0)[:, 0]
        # The root of the next choice is the token just chosen, one position further.
        self.draws.extend(last_prompt_token, torch.ones_like(row_lengths))
        first = self.root.tolist()
        with_roots = [[*prompt, token] for prompt, token in zip(prompts, first, strict=True)]
        self.proposer.prefill(
            Prompts(
                tokens=with_roots,
                ids=ids,
                lengths=row_lengths,
                hidden=hidden,
                cache=self.cache,
            )
        )
        return self._take([[token] for token in first], [Round() for _ in first])

    def _draws(self, ids: Tensor, row_lengths: Tensor) -> Draws:
        """Return the choices of this batch, for prompts `ids` `[B, S]` of `row_lengths` `[B]`."""
        # Rows are padded with their own first token, which a penalty counts in any case.
        in_prompt = torch.arange(ids.shape[1], device=ids.device) < row_lengths[:, None]
        text = torch.where(in_prompt, ids, ids[:, :1])
        requests = [row.request for row in self.rows]
        seeds = [self.sampling.seed if one.seed is None else one.seed for one in requests]
        keys = row_keys(seeds, [(one.id, one.sample) for one in requests], ids.device)
        # The last prompt token is the root of the first choice, at position length - 1.
        return Draws(self.sampling, keys, text, row_lengths - 1)

    def rounds(self) -> Iterator[list[Step]]:
        """Draft, verify, accept and commit, over and over; yield what each request gained."""
        static = self.static
        outcomes = self._growing_rounds() if static is None else self._static_rounds(static)
        while True:
            started = time.perf_counter()
            self.clock.mark()
            outcome = next(outcomes)
            records = [Round.of(outcome, row.place, len(self.rows)) for row in self.rows]
            steps = self._take([outcome.tokens[row.place] for row in self.rows], records)
            for record in records:
                record.t_round_s = time.perf_counter() - started
            self.clock.close(records)
            yield steps

    def _growing_rounds(self) -> Iterator[Outcome]:
        """Run rounds whose shapes follow what was accepted, which the host reads on the way."""
        while True:
            tree = self._checked(self.proposer.propose(self.root, self.draws))
            self.draws.reserve(self.cache.longest + tree.nodes)
            taps = self.proposer.taps
            hidden, logits = recorded.run_nodes(self.target, tree, self.cache, taps)
            self.clock.mark("verify")
            packed = DeviceOutcome.of(tree, judge(tree, logits, self.draws))
            outcome = packed.read()
            self.clock.mark("accept")
            accepted = Accepted.of(tree, packed, hidden, outcome)
            self.cache.commit(accepted.gained, None if accepted.in_place else accepted.path)
            self.draws.extend(accepted.ids, accepted.counts)
            self._commit(accepted)
            yield outcome

    def _static_rounds(self, rounds: recorded.StaticRounds) -> Iterator[Outcome]:
        """Run rounds of fixed shapes, compiled or recorded.

        The host reads what was decided once; where that pays, while the next round runs.
        """
        launched = self._launch(rounds, None)
        while True:
            (accepted, arriving, drafts), launched = launched, None
            if drafts is not None and runs_ahead(self.root.device):
                launched = self._launch(rounds, drafts)
            outcome = arriving()
            self.clock.mark("accept")
            if drafts is None:
                self._commit(replace(accepted, tokens=outcome.tokens))
            yield outcome
            launched = launched or self._launch(rounds, drafts)

    def _launch(
        self, rounds: recorded.StaticRounds, drafts: DraftTree | None
    ) -> tuple[Accepted, Callable[[], Outcome], DraftTree | None]:
        """Begin a static round over `drafts`, or over new ones; its outcome is on its way.

        The next drafts are made in it if the proposer is part of the round.
        """
        if drafts is None:
            tree = recorded.propose(self.target, self.proposer, self.root, self.draws)
            drafts = self._checked(tree)
        accepted, packed, drafts = rounds.run(self.target, self.proposer, drafts, self.draws)
        self.clock.mark("verify")
        return accepted, packed.fetch(), drafts

    def _checked(self, tree: DraftTree) -> DraftTree:
        """Return drafts, if the target can verify them. Raises `UserError`."""
        if self._users and (wrong := wrong_tree(tree, self.root, self.proposer, self.target)):
            raise UserError(f"drafter {self.proposer.name}: {wrong}")
        self.clock.mark("draft")
        return tree

    def _commit(self, accepted: Accepted) -> None:
        """Give what a round accepted to the proposer, and its bonus token to the next round."""
        assert accepted.bonus is not None
        # The target has not been run on the bonus token, so it is in no cache yet.
        self.root = accepted.bonus
        self.proposer.commit(accepted)
        self.clock.mark("kv")

    def _take(self, tokens: list[list[int]], records: list[Round]) -> list[Step]:
        """Cut each row's tokens where its reply ends, and drop the rows that have finished."""
        steps: list[Step] = []
        for row, emitted, record in zip(self.rows, tokens, records, strict=True):
            record.tokens, reason = row.cut(emitted, self.ends)
            steps.append((row.index, record, reason))
        self._keep([row for row, (*_, reason) in zip(self.rows, steps, strict=True) if not reason])
        return steps

    def drop(self, given_up: Collection[int]) -> None:
        """Drop the rows of the requests with these indices."""
        self._keep([row for row in self.rows if row.index not in given_up])

    def _keep(self, going: list[_RunningRow]) -> None:
        """Drop every row but those that are `going`."""
        ended = [row.place for row in self.rows if row not in going]
        self.rows = going
        # With no row left the loop ends, and `finish` releases the state.
        if not going or not ended:
            return
        if self.static is not None:
            self.static.cache.stop(ended)
            if isinstance(self.proposer, StaticProposer):
                self.proposer.stop(ended)
            return
        places = [row.place for row in going]
        index = send(places, self.root.device)
        self.root = self.root[index]
        self.draws.keep(index)
        self.cache.keep(places)
        self.proposer.keep(places)
        for place, row in enumerate(going):
            row.place = place


def _check(target: CausalModel, requests: Sequence[Request], max_new_tokens: int) -> None:
    """Raise `UserError` for requests that cannot be decoded."""
    if not requests:
        raise UserError("there is no prompt; give at least one")
    limits = [request.max_new_tokens for request in requests]
    for limit in {max_new_tokens, *(one for one in limits if one is not None)}:
        if not isinstance(limit, int) or limit < 1:
            raise UserError(f"max_new_tokens must be a whole number of at least 1, not {limit!r}")
    for request in requests:
        length = len(request.prompt_ids)
        if not length:
            raise UserError("the prompt is empty; give at least one token")
        for token in request.prompt_ids:
            if not isinstance(token, int) or not 0 <= token < target.vocab_size:
                raise UserError(
                    f"a prompt holds something that is no token id of {target.name} (0 to "
                    f"{target.vocab_size - 1})"
                )
        if length >= target.max_positions:
            raise UserError(
                f"a prompt of {length} tokens leaves no room in {target.max_positions} positions; "
                "shorten it"
            )
