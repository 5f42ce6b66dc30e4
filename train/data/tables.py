"""Tables of training and held-out tokens, built from sources of conversations.

Every dropped row is counted. The main process writes the tables into the run's folder, and every
rank reads them there. A key (`tables_key`) shows when they are out of date.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from msgspec import Meta
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ...heads.documents import Count, Document, FileFacts, read_document
from ...heads.errors import UserError
from ...heads.files import (
    JsonObject,
    differs,
    facts_of,
    refuse_link,
    whole_directory,
    write_json,
)
from ...heads.fingerprint import tokenizer_hash
from ...inference.base.console import ProgressReporter
from ...inference.conversations.formats import Conversation, conversation_of
from ...inference.conversations.messages import RowError
from ...inference.conversations.rows import MalformedRows, SourceNotes
from ...inference.conversations.selection import CategoryPath, Units, hash_number, prompt_text
from ...inference.conversations.sources import rows_of, source_files
from ...inference.targets.target import TargetSource
from .config import Data, Source
from .split import SourceRow, chance, clean, is_held_out
from .templates import Encoded, encode

log = logging.getLogger(__name__)

COUNTS_FILE = "counts.json"
LOST = ("malformed", "overlong", "nothing to learn")  # counts limited by data.max_lost_share


class TableCounts(Document):
    """`counts.json` next to the token tables of a run: their origin and their files."""

    what: ClassVar[str] = "the note of a run's tables of tokens"

    key: str
    """Hash of everything that the tables depend on, see `tables_key`."""
    counts: dict[str, dict[str, Count]]
    """Number of rows for each source and outcome, such as "train" or "malformed"."""
    files: dict[str, FileFacts]
    """Sizes and checksums of the tables."""
    identity: str
    """Hash of the tables' content, by which a resume knows them."""
    groups: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Sources with their categories; the tables hold indices into this list."""
    schema: Annotated[int, Meta(ge=1)] = 1


@dataclass
class TokenTable:
    """Documents end to end, of which document i is `starts[i] : starts[i + 1]`."""

    ids: np.ndarray
    """Token ids, int32 `[tokens]`."""
    mask: np.ndarray
    """Loss mask, bool `[tokens]`: true where the target wrote."""
    starts: np.ndarray
    """Beginnings of the documents, and the end of the last, int64 `[documents + 1]`."""
    copies: np.ndarray
    """Number of times that each document is in an epoch, int32 `[documents]`."""
    units: np.ndarray
    """Number of each document's conversation or prompt, int64 `[documents]`."""
    groups: np.ndarray
    """Index of each document's source and category in `Tables.groups`, int32 `[documents]`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def length(self, document: int) -> int:
        return int(self.starts[document + 1] - self.starts[document])

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and loss mask of a document."""
        span = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.ids[span], self.mask[span]

    def facts(self) -> JsonObject:
        """Return numbers of documents and tokens, and a hash of tokens and masks."""
        digest = hashlib.sha256()
        for array in (self.ids, self.mask, self.starts):
            digest.update(np.ascontiguousarray(array).data)
        return {
            "documents": len(self),
            "tokens": len(self.ids),
            "written": int(self.mask.sum()),
            "sha256": digest.hexdigest(),
        }

    @classmethod
    def of(
        cls,
        documents: list[Encoded],
        copies: list[int],
        units: list[int] | None = None,
        groups: list[int] | None = None,
    ) -> TokenTable:
        """Return the table of `documents`, of which document i is `copies[i]` times in an epoch.

        Without `units` each document is a different one, without `groups` all are in one group.
        """
        lengths = [len(document.token_ids) for document in documents]
        # Iterators, since a list of all tokens would take many times the memory of the table.
        ids = chain.from_iterable(document.token_ids for document in documents)
        mask = chain.from_iterable(document.mask for document in documents)
        return cls(
            # int32 holds every token id, in half of the memory of int64
            np.fromiter(ids, dtype=np.int32, count=sum(lengths)),
            np.fromiter(mask, dtype=np.bool_, count=sum(lengths)),
            np.cumsum([0, *lengths], dtype=np.int64),
            np.array(copies, dtype=np.int32),
            np.array(range(len(documents)) if units is None else units, dtype=np.int64),
            np.array([0] * len(documents) if groups is None else groups, dtype=np.int32),
        )


