"""`draftsmith data regenerate`: keep the prompts of a data set, let the target write the replies.

Training on the target's own words is the largest single lever there is (drafter-recipes 11). The token ids that the target was
given and those that it wrote are kept as they were, so nothing is tokenised twice. Each finished conversation is one appended
line; a second call with the same output goes on behind the last whole one.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import GenerationConfig

from ...heads.documents import DocumentError, convert
from ...heads.errors import UserError
from ...heads.files import check_output
from ...inference.console import Progress
from ...inference.conversations.formats import Conversation, RowError, conversation_of
from ...inference.conversations.rows import LeftOut, prompt_ids, warn_of_plain_text
from ...inference.conversations.sources import rows_of
from ...inference.target import PROCESSORS, Target, load_target
from ..documents import WrittenRow
from ..options import RegenerateOptions as Options
from ..options import ReplySampling

log = logging.getLogger(__name__)


def run(options: Options) -> None:
    check_output(options.out, "--out")
    out = Path(options.out)
    if out.exists() and out.resolve() == Path(options.data).resolve():
        raise UserError("--out must be another file than --data")
    rows = list(rows_of(options.data))[: options.limit]
    if not rows:
        raise UserError(f"{options.data} holds no rows")
    facts = provenance_of(options)
    finished, written = mend(out)
    _refuse_other(out, written, facts)
    tasks, left_out, ids = [], LeftOut(options.data, options.bad_rows), Counter[str]()
    for name, row in rows:
        try:
            task = Task.of(name, row, options.chat_template_kwargs)
        except RowError as error:
            left_out.add(name, error)
            continue
        ids[task.id] += 1
        if ids[task.id] > 1:
            task.id += f"#{ids[task.id]}"
        if task.id not in finished:
            tasks.append(task)
    if left_out.count == len(rows):
        raise UserError(f"{options.data}: no row can be used; the first is {left_out.first}; mend it")
    if finished:
        log.info("%s already holds %d conversations; %d are left", out, len(finished), len(tasks))
    if not tasks:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        out.open("a", encoding="utf-8") as file,
        Progress(total=len(tasks), desc="target writes", unit=" conversations") as progress,
    ):
        sink = Sink(file, progress, facts, written)
        if options.server.url is not None:
            from .replies import regenerate_on_server

            regenerate_on_server(tasks, options, sink)
        else:
            regenerate_here(tasks, options, sink)
    log.info("%s: %d conversations, %d tokens written by the target, %d without an end", out, sink.rows, sink.tokens, sink.cut)


@dataclass
class Task:
    """One conversation under way: what is said so far, and the user's words still to come."""

    id: str
    said: list[dict[str, Any]]
    ahead: deque[list[dict[str, Any]]]
    """What is said between two replies, for each reply still to come."""
    conversation: Conversation
    events: list[dict[str, Any]] = field(default_factory=list)
    """Token-exact sequences so far: token_ids and response_spans."""

    @classmethod
    def of(cls, name: str, row: Any, template_kwargs: dict[str, Any]) -> Task:
        if isinstance(row, RowError):
            raise row
        conversation = conversation_of(row)
        conversation.template_kwargs = {**template_kwargs, **conversation.template_kwargs}
        if conversation.messages is None and conversation.text is None:
            raise RowError("it has token ids only; regenerate from messages or text")
        if conversation.messages is not None and not any(m["role"] == "user" for m in conversation.messages):
            raise RowError("there is no user message to answer")
        task = cls(str(row.get("id", name)), [], deque(questions(conversation.messages or [])), conversation)
        task.advance()
        return task

    def advance(self) -> None:
        """Say everything up to where the next reply is wanted."""
        if self.ahead:
            self.said += self.ahead.popleft()

    @property
    def done(self) -> bool:
        return not self.ahead

    def prompt(self, target: Target) -> list[int]:
        so_far = Conversation(
            messages=self.said or None,
            text=self.conversation.text,
            tools=self.conversation.tools,
            template_kwargs=self.conversation.template_kwargs,
        )
        return prompt_ids(so_far, target.tokenizer, target.name)

    def add_reply(self, prompt: list[int], reply: list[int], message: dict[str, Any], finish_reason: str) -> None:
        """Record a reply; a prompt that continues the last sequence lengthens it, any other begins a new one."""
        last = self.events[-1] if self.events else None
        if last is None or prompt[: len(last["token_ids"])] != last["token_ids"]:
            last = {"token_ids": [], "response_spans": [], "finish_reasons": []}
            self.events.append(last)
        last["token_ids"] = prompt + reply
        last["response_spans"].append([len(prompt), len(prompt) + len(reply)])
        last["finish_reasons"].append(finish_reason)
        self.said.append(message)


