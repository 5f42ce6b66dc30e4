"""`draftsmith data split`: sets rows aside by conversation, before anything is trained on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

from ..heads.errors import UserError
from ..inference.base.output_paths import check_output_folder
from ..inference.base.settings import RowOptions
from ..inference.conversations.formats import Conversation, conversation_of
from ..inference.conversations.messages import RowError, check_text
from ..inference.conversations.rows import InMemoryRows, MalformedRows, write_rows
from ..inference.conversations.selection import Units
from ..inference.conversations.sources import rows_of, source_files
from ..train.data.split import chance

SEED = 0  # of the choice, which no other number would make better


@dataclass
class SplitOptions(RowOptions):
    """Set a share of the conversations aside, for evaluation only.

    All rows of a conversation go to the same file: rows with an equal id, or with an equal prompt
    (everything before the first reply), as every turn of a logged conversation has. The assignment
    depends only on the conversation, so it does not change when the log grows.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith data split --data logs.jsonl --out rows --share 0.1",
    )

    data: str
    """Conversations or prompts: a JSON, JSONL or parquet file, a folder of them, or a data set on
    the hub."""
    out: str
    """Folder to write: train.jsonl has the rows that may be trained on, as they are, and
    held_out.jsonl the others."""
    share: float = 0.1
    """Share of the conversations that is set aside."""
    last_turn: bool = False
    """Keep only the last row of a conversation that was logged once per turn, with all turns before
    it."""

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UserError(f"share must lie between 0 and 1, not {self.share:g}")


def run(options: SplitOptions) -> None:
    """Write the two files of the folder, and print how many rows and conversations each has.

    Raises `UserError`, also where one of them would be empty.
    """
    source = options.source(options.data)
    check_output_folder(options.out, "--out")
    train, held_out = (Path(options.out) / name for name in ("train.jsonl", "held_out.jsonl"))
    taken = {Path(options.data).resolve(), *(one.resolve() for one in source_files(source) or [])}
    if taken & {Path(options.out).resolve(), train.resolve(), held_out.resolve()}:
        raise UserError("--out would be written over --data; name another folder")
    left_out, units = MalformedRows(options.data, options.bad_rows), Units()
    rows: list[tuple[Any, Conversation]] = []
    for name, raw in rows_of(source):
        try:
            check_text(raw)
            rows.append((raw, conversation_of(raw)))
        except RowError as error:
            left_out.add(name, error)
        else:
            units.add(*rows[-1])
    if options.last_turn:
        read, rows = len(rows), last_turns(rows)
        print(f"{options.data}: {read} rows, {len(rows)} without those that a later turn repeats")
    sides: dict[Path, list[tuple[Any, int]]] = {train: [], held_out: []}
    for raw, conversation in rows:
        unit = units.of(raw, conversation)
        # Not the chance by which training holds out rows of what is left here.
        aside = chance("set aside", SEED, unit) < options.share
        sides[held_out if aside else train].append((raw, unit))
    for out, side in sides.items():
        if not side:
            raise UserError(
                f"no rows of {options.data} are left for {out}: {len(rows)} rows, share "
                f"{options.share:g}, each conversation by chance; give another --share"
            )
    Path(options.out).mkdir(parents=True, exist_ok=True)
    for out, side in sides.items():
        write_rows(InMemoryRows(options.data, [raw for raw, _ in side]), out)
        print(f"{out}: {len(side)} rows of {len({unit for _, unit in side})} conversations")


def last_turns(rows: list[tuple[Any, Conversation]]) -> list[tuple[Any, Conversation]]:
    """Return the rows, in their order, whose request is not the beginning of another row's.

    Of equal requests the last row is kept, and so is every row without messages.
    """
    requests = [request_hashes(conversation) for _, conversation in rows]
    continued = {begun for request in requests for begun in request[:-1]}
    last = {request[-1]: place for place, request in enumerate(requests) if request}
    return [
        row
        for place, (row, request) in enumerate(zip(rows, requests, strict=True))
        if not request or (request[-1] not in continued and last[request[-1]] == place)
    ]


def request_hashes(conversation: Conversation) -> list[int]:
    """Return, for each message before the last reply, a hash of all messages up to it."""
    messages = conversation.messages or []
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    texts = (json.dumps(message, sort_keys=True) for message in messages)
    return [*accumulate(texts, lambda begun, text: hash((begun, text)), initial=0)][1:]
