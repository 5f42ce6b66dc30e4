"""The page that stands in an export: what it is, how it is served, what it was measured to accept,
and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..artifact import Artifact
from .exports import CHAINS_ONLY, TITLES, ExportRequest, Recipe, kind_of

NAMES = TITLES | {"draft_model": "Draft model"}
PAPERS = {
    "eagle1": "arXiv 2401.15077",
    "eagle3": "arXiv 2503.01840",
    "dflash": "arXiv 2602.06036",
    "dspark": "arXiv 2607.05147",
    "medusa": "arXiv 2401.10774",
    "draft_model": "arXiv 2302.01318",
}


@dataclass(frozen=True)
class CardFigures:
    """A line of the table: one drafter in one setting of `draftsmith evaluate`."""

    drafts: str
    """Its name in the report, which says how it drafted."""
    chain: bool
    temperature: float
    batch: int
    tau: float
    interval: tuple[float, float]
    survival: tuple[float, ...]
    prompts: int
    source: str
    """The report and a hash of its prompts."""


def card(
    artifact: Artifact,
    order: ExportRequest,
    recipe: Recipe,
    licence: str,
    measured: Sequence[CardFigures],
) -> str:
    """The README, with the header that the hub reads."""
    kind = kind_of(artifact.drafter)
    rounded = any(
        weight.dtype.itemsize > order.dtype.itemsize for weight in artifact.drafter.parameters()
    )
    header = [
        "---",
        f"license: {licence}",
        *(
            [f"base_model: {order.target}"]
            if order.target.count("/") == 1 and not Path(order.target).exists()
            else []
        ),
        "library_name: draftsmith",
        "pipeline_tag: text-generation",
        "tags:",
        "- speculative-decoding",
        f"- {kind.replace('_', '-')}",
        "---",
    ]
    title = f"# {NAMES[kind]} for {order.target}"
    parts = [
        "\n".join(header),
        title,
        "A drafter for speculative decoding: it guesses tokens that the target checks, so that "
        "the text stays the target's own.",
        f"## Serve with {order.engine}\n\n```\n{recipe.serve(order, artifact.drafter)}\n```",
        _others(recipe, order),
        f"## Measured\n\n{_table(order, measured, rounded)}",
        f"## What it is\n\n{_facts(artifact, order)}",
        f"## Limits\n\n{_limits(artifact, recipe)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _others(recipe: Recipe, order: ExportRequest) -> str:
    others = [engine for engine in recipe.also if engine != order.engine]
    if not others:
        return ""
    return (
        f"The same files are read by: {', '.join(others)} (`draftsmith export --to ENGINE` prints "
        "the command of each)."
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(order: ExportRequest, measured: Sequence[CardFigures], rounded: bool) -> str:
    """Chains only where the engine drafts chains; the rest is said to be left out."""
    shown = [row for row in measured if row.chain or order.engine not in CHAINS_ONLY]
    left_out = len(measured) - len(shown)
    lines = []
    if not measured:
        lines.append("Nothing yet: no report was given (`draftsmith export --report`).")
    if shown:
        lines += [
            "| drafts | T | batch | tau (95%) | accepted at least 1, 2, .. | prompts |",
            "|---|---|---|---|---|---|",
        ]
        for row in shown:
            low, high = row.interval
            rates = " ".join(f"{rate:.2f}".removeprefix("0") for rate in row.survival)
            tau = f"{row.tau:.2f} ({low:.2f}-{high:.2f})"
            lines.append(
                f"| {row.drafts} | {row.temperature:g} | {row.batch} | {tau} | {rates} | "
                f"{row.prompts} |"
            )
        lines += [
            "",
            "tau: tokens kept a round, the target's own among them; measured in draftsmith's own "
            "loop, not in the engine.",
        ]
        lines += (
            [f"Measured before the weights were rounded to {_name(order.dtype)}."]
            if rounded
            else []
        )
        lines += [f"Source: {source}." for source in dict.fromkeys(row.source for row in shown)]
    if left_out:
        lines.append(
            f"{left_out} measurement(s) with trees are left out: {order.engine} drafts chains."
        )
    if not shown and measured:
        lines.append(
            f"Measure what it will see: `draftsmith evaluate --like vllm:drafts={order.drafts}`."
        )
    return "\n".join(lines)


def _facts(artifact: Artifact, order: ExportRequest) -> str:
    target, drafter = artifact.fingerprint, artifact.drafter
    data: dict[str, Any] = artifact.provenance.get("data", {})
    size = sum(parameter.numel() for parameter in drafter.parameters())
    kind = kind_of(drafter)
    rows = [
        ("method", f"{NAMES[kind]} ({PAPERS[kind]})"),
        ("parameters", f"{size:,}, stored as {_name(order.dtype)}"),
        (
            "target",
            f"`{target.name}`, {target.num_layers} layers of width {target.hidden_size}, "
            f"vocabulary {target.vocab_size:,}",
        ),
        (
            "target's weights",
            f"hash {target.weights_hash}; tokenizer {target.tokenizer_hash}, template "
            f"{target.template_hash}",
        ),
    ]
    if drafter.taps:
        rows.append(("taps", f"hidden states {list(drafter.taps)} (0: embeddings)"))
    if data:
        texts, tokens, sha = (data.get(key, "?") for key in ("documents", "tokens", "sha256"))
        rows.append(("training data", f"{texts} texts, {tokens} tokens, SHA-256 {str(sha)[:16]}"))
    else:
        rows.append(("training data", "not recorded"))
    if (pruned := artifact.provenance.get("pruned")) is not None:
        rows.append(
            (
                "draft vocabulary",
                f"cut after training; covers {pruned['coverage']:.2%} of the text that it was cut "
                "by",
            )
        )
    elif data.get("vocabulary_coverage") is not None:
        rows.append(
            (
                "draft vocabulary",
                f"covers {data['vocabulary_coverage']:.2%} of the target's tokens in that data",
            )
        )
    if (command := artifact.provenance.get("command")) is not None:
        rows.append(("command", f"`{command if isinstance(command, str) else ' '.join(command)}`"))
    if (source := artifact.provenance.get("imported_from")) is not None:
        rows.append(("imported from", f"`{source}`"))
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def _limits(artifact: Artifact, recipe: Recipe) -> str:
    name = artifact.fingerprint.name
    lines = [
        f"Trained for the weights of `{name}` named above; a fine-tune of it accepts less, and no "
        "engine says so.",
        "Acceptance depends on the text: measure on your own prompts.",
        *recipe.notes,
    ]
    return "\n".join(f"- {line}" for line in lines)
