"""`draftsmith mtp extract`: makes a drafter of the MTP layer in a checkpoint.

The layer may be the target's own, or that of the model from which the target was tuned.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...heads.artifact import Artifact
from ...heads.drafter_configs import MtpConfig
from ...heads.errors import UserError
from ...heads.exchange.hub import fetched
from ...heads.exchange.mtp import TAKE, LayerLayout, layout_in, read_layer
from ...heads.files import check_new_folder
from ...heads.mtp import MtpDrafter, check_layer, shape_for
from ...heads.pretrained import clear_errors, read_config
from ...heads.stored_tensors import StoredTensors
from ...inference.targets.stored import StoredTarget, embedding_and_head_in
from ...inference.targets.target import TargetSource
from ..provenance import provenance
from .options import ExtractLayerOptions as Options

READ = ["*.json", "*.safetensors"]
"""Files of a repository on the hub that are read."""
SIZES = ("model_type", "hidden_size", "num_hidden_layers")
"""Keys of two configurations in which a layer's model and its target have to be equal. A vocabulary
may have grown in a fine-tune: embedding and head are the target's."""


@dataclass
class StoredLayer:
    """MTP layer in a checkpoint, of which nothing but names was read."""

    folder: Path
    config: Any
    """transformers' configuration of the language model."""
    tensors: StoredTensors
    layout: LayerLayout


def find_layer(name: str, remedy: str = TAKE) -> StoredLayer:
    """Return the MTP layer of the checkpoint `name`, a folder or a repository on the hub.

    Raises `UserError` if there is none, with the `remedy`, or one of a form that is not known.
    """
    folder = fetched(name, READ, "checkpoint")
    with clear_errors(folder, "checkpoint"):
        config = read_config(folder).get_text_config()
    tensors = StoredTensors(folder)
    layout = layout_in(
        list(tensors), config.model_type, config.num_hidden_layers, str(folder), remedy
    )
    return StoredLayer(folder, config, tensors, layout)


def read_for(layer: StoredLayer, target: TargetSource) -> tuple[Artifact, torch.dtype]:
    """Return a layer as a drafter for `target`, and the type that it is stored in.

    The type is float32 where the tensors have several. Raises `UserError` for a layer of a model of
    another family or size, and for one that does not fit its own configuration.
    """
    folder = str(layer.folder)
    for key in SIZES:
        theirs, wanted = (getattr(config, key) for config in (layer.config, target.config))
        if theirs != wanted:
            raise UserError(
                f"{folder} has {key} {theirs}, the target has {wanted}; name the model that the "
                "target was tuned from"
            )
    drafter = MtpDrafter(shape_for(MtpConfig(), target.config), target.embedding_and_head)
    expected = drafter.serving_state()
    found = read_layer(layer.tensors, layer.layout, expected, folder)
    with torch.no_grad():
        for own, tensor in expected.items():
            tensor.copy_(found[own])
    check_layer(drafter, layer.config.model_type)
    if not all(bool(tensor.isfinite().all()) for tensor in expected.values()):
        raise UserError(
            f"{folder}: the MTP layer has numbers that are not finite; copy or download it again"
        )
    dtypes = {tensor.dtype for tensor in found.values()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    facts = {**provenance(), "extracted_from": folder, "prefix": layer.layout.prefix}
    return Artifact(drafter, target.fingerprint(), {}, facts), dtype


def run(options: Options) -> None:
    """Write the drafter, and print what to do with it.

    Raises `UserError` if there is no layer that fits, and for an `out` that is there already.
    """
    check_new_folder(options.out, "--out")
    if options.base is None:
        layer = find_layer(options.from_)
    else:
        remedy = "name as --base a model that has one, or train one (draftsmith train mtp)"
        layer = find_layer(options.base, remedy)
    target = embedding_and_head_in(options.from_, torch.device("cpu"), "auto", StoredTarget)
    artifact, dtype = read_for(layer, target)
    artifact.save(options.out, dtype)
    if options.base is None:
        print(f"drafter: {options.out}\n")
        print(
            f"draftsmith evaluate --target {options.from_} --drafter "
            f"{options.out}:width=1,length=3 --prompts HELD_OUT.jsonl"
        )
    else:
        print(f"drafter: {options.out}; it is {options.base}'s, for another target: train it on\n")
        with suppress(UserError):  # a target that has lost its layer
            own, _ = read_for(find_layer(options.from_), target)
            theirs = artifact.drafter.serving_state()
            if all(torch.equal(one, theirs[n]) for n, one in own.drafter.serving_state().items()):
                print(f"note: {options.from_} has the same layer, which was not tuned with it\n")
        print(
            f"draftsmith train mtp --target {options.from_} --init-from {options.out} "
            "--data.sources REPLIES.jsonl --out runs/mtp"
        )
