"""`draftsmith evaluate`: drafters compared with plain decoding and with drafters without training.

All of them decode the same prompts in the same loop, in each setting: each temperature with each
batch size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json as json_module
import logging
import os
import resource
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec import to_builtins
from msgspec.structs import replace

from ...heads.errors import UserError
from ...heads.files import STANDARD_OUTPUT, JsonObject, checksum, output_json
from ...heads.fingerprint import tokenizer_hash, without_name
from ...heads.layout import dtype_name
from ..console import Progress, warn
from ..conversations.benchmarks import benchmark_of
from ..conversations.given import GivenRows
from ..conversations.prompts import Prompt, check_batches, check_room
from ..conversations.templates import endless
from ..drafters import is_own_drafter, load_proposer, parse_spec, without_tree
from ..own_drafters import checked_proposer, files_of
from ..profile import TuningProfile, key_of, machine_of
from ..proposer import Proposer
from ..targets.packed import processor
from ..targets.target import Target, load_for_decoding
from . import replayed
from .checks import check, prompts_of
from .console_tables import show
from .definitions import DEFINITIONS
from .engines import AS_IN, DraftsAsEngine, ImitatedEngine
from .figures import figures_of_setting, gain, model_batches
from .four_tokens import four_tokens
from .journal import Journal, kept
from .measure import Results, Setting, Way, decode_alternately
from .names import BASELINES, distinct_names, short_name
from .options import EvaluateOptions as Options
from .remarks import load
from .results import (
    SCHEMA,
    Conditions,
    DrafterOrigin,
    PromptSet,
    Report,
    SettingFigures,
    TargetFacts,
    write_report,
)
from .server import report as live_report
from .tuning.profile import Tuned, untuned

log = logging.getLogger(__name__)

CONCURRENCY = (1, 8, 32, 64)
SAMPLES = 3  # replies of each drafter that the report shows token by token
PARTIAL_EVERY_S = 30.0  # between two reports of an evaluation that is under way


def if_interrupted(options: Options) -> str:
    """Return the line for a user who stopped an evaluation: what is kept, and how to continue."""
    if options.json is None or options.json == STANDARD_OUTPUT or options.features is not None:
        return "nothing was written; with --json FILE the same command continues where it stopped"
    return kept(options.json, "measured")


def run(options: Options) -> None:
    """Measure what the options name, print the tables and write the files. Raises `UserError`."""
    if options.features is not None:
        check(options)
        return replayed.run(options)
    if options.json == STANDARD_OUTPUT:
        # there is no file to write parts of the report to, or to resume from
        report = measured(dataclasses.replace(options, json=None))
        output_json(STANDARD_OUTPUT, report.to_json())
    else:
        show(measured(options))


def measured(
    options: Options,
    given: Target | None = None,
    own: Sequence[Proposer] = (),
    rows: GivenRows | None = None,
) -> Report:
    """Return the report of what the options name, and write it to their file if there is one.

    `given` is the target, if it is loaded already; `own` are proposers to measure too; `rows` are
    prompts in place of those that the options name. Raises `UserError`.
    """
    settings = check(options)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    served = None
    # the server comes first: its address may be wrong, and measuring drafters here takes long
    if options.server is not None:
        at_once = options.concurrency or list(CONCURRENCY)
        samplings = [setting.sampling for setting in settings]
        served = live_report.measure(options, samplings, at_once, rows)
    if served is None or options.drafter or own:
        return evaluate_drafters(options, settings, started, served, given, own, rows)
    report = facts_of(None, served.tokenizer, served.prompts, options, started)
    report.server = served.report
    write_report(report, options.json)
    return report


def evaluate_drafters(
    options: Options,
    settings: list[Setting],
    started: str,
    served: live_report.ServerMeasurement | None,
    given: Target | None = None,
    own: Sequence[Proposer] = (),
    rows: GivenRows | None = None,
) -> Report:
    """Return the report of the drafters that decode in this process, and write it.

    `given`, `own` and `rows` are as for `measured`. Greedy replies of a server, in `served`, are
    compared with plain decoding. Raises `UserError`.
    """
    prompts = prompts_of(options, given.tokenizer if given is not None else None, rows)
    check_batches([setting.batch for setting in settings], prompts)
    target = given or load_for_decoding(options.target)
    if why := endless(target.tokenizer, target.name, target.eos_ids, options.chat_template_kwargs):
        log.warning("%s", why)
    check_room(prompts, target.max_positions)
    loaded, left_out = proposers_of(options, target), dict[str, str]()
    own = [checked_proposer(one, one.name, target) for one in own]
    proposers = [*loaded.values(), *own]
    further_ways = tuned_and_served(options, target, left_out)
    # What may fail comes before the hours of decoding: facts, hashes of the weights, and the file
    # to be written.
    names = distinct_names(proposers)
    sizes = {name: p.weight_bytes for name, p in zip(names, proposers, strict=True)}
    classes = (f"{type(one).__module__}:{type(one).__qualname__}" for one in own)
    known = [*map(origin, loaded), *(DrafterOrigin(spec=spec) for spec in classes)]
    origins = dict(zip(names, known, strict=True))
    report = facts_of(target, target.tokenizer, prompts, options, started)
    report.left_out, report.drafters, report.drafter_bytes = left_out, origins, sizes
    if served is not None:
        report.server = served.report
    # Of objects nobody can say whether they are those of an earlier call.
    kept_in = None if own else options.json
    journal = Journal(kept_in, identity(report, options), "an evaluation")

    def ways_in(setting: Setting) -> list[Way]:
        return [*proposers, *further_ways(setting)]

    results = decode_settings(target, ways_in, prompts, settings, report, options, journal)
    model_batches(report.settings)
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
    options: Options,
    journal: Journal,
) -> list[Results]:
    """Return the results of every setting, and add their figures to `report`.

    `ways_in` returns the ways to decode in a setting. One bar counts the prompts of all settings.
    """
    results = []
    with Progress(total=len(settings) * len(prompts), desc="evaluating") as progress:
        for number, setting in enumerate(settings):
            ways = ways_in(setting)
            of_all = f"{number + 1}/{len(settings)}: " if len(settings) > 1 else ""
            conditions = f"T = {setting.sampling.temperature:g}, batch {setting.batch}"
            progress.now(of_all + conditions)
            # replies token by token need a forward pass each, and only the whole report shows them
            figures = partial(configured_figures, target, setting=setting, ways=ways, samples=0)
            where = f"of {len(prompts)} prompts in setting {number + 1} of {len(settings)}"
            each = partial_writer(report, options.json, where, figures)
            decoding = decoded_ways(ways)
            results.append(
                decode_alternately(target, decoding, prompts, setting, progress, journal, each)
            )
            report.settings.append(configured_figures(target, results[-1], setting, ways))
            if number + 1 < len(settings):
                done = f"{number + 1} of {len(settings)} settings"
                write_report(replace(report, partial=done), options.json)
    return results


def decoded_ways(ways: Sequence[Way]) -> list[Way]:
    """Return the ways that have to decode: all but tuned drafters whose profile changes nothing.

    Two measurements of the same decoding differ by one or two percent, which is not a gain.
    """
    names, without = distinct_names(ways), untuned(ways)
    same = {name for name, (_, same_tree) in without.items() if same_tree}
    return [way for name, way in zip(names, ways, strict=True) if name not in same]


def configured_figures(
    target: Target, results: Results, setting: Setting, ways: Sequence[Way], samples: int = SAMPLES
) -> SettingFigures:
    """Return the part of the report about one setting, with `samples` replies of each way.

    Tuned ways have their gain over the same drafter as it is named without the profile, whose
    replies and figures they share where the profile changes nothing.
    """
    named = dict(zip(distinct_names(ways), ways, strict=True))
    without = untuned(ways)
    results = {name: results[without[name][0] if name not in results else name] for name in named}
    entry = figures_of_setting(target, results, setting, samples)
    for name, figures in entry.drafters.items():
        way = named[name]
        figures.kind = way.name
        if isinstance(way, Tuned | DraftsAsEngine):
            figures.setting, figures.spec = way.setting, way.spec
    for name, (default, _) in without.items():
        beside = [turn.generation for turn in results[default]]
        tuned = entry.drafters[name]
        tuned.untuned = default
        tuned.gain_over_default, tuned.gain_ci95, _ = gain(results[name], beside, setting.batch)
    return entry


def partial_writer(
    report: Report, path: str | None, where: str, figures: Callable[[Results], SettingFigures]
) -> Callable[[Results], None]:
    """Return a function that writes an unfinished report, at most twice a minute.

    `report` has the settings that are finished, and `figures` makes those of the results so far of
    the present one. `where` says after their number of what the finished prompts are a part.
    """
    written = time.monotonic()

    def write(results: Results) -> None:
        nonlocal written
        if path is None or time.monotonic() - written < PARTIAL_EVERY_S:
            return
        done = len({turn.prompt.place for turn in next(iter(results.values()))})
        settings = [*report.settings, figures(results)]
        write_report(replace(report, settings=settings, partial=f"{done} {where}"), path)
        written = time.monotonic()

    return write


def identity(report: Report, options: Options) -> JsonObject:
    """Return all that the figures depend on, as JSON can hold it.

    A stopped evaluation goes on only where it is the same.
    """
    keys = ("target", "dtype", "device", "threads", "machine", "versions", "drafters")
    facts: JsonObject = {key: to_builtins(getattr(report, key)) for key in keys}
    facts["prompts"] = report.prompt_set.sha256
    # the figures do not depend on the name of the file that they are written to
    facts["options"] = asdict(options)
    del facts["options"]["json"]
    leave_out_names(facts)
    facts["profile"] = checksum(Path(options.profile)) if options.profile is not None else None
    # there and back, so that only texts, numbers, lists and dictionaries are left
    return json_module.loads(json_module.dumps(facts, default=str))


def leave_out_names(facts: JsonObject) -> None:
    """Take the target's name and paths out of an identity, where its weights are known."""
    target = facts["target"]
    if target is not None and (compared := without_name(target)) != target:
        facts["target"] = compared
        del facts["options"]["target"]["path"], facts["options"]["target"]["adapter"]


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
    tuned: list[str] = []
    if profile is not None:
        tuned = [spec for spec in drafters.values() if spec in profile]
        if not tuned:
            raise UserError(
                f"{options.profile} is of none of the drafters; name one of those that it has "
                "with --drafter"
            )
    engines: list[Way] = []
    for engine in map(ImitatedEngine, options.like):
        for spec in drafters.values():
            try:
                engines.append(DraftsAsEngine(engine, spec, target))
            except UserError as error:
                named = short_name(without_tree(spec))
                left_out[f"{named}{AS_IN}{engine.label}"] = str(error)

    def ways(setting: Setting) -> list[Way]:
        if profile is None:
            return engines
        sampling, batch = setting.sampling, setting.batch
        return [*(Tuned(profile, spec, target, sampling, batch) for spec in tuned), *engines]

    return ways


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

    `target` is None where only a server was measured; its name and tokenizer are then all that is
    known of the target. `started` is a time in UTC.
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
            benchmark=benchmark_of(options.source(options.prompts or "")),
        ),
        peak_memory_bytes=peak_memory(target),
        definitions=DEFINITIONS,
        settings=[],
    )
    if target is None:
        own_hash = tokenizer_hash(tokenizer)
        report.target = TargetFacts(name=options.target.path, tokenizer_hash=own_hash)
        return report
    report.target = TargetFacts(**target.fingerprint().as_dict())
    report.dtype, report.device = dtype_name(target.dtype), str(target.device)
    report.machine, report.conditions = machine_of(target), conditions_of(target)
    return report


def conditions_of(target: Target) -> Conditions:
    """Return what the speeds measured here depend on, with the load before the measurement."""
    cuda = target.device.type == "cuda"
    return Conditions(
        processor=torch.cuda.get_device_name(target.device) if cuda else processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        machine_cores=os.cpu_count(),
        load_before=load(),
        layout="packed" if target.packed_bytes else "as stored",
        packed_bytes=target.packed_bytes,
        four_tokens=four_tokens(target),
    )


def peak_memory(target: Target | None) -> int:
    """Return the most bytes of memory held so far, the GPU's if the target lies there."""
    if target is not None and target.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
