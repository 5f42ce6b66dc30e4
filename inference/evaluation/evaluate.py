"""`draftsmith evaluate`: drafters beside plain decoding and beside drafters without training.

All of them decode the same prompts in the same loop. There is one table for each setting, that is
for each temperature and batch size.
"""

from __future__ import annotations

import hashlib
import json as json_module
import math
import resource
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table

from ...heads.errors import UserError
from ...heads.files import check_output, checksum, whole_directory, whole_file, write_json
from ...heads.fingerprint import tokenizer_hash
from ...heads.layout import dtype_name
from ..console import Console, plain_table, warn
from ..conversations.prompts import Prompt, check_batches, check_room, read_prompts
from ..conversations.sources import source_files
from ..drafters import check_spec, load_proposer, parse_spec, weight_bytes
from ..metrics import emitted_per_round
from ..proposer import Proposer
from ..proposers.draft_model import DraftModelProposer
from ..settings import check_url
from ..target import Target, load_target
from . import replayed
from .assisted import Assisted
from .engines import AsIn, Engine
from .journal import Journal
from .measure import (
    DEFINITIONS,
    SAMPLES,
    Results,
    Setting,
    Way,
    compare,
    distinct_names,
    measured,
    model_batches,
)
from .options import EvaluateOptions as Options
from .report.tables import caption, firsts, loop_shares
from .server import report as live_report
from .tuning.profile import Tuned, TuningProfile, key_of, machine_of

SCHEMA = 2
SHOWN = 3  # positions whose acceptance the table shows; the JSON holds all
CONCURRENCY = (1, 8, 32, 64)
PARTIAL_EVERY_S = 30.0  # between two reports of an evaluation that is under way
BASELINES = ("ngram", "lookahead", "early-exit")


def if_interrupted(options: Options) -> str:
    """Return the line for a user who stopped an evaluation: what was written, and how to go on."""
    if options.json is None or options.features is not None:
        return "nothing was written; with --json FILE the same command goes on where it stopped"
    return (
        f"{options.json} holds what was measured so far, if anything was; the same command goes on "
        "where it stopped"
    )


def run(options: Options) -> None:
    """Measure what the options name, print the tables and write the files. Raises `UserError`."""
    settings = check(options)
    if options.features is not None:
        return replayed.run(options)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    served = None
    # the server comes first: its address may be wrong, and measuring drafters here takes long
    if options.server is not None:
        at_once = numbers(options.concurrency, "--concurrency", int) or list(CONCURRENCY)
        served = live_report.measure(options, [setting.sampling for setting in settings], at_once)
    if served is not None and not options.drafter:
        report = facts_of(None, served.tokenizer, served.prompts, options, started)
        report |= {"left_out": {}, "drafter_bytes": {}, "settings": [], "server": served.report}
        write(report, options)
    else:
        report = decoded(options, settings, started, served)
    show(report)


def write(report: dict[str, Any], options: Options) -> None:
    """Write the report to the file that the user named, if any."""
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(aside, report)


