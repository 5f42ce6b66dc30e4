"""`draftsmith export`: writes a drafter in the layout of a serving engine, and checks it."""

from __future__ import annotations

from pathlib import Path

import torch

from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...heads.exchange.card import CardFigures
from ...heads.exchange.engines.engine import ExportRequest
from ...heads.exchange.exporter import WrittenExport, export, load_alone, needs_target_head
from ...heads.exchange.exports import DRAFTS
from ...heads.exchange.hub import upload
from ...heads.files import check_output_folder, checksum
from ...inference.drafters import parse_spec, trained_kind
from ...inference.evaluation.results import known, read_measured
from ...inference.targets.stored import StoredTarget, embedding_and_head_in
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


def write_export(options: Options) -> WrittenExport:
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
    figures = [
        row
        for path in options.report
        for row in read_card_figures(path, options.drafter, artifact.method)
    ]
    head = None
    if options.target is not None and needs_target_head(options.to, artifact):
        head = target_head(options.target, artifact, options)
    return export(artifact, request, options.license, figures, head)


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


def read_card_figures(path: str, drafter: str, method: str) -> list[CardFigures]:
    """Return the figures that the report at `path` has of this very drafter.

    There are figures for each setting of the report and each tree of the drafter. Raises
    `UserError` if the report is about other drafters.
    """
    report = read_measured(path)
    # A drafter is recognised by its weights: names and folders change.
    weights_hash = " ".join(map(checksum, sorted(Path(drafter).glob("*.safetensors"))))
    names = {name for name, one in report.drafters.items() if one.sha256 == weights_hash}
    if not names:
        with_weights = [name for name, one in report.drafters.items() if one.sha256]
        measured = ", ".join(with_weights) or "none with weights"
        raise UserError(
            f"{path} is not about {drafter}: the drafters that it measured ({measured}) have "
            "other weights"
        )
    specs = {one.spec for name, one in report.drafters.items() if name in names}
    prompts, kind_of_method = report.prompt_set, trained_kind(method)
    default = {"width": 1 if kind_of_method is not None and kind_of_method.chains else None}
    rows = []
    for setting in report.settings:
        for name, found in setting.drafters.items():
            kind = found.kind or name
            # By its name as it is; by its spec where it was tuned, or drafted as an engine does. A
            # lookup with the drafter is not part of the export.
            if not (name in names or found.spec in specs) or "lookup=" in kind:
                continue
            if not known(found.tau_incl_bonus):
                continue
            # Later settings win: the method's default, the spec's, and those of a profile.
            named = parse_spec(found.spec or "")[1] | parse_spec(kind)[1]
            chosen = default | named | (found.setting or {})
            low, high = found.tau_ci95 or (None, None)
            row = CardFigures(
                drafts=kind,
                chain=chosen["width"] == 1,
                temperature=setting.temperature,
                batch=setting.batch,
                tau=found.tau_incl_bonus,
                interval=(low, high) if known(low) and known(high) else None,
                survival=tuple(rate for rate in found.survival[:8] if rate is not None),
                prompts=found.requests,
                prompt_set=prompts.benchmark.name
                if prompts.benchmark is not None
                else Path(prompts.path or "unnamed").name,
                source=f"{Path(path).name}, {report.scope}, SHA-256 {prompts.sha256[:16]}",
            )
            rows.append(row)
    return rows
