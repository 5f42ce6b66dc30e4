"""Data sets on the hub, and clones of them, as the package datasets finds them.

What goes wrong there is said in one line of our own, which names the setting to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ...heads.errors import UserError, first_line
from ...heads.files import write_failure
from ..settings import RowSource

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
        names = _configurations(source) if isinstance(error, ValueError) else []
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


def _configurations(source: RowSource) -> list[str]:
    """Return the names of the configurations of a data set; none where they cannot be found."""
    datasets = datasets_for(source.path)
    try:
        return datasets.get_dataset_config_names(source.path, revision=source.revision)
    except (OSError, ValueError):
        return []
