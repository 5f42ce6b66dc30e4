"""Benchmarks by name: the file that their prompts are read from, and its licence.

Each is a file of one commit, so that it holds the same prompts everywhere. The package datasets is
not needed.
"""

from __future__ import annotations

import gzip
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...heads.errors import UserError, first_line
from ..settings import RowSource
from .messages import RowError, parsed
from .sources import refuse_settings, source_files, source_of

log = logging.getLogger(__name__)

RAW = "https://raw.githubusercontent.com"
GZIP = b"\x1f\x8b"  # first bytes of what is compressed


class Benchmark(Struct, kw_only=True, frozen=True):
    """Prompts that are known by a name, as a report names them."""

    name: str
    """Name that it was asked for by."""
    path: str
    """Address of the JSONL file."""
    license: str
    """Licence that the repository names, by the hub's name for it."""
    key: str
    """Key of a row that holds what the user says: a text, or the turns of a conversation."""

    def rows(self) -> Iterator[Any]:
        """Yield what the user says in every row: a text, or a row of turns with its category.

        Raises `UserError`, with the file to download, if the rows cannot be read.
        """
        log.info("%s: %s (licence %s)", self.name, self.path, self.license)
        try:
            for row in rows_at(self.path):
                asked = row[self.key]
                if isinstance(asked, list):
                    asked = {"turns": asked, "category": row.get("category")}
                yield asked
        except UserError as error:
            raise UserError(
                f"benchmark {self.name} cannot be read: {error}; check HF_HUB_OFFLINE and "
                f"the network, or download {self.path} and give its path"
            ) from error


FILES = {
    "mt-bench": "lm-sys/FastChat/0e6d3e4beaab66f4d3f93db72541a4abab8af28d/"
    "fastchat/llm_judge/data/mt_bench/question.jsonl",
    "gsm8k": "openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/"
    "grade_school_math/data/test.jsonl",
    "humaneval": "openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d/"
    "data/HumanEval.jsonl.gz",
    "spec-bench": "hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/"
    "data/spec_bench/question.jsonl",
}
"""Files of the benchmarks: repository, commit and path."""
KEYS = {"gsm8k": ("question", "mit"), "humaneval": ("prompt", "mit")}
"""Key and licence of those whose rows do not have `turns` and whose licence is not Apache's."""


def _benchmark(name: str) -> Benchmark:
    key, license = KEYS.get(name, ("turns", "apache-2.0"))
    return Benchmark(name=name, path=f"{RAW}/{FILES[name]}", license=license, key=key)


BENCHMARKS = {name: _benchmark(name) for name in FILES}


def rows_at(address: str) -> Iterator[Any]:
    """Yield the rows of a JSONL file at an address, compressed by gzip or not.

    Raises `UserError` if it cannot be had, or is not JSONL.
    """
    import httpx
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set")
    try:
        found = httpx.get(address, follow_redirects=True, timeout=60).raise_for_status().content
        text = (gzip.decompress(found) if found.startswith(GZIP) else found).decode()
        # `splitlines` would end a line at characters that a JSON text may hold as well
        yield from map(parsed, filter(str.strip, text.split("\n")))
    except (httpx.HTTPError, RowError, OSError, ValueError) as error:
        raise UserError(f"{address}: {first_line(error)}") from error


def benchmark_of(source: str | RowSource) -> Benchmark | None:
    """Return the benchmark that a source of prompts names; None for any other source.

    Raises `UserError` for a name that is a path too, for a name that is spelled otherwise, and for
    settings that the benchmark fixes.
    """
    source = source_of(source)
    spelled = {name.replace("-", ""): name for name in BENCHMARKS}
    name = spelled.get(source.path.lower().replace("-", "").replace("_", ""))
    if name is None:
        return None
    there = Path(source.path).exists()
    if source.path != name:
        if there:
            return None
        raise UserError(f"there are no prompts {source.path!r}; did you mean {name}?")
    if there:
        raise UserError(
            f"{name} is the name of a benchmark, and of a path here; write ./{name} for the path, "
            "or rename it to read the benchmark"
        )
    refuse_settings(source, "a benchmark")
    return BENCHMARKS[name]


def check_prompts(source: RowSource) -> None:
    """Raise `UserError` for a source of prompts that is neither a benchmark nor can be read here.

    Whether the hub has a data set is not asked.
    """
    if benchmark_of(source) is None:
        source_files(source)
