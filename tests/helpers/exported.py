"""What tests of exports in real engines share: prompts, lengths, and our own counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.artifact import Artifact
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.evaluation.evaluate import Options, run
from tests.conftest import QUICKSTART, ROOT

DRAFTS, REPLY, PROMPTS = 3, 96, 24
"""Drafts a round, but of block drafters, of which a whole block is drafted where nothing else is
said."""
Counts = dict[str, Any]


def unseen_functions(folder: Path) -> Path:
    """A file of functions that neither target nor drafters have seen."""
    path = folder / "prompts.jsonl"
    script = [
        sys.executable,
        str(ROOT / "scripts/quickstart/functions.py"),
        "--split",
        "test",
        "--count",
        str(PROMPTS),
    ]
    subprocess.run([*script, "--out", str(path)], check=True, cwd=ROOT)
    return path


def selected(request: pytest.FixtureRequest) -> set[str]:
    """The cases that are to run: those that -k leaves out need no export, and no counts of ours."""
    found = (getattr(item, "callspec", None) for item in request.session.items)
    return {call.params["name"] for call in found if call is not None and "name" in call.params}


def drafts_of(artifact: Artifact | None) -> int:
    """Drafts a round."""
    return (artifact.drafter.most_drafts if artifact is not None else None) or DRAFTS


def counts_like_each(
    engine: str,
    drafters: Mapping[str, tuple[str, int]],
    prompts_file: Path,
    folder: Path,
    target: Path = QUICKSTART,
) -> dict[str, Counts]:
    """What `evaluate --like ENGINE:drafts=N` says of each (folder, N), by its name."""
    found: dict[str, Counts] = {}
    for drafts in {drafts for _, drafts in drafters.values()}:
        names = [name for name, (_, number) in drafters.items() if number == drafts]
        counts = counts_like(
            engine, [drafters[name][0] for name in names], prompts_file, folder, drafts, target
        )
        found |= dict(zip(names, counts, strict=True))
    return found


def counts_like(
    engine: str,
    drafters: Sequence[str],
    prompts_file: Path,
    folder: Path,
    drafts: int = DRAFTS,
    target: Path = QUICKSTART,
) -> list[Counts]:
    """What `evaluate --like ENGINE:drafts=3` says of each drafter."""
    config = TargetConfig(str(target), dtype="float32", device="cpu")
    given: dict[str, Any] = {
        "baselines": False,
        "repeats": 1,
        "max_new_tokens": REPLY,
        "like": [f"{engine}:drafts={drafts}"],
    }
    given["limit"] = PROMPTS
    run(
        Options(
            config,
            str(prompts_file),
            drafter=list(drafters),
            json=str(folder / "out.json"),
            **given,
        )
    )
    (setting,) = json.loads((folder / "out.json").read_text())["settings"]
    return [found for name, found in setting["drafters"].items() if f" as in {engine}" in name]