def decoded(
    options: Options,
    settings: list[Setting],
    started: str,
    served: live_report.ServerMeasurement | None,
) -> dict[str, Any]:
    """Return the report of the drafters that decode in this process, and write it.

    Replies go to the folder `options.spec_bench`, if there is one. Greedy replies of a server, in
    `served`, are compared with plain decoding. Raises `UserError`.
    """
    assert options.prompts is not None
    target = load_target(options.target)
    loaded, left_out = proposers_of(options, target)
    proposers = list(loaded.values())
    prompts = read_prompts(
        options.prompts,
        target.tokenizer,
        target.name,
        options.limit,
        options.split,
        options.bad_rows,
    )
    check_room(prompts, target.max_positions)
    check_batches([setting.batch for setting in settings], prompts)
    by_transformers = assisted(options, target, proposers, left_out)
    if by_transformers and any(setting.batch > 1 for setting in settings):
        left_out["assisted generation of batches"] = "transformers assists one request at a time"
    further_ways = tuned_and_served(options, target, left_out)
    # What may fail comes before the hours of decoding: facts, hashes of the weights, and the file
    # to be written.
    names = distinct_names(proposers)
    sizes = {name: weight_bytes(p, target) for name, p in zip(names, proposers, strict=True)}
    origins = dict(zip(sizes, map(origin, loaded), strict=True))
    report = facts_of(target, target.tokenizer, prompts, options, started)
    report |= {"left_out": left_out, "drafters": origins, "drafter_bytes": sizes, "settings": []}
    if served is not None:
        report["server"] = served.report
    journal = Journal(options.json, identity(report, options), "an evaluation")
    results = []
    for number, setting in enumerate(settings):
        ways = [*proposers, *further_ways(setting)]
        if setting.batch == 1:
            ways += by_transformers
        partial = Partial(
            report, options, setting, number, len(settings), len(prompts), target, ways
        )
        results.append(compare(target, ways, prompts, setting, journal=journal, each=partial))
        report["settings"].append(figures(target, results[-1], setting, ways))
        if number + 1 < len(settings):
            write({**report, "partial": f"{number + 1} of {len(settings)} settings"}, options)
    model_batches(report["settings"])
    if served is not None:
        for result, setting in zip(results, settings, strict=True):
            if setting.sampling.greedy:
                live_report.compare_replies(served, target, result, setting.sampling)
    if options.spec_bench is not None:
        write_spec_bench(Path(options.spec_bench), results[0], target)
    report["peak_memory_bytes"] = peak_memory(target)
    write(report, options)
    journal.finish()
    return report


def figures(
    target: Target, results: Results, setting: Setting, ways: Sequence[Way], samples: int = SAMPLES
) -> dict[str, Any]:
    """Return the part of the report about one setting: the numbers of every way to decode.

    Tuned and engine-like ways have their tree settings and the drafter's spec beside the numbers.
    `samples` replies of each way are shown token by token.
    """
    named = zip(distinct_names(ways), ways, strict=True)
    configured = {name: way for name, way in named if isinstance(way, Tuned | AsIn)}
    settings_of = {name: way.setting for name, way in configured.items()}
    entry = measured(target, results, setting, settings_of, samples)
    for name, way in configured.items():
        entry["drafters"][name]["spec"] = way.spec
    return entry


@dataclass
class Partial:
    """Writer of unfinished reports, called after every batch; it writes at most twice a minute."""

    report: dict[str, Any]
    """Report with the settings that are finished."""
    options: Options
    setting: Setting
    """Setting that is being measured."""
    number: int
    """Place of the setting among all, from 0."""
    settings: int
    """Number of settings."""
    prompts: int
    """Number of prompts."""
    target: Target
    ways: Sequence[Way]
    written: float = field(default_factory=time.monotonic)
    """Time of the last report, by `time.monotonic`."""

    def __call__(self, results: Results) -> None:
        """Write the report with the `results` so far, unless the last one is too recent."""
        if self.options.json is None or time.monotonic() - self.written < PARTIAL_EVERY_S:
            return
        plain_turns = next(iter(results.values()))
        done = len({turn.prompt.place for turn in plain_turns})
        # replies token by token need a forward pass each, and only the whole report shows them
        so_far = figures(self.target, results, self.setting, self.ways, samples=0)
        settings = [*self.report["settings"], so_far]
        where = f"{done} of {self.prompts} prompts in setting {self.number + 1} of {self.settings}"
        write({**self.report, "settings": settings, "partial": where}, self.options)
        self.written = time.monotonic()


def identity(report: dict[str, Any], options: Options) -> dict[str, Any]:
    """Return all that the figures depend on, as JSON can hold it.

    A stopped evaluation goes on only where it is the same.
    """
    keys = ("target", "dtype", "device", "threads", "machine", "versions", "drafters")
    facts = {key: report[key] for key in keys}
    facts["prompts"] = report["prompt_set"]["sha256"]
    # the figures do not depend on the names of the files that they are written to
    facts["options"] = asdict(options)
    del facts["options"]["json"], facts["options"]["spec_bench"]
    facts["profile"] = checksum(Path(options.profile)) if options.profile is not None else None
    # there and back, so that only texts, numbers, lists and dictionaries are left
    return json_module.loads(json_module.dumps(facts, default=str))


