"""Reference pages: they say what the options say."""

from __future__ import annotations

import importlib.util

from tests.conftest import ROOT


def test_the_reference_pages_are_those_of_the_options() -> None:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "reference.py")
    assert spec is not None and spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    for name, text in reference.pages().items():
        stored = (ROOT / "docs" / "reference" / name).read_text()
        assert stored == text, f"docs/reference/{name} is old; run python scripts/reference.py"
        assert ": \n" not in text, "an option without a text"
