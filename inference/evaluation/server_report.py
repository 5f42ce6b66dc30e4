"""Acceptance and speed of a running server (`draftsmith evaluate --server URL`).

The target's tokenizer renders the prompts; its weights are loaded only if drafters are measured in
this process too. docs/metrics.md#servers-counters defines the figures.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from msgspec.structs import asdict
from transformers import GenerationConfig

from ...heads.errors import UserError
from ...heads.exchange.engines.engine import CounterNames
from ...heads.pretrained import end_ids, read_config
from ..base.console import ProgressReporter
from ..base.settings import Sampling, TargetConfig, headers_with_key
from ..conversations.prompts import Prompt, next_turn
from ..decode import Generation
from ..metrics import quantiles
from ..targets.target import Target
from ..targets.target_files import base_and_adapter
from .measure import Results, first_difference
from .options import EvaluateOptions
from .results import ServerFigures, ServerReport, Speculation
from .server_client import PROTOCOLS, ServerReply, client_of, connect, counters_of, replies_to
from .server_counters import speculation_from_counters, speculation_from_replies

WARM_UP = 8  # tokens of a first reply that is not counted


@dataclass
class ServerMeasurement:
    """Report about a server, with the replies that it was computed from."""

    report: ServerReport
    prompts: list[Prompt]
    tokenizer: Any
    replies: list[list[ServerReply]]
    """One list for each of the report's settings, in their order."""


def measure(
    options: EvaluateOptions,
    tokenizer: Any,
    prompts: list[Prompt],
    samplings: Sequence[Sampling],
    concurrency: Sequence[int],
) -> ServerMeasurement:
    """Measure the server at `options.server` for each sampling and concurrency.

    Raises `UserError` for prompts that do not fit the server, and for a server that cannot be
    reached or fails.
    """
    settings = generation_settings(options.target)
    # The settings hold one id or several; without any the tokenizer's is used, if it has one.
    ends = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
    penalty = getattr(settings, "repetition_penalty", None) or 1.0
    resolved = [sampling.resolved(penalty) for sampling in samplings]

    async def measured() -> ServerMeasurement:
        assert options.server is not None
        async with client_of(options.server, headers_with_key()) as client:
            path = options.target.path
            report = await connect(client, path, options.server_model, tokenizer)
            for prompt in prompts:
                if report.context is not None and len(prompt.token_ids) >= report.context:
                    raise UserError(
                        f"prompt {prompt.id} has {len(prompt.token_ids)} tokens, the server's "
                        f"context {report.context}; leave it out, or serve with a longer context"
                    )
            found = ServerMeasurement(report, prompts, tokenizer, [])
            for sampling in resolved:
                for at_once in concurrency:
                    await _one(client, found, frozenset(end_ids(ends)), sampling, at_once, options)
        return found

    return asyncio.run(measured())


def generation_settings(config: TargetConfig) -> GenerationConfig:
    """Return the target's generation settings, from its model's config if it has no others."""
    path, _ = base_and_adapter(config)
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_model_config(read_config(path, config.trust_remote_code))


