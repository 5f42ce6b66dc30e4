"""`draftsmith data regenerate`: keep the prompts of a data set, let the target write the replies.

Nothing else raises tau as much as training on replies that the target wrote
(docs/data.md#target-written-replies). The token ids that the target was given and wrote are stored,
so nothing is tokenised twice. Each finished conversation is appended as one line, or one for each
of its sequences; a second call continues after the last complete one. Several workers
(`--share 3/64`) write files of their own into one folder, and none answers what is there.
"""

from __future__ import annotations

import logging
import random
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..heads.errors import UserError
from ..heads.files import only_writer
from ..inference.base.console import ProgressReporter
from ..inference.base.output_paths import check_output, check_output_folder
from ..inference.base.settings import (
    RowOptions,
    Sampling,
    TargetConfig,
    TemplateOptions,
    headers_with_key,
)
from ..inference.conversations.messages import RowError
from ..inference.conversations.rows import SHARES, MalformedRows, SourceNotes
from ..inference.conversations.sources import rows_of, source_files
from ..inference.conversations.templates import endless, warn_of_plain_text
from ..train.data.regeneration import (
    EarlierRows,
    ReplyTask,
    RowWriter,
    check_same_provenance,
    repair,
)
from ..train.data.replies import ServerOptions, regenerate_on_server
from ..train.data.templates import cut_replies

if TYPE_CHECKING:
    from ..inference.targets.target import Target

log = logging.getLogger(__name__)


@dataclass
class RegenerateOptions(RowOptions, TemplateOptions):
    """Let the target write the replies of a data set.

    Prompts are kept, and everything that an assistant said is replaced.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith data regenerate --target TARGET --data prompts.jsonl --out replies.jsonl "
        "--temperature 0.8",
        "draftsmith data regenerate --target TARGET --server.url http://localhost:8000/v1 "
        "--data prompts.jsonl --out replies.jsonl",
        "draftsmith data regenerate --target TARGET --data prompts.jsonl --out replies --share 0/4",
        "draftsmith data regenerate --target TARGET --data openai/gsm8k --config-name main "
        "--split train --out replies.jsonl",
    )

    target: TargetConfig
    data: str
    """Conversations or prompts: a JSON, JSONL or parquet file, a folder of them, or a data set on
    the hub, such as openai/gsm8k with its `config_name` and `split`."""
    out: str = field(metadata={"form": "FILE"})
    """JSONL file to write; one that was not finished is continued. With `share` a folder."""
    max_new_tokens: int = 1024
    """Largest number of tokens of a reply."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.7))
    """Sampling of the replies: use the settings that will be used in serving. At temperature 0
    small targets repeat themselves."""
    server: ServerOptions = field(default_factory=ServerOptions)
    limit: int | None = None
    """Number of rows to take, from the first one on; all if not given."""
    batch_size: int = 32
    """Number of prompts that are decoded together in this process."""
    share: str | None = None
    """This worker's shard, as INDEX/COUNT with INDEX from 0, such as 3/64: the fourth of 64 workers
    takes 1/64 of the conversations. Each worker adds a file to the folder `out`. Conversations
    already answered in any file there are skipped, so a smaller number of workers can finish the
    work of workers that died."""

    def __post_init__(self) -> None:
        if min(self.batch_size, self.max_new_tokens, self.limit or 1) < 1 or self.limit == 0:
            raise UserError("batch_size, max_new_tokens and limit must be at least 1")
        if self.sampling.rule != "auto":
            raise UserError("--sampling.rule accepts drafts, and replies are written without")
        if self.share is not None:
            found = re.fullmatch(r"(\d+)/(\d+)", self.share)
            if found is None or int(found[1]) >= int(found[2]):
                raise UserError(
                    f"share is {self.share!r}; write number/workers with a number from 0, such as "
                    "0/4, 1/4, 2/4 and 3/4 for four workers"
                )

    @property
    def decoding(self) -> Sampling:
        """Sampling of the decode loop, in which a penalty of the target's own config is ignored."""
        penalty = self.sampling.repetition_penalty
        return replace(self.sampling, repetition_penalty=1.0 if penalty is None else penalty)


def run(options: RegenerateOptions) -> None:
    """Run the command. Raises `UserError` before the target is loaded where that is possible."""
    if options.share is None:
        check_output(options.out, "--out")
    else:
        check_output_folder(options.out, "--out")
    if Path(options.out).exists() and Path(options.out).resolve() == Path(options.data).resolve():
        raise UserError("--out must be another file than --data")
    share = Share.of(options)
    rows = [*islice(rows_of(options.source(options.data)), options.limit)]
    if not rows:
        raise UserError(f"{options.data} holds no rows")
    # Of a share too, whose file nobody else writes.
    with only_writer(share.file, False, "wait until that has ended, or choose another --out"):
        _regenerate(options, share, rows)


