"""Rows of files, folders and data sets on the hub, and benchmarks by name.

`datasets` is imported only for parquet files and names on the hub. A benchmark is a file of one
commit, so that it holds the same prompts everywhere.
"""

from __future__ import annotations

import gzip
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

from ...heads.errors import UserError, first_line
from ...heads.files import write_failure
from ..base.settings import RowSource
from .messages import RowError
from .rows import InMemoryRows, parsed, read_json_rows

log = logging.getLogger(__name__)

KINDS = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".parquet")
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that describe the rows of a folder."""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""Names of data sets on the hub."""
RAW = "https://raw.githubusercontent.com"
GZIP = b"\x1f\x8b"  # first bytes of a gzip file


def rows_of(source: str | RowSource | InMemoryRows) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a source.

    A source is a JSON, JSONL or parquet file, a folder of them, a data set on the hub, or rows from
    Python. Raises `UserError`.
    """
    if isinstance(source, InMemoryRows):
        yield from source
        return
    files = source_files(source)
    if files is None:
        yield from hub_rows(source_of(source))
        return
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file)
        else:
            yield from read_json_rows(file)


def source_of(source: str | RowSource) -> RowSource:
    """Return `source`, which may be a path alone, as a `RowSource`."""
    return source if isinstance(source, RowSource) else RowSource(source)


def source_files(source: str | RowSource) -> list[Path] | None:
    """Return the local files that hold the rows of a source; None for a name on the hub.

    Raises `UserError` for a path that does not exist, for files that are not read, and for settings
    that a local source does not have.
    """
    source = source_of(source)
    path = Path(source.path)
    if path.is_dir():
        files = _files_in(path, source)
    elif path.is_file():
        refuse_settings(source, "a file")
        files = [path]
    elif HUB_NAME.fullmatch(source.path) and not path.name.endswith(KINDS):
        return None
    else:
        raise UserError(
            f"data source {path} does not exist; check the path (the configuration of a data set "
            f"is given as {option('config_name')})"
        )
    for file in files:
        if not file.name.endswith(KINDS):
            raise UserError(
                f"data source {file}: a file must end in {', '.join(KINDS)}; convert it, to one "
                "JSON object a line for example"
            )
    return files


def _files_in(folder: Path, source: RowSource) -> list[Path]:
    """Return the files of rows in a folder of any kind. Raises `UserError`."""
    there = sorted(file for file in folder.iterdir() if file.name[0] != ".")
    files = [file for file in there if file.name.endswith(KINDS) and file.name not in METADATA]
    card = folder / "README.md"
    if card.is_file() and card.read_bytes()[:4] == b"---\n":  # as on the hub
        raise UserError(
            f"data source {folder} is a clone of a data set, of which the README.md says what its "
            "files are; name one of the files, or give the data set's name on the hub"
        )
    refuse_settings(source, "a folder of files")
    if not files:
        others = f" but {', '.join(file.name for file in there[:3])}" if there else ""
        raise UserError(
            f"data source {folder}: the folder holds no {', '.join(KINDS)} file{others}; name a "
            "file, or the folder that holds them (load_from_disk(..).to_parquet writes one)"
        )
    return files


def refuse_settings(source: RowSource, what: str) -> None:
    """Raise `UserError` if the source has settings that a local one, `what`, does not have."""
    plain = RowSource(source.path)
    for name in ("config_name", "revision", "split"):
        if getattr(source, name) != getattr(plain, name):
            raise UserError(
                f"data source {source} is {what}, which has no {option(name)}; leave that out"
            )


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a parquet file. Raises `UserError`."""
    datasets = datasets_for(str(file))
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        number = 0
        # part by part: `from_parquet` would first copy all of it into a cache
        for part in ParquetFile(file).iter_batches():
            for row in datasets.Dataset(pyarrow.Table.from_batches([part])):
                number += 1
                yield f"{file.name}:{number}", row
    except Exception as error:
        raise UserError(
            f"cannot read {file}: it is damaged, or not a parquet file; copy or download it again"
        ) from error


def option(name: str) -> str:
    """Return how messages name a setting of a source."""
    return f"{name} (--{name.replace('_', '-')})"


