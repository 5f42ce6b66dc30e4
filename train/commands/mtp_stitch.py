"""`draftsmith mtp stitch`: writes an MTP layer into a copy of its target's checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

import torch

from ...heads.artifact import Artifact
from ...heads.drafter_configs import MtpConfig
from ...heads.errors import UserError
from ...heads.exchange.mtp import (
    TYPES,
    is_served,
    layout_for,
    layout_in,
    parted,
    places_in,
    stitch,
)
from ...heads.files import JsonObject, check_new_folder
from ...heads.mtp import MtpDrafter, shape_for
from ...heads.pretrained import clear_errors, read_config
from ...heads.stored_tensors import TensorFacts
from ...inference.targets.stored import StoredTarget, embedding_and_head_in
from .options import StitchOptions as Options

SERVE = """\
vllm serve {model} --speculative-config '{{"method": "mtp", "num_speculative_tokens": 3}}'
python -m sglang.launch_server --model-path {model} --speculative-algorithm NEXTN \\
    --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
printf 'speculative_config:\\n  decoding_type: MTP\\n  max_draft_len: 3\\n' > speculative.yaml
trtllm-serve {model} --config speculative.yaml
llama-server -m model.gguf --spec-type draft-mtp --spec-draft-n-max 3  # of convert_hf_to_gguf.py
"""
"""Commands that serve a checkpoint with its MTP layer."""
SIZES = ("size", "heads", "experts", "rank", "dim")
"""Words in the names of settings that are sizes."""


def run(options: Options) -> None:
    """Write the checkpoint, and print how engines serve it. Raises `UserError`."""
    check_new_folder(options.out, "--out")
    checkpoint = Path(options.into)
    if not checkpoint.is_dir():
        raise UserError(f"{options.into} is no folder; download the target first")
    target = embedding_and_head_in(options.into, torch.device("cpu"), "auto", StoredTarget)
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
    check_fits(drafter.shape.layer, shape_for(MtpConfig(), target.config).layer, options)
    with clear_errors(checkpoint):
        config = read_config(checkpoint).get_text_config()
    family = layout_for(config.model_type, config.num_hidden_layers)
    places = places_in(checkpoint)
    there = any(name.startswith(family.prefix) for name in places)
    if there:
        layout_in(list(places), config.model_type, config.num_hidden_layers, str(checkpoint))
    own = {name: tensor.detach() for name, tensor in drafter.serving_state().items()}
    if not there:  # buffers stay in float32, as families with them store them
        dtype, buffers = stored_dtype(places), [buffer.data_ptr() for buffer in drafter.buffers()]
        own = {n: t if t.data_ptr() in buffers else t.to(dtype) for n, t in own.items()}
    tensors = parted(own, family, list(places))
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


def check_fits(layer: JsonObject, wanted: JsonObject, options: Options) -> None:
    """Raise `UserError` if a layer is not of a target's family and sizes.

    Both are configurations of a model with one layer: the drafter's, and that of the target.
    """
    for key, value in sorted(wanted.items(), key=lambda item: item[0] != "model_type"):
        is_size = type(value) is int and any(word in key for word in SIZES)
        if (key == "model_type" or is_size) and layer.get(key) != value:
            raise UserError(
                f"{options.drafter} is a layer of a model with {key} {layer.get(key)}, and "
                f"{options.into} has {value}; name the target that it was made for, or a fine-tune "
                "of that"
            )


def stored_dtype(places: Mapping[str, tuple[Path, TensorFacts]]) -> torch.dtype:
    """Return the type of most of a checkpoint's matrices."""
    found = Counter(facts.dtype for _, facts in places.values() if len(facts.shape) > 1)
    return TYPES.get(found.most_common(1)[0][0], torch.bfloat16)
