"""Features and sizes that every library is given; imports nothing but torch and safetensors.

A folder of data:

    target/               the target, or of a made-up one its embedding, final norm and head
    shape.json            `Shape`
    features.safetensors  ids, loss_mask [N]; taps [N, 3 * H]; raw, last [N, H]: the last hidden
                          state before and after the final norm; starts [documents + 1]

N tokens of all documents end to end, H hidden size of the target.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of the drafter, the same for every library, and how it is unrolled."""

    taps: tuple[int, ...]
    draft_vocab: int
    heads: int
    kv_heads: int
    mlp: int
    steps: int | None = None
    """Unrolled steps; None for each library's default."""
    rows: tuple[tuple[int, ...], ...] = ()
    """Documents of each step's batch, in the order of the data."""


@dataclass(frozen=True)
class Document:
    """One text with the target's states."""

    ids: Tensor
    loss_mask: Tensor
    taps: Tensor
    raw: Tensor
    last: Tensor


@dataclass
class Data:
    """Folder of data, read."""

    folder: Path
    shape: Shape
    documents: list[Document]

    @property
    def target(self) -> Path:
        return self.folder / "target"


def write(folder: Path, shape: Shape, documents: list[Document]) -> None:
    """Write shape and documents next to the target in `folder`."""
    names = ("ids", "loss_mask", "taps", "raw", "last")
    tensors = {name: torch.cat([getattr(d, name) for d in documents]) for name in names}
    lengths = torch.tensor([0, *(len(d.ids) for d in documents)])
    save_file(tensors | {"starts": lengths.cumsum(0)}, folder / "features.safetensors")
    (folder / "shape.json").write_text(json.dumps(asdict(shape)))


def read(folder: Path) -> Data:
    """Read what `write` wrote."""
    values = json.loads((folder / "shape.json").read_text())
    rows = tuple(tuple(row) for row in values.pop("rows"))
    tensors = load_file(folder / "features.safetensors")
    starts = tensors.pop("starts").tolist()
    documents = [
        Document(**{name: tensor[a:b] for name, tensor in tensors.items()})
        for a, b in pairwise(starts)
    ]
    taps = tuple(values.pop("taps"))
    return Data(folder, Shape(taps=taps, rows=rows, **values), documents)
