"""Damaged and malicious files of `torch.save`, which import reads: one line each, quickly, and with
little memory. The default run tries a few hundred mutations, `--all` thousands."""

from __future__ import annotations

import io
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.heads.errors import UserError
from draftsmith.heads.stored_tensors import StoredTensors
from tests.helpers.mutations import TOTALS, damaged, outcome
from tests.helpers.public_checkpoints import LLAMA, store
from tests.helpers.random_artifacts import eagle

TENSORS = {
    "fc.weight": torch.ones(8, 4),
    "norm.weight": torch.ones(4).half(),
    "d2t": torch.arange(5),
}
GROWTH = 100 << 20


def pickled(tensors: dict[str, torch.Tensor], archive: bool) -> bytes:
    """As torch.save writes them now, in a zip archive, or did until 2020, as pickles in a row."""
    data = io.BytesIO()
    torch.save(tensors, data, _use_new_zipfile_serialization=archive)
    return data.getvalue()


def repacked(data: bytes, draw: random.Random) -> bytes:
    """An archive whose checksums are right, with a damaged pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as sound, zipfile.ZipFile(out, "w") as packed:
        for entry in sound.infolist():
            content = sound.read(entry)
            named = entry.filename.endswith("data.pkl")
            packed.writestr(entry.filename, damaged(content, draw) if named else content)
    return out.getvalue()


KINDS: dict[str, tuple[str, bytes, Callable[[bytes, random.Random], bytes]]] = {
    "archive": ("pytorch_model.bin", pickled(TENSORS, True), damaged),
    "archive with a damaged pickle": ("pytorch_model.bin", pickled(TENSORS, True), repacked),
    "before archives": ("x.pt", pickled(TENSORS, False), damaged),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_one_line(
    kind: str, count: int, tmp_path: Path
) -> None:
    name, sound, change = KINDS[kind]
    draw, refused = random.Random(kind), 0
    for _ in range(count):
        (tmp_path / name).write_bytes(change(sound, draw))
        try:
            stored = StoredTensors(tmp_path)
            for tensor in stored.values():
                assert tensor.numel() <= len(sound)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    TOTALS.update(tried=count, accepted=count - refused)
    assert refused > count / 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.full)])
def test_import_ends_with_status_2(count: int, tmp_path: Path, saved_tiny: Path) -> None:
    tensors = dict(eagle("eagle1").drafter.serving_state())
    folder = store(tmp_path / "e", LLAMA, tensors)
    (folder / "model.safetensors").unlink()
    out, draw, refused = tmp_path / "out", random.Random(5), 0
    for i in range(count):
        sound = pickled(tensors, bool(i % 2))
        # The first kilobytes are what a reader looks at; the rest is weights.
        (folder / "pytorch_model.bin").write_bytes(damaged(sound[:4000], draw) + sound[4000:])
        found = outcome(
            ["import", "--from", str(folder), "--target", str(saved_tiny), "--out", str(out)]
        )
        assert found.wrong() is None and out.exists() == (found.code == 0), found
        shutil.rmtree(out, ignore_errors=True)
        refused += found.code == 2
    assert refused > count / 2


def bomb(path: Path) -> None:
    """A quarter of a megabyte that is 256 unpacked, behind the end of the pickle in the archive."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        zipfile.ZipFile(io.BytesIO(pickled(TENSORS, True))) as sound,
    ):
        for entry in sound.infolist():
            named = entry.filename.endswith("data.pkl")
            archive.writestr(entry.filename, sound.read(entry) + bytes(named << 28))


def test_an_archive_that_swells_is_refused_before_it_is_unpacked(
    tmp_path: Path, saved_tiny: Path
) -> None:
    folder = store(tmp_path / "e", LLAMA, TENSORS)
    (folder / "model.safetensors").unlink()
    bomb(folder / "pytorch_model.bin")
    assert (folder / "pytorch_model.bin").stat().st_size < 1 << 20
    command = ["import", "--from", str(folder), "--target", str(saved_tiny)]
    found = outcome([*command, "--out", str(tmp_path / "out")])
    assert found.wrong() is None and found.code == 2 and found.growth < GROWTH, found
    assert "its contents are larger" in found.errors


TENSORS_OF_NO_SIZE: dict[str, Callable[[], torch.Tensor]] = {
    "one element for all": lambda: torch.ones(1).expand(2**40),
    "sparse": lambda: torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2**40,)),
    "without values": lambda: torch.ones(4, 4, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS_OF_NO_SIZE)
def test_a_tensor_that_the_file_does_not_hold_is_refused(kind: str, tmp_path: Path) -> None:
    torch.save(TENSORS | {"fc.bias": TENSORS_OF_NO_SIZE[kind]()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="fc.bias is larger than the file, or not a plain tensor"):
        StoredTensors(tmp_path)


class Evil:
    """Object whose pickle runs a command while it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_no_pickle_runs_code(name: str, tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.ones(1), "x": Evil(tmp_path / "ran")}, tmp_path / name)
    with pytest.raises(UserError, match="is refused: damaged, or more than tensors"):
        StoredTensors(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(UserError, match="is refused"):
        StoredTensors(tmp_path)
    assert not (tmp_path / "ran").exists()
