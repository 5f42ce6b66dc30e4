"""`draftsmith tune`: which tree, which K, will it pay: the most tokens a second on this machine,
predicted, then measured."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.table import Table

from ....heads.errors import UserError
from ....heads.files import check_output, whole_file, write_json
from ...console import Console, Progress
from ...conversations.prompts import Prompt, check_batches, check_room, read_prompts
from ...conversations.sources import source_files
from ...decode import Generation, Request, generate
from ...proposer import PlainDecoding, check_spec, load_proposer
from ...settings import Sampling
from ...target import Target, load_target
from ..evaluate import numbers, origin
from ..journal import Journal
from ..measure import Setting, compare, measured
from ..options import SWEEPS
from ..options import TuneOptions as Options
from .budget import (
    DRAFTING,
    MEASURING,
    REPLAYS,
    TRIAL_ROOTS,
    VERIFICATION,
    Budget,
    finalists_that_fit,
    roots_that_fit,
    samples_that_fit,
    texts_that_fit,
)  # fmt: skip
from .candidates import Candidate, candidates, check_tunable
from .costs import (
    NODES,
    PLAIN,
    SETTLE,
    SHORTEST,
    DraftCosts,
    VerifyCosts,
    between,
    drafting,
    verification,
)
from .profile import SCHEMA, key_of, machine_of
from .replay_roots import KnownText

log = logging.getLogger(__name__)


def if_interrupted(options: Options) -> str:
    """A line for a person who stopped a tuning: which file holds what was tuned, and how to go
    on."""
    return (
        f"{options.out} holds what was tuned so far, if anything was; the same command goes on "
        "where it stopped"
    )


def run(options: Options) -> None:
    samplings, batches, contexts = check(options)
    target = load_target(options.target)
    prompts = read_prompts(
        options.prompts,
        target.tokenizer,
        target.name,
        options.limit,
        options.split,
        options.bad_rows,
    )
    # what is counted and what is timed are first turns
    prompts = [replace(prompt, later=[]) for prompt in prompts]
    check_room(prompts, target.max_positions)
    check_batches(batches, prompts)
    for spec in options.drafter:
        check_tunable(
            load_proposer(
                spec, target, lambda message: print(f"warning: {message}", file=sys.stderr)
            ),
            spec,
        )
    drafters: dict[str, list[dict[str, Any]]] = {key_of(spec): [] for spec in options.drafter}
    profile = {
        "schema_version": SCHEMA,
        "command": shlex.join(["draftsmith", *sys.argv[1:]]),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": target.fingerprint().as_dict(),
        "machine": machine_of(target),
        "prompts": {
            "path": options.prompts,
            "count": len(prompts),
            "max_new_tokens": options.max_new_tokens,
        },
        "drafters": drafters,
    }
    journal = Journal(options.out, identity(profile, prompts, options), "a tuning")
    budget = Budget.of_minutes(options.budget)
    parts = [(sampling, spec) for sampling in samplings for spec in options.drafter]
    announce(options, parts, batches)
    with Progress(desc="tuning", unit=" steps") as progress:

        def tick(what: str) -> None:
            progress.now(what)
            progress.update()

        bench = Bench(
            target, prompts, options, sorted({1, *batches}), contexts, tick, journal, budget.left
        )
        profile["verification_s"] = bench.verify.table
        for number, (sampling, spec) in enumerate(parts):
            key = f"{key_of(spec)}, T {sampling.temperature:g}"
            if (rows := journal.get(key)) is None:
                rows = bench.tune(
                    spec, sampling, batches, Budget(budget.left / (len(parts) - number))
                )
                journal.put(key, rows)
            drafters[key_of(spec)] += rows
            if number + 1 < len(parts):
                write(
                    {
                        **profile,
                        "partial": f"{number + 1} of {len(parts)} drafters and temperatures",
                    },
                    options,
                )
    write(profile, options)
    journal.finish()
    show(profile, Console())
    if options.budget:
        log.info(
            "took %.1f of %g minutes", (time.monotonic() - budget.started) / 60, options.budget
        )


def announce(options: Options, parts: Sequence[Any], batches: Sequence[int]) -> None:
    """Say what is about to be done and how long it takes."""
    what = f"{len(parts)} of drafter and temperature, batch {', '.join(map(str, batches))}"
    if options.budget:
        more = (
            "a larger --budget gives more prompts, timings and finalists, --budget 0 all that the "
            "options name"
        )
        log.info("tuning %s: at most about %g minutes; %s", what, options.budget, more)
    else:
        log.info("tuning %s: as long as it takes; --budget MINUTES would limit it", what)


def write(profile: dict[str, Any], options: Options) -> None:
    with whole_file(options.out) as aside:
        write_json(aside, profile)


def identity(
    profile: dict[str, Any], prompts: Sequence[Prompt], options: Options
) -> dict[str, Any]:
    """All that the figures depend on, as JSON: a stopped tuning goes on only where it is the
    same."""
    texts = hashlib.sha256(repr([prompt.token_ids for prompt in prompts]).encode()).hexdigest()
    asked = {key: value for key, value in asdict(options).items() if key != "out"}
    weights = [origin(spec) for spec in options.drafter]
    found = {
        "target": profile["target"],
        "machine": profile["machine"],
        "prompts": texts,
        "options": asked,
        "drafters": weights,
    }
    return json.loads(json.dumps(found, default=str))


def check(options: Options) -> tuple[list[Sampling], list[int], list[int]]:
    """Distributions, batch sizes and contexts. Raises `UserError` for what is known to be wrong
    before a large target loads."""
    for spec in options.drafter:
        check_spec(spec)
    keys = [key_of(spec) for spec in options.drafter]
    if len(set(keys)) < len(keys):
        raise UserError(
            "a drafter is named twice; its trees are what tune looks for, so name it once"
        )
    source_files(options.prompts)
    check_output(options.out, "--out")
    batches = sorted(set(numbers(options.batch_sizes, "--batch-sizes", int, 1)))
    contexts = sorted(set(numbers(options.contexts, "--contexts", int, 1)))
    temperatures = numbers(options.temperatures, "--temperatures", float) or [
        options.sampling.temperature
    ]
    return (
        [replace(options.sampling, temperature=temperature) for temperature in temperatures],
        batches,
        contexts,
    )


class Bench:
    """Target, prompts and this machine's costs."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        options: Options,
        batches: Sequence[int],
        contexts: Sequence[int],
        tick: Any,
        journal: Journal,
        seconds: float,
    ) -> None:
        """`seconds`: for the whole tuning, of which timing verification takes its share."""
        self.target, self.prompts, self.options, self.batches, self.tick = (
            target,
            prompts,
            options,
            batches,
            tick,
        )
        words = [token for prompt in prompts for token in prompt.token_ids]
        self.verify = stored_costs(journal.get("verification"))
        if not self.verify.table:
            share = VERIFICATION * seconds
            self.verify = verification(
                target, batches, contexts, words, tick, options.samples, share
            )
            journal.put("verification", self.verify.table)

    def tune(
        self, spec: str, sampling: Sampling, batches: Sequence[int], budget: Budget
    ) -> list[dict[str, Any]]:
        """A row of the profile for each batch size.

        Times are predicted in plain rounds, and plain decoding's own time is that of the moment at
        which the finalists are measured, since machines speed up and slow down.
        """
        target, options = self.target, self.options
        sampling = sampling.resolved(target.repetition_penalty)
        seconds = budget.left
        count, tokens = texts_that_fit(
            len(self.prompts), options.max_new_tokens, batches, seconds, self._step
        )
        prompts = [prompt.token_ids for prompt in self.prompts[:count]]
        texts = self._texts(prompts, tokens, sampling)
        texts = self._begun(texts, spec, sampling, REPLAYS * seconds)
        found, about = candidates(target, spec, texts, sampling, self.tick)
        probes = probes_of(found)
        samples = self._samples(probes, prompts, DRAFTING * seconds)
        costs, plain_costs = drafting(
            target, probes, prompts, self.batches, self.verify, sampling, self.tick, samples
        )
        about["effort"] = {"prompts": count, "max_new_tokens": tokens, "samples": samples}
        plain = replace(PLAIN, accepted=[[0] * len(text.roots) for text in texts])
        rows = []
        for number, batch in enumerate(batches):

            def price(c, b=batch):
                return predicted(c, texts, b, self.verify, costs)

            ranked = sorted(found, key=lambda c: -price(c)["tokens_s"])
            foretold = [
                predicted(plain, texts, batch, self.verify, plain_costs),
                *map(price, [found[0], *ranked[: options.finalists]]),
            ]
            written = count * tokens
            runs = [written / way["tokens_s"] for way in foretold]
            share = (budget.left or MEASURING * seconds) / (len(batches) - number)
            finalists, repeats = finalists_that_fit(options.finalists, options.repeats, runs, share)
            promising = ranked[:finalists]
            chosen = [*promising, *([found[0]] if found[0] not in promising else [])]
            predictions = [foretold[0], *map(price, chosen)]
            self.tick(f"{len(chosen)} finalists, T = {sampling.temperature:g}, batch {batch}")
            measurements = self._measure(
                [plain, *chosen],
                sampling,
                Setting(sampling, batch, tokens, repeats),
                self.prompts[:count],
            )
            pace = measurements[0]["tokens_s"] / predictions[0]["tokens_s"]
            predictions = [
                {**p, "tokens_s": p["tokens_s"] * pace, "tokens_s_unscaled": p["tokens_s"]}
                for p in predictions
            ]
            finals = [
                {
                    "kind": c.kind,
                    "label": c.label,
                    "setting": c.setting,
                    "predicted": p,
                    "measured": m,
                }
                for c, p, m in zip([plain, *chosen], predictions, measurements, strict=True)
            ]
            best = max(finals[1:], key=lambda row: row["measured"]["tokens_s"])
            default = finals[1 + chosen.index(found[0])]
            rows.append(
                {
                    "temperature": sampling.temperature,
                    "batch": batch,
                    **best,
                    "plain": finals[0],
                    "default": default,
                }
                | {
                    "finalists": finals[1:],
                    "candidates": len(found),
                    "cost_fit_error": costs.error,
                    "pace": pace,
                    **about,
                }
            )
        return rows

    def _step(self, rows: int) -> float:
        """Seconds of a plain step, about: a row more costs what a node more of a tree does."""
        batch = max(b for b in self.verify.table if b <= rows)
        return self.verify.seconds(batch, min(rows - batch, max(NODES)), SHORTEST)

    def _texts(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling
    ) -> list[KnownText]:
        """The target's own replies. Raises `UserError` where they leave nothing to draft."""
        self.tick(
            f"{PLAIN.kind} of {len(prompts)} replies of {tokens} tokens, T = "
            f"{sampling.temperature:g}"
        )
        requests = [Request(prompt, i) for i, prompt in enumerate(prompts)]
        replies = generate(self.target, PlainDecoding(), requests, tokens, sampling)
        texts = [
            KnownText.of(reply, (request.id, request.sample))
            for reply, request in zip(replies, requests, strict=True)
        ]
        if not any(text.roots for text in texts):
            raise UserError(
                "the target answers every prompt with one token, so there is nothing to draft; "
                "give other prompts"
            )
        return texts

    def _begun(
        self, texts: list[KnownText], spec: str, sampling: Sampling, seconds: float
    ) -> list[KnownText]:
        """As much of the beginnings of `texts` as can be expanded over in `seconds`; all of them
        where there is no limit."""
        if math.isinf(seconds):
            return texts
        self.tick("a first look at what the drafter takes")
        started = time.monotonic()
        candidates(
            self.target,
            spec,
            [text.begin(TRIAL_ROOTS) for text in texts],
            sampling,
            lambda what: None,
        )
        longest = max(len(text.roots) for text in texts)
        roots = roots_that_fit(longest, time.monotonic() - started, seconds)
        return [text.begin(roots) for text in texts]

    def _samples(
        self, probes: Sequence[Candidate], prompts: Sequence[Sequence[int]], seconds: float
    ) -> int:
        """Rounds of each probe that fit into `seconds`, on top of its prompts and of the rounds
        that are not counted."""
        # a draft takes about as long again
        rounds = [2 * self._step(batch) * (1 + len(probes)) for batch in self.batches]
        words = sum(map(len, prompts)) / len(prompts)
        reading = sum(
            words * batch * self._step(max(NODES)) / max(NODES) for batch in self.batches
        ) * (1 + len(probes))
        fixed = SWEEPS * (reading + SETTLE * sum(rounds))
        return samples_that_fit(self.options.samples, SWEEPS, fixed, sum(rounds), seconds)

    def _measure(
        self,
        chosen: Sequence[Candidate],
        sampling: Sampling,
        setting: Setting,
        prompts: Sequence[Prompt],
    ) -> list[dict[str, float]]:
        """Decode calibration prompts with each, taking turns."""
        ways = [_Ready(self.target, candidate) for candidate in chosen]
        results = compare(self.target, ways, prompts, setting, progress_bar=False)
        found = measured(self.target, results, setting)["drafters"].values()
        return [
            {"tau": s["tau_incl_bonus"], "tokens_s": s["tokens_s"], "speedup": s["speedup"]}
            for s in found
        ]


