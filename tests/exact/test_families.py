"""Every family of causal language models that transformers has: decoded as its `generate` does, or
refused in one line.

docs/model-families.md has the list, which the full counts compare with what they find.
"""

from __future__ import annotations

import re

import pytest
import transformers

from tests.conftest import ROOT
from tests.helpers.families import FAMILIES, outcome

SAMPLE = (
    "deepseek_v3", "gemma3_text", "gemma3n_text", "gpt_neo", "gpt_oss", "ministral3",
    "modernbert-decoder", "phi3", "qwen3", "qwen3_next",
)  # fmt: skip
"""Latent attention, windows, several streams of states, slots in place of positions, sinks, a scale
by position, an unknown form, and recurrent layers."""

COMPOSED = ("qwen3_5", "qwen3_5_moe")
"""Loaded as their text models; tests/commands/test_mtp.py decodes small ones."""

LISTED = {
    "equal (fused)": "Decoded by the fused forward pass",
    "equal": "Decoded by transformers' forward pass",
    "equal (no trained drafters)": "Decoded, but without trained drafters",
    "refused": "Refused on loading",
    "not constructible": "Not tried",
}


def listed() -> dict[str, set[str]]:
    """Return the families of each outcome in docs/model-families.md."""
    text = (ROOT / "docs" / "model-families.md").read_text()
    found = {}
    for kind, title in LISTED.items():
        section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert section is not None, title
        found[kind] = set(re.findall(r"`([^`]+)`", section[1]))
    return found


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.full)
        for kind in FAMILIES
        if kind not in COMPOSED
    ],
)
def test_a_family_is_decoded_as_generate_does_or_refused_in_one_line(kind: str) -> None:
    found = outcome(kind)
    assert "\n" not in found and not found.startswith("different"), found
    assert kind in listed()[found.partition(":")[0]], found


@pytest.mark.skipif(not transformers.__version__.startswith("5.23."), reason="the list is of 5.23")
def test_every_family_is_listed_once() -> None:
    names = sorted(name for kind in listed().values() for name in kind)
    assert names == FAMILIES