def questions(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What stands before each reply: messages between those of the assistant.

    Ends before a tool's result: that answers the call of a reply which is about to be replaced.
    """
    parts: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            return parts[:-1]
        if message["role"] != "assistant":
            parts[-1].append(message)
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


class Sink:
    """The output file: one line for each sequence, appended when its conversation is finished."""

    def __init__(
        self, file: TextIO, progress: Progress, provenance: dict[str, Any], written: dict[str, Any] | None = None
    ) -> None:
        self._file, self._progress, self._provenance, self._written = file, progress, provenance, written
        self.rows = self.tokens = self.cut = 0

    def add_provenance(self, more: dict[str, Any]) -> None:
        """What is known of the target only once it is loaded; rows that stand in the file must agree."""
        _refuse_other(Path(self._file.name), self._written, more)
        self._provenance |= more

    def put(self, task: Task) -> None:
        for number, event in enumerate(task.events):
            whole = number == len(task.events) - 1
            row = {"id": task.id, "part": number, "last_part": whole, **event, "regenerated": self._provenance}
            row["messages"] = task.said if task.conversation.messages is not None else None
            row["text"] = None if row["messages"] else (task.conversation.text or "") + task.said[-1]["content"]
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.tokens += sum(end - start for start, end in event["response_spans"])
            self.cut += sum(reason != "stop" for reason in event["finish_reasons"])
        self._flush()

    def put_text(self, task: Task) -> None:
        """A conversation whose server gave no token ids."""
        row = {"id": task.id, "part": 0, "last_part": True, "messages": task.said, "regenerated": self._provenance}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._flush()

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows += 1
        self._progress.update()


def mend(out: Path) -> tuple[set[str], dict[str, Any] | None]:
    """Ids of the conversations that stand whole in `out`, and how they were written (None if nothing is there).

    What a killed process left half-written behind them is cut off, but only if every whole line was written by this command.
    """
    if not out.exists():
        return set(), None
    foreign = UserError(f"{out} is not a file that this command wrote; choose another --out")
    if not out.is_file():
        raise foreign
    finished: set[str] = set()
    written: dict[str, Any] | None = None
    keep = end = 0
    with out.open("rb") as file:
        for line in file:
            end += len(line)
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError) as error:
                raise foreign from error
            if row is None:
                if not finished:  # one unfinished line alone may be anybody's
                    raise foreign
                continue
            try:
                known = convert(row, WrittenRow)
            except DocumentError as error:
                raise foreign from error
            written = known.regenerated
            if known.last_part:
                finished.add(known.id)
                keep = end
    if keep < end:
        with out.open("rb+") as file:
            file.truncate(keep)
    return finished, written


def provenance_of(options: Options) -> dict[str, Any]:
    facts: dict[str, Any] = {"target": options.target.path, "sampling": asdict(options.sampling)}
    if options.chat_template_kwargs:
        facts["chat_template_kwargs"] = options.chat_template_kwargs
    if options.server.url is not None:
        facts["server"] = options.server.url
    return facts


def _refuse_other(out: Path, written: dict[str, Any] | None, facts: dict[str, Any]) -> None:
    """Rows of two targets or two samplings must not end up in one file."""
    for name, value in facts.items():
        if written is not None and written.get(name) != value:
            raise UserError(f"{out} was written with {name} {written.get(name)}, now it is {value}; choose another --out")


def regenerate_here(tasks: Sequence[Task], options: Options, sink: Sink) -> None:
    """Batched sampling with the target in this process. Batches hold prompts of similar length."""
    target = load_target(options.target)
    fingerprint = target.fingerprint()
    sink.add_provenance({"tokenizer_hash": fingerprint.tokenizer_hash, "weights_hash": fingerprint.weights_hash})
    plain = sum(task.conversation.messages is None for task in tasks)
    warn_of_plain_text(plain, target.tokenizer, options.data)
    room = target.max_positions - 1
    longest = min(options.max_prompt_tokens or room, room)
    waiting: list[tuple[list[int], Task]] = []
    unreadable, overlong = LeftOut(options.data, options.bad_rows), []
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
        batch = take_batch(waiting, options.batch_size, options.sampling.max_new_tokens, target.max_positions)
        replies = sample(target, [prompt for prompt, _ in batch], options.sampling, seed_of(options.sampling.seed, batch[0]))
        for (prompt, task), reply in zip(batch, replies, strict=True):
            ended = bool(reply) and reply[-1] in target.eos_ids
            text = target.tokenizer.decode(reply[:-1] if ended else reply)
            task.add_reply(prompt, reply, {"role": "assistant", "content": text}, "stop" if ended else "length")
            if not task.done and ended:
                task.advance()
                following = task.prompt(target)
                if len(following) <= longest:
                    waiting.append((following, task))
                    continue
            sink.put(task)


def take_batch(
    waiting: list[tuple[list[int], Task]], size: int, max_new_tokens: int, positions: int
) -> list[tuple[list[int], Task]]:
    """The shortest prompts, off the list; none takes room for its reply from another by being longer."""

    def room(prompt: list[int]) -> int:
        return min(max_new_tokens, positions - len(prompt))

    waiting.sort(key=lambda item: len(item[0]))
    count = 1
    while count < min(size, len(waiting)) and room(waiting[count][0]) == room(waiting[0][0]):
        count += 1
    batch = waiting[:count]
    del waiting[:count]
    return batch


def seed_of(seed: int, first: tuple[list[int], Task]) -> int:
    """Seed of a batch, from what is in it: a resumed run does not repeat the noise of the first."""
    return zlib.crc32(f"{seed} {first[1].id} {len(first[0])}".encode())


@torch.inference_mode()
def sample(target: Target, prompts: list[list[int]], sampling: ReplySampling, seed: int) -> list[list[int]]:
    """One reply for each prompt, cut behind its end token; `generate` with left padding."""
    width = max(map(len, prompts))
    pad = next(iter(target.eos_ids), 0)
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=target.device)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": False}
    if sampling.temperature > 0:
        options = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    # The target's own config may carry penalties that are neither recorded nor applied when drafts are verified.
    options |= {name: PROCESSORS[name][-1] for name in target.processors}
    options |= {"pad_token_id": pad, "eos_token_id": sorted(target.eos_ids) or None}
    room = min(sampling.max_new_tokens, target.max_positions - width)
    config = GenerationConfig(max_new_tokens=room, **options)
    out = target.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    replies = []
    for row in out[:, width:].tolist():
        end = next((i for i, token in enumerate(row) if token in target.eos_ids), len(row) - 1)
        replies.append(row[: end + 1])
    return replies
