"""`draftsmith tune`: finds the chain or tree of most tokens per second on this machine.

A few candidates are measured by successive halving (`halving`); the best of them goes into the
profile if its gain over the default is significant.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product

from msgspec import to_builtins

from ...heads.errors import UserError
from ...heads.files import JsonObject, whole_file, write_json
from ..base.console import OutputConsole, ProgressReporter, warn
from ..base.output_paths import check_output
from ..base.settings import Sampling
from ..conversations.prompts import Prompt, check_batches, check_room, check_source, read_prompts
from ..conversations.templates import endless
from ..profile import key_of, timing_conditions
from ..proposers.registry import check_spec, load_proposer, refuse_own
from ..targets.target import Target, load_for_decoding
from ..targets.target_files import tokenizer_of
from .candidates import PLAIN, candidates, check_tunable
from .drafter_names import distinct_labels
from .evaluate import comparable_facts, origin, sweep_values
from .figure_text import busy_now, number_text, ratio_text, slower
from .halving import enough, halves, tuned_row
from .journal import Journal, interruption_message
from .options import TuneOptions as Options
from .results import FEWEST
from .tables import FigureTable, table_of

log = logging.getLogger(__name__)
SCHEMA = 1
MOST_PROMPTS = 320  # limit of the prompts that are read: two halves of 10 batches of 16


def if_interrupted(options: Options) -> str:
    """Return the line for a user who stopped a tuning, which says how to resume it."""
    return interruption_message(options.out, "tuned")


def run(options: Options) -> None:
    """Tune every drafter at every temperature and batch size, and write the profile.

    A stopped command continues after the last drafter, temperature and batch size that it measured.
    """
    samplings, batches = check(options)
    source, tokenizer = options.source(options.prompts), tokenizer_of(options.target)
    read = read_prompts(source, tokenizer, options.target.path, MOST_PROMPTS, "stop", {})
    prompts = [replace(prompt, later=[]) for prompt in read]  # first turns only
    check_batches(batches, prompts)
    for batch in batches:
        if not enough(halves(prompts)[1], batch):
            warn(
                f"batch size {batch}: its default tree will be kept, since a choice needs "
                f"{2 * FEWEST * batch} prompts and there are {len(prompts)}"
            )
    target = load_for_decoding(options.target)
    if why := endless(target.tokenizer, target.name, target.eos_ids, {}):
        log.warning("%s", why)
    check_room(prompts, target.max_positions)
    for spec in options.drafter:
        check_tunable(load_proposer(spec, target, warn, choose=True), spec)
    profile = empty_profile(options, target, len(prompts))
    drafters: dict[str, list[JsonObject]] = profile["drafters"]
    journal = Journal(options.out, identity(profile, prompts, options), "a tuning")
    started, seconds = time.monotonic(), 60 * options.budget or math.inf
    parts = list(product(samplings, options.drafter, batches))
    limit = f"at most about {options.budget:g} minutes" if options.budget else "without a limit"
    log.info("tuning %d of drafter, temperature and batch size: %s (--budget)", len(parts), limit)

    with ProgressReporter(desc="tuning", unit=" steps") as progress:

        def tick(what: str) -> None:
            progress.now(what)
            progress.update()

        for number, (sampling, spec, batch) in enumerate(parts):
            key = f"{key_of(spec)}, T {sampling.temperature:g}, batch {batch}"
            if (row := journal.get(key)) is None:
                # The remaining parts share the time that is left.
                left = max(seconds - (time.monotonic() - started), 0) / (len(parts) - number)
                ways = candidates(spec, target, batch)
                row = tuned_row(target, ways, prompts, batch, sampling, left, tick)
                journal.put(key, row)
            drafters[key_of(spec)].append(row)
    with whole_file(options.out) as aside:
        write_json(aside, profile)
    journal.finish()
    show(profile, OutputConsole())
    if options.budget:
        log.info("took %.1f of %g minutes", (time.monotonic() - started) / 60, options.budget)


def empty_profile(options: Options, target: Target, prompts: int) -> JsonObject:
    """Return a profile without results; `prompts` is their number."""
    return {
        "schema_version": SCHEMA,
        "command": shlex.join(["draftsmith", *sys.argv[1:]]),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "target": target.fingerprint().as_dict(),
        "machine": timing_conditions(target),
        "prompts": {"path": options.prompts, "count": prompts},
        "drafters": {key_of(spec): [] for spec in options.drafter},
    }


def identity(profile: JsonObject, prompts: Sequence[Prompt], options: Options) -> JsonObject:
    """Return everything that the figures depend on: see `comparable_facts`."""
    texts = repr([prompt.token_ids for prompt in prompts])
    facts = {
        "target": profile["target"],
        "machine": profile["machine"],
        "prompts": hashlib.sha256(texts.encode()).hexdigest(),
        "options": asdict(options),
        "drafters": [to_builtins(origin(spec)) for spec in options.drafter],
    }
    return comparable_facts(facts, "out")


def check(options: Options) -> tuple[list[Sampling], list[int]]:
    """Return the sampling of each temperature, and the batch sizes.

    Raises `UserError` for every mistake that can be found before a large target is loaded.
    """
    for spec in options.drafter:
        check_spec(spec)
        refuse_own(spec, "tune")
    keys = [key_of(spec) for spec in options.drafter]
    if len(set(keys)) < len(keys):
        raise UserError(
            "a drafter is named twice; its trees are what tune looks for, so name it once"
        )
    check_source(options.source(options.prompts))
    check_output(options.out, "--out")
    samplings, batches = sweep_values(options)
    return samplings, sorted({*batches})


def show(profile: JsonObject, console: OutputConsole) -> None:
    """Print the results of each drafter."""
    names = distinct_labels(profile["drafters"])
    for key, rows in profile["drafters"].items():
        for row in rows:
            console.print(_table(names[key], row).terminal())
            console.print(row["reason"], highlight=False, markup=False)
            if line := slower({names[key]: row["measured"]["speedup"]}):
                console.print(f"Drafting does not pay here: {line}.", style="bold", highlight=False)
    if line := busy_now():
        console.print(line, highlight=False)
    console.print(
        "tau: tokens a round. Over default: tokens a second over the default's. The table is of "
        "the prompts that the trees were chosen on, which favour the best of several."
    )


def _table(name: str, row: JsonObject) -> FigureTable:
    """Return the table of a row of the profile: plain decoding and the finalists of `name`."""
    rows = []
    for final in (row["plain"], *row["finalists"]):
        measured, marks = final["measured"], ""
        if final["kind"] != PLAIN.kind:
            marks += " (chosen)" * (final["setting"] == row["setting"])
            marks += " (default)" * (final["setting"] == row["default"]["setting"])
        rows.append({
            "drafts": final["label"] + marks,
            "tau": number_text(measured["tau"]),
            "tokens a second": number_text(measured["tokens_s"], ".0f"),
            "speed-up": ratio_text(measured["speedup"]),
            "over default": ratio_text(final.get("gain")),
        })  # fmt: skip
    return table_of(
        f"{name}\nT = {row['temperature']:g}, batch {row['batch']}: best of {row['candidates']} "
        "chains and trees",
        rows,
    )