def datasets_for(source: str) -> Any:
    """Return the package datasets. Raises `UserError` if it cannot be imported."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{source} is read by the package datasets, which cannot be imported "
            f"({first_line(error)}); install it, or give a JSON or JSONL file"
        ) from error
    return datasets


def hub_rows(source: RowSource) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a data set on the hub. Raises `UserError`."""
    datasets = datasets_for(source.path)
    try:
        builder = datasets.load_dataset_builder(
            source.path, source.config_name, revision=source.revision
        )
        _check_builder(source, builder)
        builder.download_and_prepare()
        rows = builder.as_dataset(split=source.split)
        yield from ((f"{source}:{i}", row) for i, row in enumerate(rows, 1))
    except UserError:
        raise
    except Exception as error:
        raise _refusal(source, error) from error


def _check_builder(source: RowSource, builder: Any) -> None:
    """Raise `UserError` for a data set without the source's revision or split.

    `builder` reads it; only its list of files has been downloaded.
    """
    # Without the network the package takes the last copy that it has, of any revision.
    if source.revision is not None and not builder.config.data_files:
        raise UserError(
            f"data set {source}: the hub cannot be reached for its revision {source.revision}; "
            f"check the network, or leave out {option('revision')} to read the copy that is here"
        )
    # Without the network the files are unknown, but not the splits. A slice is train[:100].
    names = [*map(str, builder.config.data_files or builder.info.splits or ())]
    if names and re.fullmatch(r"[\w.-]+", source.split) and source.split not in names:
        raise UserError(
            f"data set {source} has no split {source.split}; give one as {option('split')}: "
            f"{', '.join(names)}"
        )


def _refusal(source: RowSource, error: Exception) -> UserError:
    """Return the `UserError` for an error of the package datasets."""
    cause: BaseException | None = error
    while cause is not None:
        if full := write_failure(cause):
            return UserError(f"data set {source} cannot be stored: {full}; free some space")
        cause = cause.__cause__ or cause.__context__
    message = " ".join(str(error).split())[:300]
    return UserError(
        f"data source {source} is neither a local file or folder nor a data set that can be read "
        f"from the hub ({type(error).__name__}: {message}); check its name, "
        f"{option('config_name')}, {option('revision')} and the network"
    )


class Benchmark(Struct, frozen=True):
    """Set of prompts that is read by its name."""

    name: str
    """Name by which a user chooses it."""
    path: str
    """Address of the JSONL file."""
    key: str
    """Key of a row with the user's words: a text, or the turns of a conversation."""
    license: str
    """Licence that the repository names, by the hub's name for it."""

    def rows(self) -> Iterator[Any]:
        """Yield the user's words of every row: a text, or a row of turns with its category.

        Raises `UserError`, with the file to download, if the rows cannot be read.
        """
        import httpx
        from huggingface_hub import is_offline_mode

        log.info("%s: %s (licence %s)", self.name, self.path, self.license)
        try:
            if is_offline_mode():
                raise OSError("HF_HUB_OFFLINE is set")
            answer = httpx.get(self.path, follow_redirects=True, timeout=60)
            found = answer.raise_for_status().content
            text = (gzip.decompress(found) if found.startswith(GZIP) else found).decode()
            # `splitlines` would end a line at characters that a JSON text may hold as well
            for row in map(parsed, filter(str.strip, text.split("\n"))):
                asked = row[self.key]
                if isinstance(asked, list):
                    asked = {"turns": asked, "category": row.get("category")}
                yield asked
        except (httpx.HTTPError, RowError, OSError, ValueError) as error:
            raise UserError(
                f"benchmark {self.name} cannot be read: {first_line(error)}; check HF_HUB_OFFLINE "
                f"and the network, or download {self.path} and give its path"
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


BENCHMARKS = {
    name: Benchmark(name, f"{RAW}/{path}", *KEYS.get(name, ("turns", "apache-2.0")))
    for name, path in FILES.items()
}


def benchmark_of(source: str | RowSource) -> Benchmark | None:
    """Return the benchmark that a source of prompts names; None for any other source.

    Raises `UserError` for a name that is a path too, and for settings that the benchmark fixes.
    """
    source = source_of(source)
    if (name := source.path) not in BENCHMARKS:
        return None
    if Path(name).exists():
        raise UserError(
            f"{name} is the name of a benchmark, and of a path here; write ./{name} for the path, "
            "or rename it to read the benchmark"
        )
    refuse_settings(source, "a benchmark")
    return BENCHMARKS[name]
