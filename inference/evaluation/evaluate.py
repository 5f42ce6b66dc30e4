"""`draftsmith evaluate`: every drafter beside plain decoding and those that need no training, in
one table for each setting."""

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
from rich import box
from rich.table import Table

from ...heads.errors import UserError
from ...heads.files import check_output, checksum, whole_directory, whole_file, write_json
from ...heads.fingerprint import tokenizer_hash
from ..console import Console
from ..conversations.prompts import Prompt, check_batches, check_room, read_prompts
from ..conversations.sources import source_files
from ..metrics import emitted_per_round
from ..proposer import Proposer, check_spec, load_proposer, parse_spec, weight_bytes
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
    """A line for a person who stopped an evaluation: which file holds what was measured, and how to
    go on."""
    if options.json is None or options.features is not None:
        return "nothing was written; with --json FILE the same command goes on where it stopped"
    return (
        f"{options.json} holds what was measured so far, if anything was; the same command goes on "
        "where it stopped"
    )


def run(options: Options) -> None:
    settings = check(options)
    if options.features is not None:
        return replayed.run(options)
    started = datetime.now(UTC).isoformat(timespec="seconds")
    served = None
    # first: it may be wrong or gone, and measuring drafters here takes long
    if options.server is not None:
        at_once = numbers(options.concurrency, "--concurrency", int) or list(CONCURRENCY)
        served = live_report.measure(options, [setting.sampling for setting in settings], at_once)
    if served is not None and not options.drafter:
        nothing = {"left_out": {}, "drafter_bytes": {}, "settings": []}
        report = {
            **facts_of(None, served.tokenizer, served.prompts, options, started),
            **nothing,
            "server": served.report,
        }
        write(report, options)
    else:
        report = decoded(options, settings, started, served)
    show(report)


def write(report: dict[str, Any], options: Options) -> None:
    """Put the report into the file that the user named, if any."""
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(aside, report)


def decoded(
    options: Options,
    settings: list[Setting],
    started: str,
    served: live_report.ServerMeasurement | None,
) -> dict[str, Any]:
    """The report of drafters decoding here. Replies go to `options.spec_bench`, and are held
    against those that `served` has."""
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
    theirs = assisted(options, target, proposers, left_out)
    if theirs and any(setting.batch > 1 for setting in settings):
        left_out["assisted generation of batches"] = "transformers assists one request at a time"
    others = tuned_and_served(options, target, left_out)
    # What may fail comes before the hours of decoding: facts, hashes of the weights, and the file
    # to be written.
    sizes = {
        name: weight_bytes(p, target)
        for name, p in zip(distinct_names(proposers), proposers, strict=True)
    }
    own = dict(zip(sizes, map(origin, loaded), strict=True))
    report = facts_of(target, target.tokenizer, prompts, options, started)
    report |= {"left_out": left_out, "drafters": own, "drafter_bytes": sizes, "settings": []}
    if served is not None:
        report["server"] = served.report
    journal = Journal(options.json, identity(report, options), "an evaluation")
    results = []
    for number, setting in enumerate(settings):
        decoding = [*proposers, *others(setting), *(theirs if setting.batch == 1 else [])]
        partial = Partial(
            report, options, setting, number, len(settings), len(prompts), target, decoding
        )
        results.append(compare(target, decoding, prompts, setting, journal=journal, each=partial))
        report["settings"].append(figures(target, results[-1], setting, decoding))
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
    """The part of the report that is about one setting: every drafter's numbers, and the spec of
    tuned and engine-like ones."""
    named = zip(distinct_names(ways), ways, strict=True)
    others = {name: way for name, way in named if isinstance(way, Tuned | AsIn)}
    found = measured(
        target, results, setting, {name: way.setting for name, way in others.items()}, samples
    )
    for name, way in others.items():
        found["drafters"][name]["spec"] = way.spec
    return found


@dataclass
class Partial:
    """Called after every batch: writes the report of what there is, at most twice a minute."""

    report: dict[str, Any]
    options: Options
    setting: Setting
    number: int
    """The setting's place among all, from 0."""
    settings: int
    prompts: int
    target: Target
    ways: Sequence[Way]
    written: float = field(default_factory=time.monotonic)

    def __call__(self, results: Results) -> None:
        if self.options.json is None or time.monotonic() - self.written < PARTIAL_EVERY_S:
            return
        done = len({turn.prompt.place for turn in next(iter(results.values()))})
        so_far = figures(self.target, results, self.setting, self.ways, samples=0)
        where = f"{done} of {self.prompts} prompts in setting {self.number + 1} of {self.settings}"
        write(
            {**self.report, "settings": [*self.report["settings"], so_far], "partial": where},
            self.options,
        )
        self.written = time.monotonic()


