"""From sources of conversations to two tables of tokens, training and held out, with a count of
everything that was lost.

The tables are written once into the run's folder by the main process and memory-mapped by every
rank; a key over the sources, the settings and the tokenizer says when they are stale.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ...heads.documents import read_document
from ...heads.errors import UserError
from ...heads.files import differs, facts_of, whole_directory, write_json
from ...heads.fingerprint import tokenizer_hash
from ...inference.console import Progress
from ...inference.conversations.formats import Conversation, RowError, conversation_of
from ...inference.conversations.rows import LeftOut
from ...inference.conversations.sources import rows_of, source_files
from ...inference.target import Target
from ..config import Data, HeldOutConfig, Source
from ..documents import Counts
from .templates import Encoded, encode

log = logging.getLogger(__name__)

COUNTS_FILE = "counts.json"
NGRAM_WORDS = 13
WORD = re.compile(r"\w+|[^\w\s]")
LOST = ("malformed", "overlong", "nothing to learn")


@dataclass
class TokenTable:
    """Documents end to end: `ids` int32 and `mask` bool, both `[tokens]`; document i is `starts[i]
    : starts[i + 1]`."""

    ids: np.ndarray
    mask: np.ndarray
    starts: np.ndarray
    copies: np.ndarray
    """How often an epoch takes each document, `[documents]`."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def length(self, document: int) -> int:
        return int(self.starts[document + 1] - self.starts[document])

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        span = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.ids[span], self.mask[span]

    def check(self) -> None:
        """Raise `ValueError` unless the parts fit together."""
        shapes = [part.ndim == 1 for part in (self.ids, self.mask, self.starts, self.copies)]
        kinds = self.mask.dtype == np.bool_ and all(
            p.dtype.kind == "i" for p in (self.ids, self.starts, self.copies)
        )
        if not (
            all(shapes)
            and kinds
            and len(self.mask) == len(self.ids)
            and len(self.copies) == len(self) > 0
        ):
            raise ValueError("its parts do not fit together")
        if (
            self.starts[0] != 0
            or self.starts[-1] != len(self.ids)
            or (np.diff(self.starts) < 0).any()
        ):
            raise ValueError("its documents overlap")

    def facts(self) -> dict[str, Any]:
        """How much it holds, and a hash of every token and of who wrote it."""
        digest = hashlib.sha256()
        for part in (self.ids, self.mask, self.starts):
            digest.update(np.ascontiguousarray(part).data)
        written = int(self.mask.sum())
        return {
            "documents": len(self),
            "tokens": len(self.ids),
            "written": written,
            "sha256": digest.hexdigest(),
        }

    @classmethod
    def of(cls, documents: list[Encoded], copies: list[int]) -> TokenTable:
        lengths = np.array([len(d.token_ids) for d in documents], dtype=np.int64)
        return cls(
            np.array([i for d in documents for i in d.token_ids], dtype=np.int32),
            np.array([m for d in documents for m in d.mask], dtype=np.bool_),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.array(copies, dtype=np.int32),
        )


@dataclass
class Tables:
    """What a run learns from and is judged on, and the counts of how they came about."""

    train: TokenTable
    held_out: TokenTable
    counts: dict[str, dict[str, int]]


def prepare(data: Data, target: Target, folder: Path, seed: int) -> Tables:
    """Build the tables in `folder`, or take those that stand there if nothing they depend on has
    changed.

    Raises `UserError` for a source that cannot be read, that loses more rows than
    `data.max_lost_share` (naming the first), and when nothing is left to learn from or to hold out.
    """
    key = tables_key(data, target, seed)
    if folder.exists():
        try:
            if noted(folder).key == key:
                return load(folder)
        except UserError as error:
            log.warning(
                "%s: the tables are built again from data.sources", str(error).partition("; ")[0]
            )
    tables = build(data, target, seed)
    with whole_directory(folder) as aside:
        for name, table in (("train", tables.train), ("held_out", tables.held_out)):
            save_file(
                {k: np.ascontiguousarray(v) for k, v in vars(table).items()},
                aside / f"{name}.safetensors",
            )
        write_json(
            aside / COUNTS_FILE,
            {"schema": 1, "key": key, "counts": tables.counts, "files": facts_of(aside)},
        )
    return tables