def assisted(
    options: Options, target: Target, proposers: Sequence[Proposer], left_out: dict[str, str]
) -> list[Assisted]:
    """Return assisted generation with the first draft model, in a list; else an empty list.

    The list is empty where baselines are not wanted, and where there is no draft model that
    transformers takes; in the second case the reason is added to `left_out`.
    """
    models = [proposer for proposer in proposers if isinstance(proposer, DraftModelProposer)]
    if not options.baselines:
        return []
    try:
        if not models:
            raise UserError("it needs a small model; give one as --drafter")
        return [Assisted(target, models[0])]
    except UserError as error:
        left_out["assisted generation"] = str(error)
        return []


def tuned_and_served(
    options: Options, target: Target, left_out: dict[str, str]
) -> Callable[[Setting], list[Way]]:
    """Return a function from a setting to its further ways to decode.

    These are the named drafters with their trees of `options.profile`, and as in each engine of
    `options.like`. An engine that does not take a drafter is added to `left_out` with the reason.
    Raises `UserError`.
    """
    profile = TuningProfile(options.profile, target) if options.profile is not None else None
    # a drafter may be named with several trees, which profile and engine replace by their own
    drafters = {key_of(spec): spec for spec in options.drafter}
    tuned = [spec for spec in drafters.values() if profile is not None and spec in profile]
    if profile is not None and not tuned:
        raise UserError(
            f"{options.profile} is of none of the drafters; name one of those that it has with "
            "--drafter"
        )
    engines: list[Way] = []
    for engine in map(Engine, options.like):
        for spec in drafters.values():
            try:
                engines.append(AsIn(engine, spec, target, lambda message: None))
            except UserError as error:
                left_out[f"{spec} as in {engine.label}"] = str(error)

    def ways(setting: Setting) -> list[Way]:
        if profile is None:
            return engines
        sampling, batch = setting.sampling, setting.batch
        return [*(Tuned(profile, spec, target, sampling, batch) for spec in tuned), *engines]

    return ways


def check(options: Options) -> list[Setting]:
    """Return the settings to measure, a temperature and a batch size each.

    Raises `UserError` for all that can be known to be wrong before a large target is loaded and
    hours have passed.
    """
    for name in ("limit", "max_new_tokens", "batch_size", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if (options.features is None) == (options.prompts is None):
        raise UserError("give either --target and --prompts to decode, or --features to replay")
    only_decoding = ("temperatures", "batch_sizes", "spec_bench", "profile", "like")
    given = [name for name in only_decoding if getattr(options, name)]
    if options.features is not None and given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"--features replays greedy texts one by one; leave out {names}")
    for engine in options.like:
        Engine(engine)  # raises for an engine or a setting that is not known
    if (options.like or options.profile) and not options.drafter:
        raise UserError("--like and --profile are about drafters; name one with --drafter")
    check_server(options)
    if options.prompts is not None:
        source_files(options.prompts)
    for spec in options.drafter:
        check_spec(spec)
    check_output(options.json, "--json")
    if options.spec_bench is not None and Path(options.spec_bench).exists():
        raise UserError(f"{options.spec_bench} is there already; name another --spec-bench")
    sizes = numbers(options.batch_sizes, "--batch-sizes", int, 1) or [options.batch_size]
    temperatures = numbers(options.temperatures, "--temperatures", float) or [
        options.sampling.temperature
    ]
    samplings = [replace(options.sampling, temperature=temperature) for temperature in temperatures]
    return [
        Setting(sampling, size, options.max_new_tokens, options.repeats)
        for sampling in samplings
        for size in sizes
    ]


def check_server(options: Options) -> None:
    """Raise `UserError` for options that do not go with `server`, or only with it."""
    if options.server is None:
        if options.concurrency is not None or options.server_model is not None:
            raise UserError(
                "--concurrency and --server-model are of a server; name it with --server "
                "http://127.0.0.1:8000"
            )
        return
    check_url(options.server, "--server")
    if options.features is not None:
        raise UserError(
            "--features replays without a server; leave out one of --features and --server"
        )
    if options.batch_sizes is not None or options.batch_size != 1:
        raise UserError(
            "--server takes --concurrency 1,8,32 in place of batch sizes; drafters here are "
            "measured one by one"
        )
    if options.spec_bench is not None and not options.drafter:
        raise UserError(
            "--spec-bench writes the replies of drafters here; name one with --drafter, or leave "
            "it out"
        )
    if min(numbers(options.concurrency, "--concurrency", int), default=1) < 1:
        raise UserError("--concurrency must be at least 1")


