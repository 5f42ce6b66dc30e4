"""Benchmarks by name: where their prompts are read from, and under which licence."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...heads.errors import UserError, first_line
from ..settings import RowSource
from .given import GivenRows
from .hub import hub_rows
from .messages import RowError, parsed
from .sources import refuse_settings, source_files, source_of

log = logging.getLogger(__name__)

SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
    "fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/question.jsonl"
)


class Benchmark(Struct, kw_only=True, frozen=True):
    """Prompts that are known by a name, as a report names them."""

    name: str
    """Name that it was asked for by."""
    path: str
    """Data set on the hub, or the address of a JSONL file."""
    config_name: str | None = None
    """Configuration of the data set."""
    split: str | None = None
    """Split of the data set."""
    revision: str | None = None
    """Branch, tag or commit that was asked for; None: the main branch, or a fixed file."""
    license: str
    """Licence that the data set's card or the repository names, by the hub's name for it."""
    key: str
    """Key of a row that holds what the user says: a text, or the turns of a conversation."""
    file: str
    """Address of a file with the same prompts, which is read without the package datasets."""

    def rows(self) -> Iterator[Any]:
        """Yield what the user says in every row: a text, or a row of turns with its category.

        Raises `UserError`, with the file to download, if the rows cannot be read.
        """
        named = {"configuration": self.config_name, "split": self.split, "revision": self.revision}
        where = [f"{what} {name}" for what, name in named.items() if name is not None]
        log.info("%s: %s (licence %s)", self.name, ", ".join([self.path, *where]), self.license)
        split = self.split or "train"
        source = RowSource(self.path, split, self.config_name, self.revision)
        try:
            for name, row in hub_rows(source) if self.on_hub else rows_at(self.path):
                if (asked := row.get(self.key)) is None:
                    raise UserError(f"row {name} has no {self.key}; read an earlier revision")
                if isinstance(asked, list):
                    asked = {"turns": asked, "category": row.get("category")}
                yield asked
        except UserError as error:
            reason, _, _ = str(error).partition(";")
            raise UserError(
                f"benchmark {self.name} cannot be read: {reason}; check HF_HUB_OFFLINE and "
                f"the network, or download {self.file} and give its path"
            ) from error

    @property
    def on_hub(self) -> bool:
        """True if it is a data set on the hub, which the package datasets reads."""
        return "://" not in self.path

    def given(self, chat: bool) -> GivenRows:
        """Return the rows as prompts; with `chat` a text is a message of the user."""
        return GivenRows(self.name, self.rows(), chat)


BENCHMARKS = {
    one.name: one
    for one in (
        Benchmark(
            name="mt-bench",
            path="HuggingFaceH4/mt_bench_prompts",
            split="train",
            license="apache-2.0",
            key="prompt",
            file="https://huggingface.co/datasets/HuggingFaceH4/mt_bench_prompts/resolve/main/"
            "raw/question.jsonl",
        ),
        Benchmark(
            name="gsm8k",
            path="openai/gsm8k",
            config_name="main",
            split="test",
            license="mit",
            key="question",
            file="https://raw.githubusercontent.com/openai/grade-school-math/master/"
            "grade_school_math/data/test.jsonl",
        ),
        Benchmark(
            name="humaneval",
            path="openai/openai_humaneval",
            split="test",
            license="mit",
            key="prompt",
            file="https://github.com/openai/human-eval/raw/master/data/HumanEval.jsonl.gz",
        ),
        Benchmark(
            name="spec-bench", path=SPEC_BENCH, license="apache-2.0", key="turns", file=SPEC_BENCH
        ),
    )
}


def rows_at(address: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a JSONL file at an address.

    Raises `UserError` if it cannot be had, or is not JSONL.
    """
    import httpx
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set")
    try:
        answer = httpx.get(address, follow_redirects=True, timeout=60).raise_for_status()
        # `splitlines` would end a line at characters that a JSON text may hold as well
        for number, line in enumerate(filter(str.strip, answer.text.split("\n")), 1):
            yield f"{number}", parsed(line)
    except (httpx.HTTPError, RowError) as error:
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
    found = BENCHMARKS[name]
    refuse_settings(source, "a benchmark", *("revision",) * found.on_hub)
    return replace(found, revision=source.revision)


def check_prompts(source: RowSource) -> None:
    """Raise `UserError` for a source of prompts that is neither a benchmark nor can be read here.

    Whether the hub has a data set is not asked.
    """
    if benchmark_of(source) is None:
        source_files(source)