async def _one(
    client: httpx.AsyncClient,
    found: ServerMeasurement,
    eos_ids: frozenset[int],
    sampling: Sampling,
    at_once: int,
    options: EvaluateOptions,
) -> None:
    """Measure one setting, and add its figures and replies to `found`.

    A warm-up comes first. Then the prompts are sent `options.repeats` times, and more often if that
    is needed for two times `at_once` requests. Raises `UserError`.
    """
    server, prompts = found.report, found.prompts
    protocol = PROTOCOLS[server.engine]
    # Most tokens of a later turn's prompt; unbounded if the context is not known.
    room = (server.context or 2**40) - options.max_new_tokens

    def follow(prompt: Prompt, reply: list[int]) -> Prompt | None:
        return next_turn(prompt, reply, found.tokenizer, options.target.path, eos_ids, room)

    # Counters are read before and after the run; the first reading must include the warm-up.
    before = None
    if isinstance(protocol.counts, CounterNames):
        before = await counters_of(client, server.engine)
    # The warm-up is one turn, without the later turns of its conversation.
    length = min(WARM_UP, options.max_new_tokens)
    warm = await replies_to(client, server, prompts[:1], 1, sampling, length, lambda *_: None)
    if before is not None:
        before = await counters_of(client, server.engine, before, warm)
    passes = max(options.repeats, math.ceil(2 * at_once / len(prompts)))
    requests = [*prompts] * passes
    label = f"server, T = {sampling.temperature:g}, {at_once} at once"
    longest = options.max_new_tokens
    with ProgressReporter(total=len(requests), desc=label) as bar:
        replies = await replies_to(
            client, server, requests, at_once, sampling, longest, follow, bar.update
        )
    found.replies.append(replies)
    if before is None:
        speculation = speculation_from_replies(protocol, replies, server.speculates)
    else:
        after = await counters_of(client, server.engine, before, replies)
        speculation = speculation_from_counters(protocol, before, after, replies, server.speculates)
    server.settings.append(figures_of(sampling, at_once, replies, speculation))


def figures_of(
    sampling: Sampling, at_once: int, replies: list[ServerReply], speculation: Speculation
) -> ServerFigures:
    """Return the figures of one setting, with the engine's own counts during the run."""
    tokens = sum(reply.tokens for reply in replies)
    seconds = max(r.arrivals[-1] for r in replies) - min(r.sent for r in replies)
    return ServerFigures(
        **asdict(speculation),
        temperature=sampling.temperature,
        concurrency=at_once,
        accept_rate=_ratio(speculation.accepted, speculation.drafted),
        mean_n_draft=_ratio(speculation.drafted, speculation.drafts),
        tokens_s=tokens / seconds,
        seconds=seconds,
        ttft_quantiles_s=quantiles([reply.ttft_s for reply in replies]),
        tpot_quantiles_s=quantiles([reply.tpot_s for reply in replies]),
        requests=len(replies),
        tokens=tokens,
        chunks=sum(len(reply.arrivals) for reply in replies),
    )


def _ratio(count: int | None, of: int | None) -> float | None:
    """Return `count / of`; `None` if either is not known or `of` is 0."""
    return count / of if of and count is not None else None


def compare_replies(
    measured: ServerMeasurement, target: Target, results: Results, sampling: Sampling
) -> None:
    """Compare the server's greedy replies with plain decoding in this process, token for token.

    Adds `equal_to_plain`, `compared` and `largest_gap` to the report's greedy settings. `results`
    are of the same prompts under the same greedy `sampling`, plain decoding first. Later turns
    after texts that differ are left out.
    """
    sampling = sampling.resolved(target.repetition_penalty)
    plain_turns = next(iter(results.values()))
    plain = {(turn.prompt.place, turn.number): turn.generation for turn in plain_turns}
    for figures, replies in zip(measured.report.settings, measured.replies, strict=True):
        if figures.temperature != 0:
            continue
        equal = compared = 0
        gaps: dict[tuple[int, int, tuple[int, ...]], float] = {}
        for reply in replies:
            prompt, expected = reply.prompt, plain.get((reply.prompt.place, reply.turn))
            # If the server's reply to an earlier turn differed, so does its prompt.
            if reply.ids is None or expected is None or expected.prompt_ids != prompt.token_ids:
                continue
            compared += 1
            equal += reply.ids == expected.token_ids
            # Several passes mostly repeat a reply; one pass of the target over each is enough.
            key = (prompt.place, reply.turn, tuple(reply.ids))
            if reply.ids != expected.token_ids and key not in gaps:
                generation = Generation(prompt.token_ids, reply.ids)
                _, gap = first_difference(target, expected, generation, sampling)
                gaps[key] = gap or 0.0
        figures.equal_to_plain, figures.compared = equal, compared
        figures.largest_gap = max(gaps.values(), default=None)
