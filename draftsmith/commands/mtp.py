"""`draftsmith mtp extract` and `mtp stitch`: an MTP layer out of a checkpoint, and into one.

The layer that is taken out may be the target's own, or that of the model from which the target was
tuned.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar

from ..heads.errors import UserError
from ..heads.files import JsonObject
from ..inference.base.output_paths import check_new_folder
from ..train.provenance import provenance

if TYPE_CHECKING:
    import torch

    from ..heads.artifact import Artifact
    from ..heads.exchange.mtp import LayerLayout
    from ..heads.stored_tensors import StoredTensors
    from ..inference.targets.target import TargetSource

SIZES = ("model_type", "hidden_size", "num_hidden_layers")
"""Keys of two configurations in which a layer's model and its target have to be equal. A vocabulary
may have grown in a fine-tune: embedding and head are the target's."""
SERVE = """\
vllm serve {model} --speculative-config '{{"method": "mtp", "num_speculative_tokens": 3}}'
python -m sglang.launch_server --model-path {model} --speculative-algorithm NEXTN \\
    --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
printf 'speculative_config:\\n  decoding_type: MTP\\n  max_draft_len: 3\\n' > speculative.yaml
trtllm-serve {model} --config speculative.yaml
llama-server -m model.gguf --spec-type draft-mtp --spec-draft-n-max 3  # of convert_hf_to_gguf.py
"""
"""Commands that serve a checkpoint with its MTP layer."""
SIZE_WORDS = ("size", "heads", "experts", "rank", "dim")
"""Words in the names of settings that are sizes."""


@dataclass
class ExtractOptions:
    """Make a drafter from the MTP layer of a target's checkpoint or of its base model's.

    A layer taken from the base model is not adapted to the fine-tuned target; continue its training
    with `draftsmith train mtp --init-from`.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp extract --from Qwen/Qwen3.5-0.8B --out drafters/mtp",
        "draftsmith mtp extract --from FINE_TUNE --base Qwen/Qwen3.5-0.8B --out drafters/mtp",
    )

    from_: str
    """Folder of the target, or its name on the hub."""
    out: str
    """Folder of the drafter to write."""
    base: str | None = None
    """Folder or name of the base model. Its MTP layer is used instead of the target's, for a target
    that lost its own in fine-tuning."""


@dataclass
class StitchOptions:
    """Write an MTP layer into a copy of its target's checkpoint, so that serving engines load both.

    All other tensors and files are copied as they are.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith mtp stitch --drafter runs/mtp/best --into FINE_TUNE --out model-with-mtp",
    )

    drafter: str
    """Folder of the drafter."""
    into: str = field(metadata={"form": "FOLDER"})
    """Folder of the target."""
    out: str
    """Folder to write."""


def run(options: ExtractOptions | StitchOptions) -> None:
    """Extract or stitch, as the options are. Raises `UserError`."""
    if isinstance(options, StitchOptions):
        stitch_layer(options)
    else:
        extract_layer(options)


@dataclass
class StoredLayer:
    """MTP layer in a checkpoint, of which nothing but names was read."""

    folder: Path
    config: Any
    """transformers' configuration of the language model."""
    tensors: StoredTensors
    layout: LayerLayout


def find_layer(name: str, remedy: str | None = None) -> StoredLayer:
    """Return the MTP layer of the checkpoint `name`, a folder or a repository on the hub.

    Raises `UserError`, with the `remedy`, if it is missing, and for one of an unknown form.
    """
    from ..heads.exchange.hub import fetch_folder
    from ..heads.exchange.mtp import EXTRACT_REMEDY, layout_in
    from ..heads.pretrained import as_user_errors, read_config
    from ..heads.stored_tensors import StoredTensors

    folder = fetch_folder(name, ["*.json", "*.safetensors"], "checkpoint")
    with as_user_errors(folder, "checkpoint"):
        config = read_config(folder).get_text_config()
    tensors = StoredTensors(folder)
    layout = layout_in(
        list(tensors),
        config.model_type,
        config.num_hidden_layers,
        str(folder),
        remedy or EXTRACT_REMEDY,
    )
    return StoredLayer(folder, config, tensors, layout)