def _regenerate(options: RegenerateOptions, share: Share, rows: list[tuple[str, Any]]) -> None:
    """Write the replies to `rows` that the file of this share lacks; see `run`."""
    out, facts, target = share.file, provenance_of(options), options.target.path
    # A file of a share has a name that nothing else has.
    mine = repair(out, ours=options.share is not None)
    # The weights of a target that is loaded here are compared in place of its name.
    here = options.server.url is None
    check_same_provenance(out, mine.written, facts, by_weights=here)
    written, finished = {out: mine.written}, mine.ids
    # Another worker may have another server of the same target.
    shared = {name: value for name, value in facts.items() if name != "server"}
    for other in share.others():
        # Another worker may still write it, so that nothing is cut off here.
        theirs = EarlierRows.of(other)
        check_same_provenance(other, theirs.written, shared, by_weights=here)
        written[other] = theirs.written
        finished |= theirs.ids
    notes = SourceNotes()
    all_tasks = tasks_of(rows, options, notes)
    tasks = [task for task in share.part_of(all_tasks) if task.id not in finished]
    if finished:
        of_share = f" for share {options.share}" if options.share else ""
        held = "%s already holds %d conversations; %d are left%s"
        log.info(held, options.out, len(finished), len(tasks), of_share)
    # Only a target that is loaded can be compared with one of another name.
    names = {row.get("target") for row in written.values() if row is not None}
    if not tasks and (not here or names <= {target}):
        return
    if options.server.url is not None:  # an unreadable key leaves no empty file
        headers_with_key()
    try:
        with (
            out.open("a", encoding="utf-8") as file,
            ProgressReporter(
                total=len(tasks), desc="target writes", unit=" conversations"
            ) as progress,
        ):
            sink = RowWriter(file, progress, facts, written)
            if options.server.url is not None:
                regenerate_on_server(
                    tasks, sink, options.server, target, options.sampling, options.max_new_tokens
                )
            else:
                regenerate_in_process(tasks, options, sink)
    except UserError:
        if out.stat().st_size == 0:
            out.unlink()  # nothing is left of a command that wrote nothing
        raise
    notes.report(options.data)
    tokens = f"{sink.tokens} tokens" if sink.tokens or not sink.rows else "replies as text"
    done = "%s: %d conversations, %s written by the target, %d without an end"
    log.info(done, out, sink.rows, tokens, sink.cut)
    if line := cut_replies(sink.cut, sink.replies):
        log.warning("%s: %s", out, line)


@dataclass(frozen=True)
class Share:
    """Part of the conversations that one of several workers answers, and the file for them."""

    number: int
    of_all: int
    file: Path

    @classmethod
    def of(cls, options: RegenerateOptions) -> Share:
        """Return the share that the options name; all conversations if they name none."""
        out = Path(options.out)
        if options.share is None:
            return cls(0, 1, out)
        number, _, of_all = options.share.partition("/")
        name = SHARES.replace("*", f"{int(number):04d}-of-{int(of_all):04d}")
        return cls(int(number), int(of_all), out / name)

    def others(self) -> list[Path]:
        """Return the files that other workers wrote, with any number of shares."""
        named_so = self.file.parent.glob(SHARES) if self.file.match(SHARES) else ()
        return sorted(path for path in named_so if path != self.file)

    def part_of(self, tasks: list[ReplyTask]) -> list[ReplyTask]:
        """Return the tasks of this share, in order."""
        # Shares of M workers are drawn by M, so that what a lost worker had spreads over all shares
        # of another number of workers. With every M-th task, a lost one of 64 would be one of 32.
        drawn = list(range(len(tasks)))
        if self.of_all > 1:
            random.Random(self.of_all).shuffle(drawn)
        return [tasks[index] for index in sorted(drawn[self.number :: self.of_all])]


def tasks_of(
    rows: list[tuple[str, Any]], options: RegenerateOptions, notes: SourceNotes
) -> list[ReplyTask]:
    """Return the tasks of `rows`, the same in every call with the same rows.

    `notes` get what is said once about the source. Raises `UserError` if no row can be used, or at
    the first malformed one if `bad_rows` is stop.
    """
    tasks, left_out, ids = [], MalformedRows(options.data, options.bad_rows), Counter[str]()
    for name, row in rows:
        try:
            task = ReplyTask.of(name, row, options.chat_template_kwargs, notes)
        except RowError as error:
            left_out.add(name, error)
            continue
        # Rows may have the same id. They get a number.
        ids[task.id] += 1
        if ids[task.id] > 1:
            task.id += f"#{ids[task.id]}"
        tasks.append(task)
    if left_out.count == len(rows):
        raise UserError(
            f"{options.data}: no row can be used; the first is {left_out.first}; fix it"
        )
    return tasks


