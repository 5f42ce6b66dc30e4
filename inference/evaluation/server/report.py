"""The option `draftsmith evaluate --server URL`: acceptance and speed of a running server.

The target's tokenizer renders the prompts; its weights are loaded only where drafters are measured
in this process as well. docs/metrics.md#servers-counters defines the figures.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import httpx
from rich.table import Table
from transformers import GenerationConfig

from ....heads.errors import UserError
from ....heads.exchange.engines.servers import CounterNames, ServerProtocol
from ....heads.pretrained import clear_errors, end_ids, read_config, read_tokenizer
from ...console import Console, Progress, plain_table
from ...conversations.given import GivenRows
from ...conversations.prompts import Prompt, next_turn
from ...decode import Generation
from ...keys import headers_with_key
from ...metrics import quantiles
from ...settings import Sampling, TargetConfig
from ...targets.target import Target
from ...targets.target_files import base_and_adapter
from ..checks import prompts_of
from ..measure import Results, first_difference
from ..options import EvaluateOptions
from ..results import (
    SHOWN,
    SettingFigures,
    by_depth,
    identical,
    written,
)
from ..server_figures import Divergence, ServerFigures, ServerReport, ServerRequest
from .client import (
    EngineServer,
    Load,
    check_tokenizer,
    client_of,
    connect,
    counters_of,
    load,
    settled,
)
from .counters import Counters, Speculation, counted_in_replies, of_counters, of_replies

WARM_UP = 8  # tokens of a first reply that is not counted
# Share of the time from which the client counts as too slow. Only runs of a second or more are
# checked: shorter ones are mostly the client's start.
BUSY = 0.7
MEANINGS = {
    "tau_incl_bonus": "as tau_definition says; unlike local tau, vLLM's leaves out steps that had "
    "no draft",
    "tau_emitted": "tokens per decoding step, steps without a draft included, the prefill's token "
    "excluded: comparable with local tau. vLLM does not count steps; where a slow reader got "
    "several in one chunk it is at most this",
    "survival": "share of the drafts of which at least d tokens were accepted",
    "accept_rate": "accepted / drafted tokens, roots excluded",
    "tokens_s": "all tokens / time from the first request to the last chunk, prefills, queue and "
    "the run's ends included",
    "ttft_quantiles_s": "from sending a request to its first chunk, its wait in the server's "
    "queue included",
    "tpot_quantiles_s": "time per later token, of each request",
    "chunk_gap_quantiles_s": "between chunks of one reply; quantiles over all gaps",
    "equal_to_plain": "greedy replies equal to plain decoding here, token for token, of `compared`",
    "client_busy": "share of the time in which the process that measures was busy itself",
    "in_flight_peak": "requests of draftsmith that were in flight at once",
}


@dataclass
class ServerMeasurement:
    """Report about a server, and the runs that it was made of."""

    report: ServerReport
    prompts: list[Prompt]
    tokenizer: Any
    loads: list[Load]
    """One for each of the report's settings, in their order."""


@dataclass
class Reader:
    """Tokenizer and generation settings of the target, with which prompts are rendered."""

    name: str
    tokenizer: Any
    eos_ids: frozenset[int]
    repetition_penalty: float


def load_reader(config: TargetConfig) -> Reader:
    """Return the target's tokenizer and settings. Raises `UserError` if it has no tokenizer."""
    path, _ = base_and_adapter(config)
    with clear_errors(path, "the tokenizer of target"):
        tokenizer = read_tokenizer(path, config.trust_remote_code)
        try:
            settings = GenerationConfig.from_pretrained(path)
        except OSError:
            # There is no generation_config.json. transformers makes the settings of the model's
            # config then.
            model_config = read_config(path, config.trust_remote_code)
            settings = GenerationConfig.from_model_config(model_config)
    # The settings hold one id, several, or none; then the tokenizer's is taken, if it has one.
    ends = settings.eos_token_id if settings.eos_token_id is not None else tokenizer.eos_token_id
    penalty = getattr(settings, "repetition_penalty", None) or 1.0
    return Reader(config.path, tokenizer, frozenset(end_ids(ends)), penalty)


