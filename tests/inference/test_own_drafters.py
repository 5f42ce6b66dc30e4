"""Drafters of other packages: by module and class, and as objects."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import draftsmith
from draftsmith.heads.errors import UserError
from draftsmith.inference.api import load
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.evaluation import tune
from draftsmith.inference.evaluation.drafter_names import distinct_labels
from draftsmith.inference.evaluation.evaluate import origin
from draftsmith.inference.evaluation.options import TuneOptions
from draftsmith.inference.proposers.registry import check_spec, load_proposer
from draftsmith.inference.rounds.tree import DraftTree, TreeShape
from draftsmith.inference.targets.target import Target
from tests.conftest import ROOT

PROMPTS = ["def add(a, b):", "def close(self):", "def read(path, mode):"]
MODULE = "scripts.my_drafter"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start where a command of the documents is started."""
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("spec", [f"{MODULE}:LastSeen:length=6", f"{MODULE}:OneMore"])
def test_own_drafters_match_target_text(quickstart: Target, spec: str) -> None:
    decoder, plain = load(quickstart, spec), load(quickstart)
    for settings in (
        {},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 1.0, "rule": "rejection"},
    ):
        replies = decoder.generate(PROMPTS, 24, **settings)
        if settings.get("rule") is None:
            expected = plain.generate(PROMPTS, 24, **settings)
            assert [r.token_ids for r in replies] == [r.token_ids for r in expected]
    drafted = [
        round_.drafted or 0 for reply in decoder.generate(PROMPTS, 24) for round_ in reply.rounds
    ]
    assert max(drafted) == (6 if "LastSeen" in spec else 1)


def test_example_drafter_guesses_the_last_continuation() -> None:
    sys.path.insert(0, str(ROOT))
    from scripts.my_drafter import guess

    assert guess([1, 2, 3, 4, 2], 2) == [3, 4]
    assert guess([1, 2, 3, 2, 5, 2], 9) == [5, 2]
    assert guess([7, 8], 3) == [] and guess([7], 3) == []


def test_own_drafters_are_evaluated_by_command_and_python(
    quickstart: Target, tmp_path: Path
) -> None:
    """One table with a class by its name, another with settings, and an object."""
    prompts = tmp_path / "p.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Mine(draftsmith.Proposer):
        max_drafted = 0

        def propose(self, root: Any, draws: Any) -> Any:
            from draftsmith.inference.rounds.tree import DraftTree, TreeShape

            return DraftTree(root[:, None], TreeShape.chain(0))

    report = draftsmith.evaluate(
        quickstart, [f"{MODULE}:LastSeen", f"{MODULE}:LastSeen:length=1", Mine()], prompts,
        max_new_tokens=48, repeats=1, baselines=False, json=tmp_path / "r.json",
    )  # fmt: skip
    drafters = report.settings[0].drafters
    assert {*drafters} == {"plain", "LastSeen", "LastSeen:length=1", "Mine"}
    assert all(found.equal_to_ar == 3 for name, found in drafters.items() if name != "plain")
    assert drafters["LastSeen"].tau_incl_bonus >= drafters["LastSeen:length=1"].tau_incl_bonus > 1  # type: ignore[operator]
    assert drafters["Mine"].tau_incl_bonus == 1
    assert report.drafters["Mine"].spec.endswith(
        ":test_own_drafters_are_evaluated_by_command_and_python.<locals>.Mine"
    )


def test_own_drafters_are_named_by_class_and_settings() -> None:
    specs = [f"{MODULE}:LastSeen", f"{MODULE}:LastSeen:length=3", f"{MODULE}:LastSeen:name=mine"]
    assert [*distinct_labels(specs).values()] == ["LastSeen", "LastSeen:length=3", "mine"]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("no_such_module:Mine", "no_such_module:Mine cannot be imported: No module named"),
        ("no_such_module.py:Mine", r"; did you mean no_such_module:Mine\?"),
        (
            "scripts.learning_drafter:GruProposer",
            "missing a required argument: 'artifact'",
        ),
        (f"{MODULE}:Absent", "has no class Absent; did you mean"),
        ("scripts/my_drafter.py:LastSeen", "or module:Class of your own; settings follow a colon"),
        (f"{MODULE}:LastSeen:tests", "settings follow a colon: ngram:length=8"),
        (f"{MODULE}:LastSeen:width=3", "unexpected keyword argument 'width'; it takes length"),
        (f"{MODULE}:guess", "missing a required argument"),
        (f"{MODULE}:NO_NODE", "is nothing that can be called"),
        (f"{MODULE}:TreeShape:parents=3", r"cannot be made: TypeError: .* \(--debug shows where\)"),
        (f"{MODULE}:OneMore:file=a/b.safetensors", "cannot be made: FileNotFoundError"),
        (f"{MODULE}:OneMore:target=3", "target is given by draftsmith; leave it out"),
        ("ngram:length", "settings are written key=value, such as ngram:length=8"),
        ("json:JSONEncoder", "makes a JSONEncoder; it has to be a subclass of draftsmith.Proposer"),
        ("ngrams", "did you mean ngram"),
        (f"{MODULE}:LastSeen:name=a b", "is not a valid name"),
    ],
)
def test_invalid_drafter_specs_are_refused_in_one_line(
    quickstart: Target, spec: str, why: str
) -> None:
    with pytest.raises(UserError, match=why) as caught:
        check_spec(spec)
        load_proposer(spec, quickstart, pytest.fail)
    assert "\n" not in str(caught.value)


