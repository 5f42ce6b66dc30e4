"""`draftsmith export`: writes a drafter in the layout of a serving engine, and checks it."""

from __future__ import annotations

from pathlib import Path

import torch

from ..heads.artifact import Artifact
from ..heads.errors import UserError
from ..heads.exchange.engines import DRAFTS
from ..heads.exchange.engines.engine import ExportRequest
from ..heads.exchange.exporter import ExportResult, export, load_alone, needs_target_head
from ..heads.exchange.hub import upload
from ..inference.base.output_paths import check_output_folder
from ..inference.targets.stored import StoredTarget, embedding_and_head_in
from .options import ExportOptions as Options


def run(options: Options) -> None:
    """Export the drafter, and print the command that serves it.

    Raises `UserError` for everything that cannot be done. The folder is then left as it was, except
    where it was written and only the upload failed.
    """
    written = write_export(options)
    done = "replaced the earlier export in" if written.replaced else "wrote"
    print(f"{done} {options.out}, read it back, and compared every tensor: equal\n")
    for note in written.notes:
        print(f"note: {note}")
    if options.license is None:
        print("note: the card names no licence; set one with --license, such as that of the target")
    print(f"\n{written.serve}")
    if options.push is not None:
        print(f"\npushed: {upload(options.out, options.push)}")


def write_export(options: Options) -> ExportResult:
    """Write the export that the options ask for, whole or not at all. Raises `UserError`."""
    check_output_folder(options.out, "--out", replaced=True)
    artifact = load_alone(options.drafter)
    if Path(options.out).resolve() == Path(options.drafter).resolve():
        raise UserError(f"{options.out} is the drafter itself; name another --out")
    most = artifact.drafter.most_drafts
    if options.drafts is not None and most is not None and options.drafts > most:
        raise UserError(
            f"--drafts {options.drafts} is more than the {most} drafts that the drafter has"
        )
    if options.dtype == "auto":
        dtype = next(p.dtype for p in artifact.drafter.parameters() if p.is_floating_point())
    else:
        dtype = getattr(torch, options.dtype)
    request = ExportRequest(
        options.to,
        options.out,
        options.target or artifact.fingerprint.name,
        options.drafts or most or DRAFTS,
        dtype,
    )
    head = None
    if options.target is not None and needs_target_head(options.to, artifact):
        head = target_head(options.target, artifact, options)
    return export(artifact, request, options.license, head)


def target_head(name: str, artifact: Artifact, options: Options) -> torch.Tensor | None:
    """Return the output matrix of the target `name`.

    Raises `UserError` if the drafter is for another target.
    """
    target = embedding_and_head_in(name, torch.device("cpu"), "auto", StoredTarget)
    trained_for, found = artifact.fingerprint, target.fingerprint()
    if errors := trained_for.errors_against(found, artifact.drafter.bound_to):
        raise UserError(
            f"{options.drafter} was trained for another target ({trained_for.name}): "
            f"{'; '.join(errors)}"
        )
    for message in trained_for.warnings_against(found):
        print(f"warning: {message}")
    return target.head_weight