@dataclass
class Tables:
    """Tables of a run, for training and for evaluation."""

    train: TokenTable
    held_out: TokenTable
    counts: dict[str, dict[str, int]]
    """Number of rows for each source and outcome."""
    groups: list[CategoryPath]
    """Sources with their categories, in the order of `TokenTable.groups`."""


def prepare(
    data: Data,
    target: TargetSource,
    folder: Path,
    seed: int,
    check: Callable[[str], None] = lambda identity: None,
) -> Tables:
    """Return the tables in `folder`, rebuilt if they are missing, damaged or out of date.

    `check` is called with the identity of the tables before anything is written; if it raises,
    `folder` stays as it was. Raises `UserError` for a source that cannot be read or that loses more
    rows than `data.max_lost_share`, and if no training or held-out rows are left.
    """
    refuse_link(folder)
    key = tables_key(data, target, seed)
    if folder.exists():
        try:
            before = table_counts(folder)
            found = load(folder) if before.key == key else None
        except UserError as error:
            # The message without its remedy, which is applied here.
            log.warning(
                "%s: rebuilding the tables from data.sources", str(error).partition("; ")[0]
            )
        else:
            if found is not None:
                check(before.identity)
                return found
    tables = build(data, target, seed)
    with whole_directory(folder) as aside:
        for name, table in (("train", tables.train), ("held_out", tables.held_out)):
            arrays = {part: np.ascontiguousarray(array) for part, array in vars(table).items()}
            save_file(arrays, aside / f"{name}.safetensors")
        files = facts_of(aside)
        # Not of the key: a source that was touched or copied gives the same tables.
        identity = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]
        check(identity)
        noting = {"schema": 1, "key": key, "identity": identity, "counts": tables.counts}
        noting["groups"] = tables.groups
        write_json(aside / COUNTS_FILE, {**noting, "files": files})
    return tables


def table_counts(folder: Path) -> TableCounts:
    """Return the contents of `counts.json` in `folder`. Raises `UserError`."""
    return read_document(folder / COUNTS_FILE, TableCounts, again_for(folder))[0]


def load(folder: Path) -> Tables:
    """Return the tables that `prepare` wrote into `folder`. Raises `UserError`."""
    note = table_counts(folder)
    for name, facts in note.files.items():
        if (reason := differs(folder, name, COUNTS_FILE, facts.bytes, facts.sha256)) is not None:
            raise UserError(f"{folder}: {reason}; {again_for(folder)}")
    try:
        train = TokenTable(**load_file(folder / "train.safetensors"))
        held_out = TokenTable(**load_file(folder / "held_out.safetensors"))
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder} does not hold tables of tokens ({error}); {again_for(folder)}"
        ) from error
    return Tables(train, held_out, note.counts, note.groups)


def again_for(folder: Path) -> str:
    """Return the remedy for tables that cannot be read."""
    return f"delete {folder} and run the command that wrote it again"


