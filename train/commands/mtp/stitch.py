"""`draftsmith mtp stitch`: writes an MTP layer into a copy of its target's checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from ....heads.artifact import Artifact
from ....heads.errors import UserError
from ....heads.exchange.mtp_checkpoints import layout_for, layout_in, parted
from ....heads.exchange.mtp_stitch import places_in, stitch
from ....heads.files import check_output_folder, whole_directory
from ....heads.mtp import MtpDrafter
from ....heads.pretrained import read_config
from ....inference.targets.stored import StoredTarget, embedding_and_head_in
from .options import StitchOptions as Options


def run(options: Options) -> None:
    """Write the checkpoint, and print how engines serve it. Raises `UserError`."""
    check_output_folder(options.out, "--out", replaced=True)
    if Path(options.out).exists():
        raise UserError(f"{options.out} is there already; name another --out")
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
        raise UserError(f"{options.drafter} is a drafter of {artifact.method}, not an MTP layer")
    shape = drafter.shape
    if (shape.reads, shape.recycles) != ("normed", "normed"):
        raise UserError(
            f"{options.drafter} reads {shape.reads} states and recycles {shape.recycles} ones; "
            "engines pass both after a norm"
        )
    config = read_config(checkpoint).get_text_config()
    family = layout_for(config.model_type, config.num_hidden_layers)
    there = [name for name in places_in(checkpoint) if name.startswith(family.prefix)]
    if there:
        layout_in(there, config.model_type, config.num_hidden_layers, str(checkpoint))
    own = {name: tensor.detach() for name, tensor in drafter.serving_state().items()}
    if not there:  # buffers stay in float32, as families with them store them
        parameters, dtype = dict(drafter.named_parameters()), stored_dtype(target)
        kept = {tensor.data_ptr() for tensor in parameters.values()}
        own = {n: t.to(dtype) if t.data_ptr() in kept else t for n, t in own.items()}
    tensors = parted(own, family, there)
    if options.head_only:
        with whole_directory(options.out) as aside:
            stored = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
            save_file(stored, aside / "model-mtp.safetensors", {"format": "pt"})
        print(f"wrote {len(tensors)} tensors under {family.prefix} to {options.out}")
        return
    counts = stitch(tensors, checkpoint, Path(options.out))
    print(
        f"wrote {options.out}: {counts['replaced']} tensors of the layer replaced, "
        f"{counts['added']} added, {counts['kept']} others compared byte for byte\n"
    )
    print(f"vllm serve {options.out} --speculative-config "
          "'{\"method\": \"mtp\", \"num_speculative_tokens\": 3}'")  # fmt: skip
    print(
        f"python -m sglang.launch_server --model-path {options.out} --speculative-algorithm NEXTN "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    )


def stored_dtype(target: StoredTarget) -> torch.dtype:
    """Return the type of the checkpoint's own matrices."""
    return target.head_weight.dtype
