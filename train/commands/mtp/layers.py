"""MTP layers as drafters: read from a checkpoint, for the same target or another of its sizes."""

from __future__ import annotations

from pathlib import Path

import torch

from ....heads.artifact import Artifact
from ....heads.drafter_configs import MtpConfig
from ....heads.errors import UserError
from ....heads.exchange.hub import fetched
from ....heads.exchange.mtp_checkpoints import layout_in, read_layer
from ....heads.files import check_output_folder
from ....heads.mtp import MtpDrafter, shape_for
from ....heads.pretrained import read_config
from ....heads.stored_tensors import StoredTensors
from ....inference.targets.stored import StoredTarget, embedding_and_head_in
from ....inference.targets.target import TargetSource
from ...provenance import provenance

READ = ["*.json", "*.safetensors"]
"""Files of a repository on the hub that are read."""


def layer_in(name: str, target: TargetSource) -> tuple[Artifact, torch.dtype]:
    """Return the MTP layer of the checkpoint `name` as a drafter for `target`, and its type.

    The type is float32 where the tensors have several. Raises `UserError` for a checkpoint without
    a layer that fits the target.
    """
    folder = fetched(name, READ, "checkpoint")
    config = read_config(folder).get_text_config()
    tensors = StoredTensors(folder)
    layout = layout_in(list(tensors), config.model_type, config.num_hidden_layers, str(folder))
    drafter = MtpDrafter(shape_for(MtpConfig(), target.config), target.embedding_and_head)
    expected = drafter.serving_state()
    found = read_layer(tensors, layout, expected, str(folder))
    with torch.no_grad():
        for own, tensor in expected.items():
            tensor.copy_(found[own])
    dtypes = {tensor.dtype for tensor in found.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    facts = {**provenance(), "extracted_from": str(folder), "prefix": layout.prefix}
    return Artifact(drafter, target.fingerprint(), {}, facts), dtype


def make_drafter(source: str, target_name: str, out: str) -> StoredTarget:
    """Write the MTP layer of the checkpoint `source` as a drafter for a target; return the target.

    Raises `UserError` if there is none that fits, and for an `out` that is there already.
    """
    check_output_folder(out, "--out", replaced=True)
    if Path(out).exists():
        raise UserError(f"{out} is there already; name another --out")
    cpu = torch.device("cpu")
    target = embedding_and_head_in(target_name, cpu, "auto", StoredTarget)
    artifact, dtype = layer_in(source, target)
    artifact.save(out, dtype)
    return target
