"""llama.cpp: its tools, and what they count."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.exported import (
    DRAFTS,
    REPLY,
    Counts,
    unseen_functions,
)

pytestmark = [
    pytest.mark.peers,
    pytest.mark.llamacpp,
    pytest.mark.skipif(
        "LLAMACPP_PYTHON" not in os.environ,
        reason="LLAMACPP_PYTHON names no Python that has llama.cpp",
    ),
]

TOOLS = ROOT / "scripts" / "llamacpp"

DRAFT_MODEL = QUICKSTART.parent / "draft_model"

ALIKE = 22

"""Of the 24 replies of llama.cpp's plain decoding, those that have to be ours."""

TIE = 1e-3


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unseen_functions(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def prompts(quickstart: Target, prompts_file: Path) -> list[list[int]]:
    return [
        prompt.token_ids
        for prompt in read_prompts(prompts_file, quickstart.tokenizer, quickstart.name)
    ]


def expected(rounds: list[list[int]], most: int) -> Counts:
    """Counts by llama.cpp of a reply of which our loop says (drafted, accepted, emitted) of each
    round.

    It drafts no more than can be emitted before the limit, one token being the target's own; ours
    always drafts a whole chain. Drafts behind an end token count as accepted in both. The first
    token is the prefill's, and emitted already.
    """
    emitted, drafted, accepted_of = 1, 0, []
    for _, accepted, tokens in rounds:
        drafts = min(most, REPLY - emitted - 1)
        emitted += tokens
        if drafts > 0:
            drafted += drafts
            accepted_of.append(min(accepted, drafts))
    places = [sum(accepted >= depth for accepted in accepted_of) for depth in range(1, most + 1)]
    return {
        "drafts": len(accepted_of),
        "drafted": drafted,
        "accepted": sum(accepted_of),
        "by_position": places,
    }


def tool(script: str, *arguments: Any, folder: Path) -> subprocess.CompletedProcess[str]:
    """One of scripts/llamacpp, with the Python that has llama.cpp, in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }
    command = [
        str(Path(os.environ["LLAMACPP_PYTHON"]).absolute()),
        str(TOOLS / script),
        *map(str, arguments),
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)


def count(
    folder: Path, prompts: list[list[int]], options: list[str], texts: list[str]
) -> subprocess.CompletedProcess[str]:
    """Have a llama-server reply to these prompts; what it counts is in result.json."""
    job = {"options": options, "prompts": prompts, "max_tokens": REPLY, "texts": texts}
    (folder / "job.json").write_text(json.dumps(job))
    return tool("counts.py", "job.json", "result.json", folder=folder)


def result_of(folder: Path, done: subprocess.CompletedProcess[str], drafts: int = DRAFTS) -> Counts:
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "result.json").read_text())
    for counts in found["counts"]:
        counts["by_position"] += [0] * (drafts - len(counts["by_position"]))
    return found


def gap(target: Target, prompt: list[int], one: list[int], other: list[int]) -> float:
    """How far apart the target's logits of two replies are where these part."""
    place = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    logits = target.model(torch.tensor([prompt + one[:place]])).logits[0, -1]
    return float((logits[one[place]] - logits[other[place]]).abs())
