"""The best checkpoint of a run over several sources is the best on all of them."""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import textwrap
import tokenize
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.inference.decode import generate_one
from draftsmith.inference.metrics import emitted_per_round, tau
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.config import Evaluation
from draftsmith.train.data.tables import load
from draftsmith.train.evaluation import PLAIN_PROMPT, held_out_prompts
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.rows import write
from tests.helpers.training import train

TOKENS = 24


def texts_of(kind: str) -> list[str]:
    """Return 120 texts of one kind: functions of the library, paragraphs of the documents, sums."""
    draw = random.Random(0)
    if kind == "code":
        found = []
        for module in (argparse, ast, inspect, random, textwrap, tokenize):
            text = inspect.getsource(module)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    found.append(ast.get_source_segment(text, node) or "")
    elif kind == "prose":
        files = sorted((ROOT / "docs").glob("*.md"))
        found = [part for file in files for part in file.read_text().split("\n\n")]
        found = [part for part in found if not part.startswith(("|", "```", "#"))]
    else:
        pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(1200)]
        sums = [f"{a} + {b} = {a + b}" for a, b in pairs]
        found = ["\n".join(sums[i : i + 10]) for i in range(0, 1200, 10)]
    found = [text for text in found if 100 < len(text) < 600]
    draw.shuffle(found)
    return found[:120]


@pytest.mark.full
def test_the_best_checkpoint_is_chosen_by_all_sources(tmp_path: Path, quickstart: Target) -> None:
    """Heads learn code, then prose and sums. By the first rows, which are code, the second run's
    first checkpoint is its best; by prompts of all sources it is a later one, which has the higher
    tau on all held-out prompts."""
    kinds = ("code", "prose", "sums")
    for kind in kinds:
        write(tmp_path / f"{kind}.jsonl", [{"text": text} for text in texts_of(kind)])

    def config(name: str, learned: tuple[str, ...], **more: Any) -> Path:
        sources = []
        for kind in kinds:
            weight = 1.0 if kind in learned else 1e-9
            path = str(tmp_path / f"{kind}.jsonl")
            sources.append({"path": path, "name": kind, "weight": weight})
        facts = {
            "out": str(tmp_path / name),
            "target": {"path": str(QUICKSTART), "device": "cpu"},
            "data": {
                "sources": sources, "held_out": {"by": "row", "share": 0.3}, "max_length": 256,
                "max_lost_share": 0.2, "decontaminate": False,
            },
            "heads": {"num_heads": 3}, "epochs": 40, "max_steps": 24, "rows_per_step": 4,
            "optim": {"lr": 3e-3},
            "evaluation": {"every": 8, "limit": 12, "max_new_tokens": TOKENS, "tree_nodes": 8},
            "checkpoints": {"every": 8, "keep": 9},
        }  # fmt: skip
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(facts | more))
        return path

    train(config("one", ("code",), max_steps=80))
    # At this rate the heads forget code on every machine.
    more = {"optim": {"lr": 1e-2}, "init_from": str(tmp_path / "one" / "best")}
    train(config("two", ("prose", "sums"), **more))
    tables = load(tmp_path / "two" / "data")
    documents = [tables.held_out.document(i)[0] for i in range(12)]
    first = [ids[: min(PLAIN_PROMPT, len(ids) // 2)].tolist() for ids in documents]
    drawn = [prompt.token_ids for prompt in held_out_prompts(tables, 12, 512)]
    whole = [prompt.token_ids for prompt in held_out_prompts(tables, 10**6, 512)]

    def judged(step: Path, prompts: list[list[int]]) -> float:
        proposer = load_proposer(step / "drafter", quickstart, lambda message: None)
        greedy = Evaluation().sampling
        found = [generate_one(quickstart, proposer, p, TOKENS, sampling=greedy) for p in prompts]
        return tau([emitted_per_round(generation) for generation in found])

    steps = sorted((tmp_path / "two" / "checkpoints").iterdir())
    old = max(steps, key=lambda step: judged(step, first))
    new = max(steps, key=lambda step: judged(step, drawn))
    assert (tmp_path / "two" / "best").resolve().parent == new.resolve()
    assert old == steps[0] != new
    assert judged(new, whole) > 1.05 * judged(old, whole)