def drafts(tree: Callable[[Tensor], Any]) -> type[draftsmith.Proposer]:
    """A class whose trees are `tree` of the roots."""

    class Mine(draftsmith.Proposer):
        max_drafted = 2

        def propose(self, root: Tensor, draws: Any) -> Any:
            return tree(root)

    return Mine


def chain(*columns: Tensor) -> DraftTree:
    return DraftTree(torch.stack(columns, dim=1), TreeShape.chain(len(columns) - 1))


def with_parents(root: Tensor, parents: list[int]) -> DraftTree:
    tokens = torch.stack([root] * 3, dim=1)
    return DraftTree(tokens, parents=torch.tensor([parents] * len(root)), levels=2)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (
            lambda root: root.absent,
            r"failed in .*own_drafters.py, line \d+: AttributeError: ",
        ),
        (lambda root: root[:, None], "propose returned Tensor; it has to return a DraftTree"),
        (lambda root: chain(root + 1, root), "node 0 of its tree is not the root"),
        (lambda root: chain(*[root] * 4), "it drafted 3 tokens; its max_drafted is 2"),
        (lambda root: chain(root, root * 0 + 10**6), "it drafted token 1000000; the target has "),
        (lambda root: chain(root, root * 0 - 2), "it drafted token -2"),
        (lambda root: chain(root[:1]), r"int64 \[1, 1\] on cpu, not int64 \[2, nodes\] on cpu"),
        (lambda root: chain(root.float()), r"tokens of its tree are float32 \[2, 1\]"),
        (lambda root: with_parents(root, [0, 2, 0]), "a node of its tree does not come after its"),
        (lambda root: with_parents(root, [0, 0]), r"parents of its tree are int64 \[2, 2\]"),
    ],
)
def test_a_tree_that_cannot_be_verified_is_refused(
    quickstart: Target, tree: Callable[[Tensor], Any], why: str
) -> None:
    with pytest.raises(UserError, match=f"Mine.*{why}") as caught:
        load(quickstart, drafts(tree)()).generate(PROMPTS[:2], 8)
    assert "\n" not in str(caught.value)


def test_mistakes_in_other_methods_name_them(quickstart: Target) -> None:
    class Silent(draftsmith.Proposer):
        max_drafted = 1

    with pytest.raises(UserError, match="drafter Silent has no method propose"):
        load(quickstart, Silent())
    mine = drafts(chain)
    mine.max_drafted = "2"  # type: ignore[assignment]
    with pytest.raises(UserError, match="max_drafted of drafter Mine is '2', not a whole number"):
        load(quickstart, mine())

    class ReadsFar(drafts(chain)):  # type: ignore[misc]
        taps = (0, 99)

    with pytest.raises(UserError, match="drafter ReadsFar reads tap 99; the target has taps 0 to"):
        load(quickstart, ReadsFar())

    class Forgets(drafts(chain)):  # type: ignore[misc]
        def commit(self, accepted: Any) -> None:
            raise KeyError("state")

    with pytest.raises(UserError, match=r"Forgets failed in .*, line \d+: KeyError: .*--debug"):
        load(quickstart, Forgets()).generate(PROMPTS[:2], 8)
    with pytest.raises(UserError, match=r"a name or a draftsmith.Proposer, not int"):
        load(quickstart, 3)  # type: ignore[arg-type]


def test_copies_of_a_proposer_keep_separate_state(quickstart: Target) -> None:
    """A server decodes with copies of one proposer."""
    prompts = quickstart.tokenizer(PROMPTS).input_ids
    one = load_proposer(f"{MODULE}:LastSeen", quickstart, pytest.fail)
    other = one.clone()
    one.prefill(SimpleNamespace(tokens=prompts[:1]))  # type: ignore[arg-type]
    other.prefill(SimpleNamespace(tokens=prompts[1:]))  # type: ignore[arg-type]
    assert (len(vars(one)["_texts"]), len(vars(other)["_texts"])) == (1, 2)


def test_changed_code_and_weights_are_another_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that was stopped goes on only with the same hashes."""
    monkeypatch.chdir(tmp_path)
    module, weights = tmp_path / "changing_drafter.py", tmp_path / "w.bin"
    module.write_text("class Mine: pass\n")
    weights.write_bytes(b"1")
    found = [origin("changing_drafter:Mine:file=w.bin").sha256]
    weights.write_bytes(b"2")
    found.append(origin("changing_drafter:Mine:file=w.bin").sha256)
    module.write_text("class Mine: more = 1\n")
    found.append(origin("changing_drafter:Mine:file=w.bin").sha256)
    assert None not in found and len({*found}) == 3


def test_tune_and_profiles_refuse_own_drafters(quickstart: Target, tmp_path: Path) -> None:
    spec = f"{MODULE}:LastSeen:length=6"
    with pytest.raises(UserError, match="knows the trees of draftsmith's own drafters only"):
        load_proposer(spec, quickstart, pytest.fail, {"length": 2})
    (tmp_path / "p.jsonl").write_text("{}")
    options = TuneOptions(
        TargetConfig("t"), str(tmp_path / "p.jsonl"), str(tmp_path / "o.json"), [spec]
    )
    with pytest.raises(UserError, match="tune knows the trees of draftsmith's own"):
        tune.check(options)


def test_an_object_of_another_kind_is_refused(quickstart: Target, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):"}\n')
    with pytest.raises(UserError, match="drafter is a folder, a name or a proposer, not object"):
        draftsmith.evaluate(quickstart, object(), prompts)  # type: ignore[arg-type]