def numbers(text: str | None, option: str, kind: type, least: float | None = None) -> list[Any]:
    """Return the numbers of a text such as 1,4,16, each made by `kind`; none where `text` is None.

    Raises `UserError`, which names `option`, for anything else and for numbers below `least`.
    """
    try:
        values = [kind(item) for item in text.split(",")] if text is not None else []
    except ValueError as error:
        raise UserError(f"{option} takes numbers with commas between them, not {text!r}") from error
    for number in values:
        if not math.isfinite(number) or (least is not None and number < least):
            raise UserError(
                f"{option} must be {'finite' if least is None else f'at least {least:g}'}, not "
                f"{number}"
            )
    return values


def proposers_of(options: Options, target: Target) -> tuple[dict[str, Proposer], dict[str, str]]:
    """Return the proposers by their specs, and the reasons why baselines are left out.

    Plain decoding comes first, then the baselines, then the drafters that the user named. Raises
    `UserError` for a named drafter that does not load.
    """

    named = [spec for spec in dict.fromkeys(options.drafter) if spec != "none"]
    proposers = {"none": load_proposer("none", target, warn)}
    left_out = {}
    baselines = BASELINES if options.baselines else ()
    for spec in baselines:
        if spec not in named:
            try:
                proposers[spec] = load_proposer(spec, target, warn)
            except UserError as error:  # such as early exit, which not every architecture allows
                left_out[spec] = str(error)
    for spec in named:
        proposers[spec] = load_proposer(spec, target, warn)
    return proposers, left_out


def origin(spec: str) -> dict[str, str | None]:
    """Return a drafter's spec, and the hashes of its weight files; None for one without files."""
    name, _ = parse_spec(spec)
    files = sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    return {"spec": spec, "sha256": " ".join(map(checksum, files)) or None}


def facts_of(
    target: Target | None, tokenizer: Any, prompts: Sequence[Prompt], options: Options, started: str
) -> dict[str, Any]:
    """Return the first part of the report: target, machine, options and prompts.

    `target` is None where only a server was measured; its name and tokenizer are then all that is
    known of the target. `started` is a time in UTC.
    """
    assert options.prompts is not None
    known = {"name": options.target.path, "tokenizer_hash": tokenizer_hash(tokenizer)}
    texts = repr([(prompt.token_ids, prompt.later) for prompt in prompts])
    return {
        "schema_version": SCHEMA,
        "command": shlex.join(["draftsmith", *sys.argv[1:]]),
        "started_at": started,
        "target": target.fingerprint().as_dict() if target is not None else known,
        "dtype": dtype_name(target.dtype) if target is not None else None,
        "device": str(target.device) if target is not None else None,
        "threads": torch.get_num_threads(),
        "machine": machine_of(target) if target is not None else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sampling": asdict(options.sampling),
        "options": asdict(options),
        "prompt_set": {
            "path": options.prompts,
            "sha256": hashlib.sha256(texts.encode()).hexdigest(),
            "prompts": len(prompts),
            "categories": dict(Counter(prompt.category for prompt in prompts)),
        },
        "peak_memory_bytes": peak_memory(target),
        "definitions": DEFINITIONS,
    }


