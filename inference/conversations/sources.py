"""Rows of files, folders and data sets on the hub.

`datasets` is imported only for parquet files and for names on the hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...heads.errors import UserError, first_line
from .rows import read_json_rows

KINDS = (".json", ".jsonl", ".parquet")


def rows_of(source: str, split: str = "train") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a source.

    A source is a JSON, JSONL or parquet file, a folder of them, or a data set on the hub, of which
    `split` is read. Raises `UserError`.
    """
    files = source_files(source)
    if files is None:
        yield from _hub_rows(source, split)
        return
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file)
        else:
            yield from read_json_rows(file)


def source_files(source: str) -> list[Path] | None:
    """Return the local files of a source; None for a name on the hub.

    Raises `UserError` for a path that does not exist and for files that are not read.
    """
    path = Path(source)
    if path.is_file():
        if path.suffix not in KINDS:
            raise UserError(f"data source {path}: a file must end in {', '.join(KINDS)}")
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in KINDS)
        if not files:
            raise UserError(f"data source {path}: the folder holds no {', '.join(KINDS)} file")
        return files
    # None of these can be the name of a data set, which is NAME or OWNER/NAME
    if (
        path.suffix in KINDS
        or path.is_absolute()
        or source.startswith((".", "~"))
        or source.count("/") > 1
    ):
        raise UserError(f"data source {path} does not exist; check the path")
    return None


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a parquet file. Raises `UserError`."""
    datasets, DatasetsError = _datasets(str(file))
    try:
        rows = datasets.Dataset.from_parquet(str(file))
        yield from ((f"{file.name}:{i}", row) for i, row in enumerate(rows, 1))
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a data set on the hub. Raises `UserError`."""
    datasets, DatasetsError = _datasets(source)
    try:
        rows = datasets.load_dataset(source, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        reason = first_line(error)
        raise UserError(
            f"data source {source!r} is no local file, and the hub says: {reason}"
        ) from error
    yield from ((f"{source}:{i}", row) for i, row in enumerate(rows, 1))


def _datasets(source: str) -> tuple[Any, type[Exception]]:
    """Return the package datasets and its error. Raises `UserError` if it cannot be imported."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise UserError(
            f"{source} is read by the package datasets, which cannot be imported "
            f"({first_line(error)}); install it, or give a JSON or JSONL file"
        ) from error
    return datasets, DatasetsError
