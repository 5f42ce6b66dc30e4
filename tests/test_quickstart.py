"""Data of `scripts/quickstart` that is made from source text."""

from __future__ import annotations

from importlib import import_module

import pytest

from tests.conftest import ROOT

SOURCE = '''\
def double(x, *, times=1):
    """Return x, doubled so many times as
    `times` says.
    """
    for _ in range(times):
        x = 2 * x
    return x


def undocumented(x):
    return x


def short(x):
    """Return x."""
    return x
'''


def test_a_docstring_becomes_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/quickstart"))
    functions, fine_tune = import_module("functions"), import_module("fine_tune")
    found = list(functions.functions_in(SOURCE, "some.module"))
    assert [function.name for function in found] == ["double", "undocumented", "short"]
    (only,) = fine_tune.reversed_tasks(found)
    assert (only.module, only.name) == ("some.module", "double")
    assert only.prompt == (
        "def double(x, *, times=1):\n    for _ in range(times):\n        x = 2 * x\n    return x"
    )
    assert only.body == "Return x, doubled so many times as\n`times` says."
