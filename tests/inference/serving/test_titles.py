"""Titles that the page shows: of the target, of each drafter, and what a model card says."""

from __future__ import annotations

from pathlib import Path

import httpx

from draftsmith.inference.drafters import load_proposer
from draftsmith.inference.serving.titles import drafter_title, target_title, writes_code
from draftsmith.inference.targets.target import Target
from tests.inference.serving.conftest import EAGLE3, Running


def test_models_have_titles_for_people(server: Running) -> None:
    listed = httpx.get(f"{server.address}/v1/models").json()["data"]
    titles = {entry["id"]: entry["title"] for entry in listed}
    assert titles == {
        "target": "quickstart/target",
        "target:eagle3": "EAGLE-3, chains of 4",
        "target:ngram": "ngram",
        "target:plain": "plain",
    }
    assert all(entry["code"] for entry in listed)  # its card has the tag


def test_titles(tmp_path: Path, quickstart: Target) -> None:
    for path, title in {
        "Qwen/Qwen3-0.6B": "Qwen3-0.6B",
        "/data/smollm2/final": "smollm2/final",
        "runs/mine/checkpoints/step-30": "mine/checkpoints/step-30",
        "target": "target",
    }.items():
        assert target_title(path) == title
    for spec, title in {
        f"{EAGLE3}:lookup=3": "EAGLE-3, trees of 26 nodes, lookup=3",
        f"{EAGLE3}:length=3,width=1": "EAGLE-3, chains of 3",
        f"{EAGLE3}:length=3,nodes=8": "EAGLE-3, trees of 8 nodes, length=3",
        "ngram:length=4": "ngram, length=4",
    }.items():
        assert drafter_title(load_proposer(spec, quickstart, print)) == title
    for card, code in {
        "---\ntags:\n- code\n---\n": True,
        "---\ntags: code-review\n---\n": False,
        "---\ntags: [chat\n---\n": False,
        "words": False,
    }.items():
        (tmp_path / "README.md").write_text(card)
        assert writes_code(str(tmp_path)) == code
    assert not writes_code("Qwen/Qwen3-0.6B")
