"""Models as the page shows them."""

from __future__ import annotations

from pathlib import Path

import httpx

from draftsmith.inference.serving.app import writes_code
from tests.inference.serving.conftest import Running


def test_models_have_titles_for_people(server: Running) -> None:
    listed = httpx.get(f"{server.address}/v1/models").json()["data"]
    titles = {entry["id"]: entry["title"] for entry in listed}
    assert titles == {
        "target": "quickstart/target",
        "target:eagle3": "eagle3",
        "target:ngram": "ngram",
        "target:plain": "plain",
    }
    assert all(entry["code"] for entry in listed)  # its card has the tag
    assert listed[0]["about"].startswith("llama, ")


def test_a_card_says_whether_a_model_writes_code(tmp_path: Path) -> None:
    for card, code in {
        "---\ntags:\n- code\n---\n": True,
        "---\ntags: code-review\n---\n": False,
        "---\ntags: [chat\n---\n": False,
        "words": False,
    }.items():
        (tmp_path / "README.md").write_text(card)
        assert writes_code(str(tmp_path)) == code
    assert not writes_code("Qwen/Qwen3-0.6B")