def measure(
    options: EvaluateOptions,
    samplings: Sequence[Sampling],
    concurrency: Sequence[int],
    rows: GivenRows | None = None,
) -> ServerMeasurement:
    """Measure the server at `options.server` for each sampling and concurrency.

    `rows` are prompts in place of those that the options name. Raises `UserError` for prompts that
    cannot be read or do not fit the server, and for a server that is not there or fails.
    """
    reader = load_reader(options.target)
    prompts = prompts_of(options, reader.tokenizer, rows)
    resolved = [sampling.resolved(reader.repetition_penalty) for sampling in samplings]
    return asyncio.run(_measure(options, reader, prompts, resolved, concurrency))


async def _measure(
    options: EvaluateOptions,
    reader: Reader,
    prompts: list[Prompt],
    samplings: Sequence[Sampling],
    concurrency: Sequence[int],
) -> ServerMeasurement:
    """Check the server, then measure every setting one after the other; see `measure`."""
    assert options.server is not None
    headers = headers_with_key(options.server_api_key_file, "--server-api-key-file")
    async with client_of(options.server, headers) as client:
        server = await connect(client, reader.name, options.server_model)
        await check_tokenizer(client, server, reader.tokenizer)
        check_lengths(prompts, server)
        runs, settings = [], []
        for sampling in samplings:
            for at_once in concurrency:
                run, speculation = await _one(
                    client, server, reader, prompts, sampling, at_once, options
                )
                runs.append(run)
                settings.append(figures_of_load(sampling, at_once, run, speculation))
    report = ServerReport(
        url=server.url,
        engine=server.engine,
        version=server.version,
        model=server.model,
        context=server.context,
        definitions=MEANINGS,
        settings=settings,
    )
    return ServerMeasurement(report, prompts, reader.tokenizer, runs)


def check_lengths(prompts: Sequence[Prompt], server: EngineServer) -> None:
    """Raise `UserError` for a prompt that leaves no room for a token in the server's context."""
    for prompt in prompts:
        if server.context is not None and len(prompt.token_ids) >= server.context:
            raise UserError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens, the server's context "
                f"{server.context}; leave it out, or start the server with a longer context"
            )


async def _one(
    client: httpx.AsyncClient,
    server: EngineServer,
    reader: Reader,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    at_once: int,
    options: EvaluateOptions,
) -> tuple[Load, Speculation]:
    """Measure one setting, and return its run and the engine's figures of its speculation.

    A warm-up comes first. Then the prompts are sent `options.repeats` times, and more often if that
    is needed for two times `at_once` requests. Raises `UserError`.
    """
    # Tokens of a later turn's prompt; without a known context, more than any conversation has.
    room = (server.context or 2**40) - options.max_new_tokens

    def follow(prompt: Prompt, reply: list[int]) -> Prompt | None:
        return next_turn(prompt, reply, reader.tokenizer, reader.name, reader.eos_ids, room)

    # Counts that do not come with the replies are read before and after the run, and the warm-up
    # has to be in the first reading.
    protocol, before = server.protocol, None
    if isinstance(protocol.counts, CounterNames):
        before = await counters_of(client, protocol)
    # The warm-up ends after its first turn, whatever comes next in that conversation.
    length = min(WARM_UP, options.max_new_tokens)
    warm = await load(client, server, prompts[:1], 1, sampling, length, lambda prompt, reply: None)
    if before is not None:
        before = (await _counted(client, protocol, before, warm))[0]
    passes = max(options.repeats, math.ceil(2 * at_once / len(prompts)))
    requests = [*prompts] * passes
    label = f"server, T = {sampling.temperature:g}, {at_once} at once"
    with Progress(total=len(requests), desc=label) as bar:
        run = await load(
            client, server, requests, at_once, sampling, options.max_new_tokens, follow, bar.update
        )
    tokens = sum(reply.tokens for reply in run.replies)
    if before is None:
        metas = [reply.meta for reply in run.replies]
        return run, of_replies(protocol, metas, tokens, server.speculates)
    now, own = await _counted(client, protocol, before, run)
    delta, ran_before = now.since(before), before.running
    if own is not None:  # of these replies alone, whatever else the server does
        own.prefix_hits, own.prefix_queries = delta.prefix_hits, delta.prefix_queries
        delta, ran_before = own, 0
    if server.speculates is False:
        delta.drafts = None  # llama.cpp counts its drafts, none, without speculation too
    chunks = sum(len(reply.arrivals) for reply in run.replies)
    replies = len(run.replies)
    speculation = of_counters(protocol, delta, tokens, replies, chunks, ran_before)
    if own is not None and protocol.counts_of_replies is not None:
        speculation.tau_definition = protocol.counts_of_replies.definition
    return run, speculation


