"""Writing of an MTP layer into a copy of its target's checkpoint, of which nothing else changes.

Files are copied, and the bytes of the layer's tensors are replaced in the copies; a layer that the
checkpoint does not have becomes one more file of an index.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from ..files import check_space, read_json, whole_directory, write_json
from ..pretrained import WEIGHTS_INDEX
from ..stored_tensors import TensorFacts, files_of, header
from .mtp_checkpoints import QUANTISED

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
}  # fmt: skip
CHUNK = 1 << 24  # bytes that are compared at once
LAYER_FILE = "model-mtp.safetensors"
"""File of a layer by itself."""


def stitch(
    tensors: Mapping[str, Tensor], count_key: str, checkpoint: Path, out: Path
) -> dict[str, int]:
    """Write a copy of the folder `checkpoint` to `out`, with `tensors` by their names in it.

    Returns how many tensors were `replaced` and `added`, and how many others there are, `kept`.
    Tensors that are there take the type that they have; for others `count_key` of the config.json
    becomes 1. Raises `UserError` for tensors that do not fit (`fitted`), where a layer cannot be
    added, and if what was written differs from what was to be written; `out` is then as it was.
    """
    if checkpoint.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError(f"{out} lies in {checkpoint}, which is copied; name another --out")
    places = places_in(checkpoint)
    tensors = fitted(tensors, places, checkpoint)
    there = places.keys() & tensors.keys()
    if not there:
        check_addable(checkpoint, places)
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    size += sum(tensor.nbytes for tensor in tensors.values())
    check_space(out.parent, size, "name an --out on another disk")
    with whole_directory(out) as aside:
        for path in sorted(checkpoint.iterdir()):
            if path.is_dir():
                shutil.copytree(path, aside / path.name)
            else:
                shutil.copyfile(path, aside / path.name)
        if there:
            replace(tensors, places, aside)
        else:
            add(tensors, places, aside)
            note_layer(aside / "config.json", count_key)
        check_kept(checkpoint, aside, tensors)
    return {
        "replaced": len(there),
        "added": len(tensors) - len(there),
        "kept": len(places) - len(there),
    }


def fitted(
    tensors: Mapping[str, Tensor], places: Mapping[str, tuple[Path, TensorFacts]], checkpoint: Path
) -> dict[str, Tensor]:
    """Return `tensors` as `checkpoint` stores them: on the CPU, in the types that they have there.

    `places` are those of the checkpoint's tensors; a layer that it does not have keeps its types.
    Raises `UserError` where some of `tensors` are there and others not, and for one of another
    shape or of a type that is no plain floating one.
    """
    there = places.keys() & tensors.keys()
    if there and (missing := sorted(tensors.keys() - there)):
        raise UserError(
            f"{checkpoint} has a part of an MTP layer, without {missing[0]}; copy or download it "
            "again"
        )
    stored = {}
    for name, tensor in tensors.items():
        dtype = tensor.dtype
        if there:
            file, facts = places[name]
            if list(tensor.shape) != facts.shape or facts.dtype not in TYPES:
                raise UserError(
                    f"{name} of {file} is {facts.dtype} {facts.shape}, the drafter's is "
                    f"{list(tensor.shape)}; name the target that it was made for"
                )
            dtype = TYPES[facts.dtype]
        stored[name] = tensor.detach().to("cpu", dtype).contiguous()
    return stored


def places_in(checkpoint: Path) -> dict[str, tuple[Path, TensorFacts]]:
    """Return the file and the facts of each tensor of a checkpoint. Raises `UserError`."""
    found: dict[str, tuple[Path, TensorFacts]] = {}
    for file in files_of(checkpoint, ("*.safetensors",)):
        found |= {name: (file, facts) for name, facts in header(file).items()}
    if not found:
        raise UserError(f"{checkpoint} holds no safetensors files; name a model's folder")
    return found


def check_addable(checkpoint: Path, places: Mapping[str, tuple[Path, TensorFacts]]) -> None:
    """Raise `UserError` unless a layer can be added to a checkpoint that has none."""
    if is_quantised(checkpoint, places):
        raise UserError(
            f"{checkpoint} is quantised, and an engine would look for a quantised layer; stitch "
            "the layer into the checkpoint that was quantised, and quantise that"
        )
    files = {file.name for file, _ in places.values()}
    if len(files) > 1 and not (checkpoint / WEIGHTS_INDEX).is_file():
        raise UserError(
            f"{checkpoint} has {len(files)} files of weights and no {WEIGHTS_INDEX}; save it again "
            "with save_pretrained"
        )
    if (checkpoint / LAYER_FILE).exists():
        raise UserError(f"{checkpoint} has a {LAYER_FILE} that no index names; remove it")


def is_quantised(checkpoint: Path, places: Mapping[str, tuple[Path, TensorFacts]]) -> bool:
    """Return true if a checkpoint is quantised, by its configuration or by its tensors."""
    values = read_json(checkpoint / "config.json")
    said = any(
        part.get(key)
        for part in (values, values.get("text_config") or {})
        for key in ("quantization_config", "compression_config")
    )
    return said or any(
        QUANTISED.search(name) or (len(facts.shape) > 1 and facts.dtype not in TYPES)
        for name, (_, facts) in places.items()
    )


def replace(
    tensors: Mapping[str, Tensor], places: Mapping[str, tuple[Path, TensorFacts]], aside: Path
) -> None:
    """Overwrite the bytes of `tensors` in the files of `aside`, which are those of `places`."""
    for name, tensor in tensors.items():
        file, facts = places[name]
        with (aside / file.name).open("r+b") as opened:
            opened.seek(start_of_data(file) + facts.data_offsets[0])
            opened.write(bytes_of(tensor))


def add(
    tensors: Mapping[str, Tensor], places: Mapping[str, tuple[Path, TensorFacts]], aside: Path
) -> None:
    """Write `tensors` as one more file of the checkpoint in `aside`, and name it in its index."""
    index = aside / WEIGHTS_INDEX
    table = read_json(index) if index.is_file() else {"metadata": {}, "weight_map": {}}
    if not index.is_file():
        # Readers that find a single file ignore an index.
        names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        (file,) = {file.name for file, _ in places.values()}
        (aside / file).rename(aside / names[0])
        table["weight_map"] = dict.fromkeys(places, names[0])
    else:
        names = ["", LAYER_FILE]
    save_file(dict(tensors), aside / names[1], {"format": "pt"})
    table["weight_map"] |= dict.fromkeys(tensors, names[1])
    sizes = [facts.data_offsets[1] - facts.data_offsets[0] for _, facts in places.values()]
    total = sum(sizes) + sum(tensor.nbytes for tensor in tensors.values())
    table["metadata"] = {**table.get("metadata", {}), "total_size": total}
    index.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


def note_layer(config: Path, count_key: str) -> None:
    """Write into a config.json that the model has an MTP layer, under its family's key."""
    values = read_json(config)
    values.get("text_config", values)[count_key] = 1
    write_json(config, values)