def identity(report: dict[str, Any], options: Options) -> dict[str, Any]:
    """All that the figures depend on, as JSON: a stopped evaluation goes on only where it is the
    same."""
    facts = {
        key: report[key]
        for key in ("target", "dtype", "device", "threads", "machine", "versions", "drafters")
    }
    asked = {
        key: value for key, value in asdict(options).items() if key not in ("json", "spec_bench")
    }
    profile = checksum(Path(options.profile)) if options.profile is not None else None
    found = {
        **facts,
        "prompts": report["prompt_set"]["sha256"],
        "options": asked,
        "profile": profile,
    }
    return json_module.loads(json_module.dumps(found, default=str))


def assisted(
    options: Options, target: Target, proposers: Sequence[Proposer], left_out: dict[str, str]
) -> list[Assisted]:
    """transformers' own loop with the first of the small models, if baselines are wanted and there
    is one that it takes."""
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
    """For each setting, the named drafters as `options.profile` has them, and as in each engine of
    `options.like`."""
    profile = TuningProfile(options.profile, target) if options.profile is not None else None
    # trees of one drafter differ in their settings alone
    apart = {key_of(spec): spec for spec in options.drafter}
    tuned = [spec for spec in apart.values() if profile is not None and spec in profile]
    if profile is not None and not tuned:
        raise UserError(
            f"{options.profile} is of none of the drafters; name one of those that it has with "
            "--drafter"
        )
    engines: list[Way] = []
    for engine in map(Engine, options.like):
        for spec in apart.values():
            try:
                engines.append(AsIn(engine, spec, target, lambda message: None))
            except UserError as error:
                left_out[f"{spec} as in {engine.label}"] = str(error)

    def ways(setting: Setting) -> list[Way]:
        return [
            Tuned(profile, spec, target, setting.sampling, setting.batch)
            for spec in tuned
            if profile is not None
        ] + engines

    return ways


def check(options: Options) -> list[Setting]:
    """The settings to measure. Raises `UserError` for what is known to be wrong before a large
    target loads, or hours pass."""
    for name in ("limit", "max_new_tokens", "batch_size", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if (options.features is None) == (options.prompts is None):
        raise UserError("give either --target and --prompts to decode, or --features to replay")
    only_decoding = ("temperatures", "batch_sizes", "spec_bench", "profile", "like")
    if options.features is not None and (
        given := [name for name in only_decoding if getattr(options, name)]
    ):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"--features replays greedy texts one by one; leave out {names}")
    for engine in options.like:
        Engine(engine)
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
    """Raises `UserError` for options that do not go with `server`, or only with it."""
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
    """Numbers with commas between them, none of them below `least`; none if nothing is given.
    Raises `UserError`."""
    try:
        found = [kind(part) for part in text.split(",")] if text is not None else []
    except ValueError as error:
        raise UserError(f"{option} takes numbers with commas between them, not {text!r}") from error
    for number in found:
        if not math.isfinite(number) or (least is not None and number < least):
            raise UserError(
                f"{option} must be {'finite' if least is None else f'at least {least:g}'}, not "
                f"{number}"
            )
    return found


def proposers_of(options: Options, target: Target) -> tuple[dict[str, Proposer], dict[str, str]]:
    """Plain decoding, the baselines and what the user names, by their specs, and why a baseline is
    left out."""

    def warn(message):
        return print(f"warning: {message}", file=sys.stderr)

    named = [spec for spec in dict.fromkeys(options.drafter) if spec != "none"]
    proposers = {"none": load_proposer("none", target, warn)}
    left_out = {}
    for spec in BASELINES if options.baselines else ():
        if spec not in named:
            try:
                proposers[spec] = load_proposer(spec, target, warn)
            except UserError as error:  # such as early exit, which not every architecture allows
                left_out[spec] = str(error)
    return proposers | {spec: load_proposer(spec, target, warn) for spec in named}, left_out


def origin(spec: str) -> dict[str, str | None]:
    """A drafter as it was named, and a hash of its weights' files; None for one that has no
    files."""
    name, _ = parse_spec(spec)
    files = sorted(Path(name).glob("*.safetensors")) if Path(name).is_dir() else []
    return {"spec": spec, "sha256": " ".join(map(checksum, files)) or None}


