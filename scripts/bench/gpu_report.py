"""Figures of the GPU benchmark: written down one by one, and as a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Report:
    """Figures and checks of one stage, appended to a file as they are known."""

    def __init__(self, path: Path, stage: str) -> None:
        self._path, self._stage = path, stage

    def figure(self, name: str, value: Any, expected: str = "") -> None:
        """Note a figure. `expected`: what was predicted without a GPU."""
        self._add({"figure": name, "value": value, "expected": expected})
        print(f"  {name}: {value}" + (f"  (expected: {expected})" if expected else ""), flush=True)

    def check(self, name: str, holds: bool, detail: str = "") -> None:
        """Note whether something holds that has to."""
        self._add({"check": name, "holds": bool(holds), "detail": detail})
        print(f"  {'passed' if holds else 'FAILED'}: {name}  {detail}", flush=True)

    def _add(self, entry: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"stage": self._stage, **entry}) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(folder: Path, entries: list[dict[str, Any]], times: dict[str, float]) -> None:
    """Write all entries as JSON and as Markdown tables, one for each stage."""
    (folder / "gpu.json").write_text(json.dumps({"seconds": times, "entries": entries}, indent=1))
    lines = ["# One GPU", "", *(f"- {line}" for line in answers(entries)), ""]
    for stage, seconds in times.items():
        lines += [f"## {stage} ({seconds:.0f} s)", "", "| | | expected |", "|---|---|---|"]
        for entry in entries:
            if entry["stage"] != stage:
                continue
            if "figure" in entry:
                cells = [entry["figure"], shown(entry["value"]), entry["expected"]]
            else:
                holds = "passed" if entry["holds"] else "**FAILED**"
                cells = [entry["check"], f"{holds} {entry['detail']}", ""]
            lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
        lines.append("")
    (folder / "gpu.md").write_text("\n".join(lines))


def answers(entries: list[dict[str, Any]]) -> list[str]:
    """Return what a reader asks first, a line each, as far as it was measured."""
    figures = {
        (entry["stage"], entry["figure"]): entry["value"] for entry in entries if "figure" in entry
    }
    floor = figures.get(("graph", "ms to read the weights once"))
    rows = {
        name: row
        for (stage, name), row in figures.items()
        if stage == "graph" and isinstance(row, dict) and name.startswith("context")
    }
    lines = []
    for name, row in rows.items():
        busy = f", {row['idle share']:.0%} of it idle" if "idle share" in row else ""
        lines.append(
            f"{name}: a round takes {row['round ms']:.2f} ms{busy}, the weights alone {floor:.2f} "
            f"ms ({floor / row['round ms']:.0%} of bandwidth)"
        )
    trees = {name: row["times plain"] for name, row in rows.items() if "nodes" in name}
    if trees:
        best = max(trees, key=lambda name: trees[name])
        lines.append(f"best tree: {best}, {trees[best]:.2f} times plain decoding as one graph")
    for (stage, name), row in figures.items():
        if stage == "training" and isinstance(row, dict):
            memory = row.get("GiB above resident")
            above = "" if memory is None else f", {memory:.1f} GiB above what is resident"
            lines.append(f"training {name}: {row['tokens/s']:.0f} tokens/s{above}")
    failed = [entry["check"] for entry in entries if entry.get("holds") is False]
    lines.append(f"failed checks: {', '.join(failed) or 'none'}")
    return lines


def shown(value: Any) -> str:
    """Return a value as text; the parts of a dict one after another."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
