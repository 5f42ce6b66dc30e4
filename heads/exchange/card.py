"""Model card (`README.md`) of an export: the serve command, measured figures, facts and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path

import torch
from huggingface_hub import EvalResult, ModelCardData

from ..artifact import Artifact
from ..files import JsonObject
from ..layout import dtype_name
from .engines import ENGINES
from .engines.engine import ExportRequest
from .exports import PAPERS, TITLES, also_read_by

HEADINGS = TITLES | {"draft_model": "Draft model"}


@dataclass(frozen=True)
class CardPrompts:
    """Prompts of a measurement, as the hub names a data set."""

    name: str
    """Name of the benchmark or of the file."""
    path: str = "custom"
    """Data set on the hub; custom if the prompts are from elsewhere."""
    config_name: str | None = None
    split: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class CardFigures:
    """Row of the card's table: one drafter in one setting of `draftsmith evaluate`."""

    drafts: str
    """Name of the drafter in the report, which includes how it drafted."""
    chain: bool
    """True if the drafts formed chains, false for trees."""
    temperature: float
    batch: int
    tau: float
    interval: tuple[float, float]
    """95% interval of tau: its lower and upper end; NaN where there are too few prompts."""
    survival: tuple[float, ...]
    """Shares of the rounds that accepted at least 1, 2, .. drafts."""
    prompts: int
    dtype: str
    """Type of the weights that were measured, without its module."""
    source: str
    """Name of the report's file, number of its prompts and the start of their SHA-256."""
    prompt_set: CardPrompts = CardPrompts("custom")
    """Prompts that were decoded."""


def card(
    artifact: Artifact,
    request: ExportRequest,
    serve: str,
    notes: Sequence[str],
    licence: str | None,
    measured: Sequence[CardFigures],
) -> str:
    """Return the text of the card, with the header that the Hugging Face hub reads.

    `serve` is the serve command, `notes` are remarks on the drafter in this engine. `licence` is
    the hub's name of one; None leaves it out, since nobody has said which it is.
    `measured` are the table's rows, possibly none.
    """
    kind, engine = artifact.drafter.kind, ENGINES[request.engine]
    stored = max(weight.dtype.itemsize for weight in artifact.drafter.parameters())
    verb = "Decode" if engine.in_process else "Serve"
    how = f"## {verb} with {engine.title}\n\n```bash\n{serve}\n```"
    if others := also_read_by(request.engine, artifact):
        how += (
            f"\n\nThe same files are read by: {', '.join(others)} (`draftsmith export --to ENGINE` "
            "prints the command of each)."
        )
    # Two that every drafter has, then the engine's.
    limits = [
        f"Trained for the weights of `{artifact.fingerprint.name}` named above; a fine-tune of it "
        "accepts less, and no engine says so.",
        "Acceptance depends on the text: measure on your own prompts.",
        *notes,
    ]
    sections = [
        f"---\n{_header(artifact, request, licence, measured).to_yaml()}\n---",
        f"# {HEADINGS[kind]} for {request.target}",
        "A drafter for speculative decoding: it guesses tokens that the target checks, so that "
        "the text stays the target's own.",
        how,
        f"## Measured\n\n{_table(request, measured, stored)}",
        f"## What it is\n\n{_facts(artifact, request)}",
        "## Limits\n\n" + "\n".join(f"- {line}" for line in limits),
    ]
    return "\n\n".join(sections) + "\n"


def _header(
    artifact: Artifact,
    request: ExportRequest,
    licence: str | None,
    measured: Sequence[CardFigures],
) -> ModelCardData:
    """Return the card's metadata: what the hub searches, links and shows beside the text."""
    kind, engine = artifact.drafter.kind, ENGINES[request.engine]
    in_transformers = engine.in_process or artifact.drafter.whole_model
    # The hub links `base_model` to a repository, so a local folder is not named there.
    on_hub = request.target.count("/") == 1 and not Path(request.target).exists()
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=row.prompt_set.path,
            dataset_name=row.prompt_set.name,
            dataset_config=row.prompt_set.config_name,
            dataset_split=row.prompt_set.split,
            dataset_revision=row.prompt_set.revision,
            dataset_args={"prompts": row.prompts},
            metric_type="tau",
            metric_name="tau (tokens emitted a round)",
            metric_value=round(row.tau, 3),
            metric_args={
                "drafts": row.drafts, "temperature": row.temperature, "batch": row.batch
            },
        )
        for row in _shown(request, measured)
        if isfinite(row.tau)
    ]  # fmt: skip
    return ModelCardData(
        license=licence,
        base_model=request.target if on_hub else None,
        datasets=artifact.provenance.get("data", {}).get("datasets") or None,
        library_name="transformers" if in_transformers else "draftsmith",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", kind.replace("_", "-"), *engine.card_tags],
        model_name=Path(request.out).resolve().name if results else None,
        eval_results=results or None,
    )


