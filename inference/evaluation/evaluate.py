"""`draftsmith evaluate`: drafters compared with plain decoding and with untrained drafters.

All of them decode the same prompts in the same loop, at each temperature and batch size.
"""

from __future__ import annotations

import hashlib
import json as json_module
import logging
import os
import resource
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec import to_builtins

from ...heads.errors import UserError
from ...heads.files import JsonObject, checksum
from ...heads.fingerprint import tokenizer_hash, without_name
from ...heads.layout import dtype_name
from ..base.console import ProgressReporter, warn
from ..base.output_paths import STANDARD_OUTPUT, check_json, output_json
from ..base.settings import Sampling, check_url, headers_with_key
from ..conversations.prompts import Prompt, check_batches, check_room, check_source, read_prompts
from ..conversations.rows import InMemoryRows
from ..conversations.sources import benchmark_of
from ..conversations.templates import check_template_kwargs, endless
from ..profile import TuningProfile, key_of, read_profile, timing_conditions
from ..proposers.contract import Proposer
from ..proposers.custom_drafters import checked_proposer, files_of
from ..proposers.registry import check_spec, is_own_drafter, load_proposer, parse_spec, without_tree
from ..targets.packed import processor
from ..targets.target import Target, load_for_decoding
from ..targets.target_files import tokenizer_of
from . import server_report as live_report
from .drafter_names import BASELINES, distinct_names, short_name
from .engines import AS_IN, ImitatedEngine, as_in_engine
from .figure_text import load
from .figures import figures_of_setting
from .journal import Journal, interruption_message
from .measure import ChosenWay, Results, Setting, Way, decode_alternately
from .options import EvaluateOptions as Options
from .options import TuneOptions
from .results import (
    SCHEMA,
    Conditions,
    DrafterOrigin,
    PromptSet,
    Report,
    write_report,
)
from .tables import show

log = logging.getLogger(__name__)

CONCURRENCY = (1, 8, 32, 64)
SAMPLES = 3  # replies of each drafter that the report shows token by token


def if_interrupted(options: Options) -> str:
    """Return the line for a user who stopped an evaluation: what is kept, and how to continue."""
    if options.json is None or options.json == STANDARD_OUTPUT:
        return "nothing was written; with --json FILE the same command continues where it stopped"
    return interruption_message(options.json, "measured")


def run(options: Options) -> None:
    """Measure what the options name, print the tables and write the files. Raises `UserError`."""
    if options.json == STANDARD_OUTPUT:
        # standard output cannot be resumed
        report = measured(replace(options, json=None))
        output_json(STANDARD_OUTPUT, report.to_json())
    else:
        show(measured(options))


def measured(
    options: Options,
    given: Target | None = None,
    own: Sequence[Proposer] = (),
    rows: InMemoryRows | None = None,
) -> Report:
    """Return the report of what the options name, and write it to their file if there is one.

    `given` is the target, if it is loaded already; `own` are further proposers to measure; `rows`
    are prompts in place of those that the options name. Raises `UserError`.
    """
    settings = check(options)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    tokenizer = given.tokenizer if given is not None else tokenizer_of(options.target)
    prompts = prompts_of(options, tokenizer, rows)
    served = None
    # The server comes first: its address may be wrong, and measuring drafters here takes long.
    if options.server is not None:
        at_once = options.concurrency or list(CONCURRENCY)
        samplings = [setting.sampling for setting in settings]
        served = live_report.measure(options, tokenizer, prompts, samplings, at_once)
    if served is None or options.drafter or own:
        return evaluate_drafters(options, settings, prompts, started, served, given, own)
    report = facts_of(None, tokenizer, prompts, options, started)
    report.server = served.report
    write_report(report, options.json)
    return report


