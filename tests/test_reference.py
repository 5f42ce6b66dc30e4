"""Reference pages: they say what the options say."""

from __future__ import annotations

from tests.conftest import ROOT
from tests.pages import module_of


def test_the_reference_pages_are_those_of_the_options() -> None:
    for name, text in module_of("scripts/reference.py").pages().items():
        stored = (ROOT / "docs" / "reference" / name).read_text()
        assert stored == text, f"docs/reference/{name} is old; run python scripts/reference.py"
        assert ": \n" not in text, "an option without a text"
