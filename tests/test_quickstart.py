"""Data of `scripts/quickstart` that is made from source text, and what its last step shows."""

from __future__ import annotations

import io
import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from draftsmith.inference.base.console import OutputConsole
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.evaluation.drafter_names import distinct_labels
from draftsmith.inference.evaluation.evaluate import measured
from draftsmith.inference.evaluation.options import EvaluateOptions
from draftsmith.inference.evaluation.report.command import gather, html, markdown
from draftsmith.inference.evaluation.tables import show
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.reports import Seen

NAMES = ["medusa", "eagle", "ngram", "eagle + lookup"]
"""Rows of the first table that a newcomer sees, besides plain decoding."""

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


def drafters_of_the_script(run: str) -> list[str]:
    """The drafters that step 5 of the script evaluates, with `run` in place of its folder."""
    script = (ROOT / "scripts/quickstart.sh").read_text().partition("draftsmith evaluate")[2]
    return re.findall(r"--drafter (\S+)", script.partition("--json")[0].replace("$run", run))


def test_the_script_evaluates_each_drafter_as_trained_and_the_lookup_apart() -> None:
    specs = drafters_of_the_script("runs/quickstart")
    assert [*distinct_labels(specs).values()] == NAMES
    assert [spec.partition(":")[2] for spec in specs] == ["", "", "", "lookup=3"]


def test_table_json_and_page_of_one_evaluation_say_the_same(
    quickstart: Target, tmp_path: Path
) -> None:
    for method, drafter in (("medusa", "medusa"), ("eagle", "eagle3")):
        (tmp_path / method).mkdir()
        (tmp_path / method / "best").symlink_to(QUICKSTART.parent / "drafters" / drafter)
    prompts, written = tmp_path / "prompts.jsonl", tmp_path / "evaluation.json"
    rows = [{"prompt": f"def {name}(self, other):\n"} for name in ("__eq__", "__add__")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = EvaluateOptions(
        target=TargetConfig(str(QUICKSTART)), prompts=str(prompts),
        drafter=drafters_of_the_script(str(tmp_path)), baselines=False, repeats=1,
        max_new_tokens=8, json=str(written),
    )  # fmt: skip
    report = measured(options, quickstart)
    # whatever is measured here, one drafter loses and some replies loop
    (setting,) = report.settings
    setting.drafters["medusa"].speedup, setting.plain.loop_share = 0.92, 0.5
    written.write_text(json.dumps(report.to_json()))
    terminal = OutputConsole(width=120, file=io.StringIO())
    show(report, terminal)
    assert isinstance(terminal.file, io.StringIO)
    shown, found = terminal.file.getvalue(), gather([str(written)])
    page = html(found).decode()
    cells = {row[0]: row for row in Seen(page).rows if row}
    in_json = json.loads(written.read_text())["settings"][0]["drafters"]
    assert [*in_json] == ["plain", *NAMES]
    for name in NAMES:
        tau, gain = in_json[name]["tau_incl_bonus"], in_json[name]["speedup"]
        assert re.search(rf" {re.escape(name)} +{gain:.2f}x +{tau:.2f} ", shown), shown
        assert {f"{tau:.2f}", f"{gain:.2f}x"} <= {*cells[name]}, name
    said = " ".join(shown.split())
    for document in (said, page, markdown(found)):
        assert "2 prompts; " in document and "50% of the replies loop" in document
        assert "slower than plain decoding: medusa (0.92x)" in document
