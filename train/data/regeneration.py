"""Conversations whose replies the target writes again, and the file that they are appended to."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from msgspec import Struct

from ...heads.documents import DocumentError, convert
from ...heads.errors import UserError
from ...heads.files import JsonObject
from ...heads.fingerprint import without_name
from ...inference.base.console import ProgressReporter
from ...inference.conversations.formats import CUT_SHORT, Conversation, conversation_of
from ...inference.conversations.messages import RowError, plain_message
from ...inference.conversations.rendering import prompt_ids
from ...inference.conversations.rows import SourceNotes
from ...inference.conversations.templates import plain_ids

if TYPE_CHECKING:
    from ...inference.targets.target import Target


class RegeneratedRow(Struct):
    """Line of the output of `data regenerate`, as far as a resume reads it."""

    id: str
    """Name of the conversation."""
    last_part: bool
    """True in the last of the lines that the conversation becomes."""
    regenerated: JsonObject
    """Provenance: facts about the target and the sampling that wrote the replies."""


@dataclass
class ReplyTask:
    """A conversation whose replies are being written."""

    id: str
    said: list[JsonObject]
    """Messages so far, with the target's own replies."""
    ahead: deque[list[JsonObject]]
    """For each reply after the next one, the messages before it."""
    conversation: Conversation
    """The conversation as it was read."""
    notes: SourceNotes
    """What is said once about the source of the rows."""
    events: list[JsonObject] = field(default_factory=list)
    """Token-exact sequences so far: token_ids, response_spans and finish_reasons."""

    @classmethod
    def of(cls, name: str, row: Any, template_kwargs: JsonObject, notes: SourceNotes) -> ReplyTask:
        """Return the task of a row, ready for its first reply.

        `notes` get what is said once about the source. Its id is the row's `id`, or else `name`.
        Raises `RowError` for a malformed row and one without anything to answer.
        """
        conversation = conversation_of(row).with_arguments(template_kwargs)
        messages = conversation.messages
        if messages is None and conversation.text is None:
            raise RowError("it has token ids only; regenerate from messages or text")
        if messages is not None and not any(message["role"] == "user" for message in messages):
            raise RowError("there is no user message to answer")
        ahead = deque(questions(messages or []))
        task = cls(str(row.get("id", name)), [], ahead, conversation, notes)
        task.advance()
        return task

    def advance(self) -> bool:
        """Append the messages before the next reply; return False if none is to be written."""
        # A reply that was cut is not what the next message answers, and a call wants a result.
        cut = bool(self.events) and self.events[-1]["finish_reasons"][-1] in CUT_SHORT
        called = bool(self.said) and "tool_calls" in self.said[-1]
        if cut or called or not self.ahead:
            return False
        self.said += self.ahead.popleft()
        return True

    def prompt(self, target: Target) -> list[int]:
        """Return the token ids that the target is given for the next reply. Raises `RowError`."""
        so_far = replace(self.conversation, messages=self.said or None, paths=[])
        prompt = prompt_ids(so_far, target.tokenizer, target.name, self.notes)
        text = self.conversation.text
        if text is not None and len(prompt) < len(plain_ids(target.tokenizer, text)):
            raise RowError("its text is already rendered, with a reply in it; write it as messages")
        return prompt

    def add_reply(
        self,
        prompt: list[int],
        reply: list[int],
        message: JsonObject,
        finish_reason: str,
        stop_reason: int | str | None = None,
    ) -> None:
        """Record a reply to a prompt, as token ids and as a message.

        `stop_reason` is the token or stop string that ended it, where a server names one.

        A prompt that begins with the tokens of the last sequence lengthens that one. Any other
        begins a new one: the chat template has rewritten earlier turns.
        """
        last = self.events[-1] if self.events else None
        if last is None or prompt[: len(last["token_ids"])] != last["token_ids"]:
            last = {"token_ids": [], "response_spans": [], "finish_reasons": []}
            self.events.append(last)
        last["token_ids"] = prompt + reply
        last["response_spans"].append([len(prompt), len(prompt) + len(reply)])
        last["finish_reasons"].append(finish_reason)
        last |= {} if stop_reason is None else {"stop_reason": stop_reason}
        self.said.append(plain_message(message, "the reply"))


def questions(messages: list[JsonObject]) -> list[list[JsonObject]]:
    """Return the messages before each reply: those between two messages of the assistant.

    Ends before a tool's result, which answers a call in a reply that is about to be replaced.
    """
    before_replies: list[list[JsonObject]] = [[]]
    for message in messages:
        if message["role"] == "tool":
            # The last group is not complete: the tool's result would have been in it.
            return before_replies[:-1]
        if message["role"] != "assistant":
            before_replies[-1].append(message)
        elif before_replies[-1]:
            before_replies.append([])
    return [group for group in before_replies if group]


