"""`draftsmith doctor`: checks of this machine, a target and a training config."""

from __future__ import annotations

import os
import shutil
import time
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import psutil
import torch
from rich.markup import escape
from rich.table import Table

from ...heads.errors import UserError
from ...heads.files import JsonObject, check_json, output_json
from ...heads.layout import dtype_name
from ...inference.console import Console, several
from ...inference.conversations.messages import RowError
from ...inference.conversations.notes import Notes
from ...inference.conversations.sources import rows_of, source_files
from ...inference.conversations.templates import ChatTemplate, endless
from ...inference.settings import TargetConfig
from ...inference.targets.target import Target, load_target, resolve_device, resolve_dtype
from ...inference.targets.target_files import footprint, gigabytes, too_large
from ..command_line.parse import config_with
from ..config import RunConfig
from ..data.features import LiveTarget
from ..loop import check_beginning, check_with_target
from ..method import MethodName, method_for, method_named, run_class_named
from ..outline import target_of_run
from ..planning.optimiser import optimiser_share
from ..provenance import versions
from ..serving import check_engines
from .learned import PROBE, ShownSequence, first_rows, sequences_of
from .options import DoctorOptions as Options

GIB = 2**30
COSTLY = 0.3  # share of a step's time from which the optimiser has a warning
SNUG = 0.6  # share of the free memory that weights may take without a warning


@dataclass
class Finding:
    """One line of the report: what was found and, where it would not run, what to do."""

    check: str
    status: Literal["ok", "warning", "error"]
    found: str


@dataclass
class RowFinding(Finding):
    """Line about a row of `--chat`, with what is shown of it."""

    sequences: list[ShownSequence]


def run(options: Options) -> None:
    """Check and print the report. Exits with status 2 if one of the findings is an error."""
    check_json(options.json)
    # Read before the target is loaded, which takes longer.
    chat = options.source(options.chat) if isinstance(options.chat, str) else options.chat
    rows = first_rows(chat) if chat else []
    findings = [*machine()]
    target = options.target
    template_kwargs: JsonObject = {}
    if options.config is not None:
        # A target that was named is checked in place of the config's.
        run_findings, config = check_run(options.config, options.method, target, options.set)
        findings += run_findings
        target = config.target
        template_kwargs = config.data.chat_template_kwargs
    if target.path:
        findings += check_target(target, rows, template_kwargs)
    if not output_json(options.json, [asdict(finding) for finding in findings]):
        show(findings)
    if any(finding.status == "error" for finding in findings):
        raise SystemExit(2)


def show(findings: list[Finding]) -> None:
    """Print the findings as a table, and below it the rows of `--chat`."""
    table = Table("check", "status", "found")
    colors = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in findings:
        status = f"[{colors[finding.status]}]{finding.status}[/]"
        table.add_row(escape(finding.check), status, escape(finding.found))
    console = Console()
    console.print(table)
    color = console.color_system is not None and not console.no_color
    for finding in findings:
        sequences = finding.sequences if isinstance(finding, RowFinding) else []
        for number, one in enumerate(sequences, 1):
            part = f", sequence {number} of {len(sequences)}" if len(sequences) > 1 else ""
            heading = f"--- {finding.check}{part}: {one.tokens} tokens, {one.learned} learned"
            console.print(heading, markup=False, highlight=False, soft_wrap=True)
            console.print(one.drawn(color), soft_wrap=True)


def machine() -> Iterator[Finding]:
    """Yield the findings about versions, devices, memory and disk."""
    installed = versions()
    # deepspeed is installed on Linux only.
    missing = [name for name, found in installed.items() if not found and name != "deepspeed"]
    text = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    if missing:
        text += f"; missing: {', '.join(missing)}"
    yield Finding("versions", "error" if missing else "ok", text)
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    text = f"{several(cores, 'core')}, torch uses {several(threads, 'thread')}"
    yield Finding("processor", "ok", f"{text}; {bfloat16_products()}")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = (size / GIB for size in torch.cuda.mem_get_info(i))
            text = f"{torch.cuda.get_device_name(i)}, {free:.1f} of {total:.1f} GiB free"
            yield Finding(f"cuda:{i}", "ok", text)
    else:
        yield Finding("cuda", "ok", "none; everything runs on the CPU, only slower")
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    yield room("memory", memory.available, text, "close other programs")
    disk = shutil.disk_usage(".").free
    text = f"{disk / GIB:.1f} GiB free in the current folder"
    yield room("disk", disk, text, "checkpoints need room")


