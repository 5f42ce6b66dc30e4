"""`draftsmith export`: writes a drafter in the layout of a serving engine, and checks it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from ..heads.errors import UserError
from ..heads.exchange.engines import DRAFTS, EngineName
from ..heads.exchange.engines.engine import ExportRequest
from ..inference.base.output_paths import check_output_folder

if TYPE_CHECKING:
    from torch import Tensor

    from ..heads.artifact import Artifact
    from ..heads.exchange.exporter import ExportResult

# The form of the names that the hub knows licences by.
LICENCE = re.compile(r"[a-z0-9][a-z0-9.\-]*")


@dataclass
class ExportOptions:
    """Write a drafter in the layout that a serving engine loads.

    The command that serves it is printed, and a model card is in the folder.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "draftsmith export --drafter runs/mine/best --to vllm --out exports/eagle3-mine",
        "draftsmith export --drafter runs/mine/best --to hf --out exports/mine --push me/mine",
    )

    drafter: str
    """Folder of the drafter."""
    to: EngineName
    """Engine that is to serve the drafter."""
    out: str
    """Folder to write."""
    target: str | None = None
    """Target that the engine is to load, for the serve command and the config: a folder or a name
    on the hub; if not given, the name that it had in training. Its output matrix is read if the
    engine needs it in the drafter's folder."""
    drafts: int | None = None
    """Number of drafts per round in the serve command; if not given, all heads of a Medusa drafter,
    all drafts of a block, else 3."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the stored weights; auto keeps the drafter's."""
    license: str | None = None
    """Licence in the card, by the hub's name for it, such as apache-2.0; if not given, the card
    names none."""
    push: str | None = None
    """Repository on the hub to upload the folder to, such as me/eagle3-mine; created as private if
    it does not exist."""

    def __post_init__(self) -> None:
        if self.drafts is not None and self.drafts < 1:
            raise UserError(f"drafts must be at least 1, not {self.drafts}")
        if self.license is not None and not LICENCE.fullmatch(self.license):
            raise UserError(
                f"license {self.license!r} is not a name that the hub knows, such as apache-2.0, "
                "mit or other"
            )


def run(options: ExportOptions) -> None:
    """Export the drafter, and print the command that serves it.

    Raises `UserError` for everything that cannot be done. The folder is then left as it was, except
    where it was written and only the upload failed.
    """
    from ..heads.exchange.hub import upload

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


def write_export(options: ExportOptions) -> ExportResult:
    """Write the export that the options ask for, whole or not at all. Raises `UserError`."""
    import torch

    from ..heads.exchange.exporter import export, load_without_target, needs_target_head

    check_output_folder(options.out, "--out", replaced=True)
    artifact = load_without_target(options.drafter)
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


def target_head(name: str, artifact: Artifact, options: ExportOptions) -> Tensor | None:
    """Return the output matrix of the target `name`.

    Raises `UserError` if the drafter is for another target.
    """
    from ..inference.targets.stored import StoredTarget, embedding_and_head_in

    target = embedding_and_head_in(name, StoredTarget)
    trained_for, found = artifact.fingerprint, target.fingerprint()
    if errors := trained_for.errors_against(found, artifact.drafter.bound_to):
        raise UserError(
            f"{options.drafter} was trained for another target ({trained_for.name}): "
            f"{'; '.join(errors)}"
        )
    for message in trained_for.warnings_against(found):
        print(f"warning: {message}")
    return target.head_weight
