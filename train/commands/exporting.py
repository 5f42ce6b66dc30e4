"""`draftsmith export`: writes a drafter in the layout of a serving engine, and checks it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta, Struct

from ...heads.artifact import Artifact
from ...heads.documents import DocumentError, convert
from ...heads.errors import UserError
from ...heads.exchange.card import CardFigures, CardPrompts
from ...heads.exchange.engines import ENGINES
from ...heads.exchange.engines.engine import ExportRequest
from ...heads.exchange.exporter import WrittenExport, export, load_alone, with_vocabulary
from ...heads.exchange.exports import DRAFTS
from ...heads.exchange.hub import upload
from ...heads.files import check_output_folder, checksum, read_json
from ...heads.vocabulary import most_frequent
from ...inference.conversations.formats import conversation_of
from ...inference.conversations.messages import RowError
from ...inference.conversations.notes import Notes
from ...inference.conversations.rows import LeftOut
from ...inference.conversations.sources import rows_of
from ...inference.drafters import parse_spec, trained_kind
from ...inference.evaluation.results import NAN, read_measured
from ...inference.settings import BadRows, RowSource
from ...inference.targets.stored import StoredTarget, embedding_and_head_in
from ...inference.targets.target import TargetSource
from ..data.templates import encode
from ..methods.vocabulary import special_ids
from .options import ExportOptions as Options

Requests = Annotated[int, Meta(ge=1, le=1 << 20)]


def run(options: Options) -> None:
    """Export the drafter, and print the command that serves it.

    Raises `UserError` for everything that cannot be done. The folder is then left as it was, except
    where it was written and only the upload failed.
    """
    written = write_export(options)
    done = "replaced the earlier export in" if written.replaced else "wrote"
    print(
        f"{done} {options.out}, read it back, and compared every tensor and a forward pass: equal\n"
    )
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
    artifact, head = load_alone(options.drafter), None
    if Path(options.out).resolve() == Path(options.drafter).resolve():
        raise UserError(f"{options.out} is the drafter itself; name another --out")
    if options.target is not None:
        cpu = torch.device("cpu")
        target = embedding_and_head_in(options.target, cpu, "auto", StoredTarget)
        artifact, head = beside_target(artifact, target, options), target.head_weight
    drafts = drafts_for(artifact, options.drafts)
    by_load: tuple[tuple[int, int, int], ...] = ()
    if options.by_load is not None:
        by_load = read_by_load(options, artifact.drafter.most_drafts)
        drafts = max(number for *_, number in by_load)
    if options.dtype == "auto":
        dtype = next(p.dtype for p in artifact.drafter.parameters() if p.is_floating_point())
    else:
        dtype = getattr(torch, options.dtype)
    serve_as = options.serve_as or artifact.fingerprint.name
    request = ExportRequest(options.to, options.out, serve_as, drafts, dtype, by_load)
    # The figures of a card are those of the very weights that are exported.
    if options.draft_vocab_size is not None and options.report:
        raise UserError(
            "the report measured the drafter with more tokens; evaluate the export and give the "
            "report of that"
        )
    card_figures = []
    for path in options.report:
        card_figures += read_card_figures(path, options.drafter, artifact.method)
    return export(artifact, request, options.license, card_figures, head)


def drafts_for(artifact: Artifact, asked: int | None) -> int:
    """Return the drafts per round of the serve command: `asked`, or the drafter's default.

    Raises `UserError` for more drafts than the drafter has.
    """
    most = artifact.drafter.most_drafts
    if asked is not None and most is not None and asked > most:
        raise UserError(f"--drafts {asked} is more than the {most} drafts that the drafter has")
    return asked or most or DRAFTS


class LoadRow(Struct):
    """Numbers of drafts for one context, see `simulate.by_load`."""

    context: int
    ranges: Annotated[
        list[tuple[Requests, Requests, Annotated[int, Meta(ge=0, le=1 << 10)]]], Meta(min_length=1)
    ]


class Simulated(Struct):
    """JSON of `draftsmith simulate`, as far as it is read here."""

    by_load: Annotated[list[LoadRow], Meta(min_length=1)]


def read_by_load(options: Options, most: int | None) -> tuple[tuple[int, int, int], ...]:
    """Return the numbers of drafts by requests at once that the options name, at most `most`.

    Raises `UserError` for an engine that takes none, and for a file without them, of several
    contexts, or by which nothing would ever be drafted.
    """
    if not ENGINES[options.to].takes_by_load:
        able = ", ".join(name for name, engine in ENGINES.items() if engine.takes_by_load)
        raise UserError(f"{options.to} takes one number of drafts: --drafts; --by-load: {able}")
    path = options.by_load or ""
    try:
        rows = convert(read_json(Path(path)), Simulated).by_load
    except DocumentError as error:
        raise UserError(
            f"{path} has no drafts by load ({error}); write it with draftsmith simulate --gpu GPU "
            "--params N --context N --json FILE"
        ) from error
    if len(rows) > 1:
        contexts = ", ".join(str(row.context) for row in rows)
        raise UserError(f"{path} is of several contexts ({contexts}); simulate one: --context N")
    ranges = [(first, last, min(drafts, most or drafts)) for first, last, drafts in rows[0].ranges]
    if not any(drafts for *_, drafts in ranges):
        raise UserError(f"by {path} nothing is gained from drafting at any load")
    starts = [1, *(last + 1 for _, last, _ in ranges[:-1])]
    ends = zip(ranges, starts, strict=True)
    if any(first != start or last < first for (first, last, _), start in ends):
        raise UserError(f"{path}: the ranges of by_load do not follow one another from 1 on")
    return tuple(ranges)


def beside_target(artifact: Artifact, target: TargetSource, options: Options) -> Artifact:
    """Return the artifact with the draft vocabulary that the options ask for.

    Raises `UserError` for a drafter of another target, for a vocabulary of a size that it cannot
    have, and for replies in which the target wrote nothing.
    """
    fingerprint = artifact.fingerprint
    if errors := fingerprint.errors_against(target.fingerprint(), artifact.drafter.bound_to):
        raise UserError(
            f"{options.drafter} was trained for another target ({fingerprint.name}): "
            f"{'; '.join(errors)}"
        )
    for message in fingerprint.warnings_against(target.fingerprint()):
        print(f"warning: {message}")
    if options.draft_vocab_size is None:
        return artifact
    sources = [options.source(path) for path in options.vocab_data]
    counts, always = token_counts(target, sources, options.bad_rows), special_ids(target)
    ranked = counts.double()
    # A drafter with a draft vocabulary has no output row for any other token. Counts are at least
    # 0, so with -1 those tokens come last.
    if (current_ids := getattr(artifact.drafter, "draft_vocab_ids", None)) is not None:
        if options.draft_vocab_size > len(current_ids):
            raise UserError(
                f"the drafter proposes {len(current_ids)} tokens already; ask for fewer than that"
            )
        ranked = torch.full_like(ranked, -1.0).scatter(0, current_ids, ranked[current_ids])
        always &= set(current_ids.tolist())
    if not len(always) <= options.draft_vocab_size <= target.vocab_size:
        raise UserError(
            f"--draft-vocab-size {options.draft_vocab_size} must lie between the {len(always)} "
            "special tokens and the target's "
            f"{target.vocab_size}"
        )
    pruned = with_vocabulary(
        artifact, most_frequent(ranked, options.draft_vocab_size, always), counts
    )
    # Not noted where the vocabulary is as large as before: then nothing was cut.
    coverage = pruned.provenance.get("pruned", {}).get("coverage", 1.0)
    print(
        f"draft vocabulary: {options.draft_vocab_size:,} tokens, which are {coverage:.2%} of "
        "those that the target wrote"
    )
    return pruned


def token_counts(
    target: TargetSource, sources: Sequence[RowSource], bad_rows: BadRows
) -> torch.Tensor:
    """Return how often the target wrote each token `[V]` in the replies of `sources`.

    A malformed row is treated as `bad_rows` says. Raises `UserError` if no token was written, or if
    the tokens are not the target's.
    """
    counts = Counter[int]()
    for source in sources:
        left_out, notes = LeftOut(source.path, bad_rows), Notes()
        for name, row in rows_of(source):
            try:
                sequences = encode(
                    conversation_of(row), target.tokenizer, target.eos_ids, target.name, {}, notes
                )
            except RowError as error:
                left_out.add(name, error)
                continue
            for sequence in sequences:
                counts.update(compress(sequence.token_ids, sequence.mask))
        notes.report(source.path)
    named = ", ".join(map(str, sources))
    if not counts:
        raise UserError(f"{named}: no token that the target wrote; give replies that it wrote")
    if max(counts) >= target.vocab_size:
        raise UserError(f"{named} were written with another tokenizer than the target's")
    return torch.tensor([counts[token] for token in range(target.vocab_size)])


def read_card_figures(path: str, drafter: str, method: str) -> list[CardFigures]:
    """Return the figures that the report at `path` has of this very drafter.

    There are figures for each setting of the report and each tree of the drafter. Raises
    `UserError` if the report is about other drafters.
    """
    report = read_measured(path)
    # A drafter is recognised by its weights: names and folders change.
    weights_hash = " ".join(map(checksum, sorted(Path(drafter).glob("*.safetensors"))))
    listed = report.drafters
    dtype = report.dtype or "float32"  # the type of targets on a CPU, where a report names none
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise UserError(f"{path}: {dtype!r} is no type of a target; evaluate again")
    names = {name for name, origin in listed.items() if origin.sha256 == weights_hash}
    if not names:
        with_weights = [name for name, origin in listed.items() if origin.sha256]
        measured = ", ".join(with_weights) or "none with weights"
        raise UserError(
            f"{path} is not about {drafter}: the drafters that it measured ({measured}) have "
            "other weights"
        )
    specs = {origin.spec for name, origin in listed.items() if name in names}
    prompt_set = CardPrompts(Path(report.prompt_set.path or "unnamed").name)
    if (benchmark := report.prompt_set.benchmark) is not None:
        prompt_set = CardPrompts(benchmark.name)
    source = f"{Path(path).name}, {report.scope}, SHA-256 {report.prompt_set.sha256[:16]}"
    method_kind = trained_kind(method)
    default = {"width": 1 if method_kind is not None and method_kind.chains else None}
    rows = []
    for setting in report.settings:
        for name, found in setting.drafters.items():
            kind = found.kind or name
            # By its name as it is; by its spec where it was tuned, or drafted as an engine does. A
            # lookup with the drafter is no part of the export.
            if not (name in names or found.spec in specs) or "lookup=" in kind:
                continue
            low, high = known(found.tau_ci95 or (None, None))
            # Later settings win: the method's default, the spec's, and those of a profile.
            named = parse_spec(found.spec or "")[1] | parse_spec(kind)[1]
            chosen = default | named | (found.setting or {})
            row = CardFigures(
                drafts=kind,
                chain=chosen["width"] == 1,
                temperature=setting.temperature,
                batch=setting.batch,
                tau=known([found.tau_incl_bonus])[0],
                interval=(low, high),
                survival=known(found.survival[:8]),
                prompts=found.requests,
                dtype=named.get("dtype", dtype),
                source=source,
                prompt_set=prompt_set,
            )
            rows.append(row)
    return rows


def known(values: Sequence[float | None]) -> tuple[float, ...]:
    """Return the figures of a report, NaN for those that it does not have."""
    return tuple(NAN if value is None else value for value in values)