def check_kept(checkpoint: Path, written: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise `UserError` unless `written` has `tensors`, and all others of `checkpoint` as there."""
    before, after = places_in(checkpoint), places_in(written)
    if after.keys() != before.keys() | tensors.keys():
        raise UserError(f"{written} has other tensors than were written; write it again")
    for name, (file, facts) in after.items():
        if name in tensors:
            same = read_bytes(file, facts) == bytes_of(tensors[name])
        else:
            old_file, old = before[name]
            same = old.dtype == facts.dtype and old.shape == facts.shape
            same = same and equal_bytes(old_file, old, file, facts)
        if not same:
            raise UserError(f"{name} was not written as it should be; write it again")


def equal_bytes(one: Path, facts: TensorFacts, other: Path, others: TensorFacts) -> bool:
    """Return whether a tensor has the same bytes in two files, a chunk at a time."""
    (start, end), (others_start, others_end) = facts.data_offsets, others.data_offsets
    if end - start != others_end - others_start:
        return False
    with one.open("rb") as a, other.open("rb") as b:
        a.seek(start_of_data(one) + start)
        b.seek(start_of_data(other) + others_start)
        left = end - start
        while left > 0:
            count = min(left, CHUNK)
            if a.read(count) != b.read(count):
                return False
            left -= count
    return True


def read_bytes(file: Path, facts: TensorFacts) -> bytes:
    """Return the bytes of a tensor."""
    with file.open("rb") as opened:
        opened.seek(start_of_data(file) + facts.data_offsets[0])
        return opened.read(facts.data_offsets[1] - facts.data_offsets[0])


def start_of_data(file: Path) -> int:
    """Return where the tensors of a safetensors file begin: after the length and the header."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous tensor on the CPU, as safetensors stores them."""
    return tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
