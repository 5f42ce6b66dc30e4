"""Conversations whose replies are being written anew, and the file that they are appended to."""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...heads.documents import DocumentError, convert
from ...heads.errors import UserError
from ...inference.console import Progress
from ...inference.conversations.formats import Conversation, RowError, conversation_of
from ...inference.conversations.rows import prompt_ids
from ...inference.target import Target
from ..documents import WrittenRow


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
        if conversation.messages is not None and not any(
            m["role"] == "user" for m in conversation.messages
        ):
            raise RowError("there is no user message to answer")
        task = cls(
            str(row.get("id", name)),
            [],
            deque(questions(conversation.messages or [])),
            conversation,
        )
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

    def add_reply(
        self, prompt: list[int], reply: list[int], message: dict[str, Any], finish_reason: str
    ) -> None:
        """Record a reply; a prompt that continues the last sequence lengthens it, any other begins
        a new one."""
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
        self,
        file: TextIO,
        progress: Progress,
        provenance: dict[str, Any],
        written: dict[str, Any] | None = None,
    ) -> None:
        self._file, self._progress, self._provenance, self._written = (
            file,
            progress,
            provenance,
            written,
        )
        self.rows = self.tokens = self.cut = 0

    def add_provenance(self, more: dict[str, Any]) -> None:
        """What is known of the target only once it is loaded; rows that stand in the file must
        agree."""
        refuse_other(Path(self._file.name), self._written, more)
        self._provenance |= more

    def put(self, task: Task) -> None:
        for number, event in enumerate(task.events):
            whole = number == len(task.events) - 1
            row = {
                "id": task.id,
                "part": number,
                "last_part": whole,
                **event,
                "regenerated": self._provenance,
            }
            row["messages"] = task.said if task.conversation.messages is not None else None
            row["text"] = (
                None
                if row["messages"]
                else (task.conversation.text or "") + task.said[-1]["content"]
            )
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self.tokens += sum(end - start for start, end in event["response_spans"])
            self.cut += sum(reason != "stop" for reason in event["finish_reasons"])
        self._flush()

    def put_text(self, task: Task) -> None:
        """A conversation whose server gave no token ids."""
        row = {
            "id": task.id,
            "part": 0,
            "last_part": True,
            "messages": task.said,
            "regenerated": self._provenance,
        }
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._flush()

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows += 1
        self._progress.update()


def mend(out: Path) -> tuple[set[str], dict[str, Any] | None]:
    """Ids of the conversations that stand whole in `out`, and how they were written (None if
    nothing is there).

    What a killed process left half-written behind them is cut off, but only if every whole line was
    written by this command.
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


def refuse_other(out: Path, written: dict[str, Any] | None, facts: dict[str, Any]) -> None:
    """Rows of two targets or two samplings must not end up in one file."""
    for name, value in facts.items():
        if written is not None and written.get(name) != value:
            raise UserError(
                f"{out} was written with {name} {written.get(name)}, now it is {value}; choose "
                "another --out"
            )
