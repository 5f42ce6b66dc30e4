"""A method of another package, by its class or `module:Class`: the example in `scripts/`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import draftsmith
from draftsmith.commands import cli
from draftsmith.heads.artifact import Artifact
from draftsmith.heads.errors import UserError
from draftsmith.inference.api import load
from draftsmith.inference.evaluation.evaluate import origin
from draftsmith.inference.proposers.registry import check_spec, load_proposer, proposer_of
from draftsmith.inference.replay import replay, rounds_on_text
from draftsmith.inference.targets.stored import HeldOutPrompt
from draftsmith.inference.targets.target import Target
from draftsmith.train.data.config import Evaluation
from draftsmith.train.evaluation import write_text
from draftsmith.train.method import Method
from draftsmith.train.methods.registry import method_named
from tests.conftest import PYTHON, QUICKSTART, ROOT
from tests.helpers.trained import accepted_in_chains

METHOD = "scripts.learning_drafter:Gru"
PROMPTS = [
    "def add(a, b):", "def close(self):", "def read(path, mode):", "def items(self):",
    "def name(self, value):", "def is_open(self):", "def write(self, text):", "def size(self):",
]  # fmt: skip
EXAMPLE = ROOT / "scripts" / "learning_drafter.py"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start where a command of the documents is started."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def trained(quickstart: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drafter after a few steps on the target's replies to `PROMPTS`."""
    folder = tmp_path_factory.mktemp("own")
    replies = load(quickstart).generate(PROMPTS, 48)
    rows = [
        {"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": r.text}]}
        for p, r in zip(PROMPTS, replies, strict=True)
    ]
    for name, part in (("train", rows[:6]), ("held", rows[6:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sources = [{"path": folder / f"{name}.jsonl", "name": name} for name in ("train", "held")]
    options: dict[str, Any] = {
        "data": {"sources": sources, "held_out": {"by": "source", "sources": ["held"]}},
        "out": folder / "gru",
        "size": 64,
        "length": 3,
        "max_steps": 15,
        "rows_per_step": 1,
        "log_every": 1,
        "optim": {"lr": 1e-2},
        "evaluation": {"every": 1.0, "limit": 1, "max_new_tokens": 16},
    }
    best = draftsmith.train(METHOD, QUICKSTART, **options)
    assert draftsmith.train(method_named(METHOD).__class__, QUICKSTART, **options) == best
    return best


def test_example_drafter_loss_falls_and_replay_matches_decoding(trained: Path) -> None:
    """The loss falls, and replay and decoding agree."""
    metrics = (trained.parent / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < 0.7 * losses[0]
    last = lines[-1]
    assert last["tau_estimated"] == pytest.approx(last["tau_measured"]) and last["tau_measured"] > 1
    assert len(EXAMPLE.read_text().splitlines()) <= 120


def test_the_training_pass_and_drafting_agree(quickstart: Target, trained: Path) -> None:
    """Round by round, as a chain along a text of the target."""
    artifact = Artifact.load(trained, quickstart.fingerprint(), quickstart.embedding_and_head)
    asked = [{"role": "user", "content": PROMPTS[0]}]
    ids = quickstart.tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    text = write_text(quickstart, HeldOutPrompt(ids, 0), (), Evaluation(max_new_tokens=24))
    ids, method = torch.tensor(text.ids), method_named(METHOD)
    with torch.no_grad():
        outcome = method.teacher_forced(artifact.drafter, text.hidden, ids)
    accepted = accepted_in_chains(outcome, artifact.calibration["length"])
    drafted = rounds_on_text(proposer_of(artifact, width=1), ids, text.start, text.hidden)
    assert replay(accepted, text.start, len(ids)) == drafted and max(drafted) > 1


@pytest.mark.parametrize(
    "tree",
    [
        "",
        *(pytest.param(t, marks=pytest.mark.full) for t in (",width=1,length=5", ",nodes=9")),
    ],
)
def test_example_drafter_writes_the_targets_text(
    quickstart: Target, trained: Path, tree: str
) -> None:
    drafted = load(quickstart, f"{METHOD}:folder={trained}{tree}")
    plain = load(quickstart)
    for settings in ({}, {"temperature": 0.8, "seed": 3}):
        replies = drafted.generate(PROMPTS[:3], 16, **settings)
        expected = plain.generate(PROMPTS[:3], 16, **settings)
        assert [r.token_ids for r in replies] == [r.token_ids for r in expected]
        if not settings:
            assert sum(r.tau for r in replies) / 3 > 1.3
    drafted.generate(PROMPTS[:3], 8, temperature=1.0, rule="rejection")


def test_example_drafter_is_evaluated_in_one_table_with_others(
    quickstart: Target, trained: Path
) -> None:
    drafters = [f"{METHOD}:folder={trained}", "ngram"]
    report = draftsmith.evaluate(
        quickstart, drafters, PROMPTS[:2], max_new_tokens=12, baselines=False, repeats=1
    )
    found = report.settings[0].drafters
    assert {"Gru", "ngram"} <= found.keys() and (found["Gru"].tau_incl_bonus or 0) > 1
    assert len(str(origin(drafters[0]).sha256).split()) == 2  # of the module and of the weights


def test_a_folder_does_not_choose_what_code_runs(
    quickstart: Target, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer: Any = load_proposer(trained, quickstart, pytest.fail)
    assert proposer.drafter.kind == "gru"  # imported already
    monkeypatch.delitem(sys.modules, "scripts.learning_drafter")
    with pytest.raises(UserError, match=f"'{METHOD}' of another package.* name both, such as"):
        Artifact.load(trained, quickstart.fingerprint(), quickstart.embedding_and_head)
    assert "scripts.learning_drafter" not in sys.modules


def test_mistakes_are_refused_in_one_line(trained: Path, tmp_path: Path) -> None:
    eagle = ROOT / "scripts" / "quickstart" / "drafters" / "eagle3"
    for spec, why in (
        (METHOD, f"is trained; name its folder: {METHOD}:folder=RUN/best"),
        (f"{METHOD}:folder={eagle}", "is a drafter of method eagle, not scripts.learning_drafter"),
        (f"{METHOD}:folder={tmp_path}", "is not a drafter: it has no draftsmith.json"),
        (f"{METHOD}:folder={trained},size=3", "has no setting 'size'; there are: length"),
    ):
        with pytest.raises(UserError, match=why):
            check_spec(spec)

    class Partial(Method[Any, Any]):
        run_class = drafter_class = object  # type: ignore[assignment]

    for method, why in (
        ("no_such_module:Mine", "no_such_module:Mine cannot be imported"),
        ("scripts.my_drafter:LastSeen", "LastSeen is not a subclass of draftsmith.train.method"),
        (Partial, "test_learning_drafter:Partial lacks .*make_drafter"),
    ):
        with pytest.raises(UserError, match=why):
            method_named(method)


def test_train_command_accepts_options_of_external_method(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The options of the run are those of its own class; what is wrong ends in one line."""
    for words, code, said in (
        (["--lenght", "3"], 2, "did you mean --length?"),
        (["--help-all"], 0, "Size of the cell's state."),
    ):
        with pytest.raises(SystemExit) as ended:
            cli._train_main([METHOD, *words], "draftsmith train")
        printed = capsys.readouterr()
        assert ended.value.code == code and said in printed.out + printed.err


def test_an_error_in_the_training_code_names_its_place(tmp_path: Path, trained: Path) -> None:
    module = EXAMPLE.read_text().replace("states[rows]", "states[rows + 10**9]")
    (tmp_path / "broken_drafter.py").write_text(module)
    done = subprocess.run(
        [
            PYTHON, "-m", "draftsmith", "train", "broken_drafter:Gru", "--target", str(QUICKSTART),
            "--data", str(trained.parents[1] / "train.jsonl"), "--out", str(tmp_path / "run"),
            "--data.held-out.share", "0.5", "--max-steps", "1", "--size", "8",
        ],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    place = r"error: Gru failed in broken_drafter.py, line \d+: IndexError"
    assert re.search(place, done.stderr.splitlines()[-1]), done.stderr
