"""What requests start from: prompts read from people's files, and the later turns of
conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...heads.errors import UserError
from ..settings import BadRows
from .formats import Conversation, RowError, conversation_of
from .rows import LeftOut, prompt_ids, warn_of_plain_text
from .sources import rows_of


@dataclass
class Prompt:
    """What a request starts from."""

    id: str
    token_ids: list[int]
    category: str = ""
    place: int = 0
    """Number of its row, from 0: what the turns of a conversation have in common."""
    conversation: Conversation | None = None
    """What it was rendered from, where more turns follow."""
    later: list[str] = field(default_factory=list)
    """What the user goes on to say, turn by turn (Spec-Bench, MT-Bench)."""


def read_prompts(
    path: str | Path,
    tokenizer: Any,
    target_name: str,
    limit: int | None = None,
    split: str = "train",
    bad_rows: BadRows = "stop",
) -> list[Prompt]:
    """The prompts of whatever `sources.rows_of` reads. Raises `UserError` for no prompts, and for a
    malformed row unless `bad_rows` is skip."""
    prompts: list[Prompt] = []
    plain, left_out = 0, LeftOut(str(path), bad_rows)
    for name, row in rows_of(str(path), split):
        if limit is not None and len(prompts) == limit:
            break
        try:
            if isinstance(row, RowError):
                raise row
            conversation = conversation_of(row)
            ids = prompt_ids(conversation, tokenizer, target_name)
        except RowError as error:
            left_out.add(name, error)
            continue
        plain += conversation.messages is None and conversation.token_ids is None
        own_id = str(row.get("id", row.get("question_id", name)))
        prompt = Prompt(own_id, ids, str(row.get("category", "")), len(prompts))
        if conversation.later:
            prompt.conversation, prompt.later = conversation, conversation.later
        prompts.append(prompt)
    if not prompts:
        why = (
            f"; the first of {left_out.count} malformed rows is {left_out.first}"
            if left_out.count
            else ""
        )
        raise UserError(f"{path} holds no prompts{why}; give at least one row")
    warn_of_plain_text(plain, tokenizer, str(path))
    return prompts


def check_batches(sizes: Sequence[int], prompts: Sequence[Prompt]) -> None:
    """Demand a prompt for every place of a batch: figures of a batch of 64 that held 8 would be of
    8. Raises `UserError`."""
    if max(sizes) > len(prompts):
        raise UserError(
            f"a batch of {max(sizes)} needs as many prompts, and there are {len(prompts)}; make "
            "it smaller"
        )


def check_room(prompts: Sequence[Prompt], positions: int) -> None:
    """Demand that every prompt leaves room for a token; raises `UserError` that names one which
    does not."""
    for prompt in prompts:
        if len(prompt.token_ids) >= positions:
            raise UserError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and leaves no room in "
                f"{positions} positions; "
                "shorten it or leave it out"
            )


def next_turn(
    prompt: Prompt, reply: list[int], tokenizer: Any, name: str, eos_ids: frozenset[int], room: int
) -> Prompt | None:
    """The conversation with the reply to it and what the user says next; `None` at its end, or if
    more than `room` tokens."""
    if prompt.conversation is None or not prompt.later:
        return None
    said = tokenizer.decode(reply[:-1] if reply and reply[-1] in eos_ids else reply)
    messages = [*(prompt.conversation.messages or []), {"role": "assistant", "content": said}]
    messages.append({"role": "user", "content": prompt.later[0]})
    conversation = Conversation(
        messages=messages, template_kwargs=prompt.conversation.template_kwargs
    )
    ids = prompt_ids(conversation, tokenizer, name)
    return (
        Prompt(prompt.id, ids, prompt.category, prompt.place, conversation, prompt.later[1:])
        if len(ids) <= room
        else None
    )
