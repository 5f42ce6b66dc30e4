"""Share of the tokens that the target writes, of the first rows of a run's own data."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from ...heads.errors import UserError
from ...inference.conversations.formats import conversation_of
from ...inference.conversations.messages import RowError
from ...inference.conversations.sources import rows_of, source_files
from ...inference.targets.target_files import base_and_adapter, read_tokenizer
from ..config import RunConfig, Source
from ..data.templates import encode
from ..outline import ConfigOnly, config_at

ROWS = 256  # of each source


def reply_share_of(config: RunConfig) -> float | None:
    """Return the share, in (0, 1], of the tokens of a run's data that the target writes.

    Sources weigh as much as their files' bytes times their weight. None where data or tokenizer are
    not here, or cannot be read; nothing is downloaded.
    """
    target = config.target
    if not Path(target.path).is_dir():
        return None
    written = total = 0.0
    try:
        base, _ = base_and_adapter(target)
        tokenizer = read_tokenizer(base, target.trust_remote_code)
        eos_ids = ConfigOnly(config_at(target.path, target.trust_remote_code)).eos_ids
        for source in config.data.sources:
            files = source_files(source)
            if files is None:
                return None
            replies, tokens = counted(source, config, tokenizer, eos_ids)
            size = source.weight * sum(file.stat().st_size for file in files)
            written += size * replies / max(tokens, 1)
            total += size if tokens else 0
    except UserError:
        return None
    return written / total if written else None


def counted(
    source: Source, config: RunConfig, tokenizer: Any, eos_ids: frozenset[int]
) -> tuple[int, int]:
    """Return the tokens that the target writes in the first rows of a source, and all tokens.

    Rows that training would leave out count for neither.
    """
    replies = tokens = 0
    for _, raw in islice(rows_of(source), ROWS):
        try:
            sequences = encode(
                conversation_of(raw), tokenizer, eos_ids, config.target.path,
                config.data.chat_template_kwargs,
            )  # fmt: skip
        except RowError:
            continue
        for sequence in sequences:
            if len(sequence.token_ids) <= config.data.max_length:
                replies += sum(sequence.mask)
                tokens += len(sequence.token_ids)
    return replies, tokens
