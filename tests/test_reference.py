"""Reference pages: they say what the options and the types of a report say."""

from __future__ import annotations

import re

from tests.conftest import ROOT
from tests.helpers.pages import module_of


def test_the_reference_pages_are_those_of_the_options() -> None:
    for name, text in module_of("scripts/reference.py").pages().items():
        stored = (ROOT / "docs" / "reference" / name).read_text()
        assert stored == text, f"docs/reference/{name} is old; run python scripts/reference.py"
        assert ": \n" not in text, "an option without a text"


def test_keys_of_a_report_without_a_text_are_defined_in_the_metrics() -> None:
    page = module_of("scripts/reference.py").report_page().replace("\n  ", " ")
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    named = [
        key
        for line in re.findall(r"^- (`[^:]+): as in \[metrics\]", page, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", line)
    ]
    assert "mean_n_draft" in named
    assert [key for key in named if f"`{key}`" not in metrics] == []
