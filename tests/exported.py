"""What tests of exports in real engines share: prompts, lengths, and our own counts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.inference.evaluate import Options, run
from draftsmith.inference.target import TargetConfig

from tests.conftest import QUICKSTART, ROOT

DRAFTS, REPLY, PROMPTS = 3, 96, 24
Counts = dict[str, Any]


def unseen_functions(folder: Path) -> Path:
    """A file of functions that neither target nor drafters have seen."""
    path = folder / "prompts.jsonl"
    script = [sys.executable, str(ROOT / "scripts/quickstart/functions.py"), "--split", "test", "--count", str(PROMPTS)]
    subprocess.run([*script, "--out", str(path)], check=True, cwd=ROOT)
    return path


def counts_like(engine: str, drafters: Sequence[str], prompts_file: Path, folder: Path) -> list[Counts]:
    """What `evaluate --like ENGINE:drafts=3` says of each drafter."""
    config = TargetConfig(str(QUICKSTART), dtype="float32", device="cpu")
    given: dict[str, Any] = {"baselines": False, "repeats": 1, "max_new_tokens": REPLY, "like": [f"{engine}:drafts={DRAFTS}"]}
    given["limit"] = PROMPTS
    run(Options(config, str(prompts_file), drafter=list(drafters), json=str(folder / "out.json"), **given))
    (setting,) = json.loads((folder / "out.json").read_text())["settings"]
    return [found for name, found in setting["drafters"].items() if f" as in {engine}" in name]