def bfloat16_products() -> str:
    """Return how fast the processor multiplies bfloat16 matrices, and what to train with there.

    It is measured: a processor that has instructions for bfloat16 can be the slower with them.
    """
    ratio = product_seconds(torch.bfloat16) / product_seconds(torch.float32)
    found = f"a product in bfloat16 takes {ratio:.2f} times as long as in float32"
    if ratio < 1.1:  # less than that may be noise
        return found
    return f"{found}: train on the processor with --target.dtype float32 --precision no"


def product_seconds(dtype: torch.dtype) -> float:
    """Return the seconds that a product of 512 rows takes a thread, the least of five.

    They are the processor's, so that the advice does not depend on how busy the machine is.
    """
    rows = torch.ones(512, 1024, dtype=dtype)
    matrix = torch.ones(1024, 1024, dtype=dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of several, those that wait would count as work
    try:
        return min(timeit.repeat(lambda: rows @ matrix, timer=time.thread_time, number=1, repeat=5))
    finally:
        torch.set_num_threads(threads)


def room(check: str, free: int, text: str, advice: str) -> Finding:
    """Return the finding about `free` bytes: a warning, with `advice`, for less than 2 GiB."""
    low = free < 2 * GIB
    return Finding(check, "warning" if low else "ok", f"{text}; {advice}" if low else text)


def check_run(
    path: str,
    given: MethodName | None,
    target: TargetConfig | None = None,
    changes: Sequence[str] = (),
) -> tuple[list[Finding], RunConfig]:
    """Return the findings about the config file `path` and its data sources, and the run.

    A `target` with a path replaces the config's, and `changes` other keys, each KEY=VALUE. Raises
    `UserError` if the file is not a config of the method.
    """
    method = method_for(path, given)
    if target is not None and target.path:
        changes = [f"target.path={target.path}", *changes]
    config = config_with(run_class_named(method), path, [*changes])
    if target is not None and target.path:
        config.target = target
    findings = [Finding("config", "ok", f"{path} parses as a run of {method}")]
    for source in config.data.sources:
        finding = Finding(f"data {source.name or source.path}", "ok", f"{source.path} can be read")
        try:
            if source_files(source) is None:
                finding.found = f"{source.path} is no local file; it will be asked of the hub"
            else:
                # One row is enough to see that the file can be read and has the form of its name.
                next(rows_of(source))
        except StopIteration:
            finding.status = "error"
            finding.found = f"{source.path} is empty; give it at least one row"
        except UserError as error:
            finding.status, finding.found = "error", str(error)
        findings.append(finding)
    if config.init_from is not None:
        begins = Finding("init_from", "ok", f"{config.init_from} is a drafter")
        try:
            check_beginning(config.init_from, method_named(method))
        except UserError as error:
            begins.status, begins.found = "error", str(error)
        findings.append(begins)
    if (optimiser := check_optimiser(method, config)) is not None:
        findings.append(optimiser)
    # Last: it resolves the run.
    if (fitting := check_fit(method, config)) is not None:
        findings.append(fitting)
    return findings, config


def check_fit(method: MethodName, config: RunConfig) -> Finding | None:
    """Return the finding about the config with its target: what training checks before it loads.

    None where the target's config cannot be read, which the finding about the target explains.
    """
    try:
        target_of_run(config)
    except UserError:
        return None
    try:
        check_with_target(config, method_named(method), 1)
        check_engines(config, method_named(method))
    except UserError as error:
        return Finding("config and target", "error", str(error))
    return Finding("config and target", "ok", "the settings fit the target")


def check_optimiser(method: MethodName, config: RunConfig) -> Finding | None:
    """Return the finding about the share of a step that the optimiser takes on a processor.

    None where the target's config cannot be read, and on a GPU, where the share is small.
    """
    try:
        if resolve_device(config.target.device).type != "cpu":
            return None
        share = optimiser_share(method_named(method), config)
    except UserError:  # which the run itself explains
        return None
    text = f"{config.optim.optimizer} takes some {share:.0%} of a step's time on a processor"
    if share < COSTLY:
        return Finding("optimiser", "ok", text)
    more = "more tokens in a step (--rows-per-step, --data.max-length) make it less"
    return Finding("optimiser", "warning", f"{text}; {more}")


def check_target(
    config: TargetConfig, rows: Sequence[tuple[str, Any]], template_kwargs: JsonObject
) -> Iterator[Finding]:
    """Yield the findings about a target.

    They are about its memory, weights, head, packed documents, end token and chat template, and
    what is learned of `rows` (name and value), rendered with `template_kwargs`. If the target
    cannot be loaded, the others are left out.
    """
    try:
        fits = check_memory(config)
        if fits is not None:
            yield fits
            if fits.status == "error":
                return
        target = load_target(config)
    except UserError as error:
        yield Finding("target", "error", str(error))
        return
    parameters = sum(p.numel() for p in target.model.parameters())
    text = (
        f"{target.config.model_type}, {parameters / 1e6:.1f}M parameters, {target.num_layers} "
        f"layers, hidden size {target.hidden_size}, vocabulary {target.vocab_size}, "
        f"{target.max_positions} positions, {target.dtype} on {target.device}"
    )
    yield Finding("target", "ok", text)
    # `load_target` refuses a target where this does not hold.
    yield Finding("head", "ok", "head(last hidden state) gives the target's own logits")
    try:
        LiveTarget(target)
        yield Finding("packing", "ok", "documents in one packed row do not see each other")
    except UserError as error:
        yield Finding("packing", "error", str(error))
    if not target.eos_ids:
        text = "none; generation only ends at its limit; set eos_token_id"
        yield Finding("end token", "warning", text)
    yield check_template(target)
    if why := endless(target.tokenizer, target.name, target.eos_ids, template_kwargs):
        yield Finding("end of a turn", "warning", f"{why}; data regenerate refuses it")
    notes = Notes()
    for name, row in rows:
        yield check_row(name, row, target, template_kwargs, notes)
    for line in notes.lines():
        if not (why and line.startswith(why)):
            yield Finding("chat rows", "warning", line)


def check_memory(config: TargetConfig) -> Finding | None:
    """Return the finding about the memory that the target's weights take, before they are loaded.

    None where it is not known: for a target that is no folder with safetensors files, and for one
    that is spread over ranks or devices.
    """
    stored = footprint(config.path)
    if stored is None or config.spread != "whole":
        return None
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    cuda = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if cuda else psutil.virtual_memory().available
    # `dtype` is a text, "auto", where each weight keeps the type that it is stored in.
    if isinstance(dtype, torch.dtype):
        needed, kind, name = stored.loaded_bytes(dtype), dtype, dtype_name(dtype)
    else:
        needed, kind, name = stored.stored_bytes, torch.bfloat16, "the type it is stored in"
    if needed > free:
        text = f"the weights need {too_large(stored, kind, needed, free)}"
        return Finding("target memory", "error", text)
    text = (
        f"{gigabytes(needed)} of weights in {name} ({gigabytes(stored.stored_bytes)} stored), "
        f"{gigabytes(free)} free"
    )
    if needed > SNUG * free:
        return Finding("target memory", "warning", f"{text}: little is left for training")
    if not cuda and config.dtype == "auto" and needed > stored.stored_bytes:
        text += "; --target.dtype bfloat16 keeps them as stored"
    return Finding("target memory", "ok", text)


def check_template(target: Target) -> Finding:
    """Return the finding about the chat template: what training would learn from a probe."""
    if not target.tokenizer.chat_template:
        return Finding("chat template", "warning", "none; only plain text can be learned from")
    try:
        sequences = sequences_of(PROBE, target, {})
    except RowError as error:
        return Finding("chat template", "error", f"cannot carry a conversation: {error}")
    learned = ["".join(run.text for run in one.runs if run.learned) for one in sequences]
    marked = ChatTemplate.of(target.tokenizer, target.name, {}).marked
    marks = "generation marks" if marked else "no generation marks"
    good = all(any(reply in text for text in learned) for reply in ("two", "four"))
    text = f"{marks}; of a probe it learns {' | '.join(map(repr, learned))}"
    return Finding("chat template", "ok" if good else "error", text)


def check_row(
    name: str, row: Any, target: Target, template_kwargs: JsonObject, notes: Notes
) -> RowFinding:
    """Return the finding about a row: what training would learn from it; `notes` as in `encode`."""
    try:
        sequences = sequences_of(row, target, template_kwargs, notes)
    except (RowError, UserError) as error:
        return RowFinding(f"chat {name}", "error", str(error), [])
    counts = [f"{one.learned} of {one.tokens} tokens" for one in sequences if one.learned]
    status = "ok" if counts else "warning"
    return RowFinding(f"chat {name}", status, f"learned: {', '.join(counts) or 'none'}", sequences)
