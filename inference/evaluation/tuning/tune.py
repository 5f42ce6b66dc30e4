"""`draftsmith tune`: finds the chain or tree of most tokens per second on this machine.

Every candidate's tokens per second are predicted from known texts and timed rounds; then the best
predictions are measured with the default tree, and what `choice` takes goes into the profile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product

from msgspec import to_builtins
from rich.table import Table

from ....heads.errors import UserError
from ....heads.files import JsonObject, check_output, whole_file, write_json
from ...console import Console, Progress, plain_table, warn
from ...conversations.benchmarks import check_prompts
from ...conversations.prompts import Prompt, check_batches, check_room
from ...conversations.templates import endless
from ...decode import Request, generate
from ...drafters import check_spec, load_proposer, refuse_own
from ...proposers.plain import PlainDecoding
from ...settings import Sampling
from ...targets.target import Target, load_for_decoding
from ..checks import numbers, prompts_of
from ..evaluate import leave_out_names, origin
from ..journal import Journal, kept
from ..names import distinct_labels
from ..remarks import busy_now, slower
from ..results import FEWEST
from .budget import (
    DRAFTING,
    MEASURING,
    REPLAYS,
    TRIAL_ROOTS,
    VERIFICATION,
    Budget,
    Timings,
    past_the_limit,
    roots_that_fit,
    texts_that_fit,
    timings_that_fit,
)  # fmt: skip
from .candidates import Candidate, candidates, check_tunable
from .choice import enough, fewer, halves
from .costs import (
    NODES,
    PLAIN,
    SETTLE,
    SHORTEST,
    drafting,
    probes_of,
    stored_costs,
    verification,
)
from .finalists import Search, measured_row
from .options import SWEEPS
from .options import TuneOptions as Options
from .profile import empty_profile, key_of
from .replay_roots import KnownText, KnownTexts

log = logging.getLogger(__name__)


def if_interrupted(options: Options) -> str:
    """Return a line for a person who stopped a tuning: how to continue it."""
    return kept(options.out, "tuned")


def run(options: Options) -> None:
    """Tune every drafter at every temperature and batch size, and write the profile.

    The profile is written after each drafter and temperature too, marked partial; the same command
    continues there.
    """
    samplings, batches, contexts = check(options)
    # Tuning looks at the first turns of conversations alone.
    prompts = [replace(prompt, later=[]) for prompt in prompts_of(options)]
    check_batches(batches, prompts)
    for batch in batches:
        if not enough(halves(prompts)[1], batch):
            warn(
                f"batch size {batch}: its default tree will be kept, since a choice needs "
                f"{2 * FEWEST * batch} prompts and there are {len(prompts)} (--limit)"
            )
    target = load_for_decoding(options.target)
    if why := endless(target.tokenizer, target.name, target.eos_ids, options.chat_template_kwargs):
        log.warning("%s", why)
    check_room(prompts, target.max_positions)

    for spec in options.drafter:
        check_tunable(load_proposer(spec, target, warn, choose=True), spec)
    profile = empty_profile(options, target, len(prompts))
    drafters: dict[str, list[JsonObject]] = profile["drafters"]
    journal = Journal(options.out, identity(profile, prompts, options), "a tuning")
    budget = Budget.of_minutes(options.budget)
    pairs = list(product(samplings, options.drafter))
    announce(options, pairs, batches)

    def write(partial: JsonObject) -> None:
        with whole_file(options.out) as aside:
            write_json(aside, {**profile, **partial})

    with Progress(desc="tuning", unit=" steps") as progress:

        def tick(what: str) -> None:
            progress.now(what)
            progress.update()

        # Batch size 1 is timed in any case: `Bench._step` needs a size below any other.
        timed = sorted({1, *batches})
        bench = Bench(target, prompts, options, timed, contexts, tick, journal, budget.left)
        profile["verification_s"] = bench.verify.table
        for number, (sampling, spec) in enumerate(pairs):
            key = f"{key_of(spec)}, T {sampling.temperature:g}"
            if (rows := journal.get(key)) is None:
                # What earlier pairs have left of the time is shared by those that remain.
                share = Budget(budget.left / (len(pairs) - number))
                rows = bench.tune(spec, sampling, batches, share)
                journal.put(key, rows)
                took, parts = time.monotonic() - share.started, len(pairs) - number - 1
                if line := past_the_limit(took, parts, budget.left):
                    warn(line)
            drafters[key_of(spec)] += rows
            if number + 1 < len(pairs):
                write({"partial": f"{number + 1} of {len(pairs)} drafters and temperatures"})
    write({})
    journal.finish()
    show(profile, Console())
    if options.budget:
        log.info(
            "took %.1f of %g minutes", (time.monotonic() - budget.started) / 60, options.budget
        )


def announce(options: Options, parts: Sequence[object], batches: Sequence[int]) -> None:
    """Log what will be tuned, and for how long; `parts` are the pairs of sampling and drafter."""
    scope = f"{len(parts)} of drafter and temperature, batch {', '.join(map(str, batches))}"
    if options.budget:
        more = (
            "a larger --budget gives more prompts, timings and finalists, --budget 0 all that the "
            "options name"
        )
        log.info("tuning %s: at most about %g minutes; %s", scope, options.budget, more)
    else:
        log.info("tuning %s: as long as it takes; --budget MINUTES would limit it", scope)


def identity(profile: JsonObject, prompts: Sequence[Prompt], options: Options) -> JsonObject:
    """Return everything that the figures depend on, as JSON.

    A stopped tuning is continued only where all of it is the same.
    """
    texts = repr([prompt.token_ids for prompt in prompts])
    facts = {
        "target": profile["target"],
        "machine": profile["machine"],
        "prompts": hashlib.sha256(texts.encode()).hexdigest(),
        "options": {key: value for key, value in asdict(options).items() if key != "out"},
        "drafters": [to_builtins(origin(spec)) for spec in options.drafter],
    }
    leave_out_names(facts)
    # Through JSON and back, since it is compared with what a journal holds.
    return json.loads(json.dumps(facts, default=str))


def check(options: Options) -> tuple[list[Sampling], list[int], list[int]]:
    """Return the sampling of each temperature, the batch sizes and the contexts.

    Raises `UserError` for everything that is known to be wrong before a large target is loaded.
    """
    for spec in options.drafter:
        check_spec(spec)
        refuse_own(spec, "tune")
    keys = [key_of(spec) for spec in options.drafter]
    if len(set(keys)) < len(keys):
        raise UserError(
            "a drafter is named twice; its trees are what tune looks for, so name it once"
        )
    check_prompts(options.source(options.prompts))
    check_output(options.out, "--out")
    batches = sorted(set(numbers(options.batch_sizes, "--batch-sizes", int, 1)))
    contexts = sorted(set(numbers(options.contexts, "--contexts", int, 1)))
    temperatures = numbers(options.temperatures, "--temperatures", float)
    temperatures = temperatures or [options.sampling.temperature]
    samplings = [replace(options.sampling, temperature=t) for t in temperatures]
    return samplings, batches, contexts


class Bench:
    """Target, prompts and this machine's verification times, with which drafters are tuned."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        options: Options,
        batches: Sequence[int],
        contexts: Sequence[int],
        tick: Callable[[str], None],
        journal: Journal,
        seconds: float,
    ) -> None:
        """Time verification, unless the journal has it already.

        `seconds`: the time for the whole tuning, of which timing verification takes its share.
        """
        self.target, self.prompts, self.options = target, prompts, options
        self.batches, self.tick = batches, tick
        self._replies: tuple[tuple[int, int, Sampling], KnownTexts] | None = None
        ids = [token for prompt in prompts for token in prompt.token_ids]
        self.verify = stored_costs(journal.get("verification"))
        if not self.verify.table:
            share = VERIFICATION * seconds
            self.verify = verification(target, batches, contexts, ids, tick, options.samples, share)
            journal.put("verification", self.verify.table)

    def tune(
        self, spec: str, sampling: Sampling, batches: Sequence[int], budget: Budget
    ) -> list[JsonObject]:
        """Return a row of the profile for each batch size.

        Raises `UserError` where the target's replies leave nothing to draft.
        """
        target, options = self.target, self.options
        sampling = sampling.resolved(target.repetition_penalty)
        seconds = budget.left
        count, tokens = texts_that_fit(
            len(self.prompts), options.max_new_tokens, batches, seconds, self._step
        )
        chosen_on, others = halves(fewer(self.prompts, count))
        prompts = [prompt.token_ids for prompt in chosen_on]
        known = self._texts(prompts, tokens, sampling)
        known = self._begun(known, spec, sampling, REPLAYS * seconds)
        texts = known.texts
        ways, facts = candidates(spec, known, sampling, self.tick)
        known.forget()
        probes, share = probes_of(ways), DRAFTING * seconds
        timings = self._timings(probes, prompts, share)
        if timings.seconds > share:
            probes = probes_of(ways, few=True)
            timings = self._timings(probes, prompts, share)
        costs, plain_costs = drafting(
            target, probes, prompts, self.batches, self.verify, sampling, self.tick, timings
        )
        facts["effort"] = {
            "prompts": len(chosen_on),
            "prompts_again": len(others),
            "max_new_tokens": tokens,
            "samples": timings.rounds * timings.turns,
            "probes": len(probes),
            "prompt_tokens": timings.tokens,
        }
        plain = replace(PLAIN, accepted=[[0] * len(text.roots) for text in texts])
        search = Search(
            sampling, ways, texts, self.verify, costs, plain, plain_costs, chosen_on, others, tokens
        )
        rows = []
        for number, batch in enumerate(batches):
            # Measuring gets all the time that is left, or its share where earlier work took more
            # than was estimated.
            share = budget.left / (len(batches) - number) or MEASURING * seconds / len(batches)
            rows.append(measured_row(target, search, batch, options, share, self.tick) | facts)
        return rows

    def _step(self, rows: int) -> float:
        """Return a rough estimate of the seconds of a plain step of `rows` rows.

        Rows beyond the nearest smaller batch size that was timed cost as much as nodes of a tree.
        """
        batch = max(b for b in self.verify.table if b <= rows)
        return self.verify.seconds(batch, min(rows - batch, max(NODES)), SHORTEST)

    def _texts(
        self, prompts: Sequence[Sequence[int]], tokens: int, sampling: Sampling
    ) -> KnownTexts:
        """Return the target's own replies to `prompts`, of `tokens` tokens at most.

        The last ones are kept for the next drafter. Raises `UserError` where they leave nothing to
        draft.
        """
        key = len(prompts), tokens, sampling
        if self._replies is not None and self._replies[0] == key:
            return self._replies[1]
        self._replies = None
        self.tick(
            f"{PLAIN.kind} of {len(prompts)} replies of {tokens} tokens, T = "
            f"{sampling.temperature:g}"
        )
        requests = [Request(prompt, i) for i, prompt in enumerate(prompts)]
        replies = generate(self.target, PlainDecoding(), requests, tokens, sampling)
        texts = []
        for reply, request in zip(replies, requests, strict=True):
            texts.append(KnownText.of(reply, (request.id, request.sample)))
        if not any(text.roots for text in texts):
            raise UserError(
                "the target answers every prompt with one token, so there is nothing to draft; "
                "give other prompts"
            )
        self._replies = key, KnownTexts(self.target, texts)
        return self._replies[1]

    def _begun(
        self, known: KnownTexts, spec: str, sampling: Sampling, seconds: float
    ) -> KnownTexts:
        """Return the beginnings of `known` over which candidates can be replayed in `seconds`.

        The time is estimated from a trial over the first roots of each text; without a limit the
        texts are returned whole.
        """
        if math.isinf(seconds):
            return known
        self.tick("a first look at what the drafter takes")
        # They are computed once for the trial and all replays, whatever the number of roots.
        known.states(load_proposer(spec, self.target, lambda message: None).taps)
        started = time.monotonic()
        candidates(spec, known.begin(TRIAL_ROOTS), sampling, lambda what: None)
        longest = max(len(text.roots) for text in known.texts)
        roots = roots_that_fit(longest, time.monotonic() - started, seconds)
        return known.begin(roots)

    def _timings(
        self, probes: Sequence[Candidate], prompts: Sequence[Sequence[int]], seconds: float
    ) -> Timings:
        """Return the numbers of rounds and of prompt tokens that can be timed in `seconds`."""
        ways = [PLAIN, *probes]  # plain decoding runs with the probes
        node_s = self._step(max(NODES)) / max(NODES)
        round_s = 0.0
        for batch in self.batches:
            # Drafting and the rest of a round take about as long as a plain step.
            rest = self._step(batch)
            round_s += sum(self.verify.seconds(batch, way.nodes, SHORTEST) + rest for way in ways)
        token_s = len(ways) * node_s * sum(self.batches)
        tokens = sum(map(len, prompts)) / len(prompts)
        samples = self.options.samples
        return timings_that_fit(samples, SWEEPS, SETTLE, round_s, token_s, tokens, seconds)


