"""`draftsmith import`: a public Medusa, EAGLE, DFlash or DSpark checkpoint, or an export of ours,
becomes a drafter of ours."""

from __future__ import annotations

import json as json_module
from pathlib import Path

import torch
from huggingface_hub import snapshot_download

from ...heads.artifact import (
    OWN_FILE,
    Artifact,
    check_files,
    check_shape,
    check_target,
    drafter_class,
)
from ...heads.documents import OwnFile, read_document
from ...heads.errors import UserError
from ...heads.exchange.foreign import Answers, Public, TargetSide
from ...heads.exchange.public import read_public
from ...heads.files import check_output_folder, checksum
from ...heads.stored_tensors import StoredTensors
from ...inference.stored import StoredTarget
from ..inputs import embedding_and_head_in
from ..options import ImportOptions as Options
from ..provenance import provenance

READ = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.pth"]


def run(options: Options) -> None:
    check_output_folder(options.out, "--out")
    folder = folder_of(options.from_)
    if Path(options.out).exists():
        raise UserError(f"{options.out} is there already; name another --out")
    answers = Answers(
        taps_of(options.taps),
        options.norm_output,
        options.norm_before_residual,
        options.target_embedding,
    )
    there = (folder / OWN_FILE).is_file()
    own = (
        read_document(folder / OWN_FILE, OwnFile, "copy or export the drafter again")[0]
        if there
        else None
    )
    if own is not None and own.export is None:
        raise UserError(f"{folder} is a drafter of ours already; use it as it is")
    if own is not None and own.method == "draft_model":
        raise UserError(f"{folder} is an ordinary model; give it to --drafter as it is")
    target = embedding_and_head_in(options.target, torch.device("cpu"), "auto")
    found, artifact = (
        foreign(folder, target, answers) if own is None else exported(folder, target, answers, own)
    )
    artifact.save(options.out, found.dtype)
    for note in found.notes:
        print(f"taken for granted: {note}")
    print(f"read {folder} as {found.layout}; drafter: {options.out}")
    print(
        f"\ndraftsmith evaluate --target {options.target} --drafter {options.out} --prompts "
        "HELD_OUT.jsonl"
    )


def folder_of(name: str) -> Path:
    """The folder of that name, or what the hub has under it. Raises `UserError`."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(
            f"{name} is not a folder; name a checkpoint's folder, or a repository on the hub"
        )
    try:
        return Path(snapshot_download(name, allow_patterns=READ, ignore_patterns=["*/*"]))
    except Exception as error:  # of whichever HTTP library there is
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{name} is no folder here, and the hub cannot give it ({reason}); check the name"
        ) from error


def taps_of(text: str | None) -> list[int] | None:
    try:
        taps = json_module.loads(text) if text is not None else None
    except ValueError:
        taps = text
    if taps is not None and not (
        isinstance(taps, list) and taps and all(type(tap) is int for tap in taps)
    ):
        raise UserError(f"--taps is a list of numbers such as [2,16,29], not {text}")
    return taps


def foreign(folder: Path, target: StoredTarget, answers: Answers) -> tuple[Public, Artifact]:
    """A checkpoint that says nothing of its target: it is taken for the one that was named."""
    found = read_public(folder, side_of(target), answers)
    files = StoredTensors(folder).files
    facts = {
        **provenance(),
        "imported_from": str(folder),
        "layout": found.layout,
        "sha256": {path.name: checksum(path) for path in files},
        "taken_for_granted": found.notes,
    }
    return found, Artifact(found.drafter, target.fingerprint(), {}, facts)


def exported(
    folder: Path, target: StoredTarget, answers: Answers, own: OwnFile
) -> tuple[Public, Artifact]:
    """An export of ours: everything in it has to be as it was written."""
    assert own.export is not None
    if answers != Answers():
        raise UserError(
            f"{folder} is an export of ours and leaves nothing open; leave out --taps and its like"
        )
    drafter_type = drafter_class(own.method)
    check_target(
        own.target,
        target.fingerprint(),
        drafter_type.bound_to,
        folder,
        lambda message: print(f"warning: {message}"),
    )
    if surplus := sorted(
        {path.name for path in folder.glob("*.safetensors")} - own.export.sha256.keys()
    ):
        raise UserError(
            f"{folder / surplus[0]} is not part of the export; remove it, or copy the export again"
        )
    check_files(folder, own, lambda message: print(f"warning: {message}"))
    found = read_public(folder, side_of(target), Answers(ours=True))
    if found.drafter.method != own.method:
        raise UserError(
            f"{folder} holds {found.drafter.method}, {OWN_FILE} says {own.method}; one of them "
            "was changed"
        )
    check_shape(found.drafter, own.taps, own.shape, folder / "config.json")
    if found.notes:
        raise UserError(
            f"{folder}: {found.notes[0]}; an export of ours leaves nothing open, so it was changed"
        )
    if (said := getattr(torch, own.dtype)) != found.dtype:
        raise UserError(
            f"{folder} holds {found.dtype}, {OWN_FILE} says {said}; one of them was changed"
        )
    return found, Artifact(found.drafter, own.target, own.calibration, own.provenance)


def side_of(target: StoredTarget) -> TargetSide:
    return TargetSide(
        target.num_layers,
        target.hidden_size,
        target.vocab_size,
        target.embedding_and_head,
        target.model.get_input_embeddings().weight,
        target.head_weight,
    )