def provenance_of(options: RegenerateOptions) -> dict[str, Any]:
    """Return what every row records of how it was written."""
    sampling = {"max_new_tokens": options.max_new_tokens, **asdict(options.sampling)}
    for name, neutral in (("min_p", 0), ("repetition_penalty", None), ("rule", "auto")):
        if sampling[name] == neutral:
            del sampling[name]
    facts: dict[str, Any] = {"target": options.target.path, "sampling": sampling}
    # None if there are none, so that it is compared with rows that have some.
    facts["chat_template_kwargs"] = options.chat_template_kwargs or None
    if source_files(options.source(options.data)) is None:
        facts["dataset"] = options.data
    if options.server.url is not None:
        facts["server"] = options.server.url
    return facts


def regenerate_in_process(
    tasks: Sequence[ReplyTask], options: RegenerateOptions, sink: RowWriter
) -> None:
    """Write the replies of all tasks with the target in this process, in batches of prompts.

    A conversation of several turns comes back into the queue after each reply. Prompts that are too
    long are left out with a warning.
    """
    from ..inference.decode import Request, decode
    from ..inference.proposers.ngram import PlainDecoding
    from ..inference.targets.target import load_for_decoding
    from ..inference.targets.target_files import other_sampling

    target = load_for_decoding(options.target)
    sampling = options.decoding
    other = other_sampling(target.model.generation_config, sampling)
    if other and not sampling.greedy:
        log.warning("target %s: its %s", target.name, other)
    fingerprint = target.fingerprint()
    sink.add_provenance(
        {"tokenizer_hash": fingerprint.tokenizer_hash, "weights_hash": fingerprint.weights_hash}
    )
    plain = sum(task.conversation.messages is None for task in tasks)
    kwargs = options.chat_template_kwargs
    why = endless(target.tokenizer, target.name, target.eos_ids, kwargs)
    if why and plain < len(tasks):
        raise UserError(why)
    warn_of_plain_text(plain, target.tokenizer, options.data)
    longest = target.max_positions - 1  # one position is left for the reply
    waiting: list[tuple[list[int], ReplyTask]] = []
    unreadable, overlong = MalformedRows(options.data, options.bad_rows), []
    for task in tasks:
        try:
            prompt = task.prompt(target)
        except RowError as error:
            unreadable.add(task.id, error)
            continue
        if len(prompt) > longest:
            overlong.append(f"{task.id} ({len(prompt)} tokens, at most {longest} fit)")
        else:
            waiting.append((prompt, task))
    if overlong:
        log.warning("%d prompts are left out; the first is %s", len(overlong), overlong[0])
    while waiting:
        waiting.sort(key=lambda item: len(item[0]))  # a prefill is padded to its longest prompt
        batch, waiting = waiting[: options.batch_size], waiting[options.batch_size :]
        requests = [
            # Named by the task and the turn, so that a reply does not depend on its batch.
            Request(prompt, zlib.crc32(task.id.encode()), len(task.said))
            for prompt, task in batch
        ]
        replies = [list[int]() for _ in batch]
        for steps in decode(target, PlainDecoding(), requests, options.max_new_tokens, sampling):
            for index, step, reason in steps:
                replies[index] += step.tokens
                if reason is None:
                    continue
                prompt, task = batch[index]
                following = answer(task, target, prompt, replies[index], reason)
                if following is not None and len(following) <= longest:
                    waiting.append((following, task))
                else:
                    sink.put(task)


def answer(
    task: ReplyTask, target: Target, prompt: list[int], reply: list[int], reason: str
) -> list[int] | None:
    """Add the reply to a task; return the prompt of the next one, None if nothing is left to ask.

    `reason`: why the reply ended (`decode.Generation`).
    """
    ended = reason == "eos"
    text = target.tokenizer.decode(reply[:-1] if ended else reply)
    message = {"role": "assistant", "content": text}
    task.add_reply(prompt, reply, message, "stop" if ended else "length")
    said = len(task.said)
    try:
        return task.prompt(target) if task.advance() else None
    except RowError as error:
        # It is about the reply, which the template cannot carry: the conversation ends with it.
        log.warning("%s: the next turn is left out: %s", task.id, error)
        del task.said[said:]
        return None
