"""MTP layers in the checkpoints of targets: names of their tensors, reading them, writing them.

    Qwen3-Next, Qwen3.5   mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm,
                          mtp.layers.0.*
    DeepSeek-V3, GLM-4.5  model.layers.N.eh_proj, .enorm, .hnorm, .shared_head.norm, and the decoder
                          layer under the same prefix; N is the number of the target's layers

A layer is written into a copy of its target's checkpoint, of which nothing else changes: the bytes
of its tensors are replaced in copies of the files; a layer that the checkpoint does not have
becomes one more file of an index.

Shapes: E experts, I inner size, H hidden size.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import UserError
from ..files import check_space, read_json, whole_directory, write_json
from ..layout import check_same
from ..stored_tensors import WEIGHTS_INDEX, TensorFacts, files_of, header

QWEN = {
    "fc": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm",
}  # fmt: skip
DEEPSEEK = {"fc": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "norm": "shared_head.norm"}
SHARED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's own matrices that some checkpoints hold next to the layer."""
QUANTISED = re.compile(
    r"weight_scale|_scale_inv$|\.qweight$|\.qzeros$|weight_packed$|absmax$|quant_map$|quant_state"
)
"""Names of tensors that only quantised checkpoints have."""
EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
}  # fmt: skip
LAYER_FILE = "model-mtp.safetensors"
"""File of a layer by itself."""


@dataclass(frozen=True)
class LayerLayout:
    """Names of the tensors of an MTP layer in a family's checkpoints."""

    prefix: str
    """Beginning of the names of all its tensors."""
    parts: Mapping[str, str]
    """Names after the prefix of what surrounds the decoder layer, by those in `MtpDrafter`."""
    layer: str
    """Beginning of the decoder layer's names after the prefix."""
    count_key: str
    """Key of a config.json with the number of such layers."""

    def name(self, own: str) -> str:
        """Return the name in the checkpoint of the drafter's tensor `own`: enorm.weight, .."""
        part, _, rest = own.partition(".")
        if part == "layer":
            return f"{self.prefix}{self.layer}{rest}"
        return f"{self.prefix}{self.parts[part]}.{rest}"


QWEN_TYPES = ("qwen3_next", "qwen3_5", "qwen4")
SERVED = (*QWEN_TYPES, "deepseek_v3", "glm4_moe", "glm_moe")
"""Beginnings of the `model_type` of families whose MTP layer engines read."""


def layout_for(model_type: str, layers: int) -> LayerLayout:
    """Return the layout of a family by its `model_type`, for a target of so many `layers`."""
    if model_type.startswith(QWEN_TYPES):
        return LayerLayout("mtp.", QWEN, "layers.0.", "mtp_num_hidden_layers")
    return LayerLayout(f"model.layers.{layers}.", DEEPSEEK, "", "num_nextn_predict_layers")


def is_served(model_type: str) -> bool:
    """Return true if engines read the MTP layer of a family, by the names of `layout_for`."""
    return model_type.startswith(SERVED)


EXTRACT_REMEDY = (
    "take it from the model that this one was tuned from (draftsmith mtp extract --base), or train "
    "one"
)
"""Remedy for a target without an MTP layer."""


def layout_in(
    names: Collection[str], model_type: str, layers: int, where: str, remedy: str = EXTRACT_REMEDY
) -> LayerLayout:
    """Return the layout of the MTP layer among a checkpoint's tensors `names`.

    Raises `UserError`, which begins with `where`, if it is missing (the message then ends with
    `remedy`), if there are several, or if their form is not known.
    """
    layout = layout_for(model_type, layers)
    found = [name for name in names if name.startswith(layout.prefix)]
    marks = re.compile(r"(?:^|\.)(mtp|nextn|mtp_layers)\.|\.(eh_proj|shared_head)\.")
    others = sorted(name for name in names if marks.search(name) and name not in found)
    blocks = (name for name in (*found, *others) if ".markov" in name or "block_attn" in name)
    if (block := next(blocks, None)) is not None:
        raise UserError(f"{where} has a DSpark block and no MTP layer ({block}); give it to import")
    if not found:
        other = f"; it has {others[0]}, which is not where this family keeps it" if others else ""
        raise UserError(
            f"{where} has no MTP layer: no tensor begins with {layout.prefix}{other}; {remedy}"
        )
    more = r"mtp\.layers\.[1-9]" if layout.parts is QWEN else rf"model\.layers\.{layers + 1}\."
    if any(re.match(more, name) for name in names):
        raise UserError(
            f"{where} has several MTP layers, each for one draft; draftsmith runs checkpoints with "
            "one"
        )
    if scaled := sorted(name for name in found if QUANTISED.search(name)):
        raise UserError(
            f"{where} has a quantised MTP layer ({scaled[0]}), which cannot be trained; convert "
            "the checkpoint to bfloat16 with its publisher's script, and name the folder that it "
            "writes"
        )
    return layout


def read_layer(
    tensors: Mapping[str, Tensor], layout: LayerLayout, expected: Mapping[str, Tensor], where: str
) -> dict[str, Tensor]:
    """Return the tensors of an MTP layer by the drafter's own names, of the shapes of `expected`.

    `tensors` are those of a checkpoint. Experts that it holds one by one are joined. Raises
    `UserError` for a tensor that is missing, surplus or of another shape.
    """
    found = {
        name: tensors[name]
        for name in tensors
        if name.startswith(layout.prefix) and name.removeprefix(layout.prefix) not in SHARED
    }
    found = joined_experts(found)
    named = {layout.name(own): tensor for own, tensor in expected.items()}
    check_same(named, {name: tuple(tensor.shape) for name, tensor in found.items()}, Path(where))
    for name, tensor in found.items():
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise UserError(
                f"{where} has an MTP layer of another type ({name} is {tensor.dtype}); convert it "
                "to bfloat16"
            )
    return {own: found[layout.name(own)] for own in expected}


def joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` with experts that are stored one by one as one tensor for all.

    Gates and ups `[I, H]` of E experts become `gate_up_proj` `[E, 2 I, H]`, downs `[H, I]` become
    `down_proj` `[E, H, I]`.
    """
    joined, experts = {}, dict[tuple[str, str], dict[int, Tensor]]()
    for name, tensor in tensors.items():
        if found := EXPERT.fullmatch(name):
            prefix, number, kind = found.groups()
            experts.setdefault((prefix, kind), {})[int(number)] = tensor
        else:
            joined[name] = tensor
    for prefix in {prefix for prefix, _ in experts}:
        gates, ups, downs = (
            experts.get((prefix, kind), {}) for kind in ("gate_proj", "up_proj", "down_proj")
        )
        numbers = range(len(gates))
        if not gates.keys() == ups.keys() == downs.keys() == set(numbers):
            continue  # `read_layer` says that they are missing
        pairs = [torch.cat([gates[i], ups[i]]) for i in numbers]
        joined[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        joined[f"{prefix}.down_proj"] = torch.stack([downs[i] for i in numbers])
    return joined


def to_checkpoint_names(
    own: Mapping[str, Tensor], layout: LayerLayout, names: Collection[str]
) -> dict[str, Tensor]:
    """Return a drafter's tensors by their names in a checkpoint: the inverse of `read_layer`.

    `names` are those of all tensors of the checkpoint. Experts are split if the layer's are there,
    or without such a layer those of the other layers: the two may differ.
    """
    stored: dict[str, Tensor] = {}
    names = [name for name in names if name.startswith(layout.prefix)] or names
    single = any(EXPERT.fullmatch(name) for name in names)
    for name, tensor in own.items():
        place = layout.name(name)
        prefix, _, kind = place.rpartition(".")
        if not single or not prefix.endswith("experts"):
            stored[place] = tensor
            continue
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for number, joined in enumerate(tensor):
            for one, matrix in zip(kinds, joined.chunk(len(kinds)), strict=True):
                stored[f"{prefix}.{number}.{one}.weight"] = matrix
    return stored


def stitch(
    tensors: Mapping[str, Tensor], count_key: str, checkpoint: Path, out: Path
) -> dict[str, int]:
    """Write a copy of the folder `checkpoint` to `out`, with `tensors` by their names in it.

    Returns how many tensors were `replaced` and `added`, and how many others there are, `kept`.
    Tensors that are there take the type that they have; for others `count_key` of the config.json
    becomes 1. Raises `UserError` for tensors that do not fit, and where a layer cannot be added;
    `out` is then as it was.
    """
    if checkpoint.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError(f"{out} lies in {checkpoint}, which is copied; name another --out")
    places = tensor_locations(checkpoint)
    tensors = as_stored(tensors, places, checkpoint)
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
            overwrite(tensors, places, aside)
        else:
            add_file(tensors, places, aside)
            values = read_json(aside / "config.json")
            values.get("text_config", values)[count_key] = 1
            write_json(aside / "config.json", values)
    return {
        "replaced": len(there),
        "added": len(tensors) - len(there),
        "kept": len(places) - len(there),
    }


def as_stored(
    tensors: Mapping[str, Tensor], places: Mapping[str, tuple[Path, TensorFacts]], checkpoint: Path
) -> dict[str, Tensor]:
    """Return `tensors` as `checkpoint` stores them: on the CPU, in the types that they have there.

    `places` are those of the checkpoint's tensors; a layer that it does not have keeps its types.
    Raises `UserError` where some of `tensors` are there and others not, and for one of another
    shape or of a type that is not a plain floating one.
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


def tensor_locations(checkpoint: Path) -> dict[str, tuple[Path, TensorFacts]]:
    """Return the file and the facts of each tensor of a checkpoint. Raises `UserError`."""
    found: dict[str, tuple[Path, TensorFacts]] = {}
    for file in files_of(checkpoint):
        found |= {name: (file, facts) for name, facts in header(file).items()}
    return found


def check_addable(checkpoint: Path, places: Mapping[str, tuple[Path, TensorFacts]]) -> None:
    """Raise `UserError` unless a layer can be added to a checkpoint that has none."""
    if any(
        QUANTISED.search(name) or (len(facts.shape) > 1 and facts.dtype not in TYPES)
        for name, (_, facts) in places.items()
    ):
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


def overwrite(
    tensors: Mapping[str, Tensor], places: Mapping[str, tuple[Path, TensorFacts]], aside: Path
) -> None:
    """Overwrite the bytes of `tensors` in the files of `aside`, which are those of `places`."""
    for name, tensor in tensors.items():
        file, facts = places[name]
        with (aside / file.name).open("r+b") as opened:
            # The tensors begin after the length of the header (8 bytes) and the header.
            start = 8 + int.from_bytes(opened.read(8), "little")
            opened.seek(start + facts.data_offsets[0])
            opened.write(tensor.flatten().view(torch.uint8).numpy().tobytes())


def add_file(
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