def noted(folder: Path) -> Counts:
    """What `counts.json` says of the tables in `folder`. Raises `UserError`."""
    return read_document(folder / COUNTS_FILE, Counts, again_for(folder))[0]


def load(folder: Path) -> Tables:
    """The tables that `prepare` wrote. Raises `UserError` for a file that is not as it was
    written."""
    found = noted(folder)
    for name, facts in found.files.items():
        if (reason := differs(folder, name, COUNTS_FILE, facts.bytes, facts.sha256)) is not None:
            raise UserError(f"{folder}: {reason}; {again_for(folder)}")
    try:
        train, held_out = (
            TokenTable(**load_file(folder / f"{name}.safetensors"))
            for name in ("train", "held_out")
        )
        train.check()
        held_out.check()
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        raise UserError(
            f"{folder} holds no tables of tokens ({error}); {again_for(folder)}"
        ) from error
    return Tables(train, held_out, found.counts)


def again_for(folder: Path) -> str:
    """What to do about tables that cannot be read."""
    return f"delete {folder} and run the command that wrote it again"


def tables_key(data: Data, target: Target, seed: int) -> str:
    """Hash of all that the tables depend on: settings, files, tokenizer and template."""
    facts = [
        asdict(data),
        seed,
        tokenizer_hash(target.tokenizer),
        str(getattr(target.tokenizer, "chat_template", None)),
    ]
    for source in data.sources:
        facts += [
            [str(f), f.stat().st_size, f.stat().st_mtime_ns]
            for f in source_files(source.path) or []
        ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def build(data: Data, target: Target, seed: int) -> Tables:
    """Read, encode, split, deduplicate and decontaminate; see `prepare`."""
    train: list[_Row] = []
    held_out: list[_Row] = []
    counts: dict[str, Counter[str]] = {}
    for source in data.sources:
        name = source.name or source.path
        counts[name] = count = Counter()
        lost: list[str] = []
        for row in _read(source, data, target, seed, count, lost):
            (held_out if row.held_out else train).append(row)
        _refuse_losses(name, count, lost, data.max_lost_share)
    if data.deduplicate:
        seen: set[bytes] = set()
        held_out = _distinct(held_out, seen, counts)
        train = _distinct(train, seen, counts)
    if data.decontaminate:
        train = _clean(train, held_out, counts)
    for rows, kind in ((train, "to learn from"), (held_out, "held out")):
        if not rows:
            raise UserError(
                f"no rows are left {kind} ({_describe(counts)}); check data.sources and "
                "data.held_out"
            )
    for kind, rows in (("train", train), ("held out", held_out)):
        for row in rows:
            counts[row.source][kind] += 1
    log.info("data: %s", _describe(counts))
    return Tables(
        _table(train), _table(held_out), {name: dict(count) for name, count in counts.items()}
    )


@dataclass
class _Row:
    source: str
    encoded: list[Encoded]
    words: str
    held_out: bool
    copies: int


def _table(rows: list[_Row]) -> TokenTable:
    return TokenTable.of(
        [e for row in rows for e in row.encoded], [row.copies for row in rows for _ in row.encoded]
    )


def _read(
    source: Source, data: Data, target: Target, seed: int, count: Counter[str], lost: list[str]
) -> Iterator[_Row]:
    name = source.name or source.path
    left_out = LeftOut(f"data source {name}", data.bad_rows, "--data.bad-rows")
    for row_name, raw in Progress(
        rows_of(source.path, source.split), desc=f"reading {name}", unit=" rows"
    ):
        count["read"] += 1
        held_out = _is_held_out(data.held_out, name, raw, row_name, seed)
        copies = int(source.weight) + (_chance("copies", seed, name, row_name) < source.weight % 1)
        if not held_out and copies == 0:
            count["not taken (weight)"] += 1
            continue
        try:
            if isinstance(raw, RowError):
                raise raw
            conversation = conversation_of(raw)
            _check_tokens(conversation, target)
            encoded = encode(
                conversation,
                target.tokenizer,
                target.eos_ids,
                target.name,
                data.chat_template_kwargs,
            )
        except RowError as error:
            left_out.add(row_name, error)
            count["malformed"] += 1
            lost.append(f"{row_name} ({error})")
            continue
        fits = [e for e in encoded if len(e.token_ids) <= data.max_length]
        useful = [e for e in fits if _has_label(e)]
        if useful and len(fits) < len(encoded):
            count["overlong turns"] += len(encoded) - len(fits)
        if not useful:
            count["overlong" if not fits else "nothing to learn"] += 1
            longest = max((len(e.token_ids) for e in encoded), default=0)
            reason = (
                f"{longest} tokens, data.max_length is {data.max_length}"
                if not fits
                else "no token of the assistant's"
            )
            lost.append(f"{row_name} ({reason})")
            continue
        yield _Row(name, useful, conversation.words(), held_out, 1 if held_out else copies)


def _check_tokens(conversation: Conversation, target: Target) -> None:
    """Exact tokens must be this target's: ids of another tokenizer would train without a word."""
    if conversation.token_ids is None:
        return
    if conversation.tokenizer_hash not in (None, tokenizer_hash(target.tokenizer)):
        raise RowError(
            "its token ids were written with another tokenizer; regenerate it with this target"
        )
    if not all(0 <= token < target.vocab_size for token in conversation.token_ids):
        raise RowError(f"a token id lies outside the target's vocabulary of {target.vocab_size}")


def _has_label(encoded: Encoded) -> bool:
    """Whether some drafted token can be learned: a root written by the target, followed by another
    such token."""
    mask = encoded.mask
    return any(mask[i] and mask[i - 1] for i in range(2, len(mask)))


def _is_held_out(held_out: HeldOutConfig, source: str, raw: Any, row_name: str, seed: int) -> bool:
    if held_out.by == "source":
        return source in held_out.sources
    if held_out.by == "row":
        return _chance("held out", seed, source, row_name) < held_out.share
    if not isinstance(raw, dict):
        return False
    if held_out.time_field not in raw:
        raise UserError(
            f"row {row_name} has no field {held_out.time_field!r} to split by time; set "
            "data.held_out.time_field"
        )
    return _moment(raw[held_out.time_field], row_name) >= _moment(
        held_out.since, "data.held_out.since"
    )


def _chance(*what: object) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8]) / 2**64