def stored_costs(table: dict[str, Any] | None) -> VerifyCosts:
    """`VerifyCosts` from its table as JSON gives it back, with texts for numbers; empty for
    None."""
    by_batch = (table or {}).items()

    def number(sizes):
        return {int(nodes): seconds for nodes, seconds in sizes.items()}

    return VerifyCosts(
        {
            int(b): {float(c): number(sizes) for c, sizes in contexts.items()}
            for b, contexts in by_batch
        }
    )


class _Ready:
    """A candidate as a way to decode: candidates of one drafter share its weights, so each is set
    up when its turn comes."""

    def __init__(self, target: Target, candidate: Candidate) -> None:
        self.name, self._target, self._candidate = candidate.label, target, candidate

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        return generate(self._target, self._candidate.make(), requests, max_new_tokens, sampling)


def probes_of(found: Sequence[Candidate]) -> list[Candidate]:
    """Some of each kind, from small to large: what the costs of all the others are fitted on."""
    chosen: dict[tuple[Any, ...], Candidate] = {}
    for kind in ("chain", "fixed", "dynamic"):
        those = [candidate for candidate in found if candidate.kind == kind]
        widths = (
            sorted({max(candidate.draft, default=0) for candidate in those})
            if kind == "dynamic"
            else [None]
        )
        for width in widths:
            own = [c for c in those if width is None or max(c.draft, default=0) == width]
            own.sort(key=lambda c: (len(c.draft), c.nodes))
            for place in {0, len(own) // 3, 2 * len(own) // 3, len(own) - 1} if own else ():
                chosen[kind, width, place] = own[place]
    return list(chosen.values())


def predicted(
    candidate: Candidate,
    texts: Sequence[KnownText],
    batch: int,
    verify: VerifyCosts,
    costs: DraftCosts,
) -> dict[str, float]:
    """Tau and tokens a second when `texts` are decoded in batches: their rounds are replayed, and
    each is priced with the rows that are still running."""
    rounds = [_rounds(candidate, text, place) for place, text in enumerate(texts)]
    seconds, known = 0.0, {}
    for start in range(0, len(texts), batch):
        together = rounds[start : start + batch]
        for number in range(max(map(len, together))):
            alive = [row[number] for row in together if number < len(row)]
            nodes = max(drafted for _, drafted, _ in alive)
            context = sum(root for *_, root in alive) / len(alive)
            key = (len(alive), nodes, context // 32)
            if key not in known:
                known[key] = _round_seconds(candidate, *key, verify, costs)
            seconds += known[key]
    tokens = sum(kept for row in rounds for kept, *_ in row)
    count = sum(map(len, rounds))
    return {
        "tau": tokens / count if count else float("nan"),
        "tokens_s": tokens / seconds if seconds else float("nan"),
    }


def _rounds(candidate: Candidate, text: KnownText, place: int) -> list[tuple[int, int, int]]:
    """Tokens kept, nodes drafted and the root's position of each round, as `replay.replay` replays
    them."""
    found, root, end = [], text.start, len(text.ids)
    while root < end - 1:
        here = root - text.start
        accepted = candidate.accepted[place][here]
        drafted = (
            candidate.drafted[place][here] if candidate.drafted is not None else candidate.nodes
        )
        found.append((min(accepted + 1, end - 1 - root), drafted, root))
        root += accepted + 1
    return found


def _round_seconds(
    candidate: Candidate,
    rows: int,
    nodes: int,
    bucket: float,
    verify: VerifyCosts,
    costs: DraftCosts,
) -> float:
    """A round of `rows` requests, between the batch sizes that were measured."""
    context = 32 * bucket + 16
    return between(
        {
            batch: costs.overhead(batch, candidate)
            + costs.verify_ratio[batch] * verify.seconds(batch, nodes, context)
            for batch in costs.weights
        },
        rows,
    )


def show(profile: dict[str, Any], console: Console) -> None:
    """Print what was found for each drafter, predicted beside measured."""
    for name, rows in profile["drafters"].items():
        for row in rows:
            title = (
                f"{name}\nT = {row['temperature']:g}, batch {row['batch']}: best of "
                f"{row['candidates']} chains and trees"
            )
            table = Table(
                title=title,
                title_justify="left",
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                padding=(0, 1, 0, 0),
            )
            table.add_column("", no_wrap=True)
            table.add_column("drafts", overflow="fold")
            for column in ("tau", "predicted", "tok/s", "predicted", "off by", "speed-up"):
                table.add_column(column, justify="right", no_wrap=True)
            for final in (row["plain"], *row["finalists"]):
                p, m = final["predicted"], final["measured"]
                mark = (
                    ("chosen" if final["setting"] == row["setting"] else "")
                    if final["kind"] != PLAIN.kind
                    else ""
                )
                mark += (
                    " default"
                    if final["setting"] == row["default"]["setting"] and final["kind"] != PLAIN.kind
                    else ""
                )
                taus, speeds = (
                    (f"{m['tau']:.2f}", f"{p['tau']:.2f}"),
                    (f"{m['tokens_s']:.0f}", f"{p['tokens_s']:.0f}"),
                )
                off = f"{p['tokens_s'] / m['tokens_s'] - 1:+.0%}"
                table.add_row(
                    mark.strip(), final["label"], *taus, *speeds, off, f"{m['speedup']:.2f}x"
                )
            console.print(table)
            if row["measured"]["speedup"] < 1:
                console.print("Drafting does not pay here: plain decoding is faster.", style="bold")
    console.print(
        "tau: tokens a round. Predicted: rounds in units of plain ones, which take what they took "
        "while the finalists ran. The "
        "chosen one is the fastest of few that are close, so expect a little less elsewhere; "
        "evaluate --profile measures it."
    )