def tables_key(data: Data, target: TargetSource, seed: int) -> str:
    """Return a hash of settings, files, tokenizer and template, on which the tables depend.

    Tables of equal keys are equal; those of different keys may be equal too.
    """
    facts = [
        asdict(data),
        seed,
        tokenizer_hash(target.tokenizer),
        str(getattr(target.tokenizer, "chat_template", None)),
    ]
    for source in data.sources:
        # A data set on the hub has no files here; its name is in the settings.
        for file in source_files(source) or []:
            # Size and time, since reading the contents at every start would be slow. If they
            # differ, the tables are rebuilt and compared (`prepare`).
            facts.append([str(file), file.stat().st_size, file.stat().st_mtime_ns])
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def build(data: Data, target: TargetSource, seed: int) -> Tables:
    """Return the tables of the sources, deduplicated and decontaminated; errors as of `prepare`."""
    rows: list[SourceRow] = []
    counts: dict[str, Counter[str]] = {}
    units = units_of(data)
    for source in data.sources:
        name = source.name or source.path
        counts[name] = count = Counter()
        lost: list[str] = []
        rows += _read(source, data, target, units, seed, count, lost)
        _check_losses(name, count, lost, data.max_lost_share)
    numbers = {row.unit for row in rows}
    if data.held_out.by == "row" and len(numbers) > 1 and not any(row.held_out for row in rows):
        # A share of few rows may be empty. The unit that a larger share would hold out is taken.
        first = min(numbers, key=lambda unit: chance("held out", seed, unit))
        for row in rows:
            if row.unit == first:
                row.held_out, row.copies = True, 1
    train = [row for row in rows if not row.held_out]
    held_out = [row for row in rows if row.held_out]
    if data.deduplicate:
        # Held-out rows first, so that of two equal rows the one in training is dropped.
        seen: set[bytes] = set()
        held_out = _distinct(held_out, seen, counts)
        train = _distinct(train, seen, counts)
    if data.decontaminate:
        cleaned = clean(train, held_out, data.max_contaminated_share)
        lost_rows = Counter(row.source for row in train) - Counter(row.source for row in cleaned)
        for name, number in lost_rows.items():
            counts[name]["shares words with held-out rows"] += number
        train = cleaned
    if not train or not held_out:
        remedy = "check data.sources and data.held_out"
        if data.held_out.by == "row":
            remedy = (
                "give two prompts or more, each conversation with a different id or without one, "
                "or another --data.held-out.share"
            )
        kind = "held out" if train else "to learn from"
        raise UserError(f"no rows are left {kind} ({_describe(counts)}); {remedy}")
    for kind, kept in (("train", train), ("held out", held_out)):
        for row in kept:
            counts[row.source][kind] += 1
    log.info("data: %s", _describe(counts))
    groups = sorted({row.group for row in (*train, *held_out)})
    plain = {name: dict(count) for name, count in counts.items()}
    return Tables(_table(train, groups), _table(held_out, groups), plain, groups)


def _table(rows: list[SourceRow], groups: list[CategoryPath]) -> TokenTable:
    """Return the table of all sequences of `rows`."""
    index = {group: number for number, group in enumerate(groups)}
    documents = [encoded for row in rows for encoded in row.encoded]
    row_of = [row for row in rows for _ in row.encoded]
    return TokenTable.of(
        documents,
        [row.copies for row in row_of],
        [row.unit for row in row_of],
        [index[row.group] for row in row_of],
    )


def _read(
    source: Source,
    data: Data,
    target: TargetSource,
    units: Units,
    seed: int,
    count: Counter[str],
    lost: list[str],
) -> Iterator[SourceRow]:
    """Yield the usable rows of a source.

    The outcomes of the others are added to `count`; `lost` gets the name and the reason of each
    that counts as `LOST`.
    """
    name = source.name or source.path
    left_out, notes = (
        MalformedRows(f"data source {name}", data.bad_rows, "--data.bad-rows"),
        SourceNotes(),
    )
    tokenizer = tokenizer_hash(target.tokenizer)  # takes as long as reading a hundred rows
    for row_name, raw in ProgressReporter(rows_of(source), desc=f"reading {name}", unit=" rows"):
        count["read"] += 1
        # A weight of 2.3 uses every row twice, and three tenths of them once more.
        copies = int(source.weight) + (chance("copies", seed, name, row_name) < source.weight % 1)
        try:
            conversation = conversation_of(raw)
            unit = units.of(raw, conversation, name)
            held_out = is_held_out(data.held_out, name, unit, seed)
            # The weight of a source does not matter for its held-out rows.
            if not held_out and copies == 0:
                count["not taken (weight)"] += 1
                continue
            check_tokens(conversation, tokenizer, target.vocab_size)
            encoded = encode(
                conversation, target.tokenizer, target.eos_ids, target.name,
                data.chat_template_kwargs, notes,
            )  # fmt: skip
        except RowError as error:
            left_out.add(row_name, error)
            count["malformed"] += 1
            lost.append(f"{row_name} ({error})")
            continue
        # Turns that cannot be rendered together are separate sequences, some of which may fit.
        fits = [e for e in encoded if len(e.token_ids) <= data.max_length]
        useful = [e for e in fits if _has_label(e)]
        if useful and len(fits) < len(encoded):
            count["overlong turns"] += len(encoded) - len(fits)
        if not useful and conversation.learns_nothing():
            count["not learned, as the row says"] += 1
            continue
        if not useful:
            if fits or not encoded:
                count["nothing to learn"] += 1
                reason = _unlearnable(conversation)
            else:
                count["overlong"] += 1
                longest = max(len(e.token_ids) for e in encoded)
                reason = f"{longest} tokens, data.max_length is {data.max_length}"
            lost.append(f"{row_name} ({reason})")
            continue
        yield SourceRow(
            name, useful, conversation.words(), held_out, 1 if held_out else copies, unit,
            hash_number(prompt_text(conversation)), (name, str(raw.get("category") or "")),
        )  # fmt: skip
    notes.report(f"data source {name}")