def facts_of(
    target: Target | None, tokenizer: Any, prompts: Sequence[Prompt], options: Options, started: str
) -> dict[str, Any]:
    """What the numbers were measured on; without a `target` here, only its name and tokenizer are
    known."""
    assert options.prompts is not None
    known = {"name": options.target.path, "tokenizer_hash": tokenizer_hash(tokenizer)}
    return {
        "schema_version": SCHEMA,
        "command": shlex.join(["draftsmith", *sys.argv[1:]]),
        "started_at": started,
        "target": target.fingerprint().as_dict() if target is not None else known,
        "dtype": str(target.dtype).removeprefix("torch.") if target is not None else None,
        "device": str(target.device) if target is not None else None,
        "threads": torch.get_num_threads(),
        "machine": machine_of(target) if target is not None else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "sampling": asdict(options.sampling),
        "options": asdict(options),
        "prompt_set": {
            "path": options.prompts,
            "sha256": hashlib.sha256(
                repr([(p.token_ids, p.later) for p in prompts]).encode()
            ).hexdigest(),
            "prompts": len(prompts),
            "categories": dict(Counter(prompt.category for prompt in prompts)),
        },
        "peak_memory_bytes": peak_memory(target),
        "definitions": DEFINITIONS,
    }


def peak_memory(target: Target | None) -> int:
    """Most bytes that this process has held so far: of the GPU's memory if the target lies there,
    else of the machine's."""
    if target is not None and target.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_spec_bench(folder: Path, results: Results, target: Target) -> None:
    """Rows as Spec-Bench's own evaluation reads them: one file a drafter, one line a question,
    lists over its turns."""
    with whole_directory(folder) as aside:
        aside.mkdir(exist_ok=True)
        for name, turns in results.items():
            rows: dict[str, dict[str, Any]] = {}
            for turn in turns:
                empty = {
                    "turns": [],
                    "decoding_steps": [],
                    "new_tokens": [],
                    "wall_time": [],
                    "accept_lengths": [],
                }
                row = {
                    "question_id": turn.prompt.id,
                    "category": turn.prompt.category,
                    "model_id": name,
                    "choices": [empty],
                }
                choice = rows.setdefault(turn.prompt.id, row)["choices"][0]
                found = turn.generation
                choice["turns"].append(
                    target.tokenizer.decode(found.token_ids, skip_special_tokens=True)
                )
                choice["decoding_steps"].append(len(found.rounds))
                choice["new_tokens"].append(len(found.token_ids))
                choice["wall_time"].append(found.ttft_s + found.decode_s)
                choice["accept_lengths"] += emitted_per_round(found)
            lines = "".join(json_module.dumps(row) + "\n" for row in rows.values())
            (aside / f"{name.replace('/', '-').replace(':', '-')}.jsonl").write_text(lines)


def show(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what a person looks at: a table for each setting, then tau by category."""
    console = console or Console()
    for setting in report["settings"]:
        console.print(_table_of(setting, report))
        for name, s in setting["drafters"].items():
            for warning in s["warnings"]:
                console.print(f"warning, {name}: {warning}")
            gaps = [r["top2_gap"] for r in s["per_request"] if r["top2_gap"] is not None]
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
    drafters = setting["drafters"]
    requests = drafters["plain"]["requests"]
    conditions = f"T = {setting['temperature']:g}" + (
        "" if setting["lossless"] else ", LOSSY typical acceptance"
    )
    prompts = f"{requests} held-out prompt{'s' if requests > 1 else ''}"
    table = Table(
        title=f"{report['target']['name']}\n{prompts}, {conditions}, batch {setting['batch']}, "
        f"{report['dtype']}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("drafter", overflow="fold", min_width=18)
    for column in ("tau", "95%", f"accepted 1-{SHOWN}", "tok/s", "speed-up", "identical"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, s in drafters.items():
        low, high = s["tau_ci95"]
        table.add_row(
            name,
            f"{s['tau_incl_bonus']:.2f}",
            f"{low:.2f}-{high:.2f}" if s["mean_n_draft"] else "-",
            " ".join(f"{x:.2f}".removeprefix("0") for x in s["survival"][:SHOWN]) or "-",
            f"{s['tokens_s']:.0f}",
            f"{s['speedup']:.2f}x",
            "-"
            if s["equal_to_ar"] is None
            else "yes"
            if s["equal_to_ar"] == requests
            else f"{s['equal_to_ar']} of {requests}",
        )
    return table


def _categories(setting: dict[str, Any]) -> Table:
    """Tau of every drafter that drafts, by category of the prompts."""
    drafting = {
        name: s["by_category"] for name, s in setting["drafters"].items() if s["mean_n_draft"]
    }
    table = Table(
        title=f"tau by category, {caption(setting)}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("category")
    for name in drafting:
        table.add_column(name, justify="right", overflow="fold")
    for category in sorted({c for found in drafting.values() for c in found}):
        values = (found.get(category) for found in drafting.values())
        table.add_row(
            category or "-", *(f"{v['tau_incl_bonus']:.2f}" if v else "-" for v in values)
        )
    return table