class RowWriter:
    """Output file: one line for each sequence, appended when its conversation is finished."""

    def __init__(
        self,
        file: TextIO,
        progress: ProgressReporter,
        provenance: JsonObject,
        written: Mapping[Path, JsonObject | None],
    ) -> None:
        """`provenance` goes into every row; `written` has that of the rows of each file there."""
        self._file, self._progress = file, progress
        self._provenance, self._written = provenance, written
        self.rows = self.tokens = self.replies = self.cut = 0

    def add_provenance(self, more: JsonObject) -> None:
        """Add to the provenance of rows to come, such as hashes of the target once it is loaded.

        Raises `UserError` if the rows of a file there were written otherwise.
        """
        for path, written in self._written.items():
            check_same_provenance(path, written, more)
        self._provenance |= more

    def put(self, task: ReplyTask, exact: bool = True) -> None:
        """Append a conversation, and bring its lines to the disk.

        It becomes a line for each of its sequences, or, where not `exact` since a server gave no
        token ids, one with its messages.
        """
        conversation, last = task.conversation, task.events[-1]
        more: JsonObject = {"regenerated": self._provenance, "messages": task.said}
        # Without these, training would render another prompt.
        more["tools"] = conversation.tools
        more["chat_template_kwargs"] = conversation.template_kwargs or None
        if conversation.messages is None:
            more |= {"messages": None, "text": (conversation.text or "") + task.said[-1]["content"]}
        parts = task.events
        if not exact:
            # Only the last reply may have been cut short: nothing is asked after such a one.
            parts = [{"finish_reason": last["finish_reasons"][-1]}]
            parts[0]["stop_reason"] = last.get("stop_reason")
        for number, part in enumerate(parts):
            # By `last_part` `repair` recognises a complete conversation.
            row = {"id": task.id, "part": number, "last_part": number == len(parts) - 1}
            kept = {name: value for name, value in (part | more).items() if value is not None}
            self._file.write(json.dumps(row | kept, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows += 1
        for event in task.events:
            if exact:
                self.tokens += sum(end - start for start, end in event["response_spans"])
            self.replies += len(event["finish_reasons"])
            self.cut += sum(reason in CUT_SHORT for reason in event["finish_reasons"])
        self._progress.update()


@dataclass
class EarlierRows:
    """What a file holds of an earlier call or another worker."""

    ids: set[str] = field(default_factory=set)
    """Names of the complete conversations."""
    written: JsonObject | None = None
    """Provenance of the last line; None without one."""
    complete_to: int = 0
    """Bytes up to the end of the last complete conversation. After it a killed process, or one that
    still writes, may have left part of another."""

    @classmethod
    def of(cls, path: Path) -> EarlierRows:
        """Return what `path` holds.

        Raises `UserError` for a file of which a line was not written by this command.
        """
        found, end = cls(), 0
        foreign = UserError(f"{path} is not a file that this command wrote; choose another --out")
        if not path.is_file():
            raise foreign
        with path.open("rb") as file:
            for line in file:
                end += len(line)
                if not line.endswith(b"\n"):
                    # The last line. Another worker may write the rest of it at this moment, which
                    # would then be read as a line of its own.
                    break
                try:
                    known = convert(json.loads(line), RegeneratedRow)
                except (ValueError, RecursionError, DocumentError) as error:
                    raise foreign from error
                found.written = known.regenerated
                if known.last_part:
                    found.ids.add(known.id)
                    found.complete_to = end
        return found


def repair(out: Path, ours: bool = False) -> EarlierRows:
    """Return what `out` holds, and cut off what a killed process left.

    That is everything after the last complete conversation; but only if every line before it was
    written by this command. Raises `UserError` for any other file. One unfinished line alone may be
    anybody's, and is cut off only if the file is `ours`.
    """
    if not out.exists():
        return EarlierRows()
    found, size = EarlierRows.of(out), out.stat().st_size
    if size and found.written is None and not ours:
        raise UserError(f"{out} is not a file that this command wrote; choose another --out")
    if found.complete_to < size:
        os.truncate(out, found.complete_to)
    return found


def check_same_provenance(
    out: Path, written: JsonObject | None, facts: JsonObject, by_weights: bool = False
) -> None:
    """Raise `UserError` if `facts` differ from those that the rows in `out` were `written` with.

    Rows of two targets or two samplings must not end up in one file. `by_weights`: where the rows
    note the hash of their target's weights, its name is not compared, and the hash will be.
    """
    if written is None:
        return
    compared = without_name({**written, **facts}) if by_weights else facts
    for name, value in facts.items():
        if name in compared and written.get(name) != value:
            raise UserError(
                f"{out} was written with {name} {written.get(name)}, now it is {value}; choose "
                "another --out"
            )