async def _counted(
    client: httpx.AsyncClient, protocol: ServerProtocol, before: Counters, run: Load
) -> tuple[Counters, Counters | None]:
    """Return the shared counters after `run`, and the counts of its replies; None without them.

    Without them the function waits until the shared ones hold all of the run. `before` are those
    before it.
    """
    own = counted_in_replies(protocol.counts_of_replies, [reply.meta for reply in run.replies])
    if own is not None:
        return await counters_of(client, protocol), own
    tokens = sum(reply.tokens for reply in run.replies)
    return await settled(client, protocol, before, tokens), None


def figures_of_load(
    sampling: Sampling, at_once: int, run: Load, speculation: Speculation
) -> ServerFigures:
    """Return the figures of one setting, with the engine's own counts during the run.

    A warning is added to `speculation` if this process, and not the server, limited the speed.
    """
    replies = run.replies
    if run.busy >= BUSY and run.seconds >= 1:
        speculation.warnings.append(
            f"this client was busy {run.busy:.0%} of the time: the server may be faster than its "
            "figures here"
        )
    tokens = sum(reply.tokens for reply in replies)
    gaps = []
    for reply in replies:
        for earlier, later in pairwise(reply.arrivals):
            gaps.append(later - earlier)
    return ServerFigures(
        temperature=sampling.temperature,
        concurrency=at_once,
        in_flight_peak=run.peak,
        accept_rate=_ratio(speculation.accepted, speculation.drafted),
        mean_n_draft=_ratio(speculation.drafted, speculation.drafts),
        tokens_s=tokens / run.seconds,
        seconds=run.seconds,
        ttft_quantiles_s=quantiles([reply.ttft_s for reply in replies]),
        tpot_quantiles_s=quantiles([reply.tpot_s for reply in replies]),
        chunk_gap_quantiles_s=quantiles(gaps),
        requests=len(replies),
        tokens=tokens,
        chunks=sum(len(reply.arrivals) for reply in replies),
        client_busy=run.busy,
        **asdict(speculation),
        per_request=[
            ServerRequest(
                id=reply.prompt.id,
                turn=reply.turn,
                n_prompt=len(reply.prompt.token_ids),
                n_out=reply.tokens,
                ttft_s=reply.ttft_s,
                tpot_s=reply.tpot_s,
                finish_reason=reply.finish,
            )
            for reply in replies
        ],
    )


def _ratio(count: int | None, of: int | None) -> float | None:
    """Return `count / of`; `None` if either is not known or `of` is 0."""
    return count / of if of and count is not None else None


def compare_replies(
    measured: ServerMeasurement, target: Target, results: Results, sampling: Sampling
) -> None:
    """Compare the server's greedy replies with plain decoding in this process, token for token.

    Adds `equal_to_plain`, `compared` and `divergences` to the report's greedy settings. `results`
    are of the same prompts under the same greedy `sampling`, plain decoding first. Later turns
    after texts that differ are left out.
    """
    sampling = sampling.resolved(target.repetition_penalty)
    plain_turns = next(iter(results.values()))
    plain = {(turn.prompt.place, turn.number): turn.generation for turn in plain_turns}
    for figures, run in zip(measured.report.settings, measured.loads, strict=True):
        if figures.temperature != 0:
            continue
        equal = compared = 0
        differing: dict[tuple[int, int, tuple[int, ...]], Divergence] = {}
        for reply in run.replies:
            prompt, expected = reply.prompt, plain.get((reply.prompt.place, reply.turn))
            # Where the server's reply to an earlier turn differed, so does everything after it.
            if reply.ids is None or expected is None or expected.prompt_ids != prompt.token_ids:
                continue
            compared += 1
            equal += reply.ids == expected.token_ids
            # Several passes mostly repeat a reply; one pass of the target over each is enough.
            key = (prompt.place, reply.turn, tuple(reply.ids))
            if reply.ids != expected.token_ids and key not in differing:
                generation = Generation(prompt.token_ids, reply.ids)
                index, gap = first_difference(target, expected, generation, sampling)
                differing[key] = Divergence(
                    id=prompt.id, turn=reply.turn, index=index, top2_gap=gap
                )
        figures.equal_to_plain, figures.compared = equal, compared
        figures.divergences = list(differing.values())


