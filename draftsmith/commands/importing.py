"""`draftsmith import`: makes a drafter of a public checkpoint, or of an export of draftsmith."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ..heads.documents import OwnFile, read_document
from ..heads.errors import UserError
from ..heads.files import checksum
from ..inference.base.output_paths import check_new_folder
from ..train.provenance import provenance

if TYPE_CHECKING:
    from ..heads.artifact import Artifact
    from ..heads.exchange.foreign import Answers, ImportedDrafter, TargetParts
    from ..inference.targets.stored import StoredTarget


@dataclass
class ImportOptions:
    """Make a drafter from a public checkpoint or from a draftsmith export.

    The target is the one that the drafter was trained for, or one that was tuned from it without
    added tokens.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith import --from yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --target "
        "meta-llama/Llama-3.1-8B-Instruct --out drafters/eagle3",
        "draftsmith import --from FOLDER --target TARGET --out drafters/eagle3 --set taps=2,16,29",
    )

    from_: str
    """Folder of the checkpoint, or its name on the hub."""
    target: str
    """Target: a folder, or a name on the hub. Of it, only embedding, final norm and head are
    loaded."""
    out: str
    """Folder of the drafter to write."""
    set: list[str] = field(default_factory=list, metadata={"form": "KEY=VALUE"})
    """Value that the checkpoint does not specify; may be given several times: taps=2,16,29
    (hidden states that the drafter fuses), norm_output=true or false (recycle the normed state, as
    EAGLE-3.1 does), norm_before_residual=true or false (add the layer's output to the normed
    state), embedding=target (use the target's although the checkpoint's differs)."""


def run(options: ImportOptions) -> None:
    """Import the checkpoint, and print what was assumed where it leaves something open.

    Raises `UserError` for a folder that is not a checkpoint of this target, or needs no import.
    """
    from ..heads.artifact import OWN_FILE, drafter_class
    from ..heads.exchange.hub import fetch_folder
    from ..heads.layers import LayeredDrafter
    from ..heads.stored_tensors import PICKLES
    from ..inference.targets.stored import StoredTarget, embedding_and_head_in

    answers = answers_of(options)
    check_new_folder(options.out, "--out")
    folder = fetch_folder(options.from_, ["*.json", "*.safetensors", *PICKLES], "checkpoint")
    own_file = None
    # Exports and drafters of draftsmith have this file; checkpoints of other projects have not.
    if (folder / OWN_FILE).is_file():
        remedy = "copy or export the drafter again"
        own_file, _ = read_document(folder / OWN_FILE, OwnFile, remedy)
        if own_file.export is None:
            raise UserError(f"{folder} is a drafter of draftsmith already; use it as it is")
        if not issubclass(drafter_class(own_file.method), LayeredDrafter):
            raise UserError(f"{folder} needs no import; give it to --drafter as it is")
    target = embedding_and_head_in(options.target, StoredTarget)
    if own_file is None:
        public, artifact = foreign(folder, target, answers)
    else:
        if options.set:
            raise UserError(
                f"{folder} is an export of draftsmith and leaves nothing open; leave out --set"
            )
        public, artifact = exported(folder, target, own_file)
    artifact.save(options.out, public.dtype)
    for note in public.notes:
        print(f"taken for granted: {note}")
    print(f"read {folder} as {public.layout}; drafter: {options.out}")
    print(
        f"\ndraftsmith evaluate --target {options.target} --drafter {options.out} --prompts "
        "HELD_OUT.jsonl"
    )


def answers_of(options: ImportOptions) -> Answers:
    """Return the answers of `--set` as the reader takes them. Raises `UserError`."""
    from ..heads.exchange.foreign import Answers

    answers = Answers()
    flags = {"true": True, "false": False}
    for word in options.set:
        key, _, value = word.partition("=")
        numbers = value.strip("[]").replace(" ", "").split(",")
        if key == "taps" and all(number.isdecimal() for number in numbers):
            answers.taps = [int(number) for number in numbers]
        elif key == "norm_output" and value in flags:
            answers.norm_output = flags[value]
        elif key == "norm_before_residual" and value in flags:
            answers.norm_before_residual = flags[value]
        elif (key, value) == ("embedding", "target"):
            answers.target_embedding = True
        else:
            raise UserError(
                f"--set {word} is not understood; it takes taps=2,16,29 (numbers with commas "
                "between them), norm_output=true, norm_before_residual=true, or embedding=target"
            )
    return answers


def foreign(
    folder: Path, target: StoredTarget, answers: Answers
) -> tuple[ImportedDrafter, Artifact]:
    """Return the contents of another project's checkpoint, and a drafter made of them.

    Such a checkpoint does not say which target it is for; it is taken to be `target`, and its
    provenance notes all that was taken for granted. Raises `UserError`.
    """
    from ..heads.artifact import Artifact
    from ..heads.exchange.public import read_public
    from ..heads.stored_tensors import StoredTensors

    public = read_public(folder, target_parts(target), answers)
    files = StoredTensors(folder).files
    facts = {
        **provenance(),
        "imported_from": str(folder),
        "layout": public.layout,
        "sha256": {path.name: checksum(path) for path in files},
        "taken_for_granted": public.notes,
    }
    return public, Artifact(public.drafter, target.fingerprint(), {}, facts)


def exported(folder: Path, target: StoredTarget, own: OwnFile) -> tuple[ImportedDrafter, Artifact]:
    """Return the contents of an export that draftsmith wrote, and the drafter that was exported.

    Everything in it has to be as it was written: its files' checksums, and the method and type that
    `draftsmith.json` notes. Raises `UserError` where something was changed, and for a
    target other than the drafter's.
    """
    import torch

    from ..heads.artifact import OWN_FILE, Artifact, check_files, check_target, drafter_class
    from ..heads.exchange.foreign import Answers
    from ..heads.exchange.public import read_public

    assert own.export is not None
    drafter_type = drafter_class(own.method)
    check_target(
        own.target,
        target.fingerprint(),
        drafter_type,
        folder,
        lambda message: print(f"warning: {message}"),
    )
    check_files(folder, own)
    public = read_public(folder, target_parts(target), Answers(ours=True))
    # A note is an assumption about something that a file leaves open.
    if public.notes:
        raise UserError(
            f"{folder}: {public.notes[0]}; an export of draftsmith leaves nothing open, so it was "
            "changed"
        )
    for noted, found in (
        (own.method, public.drafter.method),
        (getattr(torch, own.dtype), public.dtype),
    ):
        if noted != found:
            raise UserError(
                f"{folder} holds {found}, {OWN_FILE} says {noted}; one of them was changed"
            )
    return public, Artifact(public.drafter, own.target, own.calibration, own.provenance)


def target_parts(target: StoredTarget) -> TargetParts:
    """Return the sizes and matrices of `target` that a checkpoint is read with."""
    from ..heads.exchange.foreign import TargetParts

    return TargetParts(
        target.num_layers,
        target.hidden_size,
        target.vocab_size,
        target.embedding_and_head,
        target.model.get_input_embeddings().weight,
        target.head_weight,
    )
