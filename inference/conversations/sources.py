"""Rows of files, folders, clones and data sets on the hub.

`datasets` is imported only for parquet files, clones and names on the hub.
What goes wrong there is said in one line of our own, which names the setting to change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...heads.errors import UserError, first_line
from ...heads.files import write_failure
from ..settings import RowSource
from .given import GivenRows
from .rows import read_json_rows

KINDS = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".parquet")
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that describe the rows of a folder."""
LFS = b"version https://git-lfs.github.com/spec/"
"""Beginning of the files that git leaves in place of large ones until `git lfs pull`."""
REFUSALS = {
    ("RevisionNotFoundError",): "has no such revision; give a branch, a tag or a commit as "
    "revision (--revision)",
    ("GatedRepoError",): "is given only to those who accept its terms; do so on its page, and log "
    "in with hf auth login",
    ("DatasetNotFoundError",): "is no local file or folder, and the hub gives you no data set of "
    "this name and revision; check both",
    ("DataFilesNotFoundError", "EmptyDatasetError"): "holds no files of rows; name another",
    ("ConnectionError", "TimeoutError", "HfHubHTTPError", "httpcore", "httpx", "aiohttp"): "is no "
    "local file or folder, and the hub cannot be reached; check the name and the network",
    ("RuntimeError",): "is made by a script of its own, which is not run; the hub may have its "
    "rows as parquet: --revision refs/convert/parquet",
}
"""Messages about errors, by the names of classes, or of their packages, in their causes."""


def rows_of(source: str | RowSource | GivenRows) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a source.

    A source is a JSON, JSONL or parquet file, a folder of them, a clone of a data set on the hub,
    such a data set, or rows from Python. Raises `UserError`.
    """
    if isinstance(source, GivenRows):
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
    """Return a source that may be named by its path alone."""
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
    # None of these can be the name of a data set, which is NAME or OWNER/NAME
    elif (
        path.name.endswith(KINDS)
        or path.is_absolute()
        or source.path.startswith((".", "~"))
        or source.path.count("/") > 1
        or len(source.path.split()) != 1  # a text
        or "" in source.path.split(":")
    ):
        raise UserError(f"data source {path} does not exist; check the path")
    elif ":" in source.path:
        name, _, config = source.path.partition(":")
        raise UserError(
            f"data source {source.path} is no name; give {name}, and {config} as "
            f"{option('config_name')}"
        )
    else:
        return None
    for file in files:
        _check_file(file)
    return files


def _files_in(folder: Path, source: RowSource) -> list[Path]:
    """Return the files of rows in a folder of any kind. Raises `UserError`."""
    if any(folder.glob("*.arrow")) or (folder / "dataset_dict.json").is_file():
        raise UserError(
            f"data source {folder} was written by save_to_disk; write its rows to a file with "
            f"datasets.load_from_disk({str(folder)!r}).to_parquet, or give them from Python"
        )
    there = sorted(file for file in folder.iterdir() if file.name[0] != ".")
    files = [file for file in there if file.name.endswith(KINDS) and file.name not in METADATA]
    in_data = any(file.name.endswith(KINDS) for file in folder.glob("data/*"))
    if _has_card(folder) or (in_data and not files):
        return _clone_files(source)
    refuse_settings(source, "a folder of files")
    if not files:
        others = f" but {', '.join(file.name for file in there[:3])}" if there else ""
        raise UserError(
            f"data source {folder}: the folder holds no {', '.join(KINDS)} file{others}; name a "
            "file, or the folder that holds them"
        )
    return files


def _check_file(file: Path) -> None:
    """Raise `UserError` for a file of another kind, and for one that git has not fetched."""
    if not file.name.endswith(KINDS):
        raise UserError(
            f"data source {file}: a file must end in {', '.join(KINDS)}; convert it, to one JSON "
            "object a line for example"
        )
    try:
        if file.stat().st_size < 1024 and file.read_bytes().startswith(LFS):
            raise UserError(
                f"{file} holds no rows but a pointer to them; run git lfs pull in its folder"
            )
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; check the path") from error


def refuse_settings(source: RowSource, what: str, *allowed: str) -> None:
    """Raise `UserError` if the source has settings that a local one, `what`, does not have."""
    plain = RowSource(source.path)
    for name in ("config_name", "revision", "split"):
        if name not in allowed and getattr(source, name) != getattr(plain, name):
            raise UserError(
                f"data source {source} is {what}, which has no {option(name)}; leave that out"
            )


def _has_card(folder: Path) -> bool:
    """Return whether a folder has a README that begins with a table, as on the hub."""
    try:
        with (folder / "README.md").open("rb") as file:
            return file.read(4) == b"---\n"
    except OSError:
        return False


def _clone_files(source: RowSource) -> list[Path]:
    """Return the files of a split of a clone, which `datasets` finds. Raises `UserError`."""
    refuse_settings(source, "a clone", "split", "config_name")
    found = builder_of(source).config.data_files or {}
    by_split = {str(split): [*map(Path, files)] for split, files in found.items()}
    check_split(source, [*by_split])
    # Not resolved: the files of a copy in the hub's cache are links to a folder beside it.
    folders = (os.path.abspath(source.path), os.path.realpath(source.path))
    for file in by_split[source.split]:
        if not any(Path(os.path.abspath(file)).is_relative_to(folder) for folder in folders):
            raise UserError(
                f"data source {source}: its README.md names {file}, which is outside of the "
                "folder; correct it"
            )
    return by_split[source.split]


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


def builder_of(source: RowSource) -> Any:
    """Return what reads a data set: one on the hub, or a folder. Its rows are not downloaded yet.

    Raises `UserError`, for a configuration or a revision that does not exist among others.
    """
    datasets = datasets_for(source.path)
    try:
        builder = datasets.load_dataset_builder(
            source.path, source.config_name, revision=source.revision
        )
    except Exception as error:
        names: list[str] = []
        if isinstance(error, ValueError):
            with suppress(OSError, ValueError):
                names = datasets.get_dataset_config_names(source.path, revision=source.revision)
        raise _refusal(source, error, names) from error
    # Without the network the package takes the last copy that it has, of any revision.
    if source.revision is not None and not builder.config.data_files:
        raise UserError(
            f"data set {source}: the hub cannot be reached for its revision {source.revision}; "
            f"check the network, or leave out {option('revision')} to read the copy that is here"
        )
    return builder


def check_split(source: RowSource, names: list[str]) -> None:
    """Raise `UserError`, with the splits that there are, unless one of them is the source's."""
    if source.split not in names:
        raise UserError(
            f"data set {source} has no split {source.split}; give one as {option('split')}: "
            f"{', '.join(names) or 'it has none'}"
        )


