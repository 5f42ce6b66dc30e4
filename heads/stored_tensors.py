"""Tensors of other people's checkpoints: safetensors first, pickles only through `weights_only`, so
that nothing in them runs."""

from __future__ import annotations

import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .documents import WeightsIndex, read_document
from .errors import UserError
from .files import inside

LFS_POINTER = b"version https://git-lfs"
LONGEST_HEADER = 100_000_000  # bytes; safetensors refuses longer ones too
PICKLES = ("*.bin", "*.pt", "*.pth")
TRAINERS_OWN = re.compile(r"(training_args|optimizer|scheduler|rng_state|training_state|scaler)")


class StoredTensors(Mapping[str, Tensor]):
    """All tensors of a folder by name, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises `UserError` if there are none, if two files hold the same name, or if a file holds
        anything but tensors."""
        self.files: list[Path] = files_of(folder, ("*.safetensors",))
        opened = _safetensors if self.files else _pickled
        self.files = self.files or files_of(folder, PICKLES)
        if not self.files:
            raise UserError(
                f"{folder} holds no weights: neither *.safetensors nor {', '.join(PICKLES)}; name "
                "a drafter's folder"
            )
        self._readers: dict[str, Callable[[], Tensor]] = {}
        for path in self.files:
            for name, read in opened(path):
                if name in self._readers:
                    raise UserError(
                        f"{name} stands in two files of {folder}; leave one of them there"
                    )
                self._readers[name] = read

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def files_of(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """The weights' files: those that an index names if there is one, else all but a trainer's own.
    Raises `UserError`."""
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    for index in sorted(folder.glob("*.index.json")):
        if any(
            path.suffix == Path(index.name.removesuffix(".index.json")).suffix for path in found
        ):
            return files_in(index)
    return [path for path in found if not TRAINERS_OWN.match(path.name)]


def files_in(index: Path) -> list[Path]:
    """The files of weights that an index names, all of which are there. Raises `UserError`."""
    table, _ = read_document(index, WeightsIndex, "copy or download it again")
    named = sorted({inside(index.parent, file, index.name) for file in table.weight_map.values()})
    if missing := [path.name for path in named if not path.is_file()]:
        raise UserError(
            f"{index} names {missing[0]}, which is not there; copy or download it again"
        )
    return named


def _safetensors(path: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}; copy or download it again") from error
    for name in file.keys():  # noqa: SIM118  # it is no mapping
        yield name, partial(file.get_tensor, name)


def _pickled(path: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    try:
        held: Any = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{path} is refused: it is damaged, or holds more than tensors, which could run code"
        ) from error
    if (
        not isinstance(held, dict)
        or not held
        or not all(isinstance(tensor, Tensor) for tensor in held.values())
    ):
        raise UserError(f"{path} is refused: it is not a table of tensors by name")
    for name, tensor in held.items():
        yield str(name), partial(_itself, tensor)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


class TensorFacts(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]


def header(file: Path) -> dict[str, TensorFacts]:
    """Type, shape and place of every tensor in a safetensors file, from its header alone. Raises
    `UserError`."""
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            if start == LFS_POINTER[:8]:
                raise ValueError("a pointer of Git LFS stands in its place: run git lfs pull")
            if len(start) < 8 or (length := struct.unpack("<Q", start)[0]) > LONGEST_HEADER:
                raise ValueError("it has no header")
            held = json.loads(opened.read(length))
        if not isinstance(held, dict):
            raise ValueError("its header is no table")
        return msgspec.convert(
            {name: facts for name, facts in held.items() if name != "__metadata__"},
            dict[str, TensorFacts],
        )
    except (OSError, ValueError, RecursionError) as error:
        unread = isinstance(
            error,
            json.JSONDecodeError | UnicodeDecodeError | RecursionError | msgspec.ValidationError,
        )
        reason = "its header cannot be read" if unread else str(error)
        raise UserError(
            f"cannot load {file}: it is not a safetensors file ({reason}); copy, download or save "
            "it again"
        ) from error
