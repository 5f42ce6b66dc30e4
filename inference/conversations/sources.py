"""Rows of files, folders and data sets on the hub.

`datasets` is imported only for parquet files, folders that it wrote, clones and names on the hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from ...heads.errors import UserError
from ...heads.files import JsonObject, read_json
from ..settings import RowSource
from .given import GivenRows
from .hub import builder_of, check_split, datasets_for, hub_rows, option
from .rows import read_json_rows

KINDS = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".parquet")
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that describe the rows of a folder."""
SAVED = "a folder of save_to_disk"
LFS = b"version https://git-lfs.github.com/spec/"
"""Beginning of the files that git leaves in place of large ones until `git lfs pull`."""


def rows_of(source: str | RowSource | GivenRows) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a source.

    A source is a JSON, JSONL or parquet file, a folder of them, a folder that `save_to_disk` wrote,
    a clone of a data set on the hub, such a data set, or rows from Python. Raises `UserError`.
    """
    if isinstance(source, GivenRows):
        yield from source
        return
    files = source_files(source)
    if files is None:
        yield from hub_rows(source_of(source))
        return
    for file in files:
        if file.suffix in (".parquet", ".arrow"):
            yield from _table_rows(file)
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
    if (folder / "dataset_dict.json").is_file():
        refuse_settings(source, SAVED, "split")
        splits = _table(folder / "dataset_dict.json").get("splits")
        check_split(source, [*map(str, splits)] if isinstance(splits, list) else [])
        return _saved_files(folder / source.split)
    if (folder / "state.json").is_file() and any(folder.glob("*.arrow")):
        own = _table(folder / "state.json").get("_split")
        refuse_settings(source, SAVED, *["split"] * (source.split == own))
        return _saved_files(folder)
    files = sorted(
        file
        for file in folder.iterdir()
        if file.name.endswith(KINDS) and file.name not in METADATA and file.name[0] != "."
    )
    in_data = [file for file in folder.glob("data/*") if file.name.endswith(KINDS)]
    if _card(folder) is not None or (in_data and not files):
        return _clone_files(source)
    refuse_settings(source, "a folder of files")
    if not files:
        others = sorted(file.name for file in folder.iterdir() if file.name[0] != ".")[:3]
        there = f" but {', '.join(others)}" if others else ""
        raise UserError(
            f"data source {folder}: the folder holds no {', '.join(KINDS)} file{there}; name a "
            "file, or the folder that holds them"
        )
    return files


def _check_file(file: Path) -> None:
    """Raise `UserError` for a file of another kind, and for one that git has not fetched."""
    if not file.name.endswith((*KINDS, ".arrow")) or (
        file.suffix == ".arrow" and not (file.parent / "state.json").is_file()
    ):
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


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a `Dataset` that was saved, in order. Raises `UserError`."""
    listed = _table(folder / "state.json").get("_data_files")
    entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    files = [folder / Path(str(one.get("filename"))).name for one in entries]
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{folder}: {missing[0].name} is missing; copy the folder again")
    return files


def _table(path: Path) -> JsonObject:
    """Return the object in a JSON file. Raises `UserError`."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} is not as save_to_disk wrote it; copy the folder again")
    return value


def _card(folder: Path) -> JsonObject | None:
    """Return the table at the beginning of the README of a folder; None if there is none."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    if not text.startswith("---\n"):
        return None
    try:
        value = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return None
    return value if isinstance(value, dict) else None


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


def _table_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every row of a parquet or Arrow file. Raises `UserError`."""
    datasets = datasets_for(str(file))
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        number = 0
        if file.suffix == ".arrow":
            parts = [datasets.Dataset.from_file(str(file))]
        else:  # part by part: `from_parquet` would first copy all of it into a cache
            batches = ParquetFile(file).iter_batches()
            parts = (datasets.Dataset(pyarrow.Table.from_batches([one])) for one in batches)
        for rows in parts:
            for row in rows:
                number += 1
                yield f"{file.name}:{number}", row
    except Exception as error:
        raise UserError(
            f"cannot read {file}: it is damaged, or not a {file.suffix[1:]} file; copy or download "
            "it again"
        ) from error