def check(options: Options) -> list[Setting]:
    """Return the settings to measure, a temperature and a batch size each.

    Raises `UserError` for every mistake that can be found before a large target is loaded.
    """
    for name in ("limit", "max_new_tokens", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for engine in options.like:
        ImitatedEngine(engine)  # raises for an unknown engine or setting
    if (options.like or options.profile) and not options.drafter:
        raise UserError("--like and --profile need a drafter; name one with --drafter")
    if options.profile is not None:
        read_profile(options.profile)
    check_server(options)
    check_source(options.source(options.prompts))
    for spec in options.drafter:
        check_spec(spec)
    check_json(options.json)
    return [
        Setting(sampling, size, options.max_new_tokens, options.repeats)
        for sampling, size in product(*sweep_values(options))
    ]


def sweep_values(options: Options | TuneOptions) -> tuple[list[Sampling], list[int]]:
    """Return the sampling for each temperature of a command, and its batch sizes.

    Raises `UserError`.
    """
    if (fewest := min(options.batch_size, default=0)) < 1:
        raise UserError(f"--batch-size must be at least 1, not {fewest}")
    temperatures = options.temperature or [options.sampling.temperature]
    return [replace(options.sampling, temperature=one) for one in temperatures], options.batch_size


def check_server(options: Options) -> None:
    """Raise `UserError` for options that exclude or require `server`."""
    if options.server is None:
        of_server = ("concurrency", "server_model")
        if given := [name for name in of_server if getattr(options, name)]:
            raise UserError(
                f"--{given[0].replace('_', '-')} needs a server; name it with --server "
                "http://127.0.0.1:8000"
            )
        return
    check_url(options.server, "--server")
    headers_with_key()
    if options.batch_size != [1]:
        raise UserError(
            "--server takes --concurrency 1,8,32 in place of batch sizes; drafters here are "
            "measured one by one"
        )
    if min(options.concurrency, default=1) < 1:
        raise UserError("--concurrency must be at least 1")


def prompts_of(options: Options, tokenizer: Any, rows: InMemoryRows | None = None) -> list[Prompt]:
    """Return the prompts in `rows`, or those that the options name. Raises `UserError`."""
    check_template_kwargs(options.chat_template_kwargs)
    return read_prompts(
        options.source(options.prompts) if rows is None else rows,
        tokenizer,
        options.target.path,
        options.limit,
        options.bad_rows,
        options.chat_template_kwargs,
    )


def evaluate_drafters(
    options: Options,
    settings: list[Setting],
    prompts: list[Prompt],
    started: str,
    served: live_report.ServerMeasurement | None,
    given: Target | None = None,
    own: Sequence[Proposer] = (),
) -> Report:
    """Return the report of the drafters that decode in this process, and write it.

    `given` and `own` are as for `measured`. Greedy replies of a server, in `served`, are compared
    with plain decoding. Raises `UserError`.
    """
    check_batches([setting.batch for setting in settings], prompts)
    target = given or load_for_decoding(options.target)
    if why := endless(target.tokenizer, target.name, target.eos_ids, options.chat_template_kwargs):
        log.warning("%s", why)
    check_room(prompts, target.max_positions)
    loaded, left_out = proposers_of(options, target), dict[str, str]()
    own = [checked_proposer(one, target) for one in own]
    proposers = [*loaded.values(), *own]
    further_ways = tuned_and_served(options, target, left_out)
    # Everything that may fail comes before the hours of decoding.
    names = distinct_names(proposers)
    sizes = {name: p.weight_bytes for name, p in zip(names, proposers, strict=True)}
    classes = (f"{type(one).__module__}:{type(one).__qualname__}" for one in own)
    known = [*map(origin, loaded), *(DrafterOrigin(spec=spec) for spec in classes)]
    origins = dict(zip(names, known, strict=True))
    report = facts_of(target, target.tokenizer, prompts, options, started)
    report.left_out, report.drafters, report.drafter_bytes = left_out, origins, sizes
    if served is not None:
        report.server = served.report
    # A proposer object cannot be identified with that of an earlier call.
    kept_in = None if own else options.json
    journal = Journal(kept_in, identity(report, options), "an evaluation")

    def ways_in(setting: Setting) -> list[Way]:
        return [*proposers, *further_ways(setting)]

    results = decode_settings(target, ways_in, prompts, settings, report, journal)
    if served is not None:
        for result, setting in zip(results, settings, strict=True):
            if setting.sampling.greedy:
                live_report.compare_replies(served, target, result, setting.sampling)
    report.peak_memory_bytes = peak_memory(target)
    if report.conditions is not None:
        report.conditions.load_after = load()
    write_report(report, options.json)
    journal.finish()
    return report


def decode_settings(
    target: Target,
    ways_in: Callable[[Setting], list[Way]],
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    report: Report,
    journal: Journal,
) -> list[Results]:
    """Return the results of every setting, and add their figures to `report`.

    `ways_in` returns the ways to decode in a setting. One bar counts the prompts of all settings.
    """
    results = []
    with ProgressReporter(total=len(settings) * len(prompts), desc="evaluating") as progress:
        for number, setting in enumerate(settings):
            ways = ways_in(setting)
            of_all = f"{number + 1}/{len(settings)}: " if len(settings) > 1 else ""
            conditions = f"T = {setting.sampling.temperature:g}, batch {setting.batch}"
            progress.now(of_all + conditions)
            results.append(decode_alternately(target, ways, prompts, setting, progress, journal))
            entry = figures_of_setting(target, results[-1], setting, SAMPLES)
            for figures, way in zip(entry.drafters.values(), ways, strict=True):
                figures.kind = way.name
                if isinstance(way, ChosenWay):
                    figures.setting, figures.spec = way.setting, way.drafter
            report.settings.append(entry)
    return results


def identity(report: Report, options: Options) -> JsonObject:
    """Return all that the figures depend on: see `comparable_facts`."""
    keys = ("target", "dtype", "device", "threads", "machine", "versions", "drafters")
    facts: JsonObject = {key: to_builtins(getattr(report, key)) for key in keys}
    facts["prompts"] = report.prompt_set.sha256
    facts["profile"] = checksum(Path(options.profile)) if options.profile is not None else None
    return comparable_facts(facts | {"options": asdict(options)}, "json")


def comparable_facts(facts: JsonObject, output: str) -> JsonObject:
    """Return what a measurement depends on, as JSON; it is resumed only if all of it is equal.

    The option `output` is left out, and so are name and paths of a target whose weights are known.
    """
    del facts["options"][output]
    target = facts["target"]
    if target is not None and (compared := without_name(target)) != target:
        facts["target"] = compared
        del facts["options"]["target"]["path"], facts["options"]["target"]["adapter"]
    # back and forth, so that only texts, numbers, lists and dictionaries are left
    return json_module.loads(json_module.dumps(facts, default=str))


def tuned_and_served(
    options: Options, target: Target, left_out: dict[str, str]
) -> Callable[[Setting], list[Way]]:
    """Return a function from a setting to its further ways to decode.

    These are the named drafters with their trees of `options.profile`, and as in each engine of
    `options.like`. An engine that does not take a drafter is added to `left_out` with the reason.
    Raises `UserError`.
    """
    profile = TuningProfile(options.profile, target) if options.profile is not None else None
    # A drafter may be named with several trees, which profile and engine replace with theirs.
    drafters = {key_of(spec): spec for spec in options.drafter}
    tuned: list[str] = []
    if profile is not None:
        tuned = [spec for spec in drafters.values() if spec in profile]
        if not tuned:
            raise UserError(
                f"{options.profile} has none of the drafters; name one of those that it has with "
                "--drafter"
            )
    engines: list[Way] = []
    for engine in map(ImitatedEngine, options.like):
        for spec in drafters.values():
            try:
                engines.append(as_in_engine(engine, spec, target))
            except UserError as error:
                named = short_name(without_tree(spec))
                left_out[f"{named}{AS_IN}{engine.label}"] = str(error)

    def ways(setting: Setting) -> list[Way]:
        if profile is None:
            return engines
        sampling, batch = setting.sampling, setting.batch
        chosen = [tuned_way(profile, spec, target, sampling, batch) for spec in tuned]
        return [*chosen, *engines]

    return ways


def tuned_way(
    profile: TuningProfile, spec: str, target: Target, sampling: Sampling, batch: int
) -> ChosenWay:
    """Return a drafter with its tuned setting for a temperature and batch size."""
    setting = profile.setting(spec, sampling.temperature, batch)
    proposer = load_proposer(spec, target, lambda message: None, setting)
    return ChosenWay(proposer.name, lambda: proposer, setting, spec, proposer.spec)


def proposers_of(options: Options, target: Target) -> dict[str, Proposer]:
    """Return the proposers by their specs.

    Plain decoding comes first, then the baselines, then the drafters that the user named. Raises
    `UserError` for a named drafter that does not load.
    """
    named = [spec for spec in dict.fromkeys(options.drafter) if spec != "none"]
    proposers = {"none": load_proposer("none", target, warn)}
    for spec in BASELINES:
        if options.baselines and spec not in named:
            proposers[spec] = load_proposer(spec, target, warn)
    for spec in named:
        proposers[spec] = load_proposer(spec, target, warn, choose=True)
    return proposers


def origin(spec: str) -> DrafterOrigin:
    """Return a drafter's spec and the hashes of its weight files, or of its class's module."""
    name, settings = parse_spec(spec)
    files = sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    if is_own_drafter(name):
        files = files_of(name, settings)
    return DrafterOrigin(spec=spec, sha256=" ".join(map(checksum, files)) or None)


def facts_of(
    target: Target | None,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: Options,
    started: str,
) -> Report:
    """Return a report without figures: target, machine, options and prompts.

    `target` is None if only a server was measured; only its name and tokenizer are then known.
    `started` is a time in UTC.
    """
    texts = repr([(prompt.token_ids, prompt.later) for prompt in prompts])
    report = Report(
        schema_version=SCHEMA,
        command=shlex.join(["draftsmith", *sys.argv[1:]]),
        started_at=started,
        threads=torch.get_num_threads(),
        versions={"torch": str(torch.__version__), "transformers": transformers.__version__},
        sampling=asdict(options.sampling),
        options=asdict(options),
        prompt_set=PromptSet(
            path=options.prompts,
            sha256=hashlib.sha256(texts.encode()).hexdigest(),
            prompts=len(prompts),
            categories=dict(Counter(prompt.category for prompt in prompts)),
            benchmark=benchmark_of(options.source(options.prompts)),
        ),
        peak_memory_bytes=peak_memory(target),
        settings=[],
    )
    if target is None:
        own_hash = tokenizer_hash(tokenizer)
        report.target = {"name": options.target.path, "tokenizer_hash": own_hash}
        return report
    report.target = target.fingerprint().as_dict()
    report.dtype, report.device = dtype_name(target.dtype), str(target.device)
    report.machine, report.conditions = timing_conditions(target), conditions_of(target)
    return report


def conditions_of(target: Target) -> Conditions:
    """Return the conditions that speeds depend on, with the load before the measurement."""
    cuda = target.device.type == "cuda"
    return Conditions(
        processor=torch.cuda.get_device_name(target.device) if cuda else processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        machine_cores=os.cpu_count(),
        load_before=load(),
        layout="packed" if target.packed_bytes else "as stored",
        packed_bytes=target.packed_bytes,
    )


def peak_memory(target: Target | None) -> int:
    """Return the most bytes of memory held so far, the GPU's if the target lies there."""
    if target is not None and target.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