def read_for(layer: StoredLayer, target: TargetSource) -> tuple[Artifact, torch.dtype]:
    """Return a layer as a drafter for `target`, and the type that it is stored in.

    The type is float32 where the tensors have several. Raises `UserError` for a layer of a model of
    another family or size, and for one that does not fit its own configuration.
    """
    import torch

    from ..heads.artifact import Artifact
    from ..heads.exchange.mtp import read_layer
    from ..heads.mtp import MtpDrafter, check_layer, shape_for

    folder = str(layer.folder)
    for key in SIZES:
        theirs, wanted = (getattr(config, key) for config in (layer.config, target.config))
        if theirs != wanted:
            raise UserError(
                f"{folder} has {key} {theirs}, the target has {wanted}; name the model that the "
                "target was tuned from"
            )
    drafter = MtpDrafter(shape_for(target.config), target.embedding_and_head)
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


def extract_layer(options: ExtractOptions) -> None:
    """Write the drafter, and print what to do with it.

    Raises `UserError` if no layer fits, and for an `out` that is there already.
    """
    import torch

    from ..inference.targets.stored import StoredTarget, embedding_and_head_in

    check_new_folder(options.out, "--out")
    if options.base is None:
        layer = find_layer(options.from_)
    else:
        remedy = "name as --base a model that has one, or train one (draftsmith train mtp)"
        layer = find_layer(options.base, remedy)
    target = embedding_and_head_in(options.from_, StoredTarget)
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


def stitch_layer(options: StitchOptions) -> None:
    """Write the checkpoint, and print how engines serve it. Raises `UserError`."""
    import torch

    from ..heads.artifact import Artifact
    from ..heads.exchange.mtp import (
        TYPES,
        is_served,
        layout_for,
        layout_in,
        stitch,
        tensor_locations,
        to_checkpoint_names,
    )
    from ..heads.mtp import MtpDrafter, shape_for
    from ..heads.pretrained import as_user_errors, read_config
    from ..inference.targets.stored import StoredTarget, embedding_and_head_in

    check_new_folder(options.out, "--out")
    checkpoint = Path(options.into)
    if not checkpoint.is_dir():
        raise UserError(f"{options.into} is not a folder; download the target first")
    target = embedding_and_head_in(options.into, StoredTarget)
    artifact = Artifact.load(
        options.drafter,
        target.fingerprint(),
        target.embedding_and_head,
        lambda message: print(f"warning: {message}"),
    )
    drafter = artifact.drafter
    if not isinstance(drafter, MtpDrafter):
        raise UserError(
            f"{options.drafter} is a drafter of {artifact.method}, not an MTP layer; name one that "
            "mtp extract or train mtp wrote"
        )
    check_fits(drafter.shape.layer, shape_for(target.config).layer, options)
    with as_user_errors(checkpoint):
        config = read_config(checkpoint).get_text_config()
    family = layout_for(config.model_type, config.num_hidden_layers)
    places = tensor_locations(checkpoint)
    there = any(name.startswith(family.prefix) for name in places)
    if there:
        layout_in(list(places), config.model_type, config.num_hidden_layers, str(checkpoint))
    own = {name: tensor.detach() for name, tensor in drafter.serving_state().items()}
    if not there:  # buffers stay in float32, as families with them store them
        # The type of most of the checkpoint's matrices.
        found = Counter(facts.dtype for _, facts in places.values() if len(facts.shape) > 1)
        dtype = TYPES.get(found.most_common(1)[0][0], torch.bfloat16)
        buffers = [buffer.data_ptr() for buffer in drafter.buffers()]
        own = {n: t if t.data_ptr() in buffers else t.to(dtype) for n, t in own.items()}
    tensors = to_checkpoint_names(own, family, list(places))
    counts = stitch(tensors, family.count_key, checkpoint, Path(options.out))
    print(
        f"wrote {options.out}: {counts['replaced']} tensors of the layer replaced, "
        f"{counts['added']} added, {counts['kept']} others copied\n"
    )
    if is_served(config.model_type):
        print(SERVE.format(model=quote(options.out)))
    else:
        print(
            f"No engine is known to serve an MTP layer of {config.model_type}; draftsmith decodes "
            f"with it: --drafter {quote(options.drafter)}"
        )


def check_fits(layer: JsonObject, wanted: JsonObject, options: StitchOptions) -> None:
    """Raise `UserError` if a layer is not of a target's family and sizes.

    Both are configurations of a model with one layer: the drafter's, and that of the target.
    """
    for key, value in sorted(wanted.items(), key=lambda item: item[0] != "model_type"):
        is_size = type(value) is int and any(word in key for word in SIZE_WORDS)
        if (key == "model_type" or is_size) and layer.get(key) != value:
            raise UserError(
                f"{options.drafter} is a layer of a model with {key} {layer.get(key)}, and "
                f"{options.into} has {value}; name the target that it was made for, or a fine-tune "
                "of that"
            )
