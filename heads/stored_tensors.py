"""Tensors of checkpoints, read without running anything that is in the files.

Files of `torch.save` are read only in folders without safetensors, and only with `weights_only`.
"""

from __future__ import annotations

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
from .errors import UserError, out_of_memory
from .files import inside

LFS_POINTER = b"version https://git-lfs"
LONGEST_HEADER = 100_000_000  # bytes; safetensors refuses longer ones too
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth")
"""Files of `torch.save` in which the first public drafters are kept."""
# Files that trainers write next to the weights.
TRAINERS_OWN = re.compile(r"(training_args|optimizer|scheduler|rng_state|training_state|scaler)")


class StoredTensors(Mapping[str, Tensor]):
    """All tensors of a folder by name; each is read when it is looked up."""

    def __init__(self, folder: Path) -> None:
        """List the tensors of `folder`.

        Raises `UserError` if there are none, if two files hold the same name, or if a file cannot
        be read or holds anything but tensors.
        """
        pickled = [path for pattern in PICKLES for path in sorted(folder.glob(pattern))]
        pickled = [path for path in pickled if not TRAINERS_OWN.match(path.name)]
        use_pickles = bool(pickled) and not any(folder.glob("*.safetensors"))
        self.files = pickled if use_pickles else files_of(folder)
        self._readers: dict[str, Callable[[], Tensor]] = {}
        for path in self.files:
            for name, read in _pickled(path) if use_pickles else _safetensors(path):
                if name in self._readers:
                    raise UserError(f"{name} is in two files of {folder}; leave one of them there")
                self._readers[name] = read

    def __getitem__(self, name: str) -> Tensor:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def files_of(folder: Path) -> list[Path]:
    """Return the safetensors files in `folder`, of which an index may name some.

    Raises `UserError` if there are none, if the index is broken, or if
    it names a file that is missing or outside of the folder.
    """
    if (index := folder / WEIGHTS_INDEX).is_file():
        table, _ = read_document(index, WeightsIndex, "copy or download it again")
        # An index names a file once for each tensor in it.
        named = sorted({inside(folder, name, index.name) for name in table.weight_map.values()})
        if missing := [path.name for path in named if not path.is_file()]:
            raise UserError(
                f"{index} names {missing[0]}, which is not there; copy or download it again"
            )
        return named
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise UserError(
            f"{folder} holds no weights: it has no *.safetensors file; copy or download it "
            "again, or save it with save_pretrained, which writes safetensors"
        )
    return files


def _safetensors(path: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield name and reader of each tensor in a safetensors file. Raises `UserError`."""
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read {path}: {error}; copy or download it again") from error
    for name in file.keys():  # noqa: SIM118  # `file` is not a mapping and has no iterator
        yield name, partial(file.get_tensor, name)


def _pickled(path: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield name and reader of each tensor in a file of `torch.save`. Raises `UserError`."""
    try:
        size = path.stat().st_size
        # torch.save does not compress: an archive that grows was made to fill the memory.
        if zipped := zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > size:
                    raise ValueError("its contents are larger than the file")
        # Tensors of an archive are mapped and not read yet.
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
        for name, tensor in content.items():
            # A view of one element may have any number of rows, and a sparse tensor too.
            plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
            if not plain or tensor.is_quantized or tensor.numel() * tensor.itemsize > size:
                raise ValueError(f"{name} is larger than the file, or not a plain tensor")
    # The readers of pickles and archives were not written for damaged ones: any error may come.
    except Exception as error:
        if out_of_memory(error):
            raise
        why = str(error) if type(error) is ValueError else "damaged, or more than tensors"
        raise UserError(f"{path} is refused: {why}; save its tensors as safetensors") from error
    for name, tensor in content.items():
        yield str(name), lambda tensor=tensor: tensor


class TensorFacts(msgspec.Struct):
    """Entry for one tensor in the header of a safetensors file."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[int, msgspec.Meta(ge=0)]]
    """First byte and the one after the last, counted from the end of the header."""


def header(file: Path) -> dict[str, TensorFacts]:
    """Return each tensor's facts, by name, from a safetensors file's header. Raises `UserError`."""
    try:
        with file.open("rb") as opened:
            # A safetensors file begins with the length of its header (8 bytes, little-endian),
            # then the header in JSON.
            start = opened.read(8)
            if start == LFS_POINTER[:8]:
                raise ValueError("a pointer of Git LFS is in its place: run git lfs pull")
            if len(start) < 8 or (length := struct.unpack("<Q", start)[0]) > LONGEST_HEADER:
                raise ValueError("it has no header")
            entries = msgspec.json.decode(opened.read(length), type=dict[str, Any])
        entries.pop("__metadata__", None)
        return msgspec.convert(entries, dict[str, TensorFacts])
    except (OSError, ValueError, RecursionError) as error:
        unread = isinstance(error, msgspec.MsgspecError | UnicodeDecodeError | RecursionError)
        reason = "its header cannot be read" if unread else str(error)
        raise UserError(
            f"cannot load {file}: it is not a safetensors file ({reason}); copy, download or save "
            "it again"
        ) from error
