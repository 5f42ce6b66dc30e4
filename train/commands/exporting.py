"""`draftsmith export`: a drafter as a serving engine loads it, checked before it is written."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi

from ...heads.artifact import OWN_FILE, Artifact
from ...heads.errors import UserError
from ...heads.exchange.card import CardFigures
from ...heads.exchange.exporter import export, load_alone, with_vocabulary
from ...heads.exchange.exports import BLOCKS, DRAFTS, ExportRequest
from ...heads.files import check_output_folder, checksum
from ...heads.vocabulary import most_frequent
from ...inference.conversations.formats import RowError, conversation_of
from ...inference.conversations.rows import LeftOut
from ...inference.conversations.sources import rows_of
from ...inference.evaluation.compare import load_measured
from ...inference.proposer import parse_spec
from ...inference.settings import BadRows
from ...inference.target import Target
from ..data.templates import encode
from ..inputs import embedding_and_head_in
from ..methods.eagle import special_ids
from ..options import ExportOptions as Options


def run(options: Options) -> None:
    check_output_folder(options.out, "--out")
    artifact, head = load_alone(options.drafter), None
    if Path(options.out).resolve() == Path(options.drafter).resolve():
        raise UserError(f"{options.out} is the drafter itself; name another --out")
    if options.target is not None:
        target = embedding_and_head_in(options.target, torch.device("cpu"), "auto")
        artifact, head = beside_target(artifact, target, options), target.head_weight
    drafts = drafts_for(artifact, options.drafts)
    dtype = stored_dtype(artifact) if options.dtype == "auto" else getattr(torch, options.dtype)
    order = ExportRequest(
        options.to, options.out, options.serve_as or artifact.fingerprint.name, drafts, dtype
    )
    pruned = options.draft_vocab_size is not None
    if pruned and options.report:
        raise UserError(
            "the report measured the drafter with more tokens; evaluate the export and give its "
            "report another time"
        )
    rows = [
        row for path in options.report for row in figures(path, options.drafter, artifact.method)
    ]
    again = Path(options.out, OWN_FILE).is_file()
    recipe = export(artifact, order, options.license, rows, head)
    done = "replaced the earlier export in" if again else "wrote"
    print(
        f"{done} {options.out}, read it back, and compared every tensor and a forward pass: equal\n"
    )
    for note in recipe.notes:
        print(f"note: {note}")
    print(f"\n{recipe.serve(order, artifact.drafter)}")
    if options.push is not None:
        push(options.out, options.push)


def drafts_for(artifact: Artifact, asked: int | None) -> int:
    """Drafts a round. Raises `UserError` for more than there are heads, or drafts of a block."""
    drafter = artifact.drafter
    if artifact.method == "medusa":
        most, what = drafter.config.num_heads, "heads that there are"
    elif artifact.method in BLOCKS:
        most, what = drafter.drafts, "drafts of a block"
    else:
        return asked or DRAFTS
    if asked is not None and asked > most:
        raise UserError(f"--drafts {asked} is more than the {most} {what}")
    return asked or most


def stored_dtype(artifact: Artifact) -> torch.dtype:
    return next(p.dtype for p in artifact.drafter.parameters() if p.is_floating_point())


def beside_target(artifact: Artifact, target: Target, options: Options) -> Artifact:
    """The artifact held against its target, with the vocabulary that the options ask for."""
    known = artifact.fingerprint
    if errors := known.errors_against(target.fingerprint(), artifact.drafter.bound_to):
        raise UserError(
            f"{options.drafter} was trained for another target ({known.name}): {'; '.join(errors)}"
        )
    for message in known.warnings_against(target.fingerprint()):
        print(f"warning: {message}")
    if options.draft_vocab_size is None:
        return artifact
    counts, always = token_counts(target, options.vocab_data, options.bad_rows), special_ids(target)
    ranked = counts.double()
    # it cannot learn tokens that it never had
    if (kept := getattr(artifact.drafter, "kept", None)) is not None:
        if options.draft_vocab_size > len(kept):
            raise UserError(
                f"the drafter proposes {len(kept)} tokens already; ask for fewer than that"
            )
        ranked = torch.full_like(ranked, -1.0).scatter(0, kept, ranked[kept])
        always &= set(kept.tolist())
    if not len(always) <= options.draft_vocab_size <= target.vocab_size:
        raise UserError(
            f"--draft-vocab-size {options.draft_vocab_size} must lie between the {len(always)} "
            "special tokens and the target's "
            f"{target.vocab_size}"
        )
    found = with_vocabulary(
        artifact, most_frequent(ranked, options.draft_vocab_size, always), counts
    )
    coverage = found.provenance.get("pruned", {}).get("coverage", 1.0)
    print(
        f"draft vocabulary: {options.draft_vocab_size:,} tokens, which are {coverage:.2%} of "
        "those that the target wrote"
    )
    return found


def token_counts(target: Target, sources: list[str], bad_rows: BadRows) -> torch.Tensor:
    """How often each token `[V]` was written by the target in these replies. Raises `UserError` if
    none was."""
    counts = Counter[int]()
    for source in sources:
        left_out = LeftOut(source, bad_rows)
        for name, row in rows_of(source):
            try:
                if isinstance(row, RowError):
                    raise row
                for text in encode(
                    conversation_of(row), target.tokenizer, target.eos_ids, target.name, {}
                ):
                    counts.update(
                        token
                        for token, written in zip(text.token_ids, text.mask, strict=True)
                        if written
                    )
            except RowError as error:
                left_out.add(name, error)
    if not counts:
        raise UserError(
            f"{', '.join(sources)}: no token that the target wrote; give replies that it wrote"
        )
    ids = torch.tensor(list(counts), dtype=torch.long)
    if int(ids.max()) >= target.vocab_size:
        raise UserError(
            f"{', '.join(sources)} were written with another tokenizer than the target's"
        )
    return torch.zeros(target.vocab_size, dtype=torch.long).scatter(
        0, ids, torch.tensor(list(counts.values()))
    )


def figures(path: str, drafter: str, method: str) -> list[CardFigures]:
    """What a report says of this very drafter. Raises `UserError` if it is about others."""
    report = load_measured(path)
    ours = " ".join(map(checksum, sorted(Path(drafter).glob("*.safetensors"))))
    known: dict[str, Any] = report.get("drafters", {})
    names = {name for name, facts in known.items() if facts.get("sha256") == ours}
    if not names:
        measured = (
            ", ".join(name for name, facts in known.items() if facts.get("sha256"))
            or "none with weights"
        )
        raise UserError(
            f"{path} is not about {drafter}: the drafters that it measured ({measured}) have "
            "other weights"
        )
    specs = {facts["spec"] for name, facts in known.items() if name in names}
    prompts = report["prompt_set"]
    source = f"{Path(path).name}, {prompts['prompts']} prompts, SHA-256 {prompts['sha256'][:16]}"
    rows = []
    for setting in report["settings"]:
        for name, found in setting["drafters"].items():
            if name in names or found.get("spec") in specs:  # as it is, tuned, or as in an engine
                rows.append(_figure(name, method, found, setting, source))
    return rows


def _figure(
    name: str, method: str, found: dict[str, Any], setting: dict[str, Any], source: str
) -> CardFigures:
    low, high = found["tau_ci95"]
    chosen = (
        {"width": 1 if method == "draft_model" else None}
        | parse_spec(name)[1]
        | found.get("setting", {})
    )
    return CardFigures(
        drafts=name,
        chain=chosen["width"] == 1 or chosen.get("tree") == "chain",
        temperature=setting["temperature"],
        batch=setting["batch"],
        tau=found["tau_incl_bonus"],
        interval=(low, high),
        survival=tuple(found["survival"][:8]),
        prompts=found["requests"],
        source=source,
    )


def push(folder: str, name: str) -> None:
    """Upload to the hub. Raises `UserError`."""
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        found = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="draftsmith export"
        )
    except Exception as error:  # of whichever HTTP library there is
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{folder} was written, but the hub does not take it as {name} ({reason}); log in "
            "with hf auth login"
        ) from error
    print(f"\npushed: {found}")