def units_of(data: Data) -> Units:
    """Return the units of all rows of the sources, each of which is read once."""
    units = Units()
    for source in data.sources:
        name = source.name or source.path
        rows = rows_of(source)
        for _, raw in ProgressReporter(rows, desc=f"ids and prompts of {name}", unit=" rows"):
            with suppress(RowError):  # counted when the rows are read again
                units.add(raw, conversation_of(raw), name)
    return units


def _unlearnable(conversation: Conversation) -> str:
    """Return the reason why a conversation has no token to learn."""
    roles = [str(message["role"]) for message in conversation.messages or ()]
    if roles and "assistant" not in roles:
        return f"no message of role assistant; the roles are {', '.join(dict.fromkeys(roles))}"
    return "no token of the assistant's"


def check_tokens(conversation: Conversation, tokenizer: str, vocab_size: int) -> None:
    """Raise `RowError` for exact token ids of another tokenizer than the target's.

    `tokenizer` is the hash of the target's tokenizer, `vocab_size` the number of its tokens.
    """
    if conversation.token_ids is None:
        return
    if conversation.tokenizer_hash not in (None, tokenizer):
        raise RowError(
            "its token ids were written with another tokenizer; regenerate it with this target"
        )
    if not all(0 <= token < vocab_size for token in conversation.token_ids):
        raise RowError(f"a token id lies outside the target's vocabulary of {vocab_size}")


def _has_label(encoded: Encoded) -> bool:
    """Return whether the target wrote a root, not at position 0, and the token after it."""
    mask = encoded.mask
    return any(mask[i] and mask[i - 1] for i in range(2, len(mask)))


def _check_losses(name: str, count: Counter[str], lost: list[str], allowed: float) -> None:
    """Raise `UserError` for a source that is empty or loses more than the share `allowed` of rows.

    Otherwise the first lost rows are logged.
    """
    if not count["read"]:
        raise UserError(f"data source {name} is empty; give it at least one row")
    number = sum(count[reason] for reason in LOST)
    reasons = ", ".join(f"{count[reason]} {reason}" for reason in LOST if count[reason])
    if number == count["read"]:
        raise UserError(
            f"data source {name}: not one of {number} rows can be used ({reasons}); the first is "
            f"{lost[0]}"
        )
    if number > allowed * count["read"]:
        # The share in the remedy is rounded up to two digits, so that it suffices.
        raise UserError(
            f"data source {name} would lose {number} of {count['read']} rows ({reasons}); the "
            f"first is {lost[0]}; fix them, or accept it with "
            f"data.max_lost_share={min(1.0, number / count['read'] + 0.005):.2f}"
        )
    for row in lost[:20]:
        log.warning("data source %s: lost row %s", name, row)


def _distinct(
    rows: list[SourceRow], seen: set[bytes], counts: dict[str, Counter[str]]
) -> list[SourceRow]:
    """Return the rows whose hashes are not in `seen` yet, add them, and count the others."""
    distinct = []
    for row in rows:
        key = hashlib.sha256(repr([e.token_ids for e in row.encoded]).encode()).digest()
        if key in seen:
            counts[row.source]["duplicates"] += 1
        else:
            seen.add(key)
            distinct.append(row)
    return distinct


def _describe(counts: dict[str, Counter[str]]) -> str:
    """Return the counts of all sources in one line."""
    described = []
    for name, count in counts.items():
        outcomes = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
        described.append(f"{name}: {outcomes}")
    return "; ".join(described)