def peak_memory(target: Target | None) -> int:
    """Return the most bytes that this process has held so far.

    They are of the GPU's memory if the target lies there, else of the machine's.
    """
    if target is not None and target.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_spec_bench(folder: Path, results: Results, target: Target) -> None:
    """Write the replies in the form that Spec-Bench's own evaluation reads.

    There is one file for each drafter and one line for each question, with lists over its turns.
    """
    with whole_directory(folder) as aside:
        aside.mkdir(exist_ok=True)
        for name, turns in results.items():
            rows: dict[str, dict[str, Any]] = {}
            for turn in turns:
                prompt, reply = turn.prompt, turn.generation
                if prompt.id not in rows:
                    keys = ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
                    rows[prompt.id] = {
                        "question_id": prompt.id,
                        "category": prompt.category,
                        "model_id": name,
                        "choices": [{key: [] for key in keys}],
                    }
                choice = rows[prompt.id]["choices"][0]
                text = target.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
                choice["turns"].append(text)
                choice["decoding_steps"].append(len(reply.rounds))
                choice["new_tokens"].append(len(reply.token_ids))
                choice["wall_time"].append(reply.ttft_s + reply.decode_s)
                # of all turns in one list, as Spec-Bench's own scripts write them
                choice["accept_lengths"] += emitted_per_round(reply)
            lines = "".join(json_module.dumps(row) + "\n" for row in rows.values())
            (aside / f"{name.replace('/', '-').replace(':', '-')}.jsonl").write_text(lines)


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print a table for each setting with its warnings, then tau by category, then the server."""
    console = console or Console()
    for setting in report["settings"]:
        console.print(_table_of(setting, report))
        for name, summary in setting["drafters"].items():
            for warning in summary["warnings"]:
                console.print(f"warning, {name}: {warning}")
            gaps = [r["top2_gap"] for r in summary["per_request"] if r["top2_gap"] is not None]
            if gaps:
                console.print(
                    f"{name}: where a reply first differs, the target's two best logits are at "
                    f"most {max(gaps):.2g} apart."
                )
    if len(report["prompt_set"]["categories"]) > 1:
        for setting in firsts(report):
            console.print(_categories(setting))
    for name, reason in report["left_out"].items():
        console.print(f"{name} is left out: {reason}")
    if report["settings"]:
        console.print(f"tau: tokens a round. {loop_shares(report)}", highlight=False)
    if "server" in report:
        live_report.show(report, console)


def _table_of(setting: dict[str, Any], report: dict[str, Any]) -> Table:
    """Return the table of one setting, a row for each way to decode."""
    drafters = setting["drafters"]
    requests = drafters["plain"]["requests"]
    conditions = f"T = {setting['temperature']:g}"
    if not setting["lossless"]:
        conditions += ", LOSSY typical acceptance"
    prompts = f"{requests} held-out prompt{'s' if requests > 1 else ''}"
    table = plain_table(
        f"{report['target']['name']}\n{prompts}, {conditions}, batch {setting['batch']}, "
        f"{report['dtype']}"
    )
    table.add_column("drafter", overflow="fold", min_width=18)
    for column in ("tau", "95%", f"accepted 1-{SHOWN}", "tok/s", "speed-up", "identical"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, summary in drafters.items():
        low, high = summary["tau_ci95"]
        equal = summary["equal_to_ar"]
        if equal is None:
            identical = "-"
        else:
            identical = "yes" if equal == requests else f"{equal} of {requests}"
        table.add_row(
            name,
            f"{summary['tau_incl_bonus']:.2f}",
            f"{low:.2f}-{high:.2f}" if summary["mean_n_draft"] else "-",
            " ".join(f"{x:.2f}".removeprefix("0") for x in summary["survival"][:SHOWN]) or "-",
            f"{summary['tokens_s']:.0f}",
            f"{summary['speedup']:.2f}x",
            identical,
        )
    return table


def _categories(setting: dict[str, Any]) -> Table:
    """Return the table of tau by category of the prompts, a column for each drafter that drafts."""
    drafting = {}
    for name, summary in setting["drafters"].items():
        if summary["mean_n_draft"]:
            drafting[name] = summary["by_category"]
    table = plain_table(f"tau by category, {caption(setting)}")
    table.add_column("category")
    for name in drafting:
        table.add_column(name, justify="right", overflow="fold")
    for category in sorted(set().union(*drafting.values())):
        cells = []
        for by_category in drafting.values():
            known = category in by_category
            cells.append(f"{by_category[category]['tau_incl_bonus']:.2f}" if known else "-")
        table.add_row(category or "-", *cells)
    return table
