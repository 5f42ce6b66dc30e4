"""`draftsmith doctor`: checks of this machine, a target and a training config."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import psutil
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..command_line.parse import config_with
from ..command_line.process import versions
from ..heads.errors import UserError
from ..heads.files import JsonObject
from ..heads.fingerprint import tokenizer_hash
from ..inference.base.console import OutputConsole, plural
from ..inference.base.output_paths import check_json, output_json
from ..inference.base.settings import RowSource, SourceOptions, TargetConfig
from ..inference.conversations.formats import conversation_of
from ..inference.conversations.messages import RowError
from ..inference.conversations.rows import SourceNotes
from ..inference.conversations.sources import rows_of, source_files
from ..inference.conversations.templates import endless
from ..train.data.templates import Encoded, encode
from ..train.methods.registry import RunFile, method_for, method_named

if TYPE_CHECKING:
    from ..inference.targets.target import Target
    from ..train.config import RunConfig

GIB = 2**30
MOST_ROWS = 3  # of a file
BEGIN, END = "[[", "]]"  # around what is learned, without colour
PROBE: JsonObject = {
    "messages": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ]
}
"""Row of two replies, by which a template is tried without data."""


@dataclass
class DoctorOptions(SourceOptions, RunFile):
    """Check this machine, and a target and a training config if given.

    The exit status is 2 if a check fails.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith doctor",
        "draftsmith doctor --target scripts/quickstart/target --chat train.jsonl",
        "draftsmith doctor --target scripts/quickstart/target --config "
        "configs/medusa/quickstart.yaml",
    )

    target: TargetConfig = field(default_factory=lambda: TargetConfig(""))
    """Target to load and check."""
    config: str | None = None  # type: ignore[assignment]
    """Training config to check; its target is checked too, unless another one is named."""
    chat: bool | str = field(default=False, metadata={"form": "[FILE]"})
    """Show the first rows of a file, or a built-in one, as the chat template renders them, with
    the tokens that training learns in green or in [[brackets]]."""
    json: str | None = None
    """File to write the findings to; `-` prints them in place of the table."""

    def __post_init__(self) -> None:
        if self.chat and not self.target.path and self.config is None:
            raise UserError("--chat needs a chat template; name the target with --target")
        if self.set and self.config is None:
            raise UserError(
                f"{self.set[0].partition('=')[0]} is a key of a config; name it with --config"
            )


@dataclass
class TokenRun:
    """Tokens that are side by side and are all learned, or all not."""

    text: str
    learned: bool


@dataclass
class ShownSequence:
    """One of the sequences that a row becomes, as text."""

    tokens: int
    learned: int
    """Number of tokens that are learned."""
    runs: list[TokenRun]

    @classmethod
    def of(cls, encoded: Encoded, tokenizer: Any) -> ShownSequence:
        """Return a sequence as text, special tokens included."""
        marked, runs = zip(encoded.token_ids, encoded.mask, strict=True), []
        for learned, group in groupby(marked, key=lambda pair: pair[1]):
            runs.append(TokenRun(tokenizer.decode([token for token, _ in group]), learned))
        return cls(len(encoded.token_ids), sum(encoded.mask), runs)

    def drawn(self, color: bool) -> Text:
        """Return the text with what is learned in green, or in brackets without `color`.

        Line breaks that are learned get a sign, since neither shows them.
        """
        text = Text()
        for run in self.runs:
            if run.learned:
                seen = run.text.replace("\n", "\u21b5\n")
                text.append(seen if color else f"{BEGIN}{seen}{END}", style="green")
            else:
                text.append(run.text)
        return text


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


def run(options: DoctorOptions) -> None:
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
        finding, config = check_run(options, options.config)
        findings.append(finding)
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
    console = OutputConsole()
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
    import torch

    installed = versions()
    # deepspeed is installed on Linux only.
    missing = [name for name, found in installed.items() if not found and name != "deepspeed"]
    text = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    if missing:
        text += f"; missing: {', '.join(missing)}"
    yield Finding("versions", "error" if missing else "ok", text)
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    text = f"{plural(cores, 'core')}, torch uses {plural(threads, 'thread')}"
    yield Finding("processor", "ok", text)
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


def room(check: str, free: int, text: str, advice: str) -> Finding:
    """Return the finding about `free` bytes: a warning, with `advice`, for less than 2 GiB."""
    low = free < 2 * GIB
    return Finding(check, "warning" if low else "ok", f"{text}; {advice}" if low else text)


def tried(check: str, good: str, act: Callable[[], object]) -> Finding:
    """Return the finding `good`, or the `UserError` that `act` raises."""
    try:
        act()
    except UserError as error:
        return Finding(check, "error", str(error))
    return Finding(check, "ok", good)