def _shown(request: ExportRequest, measured: Sequence[CardFigures]) -> list[CardFigures]:
    """Return the figures that hold for the engine: those of trees only if it drafts trees."""
    return [row for row in measured if row.chain or not ENGINES[request.engine].chains_only]


def _table(request: ExportRequest, measured: Sequence[CardFigures], stored: int) -> str:
    """Return the table of measured figures, in Markdown, with remarks on it.

    Figures of trees are left out, and counted, where the engine drafts chains. `stored` is
    the size in bytes of a weight of the drafter that is exported.
    """
    shown = _shown(request, measured)
    left_out = len(measured) - len(shown)
    lines = []
    if not measured:
        lines.append("Nothing yet: no report was given (`draftsmith export --report`).")
    if shown:
        lines += [
            "| prompts | drafts | T | batch | tau (95%) | accepted at least 1, 2, .. |",
            "|---|---|---|---|---|---|",
        ]
        for row in shown:
            rates = " ".join(f"{rate:.2f}".removeprefix("0") for rate in row.survival)
            low, high = row.interval
            interval = "" if isnan(low) else f" ({low:.2f}-{high:.2f})"  # few prompts give none
            tau = f"{row.tau:.2f}{interval}"
            lines.append(
                f"| {row.prompts} of {row.prompt_set.name} | {row.drafts} | {row.temperature:g} | "
                f"{row.batch} | {tau} | {rates} |"
            )
        lines += [
            "",
            "tau: tokens emitted a round, the bonus token among them; measured in draftsmith's own "
            "loop, not in the engine.",
        ]
        unrounded = []
        for row in shown:
            bytes_measured = min(stored, getattr(torch, row.dtype).itemsize)
            if bytes_measured > request.dtype.itemsize and row.drafts not in unrounded:
                unrounded.append(row.drafts)
        if unrounded:
            names = ", ".join(unrounded)
            lines.append(f"Measured before rounding to {dtype_name(request.dtype)}: {names}.")
        # Several rows come from one report: each source is named once, in the order of the rows.
        lines += [f"Source: {source}." for source in dict.fromkeys(row.source for row in shown)]
    if left_out:
        lines.append(
            f"Measurements with trees are left out ({left_out}): {request.engine} drafts chains."
        )
    if not shown and measured:
        lines.append(
            f"Measure what it will see: `draftsmith evaluate --like vllm:drafts={request.drafts}`."
        )
    return "\n".join(lines)


def _facts(artifact: Artifact, request: ExportRequest) -> str:
    """Return the table of facts about the drafter, in Markdown.

    Imported drafters and those of older versions lack parts of the provenance: their rows are left
    out.
    """
    target, drafter, provenance = artifact.fingerprint, artifact.drafter, artifact.provenance
    size = sum(parameter.numel() for parameter in drafter.parameters())
    kind = drafter.kind
    sizes = f"{target.num_layers} layers of width {target.hidden_size}"
    hashes = f"tokenizer {target.tokenizer_hash}, template {target.template_hash}"
    rows = [
        ("method", f"{HEADINGS[kind]} ({PAPERS[kind]})"),
        ("parameters", f"{size:,}, stored as {dtype_name(request.dtype)}"),
        ("target", f"`{target.name}`, {sizes}, vocabulary {target.vocab_size:,}"),
        ("target's weights", f"hash {target.weights_hash}; {hashes}"),
    ]
    if drafter.taps:
        rows.append(("taps", f"hidden states {list(drafter.taps)} (0: embeddings)"))
    rows += _data_facts(provenance)
    if (command := provenance.get("command")) is not None:
        rows.append(("command", f"`{command if isinstance(command, str) else ' '.join(command)}`"))
    if (source := provenance.get("imported_from")) is not None:
        rows.append(("imported from", f"`{source}`"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def _data_facts(provenance: JsonObject) -> list[tuple[str, str]]:
    """Return the rows about the training data and how much of it the draft vocabulary covers."""
    data: JsonObject = provenance.get("data", {})
    rows = [("training data", "not recorded")]
    if data:
        texts, tokens, sha = (data.get(key, "?") for key in ("documents", "tokens", "sha256"))
        rows = [("training data", f"{texts} texts, {tokens} tokens, SHA-256 {str(sha)[:16]}")]
    # A vocabulary that was cut at export replaced the one of the training.
    if (pruned := provenance.get("pruned")) is not None:
        coverage = f"covers {pruned['coverage']:.2%} of the text that it was cut by"
        rows.append(("draft vocabulary", f"cut after training; {coverage}"))
    elif data.get("vocabulary_coverage") is not None:
        coverage = f"covers {data['vocabulary_coverage']:.2%}"
        rows.append(("draft vocabulary", f"{coverage} of the target's tokens in that data"))
    return rows
