"""MTP layers in the checkpoints of targets: names of their tensors, and reading them.

    Qwen3-Next, Qwen3.5   mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.norm,
                          mtp.layers.0.*
    DeepSeek-V3, GLM-4.5  model.layers.N.eh_proj, .enorm, .hnorm, .shared_head.norm, and the decoder
                          layer under the same prefix; N is the number of the target's layers

Shapes: E experts, I inner size, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UserError

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


TAKE = "take it from the model that this one was tuned from (draftsmith mtp graft), or train one"
"""Remedy for a target without an MTP layer."""


def layout_in(
    names: Collection[str], model_type: str, layers: int, where: str, remedy: str = TAKE
) -> LayerLayout:
    """Return the layout of the MTP layer among a checkpoint's tensors `names`.

    Raises `UserError`, which begins with `where`, if there is none, for which it gives the
    `remedy`, if there are several, or if their form is not known.
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
    read, problems = {}, []
    for own, tensor in expected.items():
        name = layout.name(own)
        stored = found.pop(name, None)
        if stored is None:
            problems.append(f"{name} is missing")
        elif stored.shape != tensor.shape:
            problems.append(f"{name} has shape {list(stored.shape)}, expected {list(tensor.shape)}")
        elif not stored.is_floating_point() or stored.itemsize < 2:
            problems.append(f"{name} is of type {stored.dtype}")
        else:
            read[own] = stored
    problems += [f"{name} is not part of the layer" for name in found]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(
            f"{where} has no MTP layer that fits its config: {'; '.join(problems[:3])}{more}; copy "
            "or download it again"
        )
    return read


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


def parted(
    own: Mapping[str, Tensor], layout: LayerLayout, names: Collection[str]
) -> dict[str, Tensor]:
    """Return a drafter's tensors by their names in a checkpoint: what `read_layer` undoes.

    `names` are those of all tensors of the checkpoint. Experts are parted if the layer's are there,
    or where there is no layer those of the other layers: the two may differ.
    """
    stored: dict[str, Tensor] = {}
    names = [name for name in names if name.startswith(layout.prefix)] or names
    single = any(EXPERT.fullmatch(name) for name in names)
    for name, tensor in own.items():
        place = layout.name(name)
        if single and place.endswith("experts.gate_up_proj"):
            prefix = place.removesuffix(".gate_up_proj")
            for number, pair in enumerate(tensor):
                gate, up = pair.chunk(2)
                stored[f"{prefix}.{number}.gate_proj.weight"] = gate
                stored[f"{prefix}.{number}.up_proj.weight"] = up
        elif single and place.endswith("experts.down_proj"):
            prefix = place.removesuffix(".down_proj")
            for number, down in enumerate(tensor):
                stored[f"{prefix}.{number}.down_proj.weight"] = down
        else:
            stored[place] = tensor
    return stored