def check_run(options: DoctorOptions, path: str) -> tuple[Finding, RunConfig]:
    """Return what training would refuse of the config file `path` at once, and its run.

    Options of the target and changes of keys replace the config's. Raises `UserError` if the file
    is not a config of the method.
    """
    from ..train.estimate import check_engines
    from ..train.loop import check_before_loading, check_with_target

    name = method_for(path, options.method)
    method, target, changes = method_named(name), options.target, options.set
    if target.path:
        changes = [f"target.path={target.path}", *changes]
    config = config_with(method.run_class, path, changes)
    if target.path:
        config.target = target

    def check() -> None:
        check_before_loading(config, method)
        for source in config.data.sources:
            if source_files(source) is not None:  # the hub is not asked
                first_rows(source)
        check_with_target(config, method, 1)
        check_engines(config, method)

    return tried("config", f"{path} is a run of {name} that fits its target", check), config


def check_target(
    config: TargetConfig, rows: Sequence[tuple[str, Any]], template_kwargs: JsonObject
) -> Iterator[Finding]:
    """Yield the findings about a target.

    They are about its weights, head, packed documents, end token and chat template, and what is
    learned of `rows` (name and value), rendered with `template_kwargs`. If the target cannot be
    loaded, the others are left out.
    """
    from ..inference.targets.target import load_target
    from ..inference.targets.target_files import gigabytes
    from ..train.data.features import LiveTarget

    try:
        target = load_target(config)
    except UserError as error:
        yield Finding("target", "error", str(error))
        return
    parameters = sum(p.numel() for p in target.model.parameters())
    size = gigabytes(sum(p.nbytes for p in target.model.parameters()))
    text = (
        f"{target.config.model_type}, {parameters / 1e6:.1f}M parameters, {size}, "
        f"{target.num_layers} layers, hidden size {target.hidden_size}, vocabulary "
        f"{target.vocab_size}, {target.max_positions} positions, {target.dtype} on {target.device}"
    )
    yield Finding("target", "ok", text)
    # `load_target` refuses a target where this does not hold.
    yield Finding("head", "ok", "head(last hidden state) gives the target's own logits")
    apart = "documents in one packed row do not see each other"
    yield tried("packing", apart, lambda: LiveTarget(target))
    if not target.eos_ids:
        text = "none; generation only ends at its limit; set eos_token_id"
        yield Finding("end token", "warning", text)
    yield check_template(target)
    if why := endless(target.tokenizer, target.name, target.eos_ids, template_kwargs):
        yield Finding("end of a turn", "warning", f"{why}; data regenerate refuses it")
    notes = SourceNotes()
    for name, row in rows:
        yield check_row(name, row, target, template_kwargs, notes)
    for line in notes.lines():
        if not (why and line.startswith(why)):
            yield Finding("chat rows", "warning", line)


def check_template(target: Target) -> Finding:
    """Return the finding about the chat template: what training would learn from a probe."""
    if not target.tokenizer.chat_template:
        return Finding("chat template", "warning", "none; only plain text can be learned from")
    try:
        sequences = sequences_of(PROBE, target, {})
    except RowError as error:
        return Finding("chat template", "error", f"cannot carry a conversation: {error}")
    learned = ["".join(run.text for run in one.runs if run.learned) for one in sequences]
    good = all(any(reply in text for text in learned) for reply in ("two", "four"))
    text = f"of a probe it learns {' | '.join(map(repr, learned))}"
    return Finding("chat template", "ok" if good else "error", text)


def check_row(
    name: str, row: Any, target: Target, template_kwargs: JsonObject, notes: SourceNotes
) -> RowFinding:
    """Return the finding about a row: what training would learn from it; `notes` as in `encode`."""
    try:
        sequences = sequences_of(row, target, template_kwargs, notes)
    except (RowError, UserError) as error:
        return RowFinding(f"chat {name}", "error", str(error), [])
    counts = [f"{one.learned} of {one.tokens} tokens" for one in sequences if one.learned]
    status = "ok" if counts else "warning"
    return RowFinding(f"chat {name}", status, f"learned: {', '.join(counts) or 'none'}", sequences)


def first_rows(source: str | RowSource | Literal[True]) -> list[tuple[str, Any]]:
    """Return names and values of the first rows of a source; true stands for the probe.

    Raises `UserError` for a source that cannot be read or has no rows.
    """
    rows = [("probe", PROBE)] if source is True else [*islice(rows_of(source), MOST_ROWS)]
    if not rows:
        raise UserError(f"{source} holds no rows; give at least one row")
    return rows


def sequences_of(
    row: Any, target: Target, template_kwargs: JsonObject, notes: SourceNotes | None = None
) -> list[ShownSequence]:
    """Return the sequences that training makes of a row.

    `template_kwargs` are arguments of the chat template for all rows; `notes` get what is said once
    about a source. Raises `RowError` for a row that is malformed or that the template cannot
    render, `UserError` for a target without one.
    """
    from ..train.data.tables import check_tokens

    conversation = conversation_of(row)
    check_tokens(conversation, tokenizer_hash(target.tokenizer), target.vocab_size)
    encoded = encode(
        conversation, target.tokenizer, target.eos_ids, target.name, template_kwargs, notes
    )
    return [ShownSequence.of(one, target.tokenizer) for one in encoded]