def _moment(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        pass
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError as error:
        raise UserError(f"{where}: {value!r} is neither a number nor an ISO date") from error


def _refuse_losses(name: str, count: Counter[str], lost: list[str], allowed: float) -> None:
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
        raise UserError(
            f"data source {name} would lose {number} of {count['read']} rows ({reasons}); the "
            f"first is {lost[0]}; mend them, or "
            f"accept it with data.max_lost_share={min(1.0, number / count['read'] + 0.005):.2f}"
        )
    for row in lost[:20]:
        log.warning("data source %s: lost row %s", name, row)


def _distinct(rows: list[_Row], seen: set[bytes], counts: dict[str, Counter[str]]) -> list[_Row]:
    kept = []
    for row in rows:
        key = hashlib.sha256(repr([e.token_ids for e in row.encoded]).encode()).digest()
        if key in seen:
            counts[row.source]["duplicates"] += 1
        else:
            seen.add(key)
            kept.append(row)
    return kept


def ngrams(text: str) -> set[int]:
    """Hashes of the 13-grams of words and signs in `text`, lower-cased: the usual unit of
    contamination."""
    words = WORD.findall(text.lower())
    return {hash(tuple(words[i : i + NGRAM_WORDS])) for i in range(len(words) - NGRAM_WORDS + 1)}


def _clean(train: list[_Row], held_out: list[_Row], counts: dict[str, Counter[str]]) -> list[_Row]:
    forbidden: set[int] = set().union(*(ngrams(row.words) for row in held_out))
    kept = []
    for row in train:
        if forbidden.isdisjoint(ngrams(row.words)):
            kept.append(row)
        else:
            counts[row.source]["shares a 13-gram with held-out rows"] += 1
    return kept


def _describe(counts: dict[str, Counter[str]]) -> str:
    return "; ".join(
        f"{name}: " + ", ".join(f"{n} {what}" for what, n in count.items())
        for name, count in counts.items()
    )
