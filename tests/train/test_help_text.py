"""Help pages at the widths of usual terminals."""

from __future__ import annotations

from typing import Any

import pytest
from draftsmith.inference.evaluation import options as evaluation_options
from draftsmith.train import options as train_options
from draftsmith.train.command_line.help_text import help_page, pairs_together, wrapped
from draftsmith.train.commands.cli import VERBS
from draftsmith.train.method import METHODS, method_named

CLASSES: dict[str, Any] = {
    f"train {name}": lambda name=name: method_named(name).run_class for name in METHODS
}
for verb, (_, name, _) in VERBS.items():
    module = train_options if hasattr(train_options, name) else evaluation_options
    CLASSES[verb] = lambda module=module, name=name: getattr(module, name)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("verb", CLASSES)
def test_a_page_fits_and_parts_nothing_that_belongs_together(
    monkeypatch: pytest.MonkeyPatch, verb: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for everything in (False, True):
        page = help_page(CLASSES[verb](), f"draftsmith {verb}", everything)
        lines = page.splitlines()
        assert max(map(len, lines)) <= columns
        assert all(line.count("`") % 2 == 0 for line in lines), "a piece of code is broken"
        assert "\0" not in page and not [line for line in lines if line.startswith(" `")]
        for line in lines:
            if line.endswith(" \\"):
                last = line.removesuffix(" \\").split()[-1]
                assert not last.startswith("--") or last == "--no-baselines", line
                assert line.count("'") % 2 == 0, line


def test_an_option_stays_with_its_value() -> None:
    command = "draftsmith generate --prompt 'def add(a, b):' --chat --prompts - --seed 5"
    assert wrapped(pairs_together(command), 31, "", "  ", " \\") == [
        "draftsmith generate \\",
        "  --prompt 'def add(a, b):' \\",
        "  --chat --prompts - --seed 5",
    ]


def test_a_switch_that_is_on_says_what_is_lost_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = help_page(evaluation_options.EvaluateOptions, "draftsmith evaluate", False)
    assert "--no-baselines        Without this option: measure ngram" in page
    assert "--json FILE " in page
    assert "(1e9)" in help_page(train_options.PlanOptions, "draftsmith data plan", False)
