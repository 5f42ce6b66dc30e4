"""Model card (`README.md`) of an export: the serve command, measured figures, facts and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCardData

from ..artifact import Artifact
from ..layout import dtype_name
from .engines import ENGINES
from .engines.engine import ExportRequest
from .exports import TITLES

HEADINGS = TITLES | {"draft_model": "Draft model"}


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
    interval: tuple[float, float] | None
    """95% interval of tau: its lower and upper end; None where there are too few prompts."""
    survival: tuple[float, ...]
    """Shares of the rounds that accepted at least 1, 2, .. drafts."""
    prompts: int
    prompt_set: str
    """Name of the benchmark or of the file with the prompts."""
    source: str
    """Name of the report's file, number of its prompts and the start of their SHA-256."""


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
    # The hub links `base_model` to a repository, so a local folder is not named there.
    on_hub = request.target.count("/") == 1 and not Path(request.target).exists()
    header = ModelCardData(
        license=licence,
        base_model=request.target if on_hub else None,
        datasets=artifact.provenance.get("data", {}).get("datasets") or None,
        library_name="transformers"
        if engine.in_process or artifact.drafter.whole_model
        else "draftsmith",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", kind.replace("_", "-"), *engine.card_tags],
    )
    # Two that every drafter has, then the engine's.
    limits = [
        f"Trained for the weights of `{artifact.fingerprint.name}` named above; a fine-tune of it "
        "accepts less, and no engine says so.",
        "Acceptance depends on the text: measure on your own prompts.",
        *notes,
    ]
    verb = "Decode" if engine.in_process else "Serve"
    sections = [
        f"---\n{header.to_yaml()}\n---",
        f"# {HEADINGS[kind]} for {request.target}",
        "A drafter for speculative decoding: it guesses tokens that the target checks, so that "
        "the text stays the target's own.",
        f"## {verb} with {engine.title}\n\n```bash\n{serve}\n```",
        f"## Measured\n\n{_table(request, measured)}",
        f"## What it is\n\n{_facts(artifact, request)}",
        "## Limits\n\n" + "\n".join(f"- {line}" for line in limits),
    ]
    return "\n\n".join(sections) + "\n"


def _table(request: ExportRequest, measured: Sequence[CardFigures]) -> str:
    """Return the table of measured figures, in Markdown, with remarks on it.

    Figures of trees are left out, and counted, where the engine drafts chains.
    """
    shown = [row for row in measured if row.chain or not ENGINES[request.engine].chains_only]
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
            tau = f"{row.tau:.2f}"
            if row.interval is not None:
                tau += f" ({row.interval[0]:.2f}-{row.interval[1]:.2f})"
            lines.append(
                f"| {row.prompts} of {row.prompt_set} | {row.drafts} | {row.temperature:g} | "
                f"{row.batch} | {tau} | {rates} |"
            )
        lines += [
            "",
            "tau: tokens emitted a round, the bonus token among them; measured in draftsmith's own "
            "loop, not in the engine.",
        ]
        # Several rows come from one report: each source is named once, in the order of the rows.
        lines += [f"Source: {source}." for source in dict.fromkeys(row.source for row in shown)]
    if len(shown) < len(measured):
        lines.append(
            f"Measurements with trees are left out ({len(measured) - len(shown)}): "
            f"{request.engine} drafts chains; measure what it will see with "
            f"`draftsmith evaluate --like vllm:drafts={request.drafts}`."
        )
    return "\n".join(lines)


def _facts(artifact: Artifact, request: ExportRequest) -> str:
    """Return the table of facts about the drafter, in Markdown.

    Imported drafters lack parts of the provenance: their rows are left out.
    """
    target, drafter, provenance = artifact.fingerprint, artifact.drafter, artifact.provenance
    size = sum(parameter.numel() for parameter in drafter.parameters())
    sizes = f"{target.num_layers} layers of width {target.hidden_size}"
    hashes = f"tokenizer {target.tokenizer_hash}, template {target.template_hash}"
    rows = [
        ("method", HEADINGS[drafter.kind]),
        ("parameters", f"{size:,}, stored as {dtype_name(request.dtype)}"),
        ("target", f"`{target.name}`, {sizes}, vocabulary {target.vocab_size:,}"),
        ("target's weights", f"hash {target.weights_hash}; {hashes}"),
    ]
    if drafter.taps:
        rows.append(("taps", f"hidden states {list(drafter.taps)} (0: embeddings)"))
    data = provenance.get("data", {})
    texts, tokens, sha = (data.get(key, "?") for key in ("documents", "tokens", "sha256"))
    trained_on = f"{texts} texts, {tokens} tokens, SHA-256 {str(sha)[:16]}"
    rows.append(("training data", trained_on if data else "not recorded"))
    if (coverage := data.get("vocabulary_coverage")) is not None:
        covered = f"covers {coverage:.2%} of the target's tokens in that data"
        rows.append(("draft vocabulary", covered))
    if (command := provenance.get("command")) is not None:
        rows.append(("command", f"`{command if isinstance(command, str) else ' '.join(command)}`"))
    if (source := provenance.get("imported_from")) is not None:
        rows.append(("imported from", f"`{source}`"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])