def hub_rows(source: RowSource) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a data set on the hub. Raises `UserError`."""
    builder = builder_of(source)
    # Without the network there is no list of files, but of splits. A slice is train[:100].
    names = [*map(str, builder.config.data_files or builder.info.splits or ())]
    if names and re.fullmatch(r"[\w.-]+", source.split):
        check_split(source, names)
    try:
        builder.download_and_prepare()
        rows = builder.as_dataset(split=source.split)
        yield from ((f"{source}:{i}", row) for i, row in enumerate(rows, 1))
    except Exception as error:
        raise _refusal(source, error) from error


def _refusal(source: RowSource, error: Exception, names: Sequence[str] = ()) -> UserError:
    """Return what is wrong, and what to do, for an error of the package datasets.

    `names` are the configurations, if the one that was asked for was not found.
    """
    causes: list[BaseException] = [error]
    while (before := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(before)
    if full := next(filter(None, map(write_failure, causes)), None):
        return UserError(f"data set {source} cannot be stored: {full}; free some space")
    if "find cache" in str(error):
        return UserError(
            f"data set {source}: the hub cannot be reached, and this configuration is not among "
            "the copies that are here; check the network"
        )
    if names and source.config_name not in names:
        name = source.config_name
        what = f"has no configuration {name}" if name else "has several configurations"
        label = getattr(source, "name", None)
        hint = f" (its name, {label}, is for counts and messages)" if label in names else ""
        return UserError(
            f"data set {source} {what}; give one as {option('config_name')}: "
            f"{', '.join(names)}{hint}"
        )
    kinds = [kind for cause in causes for kind in type(cause).__mro__]
    found = {kind.__name__ for kind in kinds} | {kind.__module__.split(".")[0] for kind in kinds}
    for errors, what in REFUSALS.items():
        if found & {*errors}:
            return UserError(f"data source {source} {what}")
    return UserError(
        f"data source {source} cannot be read as one table of rows; download its files and give "
        "those that are JSON, JSONL or parquet"
    )