def show(profile: JsonObject, console: Console) -> None:
    """Print the results of each drafter, predicted next to measured."""
    names = distinct_labels(profile["drafters"])
    for key, rows in profile["drafters"].items():
        for row in rows:
            console.print(_table(names[key], row))
            console.print(row["reason"], highlight=False, markup=False)
            if line := slower({names[key]: row["measured"]["speedup"]}):
                console.print(f"Drafting does not pay here: {line}.", style="bold", highlight=False)
    if line := busy_now():
        console.print(line, highlight=False)
    console.print(
        "tau: tokens a round. Predicted: rounds in units of plain ones, which take what they took "
        "while the finalists ran. Over default: tokens a second over the default's. The table is "
        "of the prompts that the trees were chosen on, where the best of several is lucky too."
    )


def _table(name: str, row: JsonObject) -> Table:
    """Return the table of a row of the profile: plain decoding and the finalists of `name`."""
    title = (
        f"{name}\nT = {row['temperature']:g}, batch {row['batch']}: best of "
        f"{row['candidates']} chains and trees"
    )
    table = plain_table(title, title_justify="left")
    table.add_column("drafts", overflow="fold")
    # Headings of two lines leave room for the drafts in 80 columns.
    columns = ("tau", "tau\npredicted", "tok/s", "tok/s\npredicted", "off by", "speed-up")
    for column in (*columns, "over\ndefault"):
        table.add_column(column, justify="right", no_wrap=True)
    for final in (row["plain"], *row["finalists"]):
        prediction, measurement = final["predicted"], final["measured"]
        marks = []
        if final["kind"] != PLAIN.kind:
            if final["setting"] == row["setting"]:
                marks.append("  (chosen)")
            if final["setting"] == row["default"]["setting"]:
                marks.append("  (default)")
        table.add_row(
            "\n".join([final["label"], *marks]),
            f"{measurement['tau']:.2f}",
            f"{prediction['tau']:.2f}",
            f"{measurement['tokens_s']:.0f}",
            f"{prediction['tokens_s']:.0f}",
            f"{prediction['tokens_s'] / measurement['tokens_s'] - 1:+.0%}",
            f"{measurement['speedup']:.2f}x",
            f"{final['gain']:.2f}x" if "gain" in final else "-",
        )
    return table