def show(server: ServerReport, local: Sequence[SettingFigures], console: Console) -> None:
    """Print the server's figures: acceptance next to that of `local` drafters, then the times."""
    for temperature in dict.fromkeys(setting.temperature for setting in server.settings):
        rows = [setting for setting in server.settings if setting.temperature == temperature]
        beside = [setting for setting in local if setting.temperature == temperature]
        title = f"{server.title}\n{server.model}, T = {temperature:g}"
        console.print(_acceptance(title, rows, beside))
        console.print(_times(rows))
        for row in rows:
            _show_warnings(row, console)
    if any(setting.speculates is False for setting in server.settings):
        console.print("The server does not speculate: it writes one token a step.")
    definitions = dict.fromkeys(s.tau_definition for s in server.settings if s.speculates)
    for definition in definitions:
        console.print(f"The server's tau: {definition}.")
    if definitions:
        console.print(
            "emitted: tokens a step, steps without a draft and ends of replies as they are: what "
            "local tau counts."
        )
    console.print(
        "tok/s of a server: all its replies together, prefills included; a local drafter's: one "
        "at a time, without them."
    )


def _show_warnings(row: ServerFigures, console: Console) -> None:
    """Print what makes the figures of one setting doubtful."""
    label = f"{row.concurrency} at once"
    for warning in row.warnings:
        console.print(f"warning, {label}: {warning}")
    if row.in_flight_peak < row.concurrency:
        console.print(f"warning, {label}: only {row.in_flight_peak} requests were in flight")
    gaps = [d.top2_gap for d in row.divergences if d.top2_gap is not None]
    if gaps:
        console.print(
            f"{label}: where a reply first differs, the target's two best logits are at most "
            f"{max(gaps):.2g} apart."
        )


def _acceptance(
    title: str, rows: Sequence[ServerFigures], local: Sequence[SettingFigures]
) -> Table:
    """Return the table of one temperature: local drafters, and below them the server's `rows`."""
    table = plain_table(title)
    table.add_column("drafter", overflow="fold", min_width=8)
    accepted = f"accepted\n1-{SHOWN}"
    columns = ("at once", "tau", "emitted", accepted, "acc/\ndrafted", "tok/s")
    for column in (*columns, "identical"):
        table.add_column(column, justify="right", no_wrap=True)
    for setting in local:
        for name, s in setting.drafters.items():
            tau = written(s.tau_incl_bonus)
            rate = written(s.accept_rate if s.mean_n_draft else None)
            same = identical(s.equal_to_ar, s.requests)
            # A local tau counts emitted tokens of all rounds, which is the meaning of "emitted".
            row = (tau, tau, by_depth(s.survival), rate, written(s.tokens_s, ".0f"), same)
            table.add_row(name, str(setting.batch), *row)
    for s in rows:
        tau, emitted, rate = map(written, (s.tau_incl_bonus, s.tau_emitted, s.accept_rate))
        same = identical(s.equal_to_plain, s.compared)
        row = (tau, emitted, by_depth(s.survival), rate, written(s.tokens_s, ".0f"), same)
        table.add_row("server", str(s.concurrency), *row)
    return table


def _times(rows: Sequence[ServerFigures]) -> Table:
    """Return a table of times in milliseconds, with a row for each concurrency."""
    table = plain_table(None)
    # How many quantiles of p50, p95 and p99 each column shows.
    columns = {"TTFT": 3, "time per token": 3, "chunk gap": 2}
    table.add_column("at once", justify="right")
    for name, count in columns.items():
        heading = f"{name}, ms\np50 / p95" + " / p99" * (count > 2)
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("requests", justify="right")
    for s in rows:
        cells = []
        times = (s.ttft_quantiles_s, s.tpot_quantiles_s, s.chunk_gap_quantiles_s)
        for quantiles_s, count in zip(times, columns.values(), strict=True):
            values = [value for value in (quantiles_s or {}).values() if value is not None]
            cells.append(" / ".join(map(_milliseconds, values[:count])) or "-")
        table.add_row(str(s.concurrency), *cells, str(s.requests))
    return table


def _milliseconds(seconds: float) -> str:
    # Three digits would show a second and more as 1e+03.
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"
