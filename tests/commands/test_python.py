"""`import draftsmith`: quick to import, and its functions do what the commands do."""

from __future__ import annotations

import inspect
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

import draftsmith
from draftsmith.command_line.parse import options_from, parse
from draftsmith.commands import python as functions
from draftsmith.commands.exporting import ExportOptions
from draftsmith.commands.extract import ExtractOptions
from draftsmith.inference.conversations.rows import rows_in_memory, write_rows
from draftsmith.inference.evaluation.intervals import tau_interval
from draftsmith.inference.evaluation.options import EvaluateOptions
from draftsmith.train import evaluation
from draftsmith.train.config import TargetConfig
from draftsmith.train.methods.registry import method_named
from tests.conftest import QUICKSTART
from tests.helpers.command_line import run_cli
from tests.helpers.trained import questions

Run = method_named("eagle").run_class
EAGLE3 = QUICKSTART.parent / "drafters" / "eagle3"


def write_prompts(path: Path, count: int) -> None:
    rows = [{"messages": [{"role": "user", "content": w}]} for w in questions("test", count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_import_is_quick_and_brings_no_torch() -> None:
    code = "import sys, draftsmith\nprint(draftsmith.__version__, 'torch' in sys.modules)\n"
    # A machine that only decodes need not have what reads data sets.
    code += "draftsmith.load\nprint({'datasets', 'wandb'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["False", "set()"]
    usage = "import resource; u = resource.getrusage(resource.RUSAGE_SELF); "
    usage += "print(u.ru_utime + u.ru_stime)"
    seconds = [
        float(
            subprocess.run(
                [sys.executable, "-c", f"import draftsmith; {usage}"],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(3)
    ]
    assert min(seconds) < 0.3, seconds


def test_public_names_exist_and_unknown_names_raise() -> None:
    for name in draftsmith.__all__:
        assert getattr(draftsmith, name) is not None and name in dir(draftsmith)
    with pytest.raises(AttributeError, match="no attribute 'loda'"):
        draftsmith.loda  # type: ignore[attr-defined]  # noqa: B018
    assert callable(draftsmith.train) and draftsmith.train.__name__ == "draftsmith.train"


def test_options_from_python_are_those_of_a_command_line() -> None:
    run = options_from(
        Run,
        {
            "target": QUICKSTART,
            "data": ["a.jsonl", {"path": "b.jsonl", "weight": 0.5}],
            "out": Path("runs/x"),
            "optim": {"lr": 3e-4},
            "heads.taps": [2, 4, 7],
            "epochs": 2,
        },
    )
    assert run.target == TargetConfig(str(QUICKSTART))
    assert [(source.path, source.weight) for source in run.data.sources] == [
        ("a.jsonl", 1.0),
        ("b.jsonl", 0.5),
    ]
    assert run.optim.lr == 3e-4 and run.heads.taps == [2, 4, 7] and run.epochs == 2
    assert "lr: 0.0003" in run.as_yaml()
    odd = options_from(
        Run,
        {
            "target": TargetConfig(str(QUICKSTART), dtype="float32"),
            "device": "cpu",
            "data": [{"path": Path("a.jsonl"), "weight": np.float32(0.5)}],
            "out": "null",
            "epochs": np.int64(3),
        },
    )
    assert odd.target == TargetConfig(str(QUICKSTART), dtype="float32", device="cpu")
    assert odd.data.sources[0].path == "a.jsonl" and odd.data.sources[0].weight == 0.5
    assert (odd.out, odd.epochs) == ("null", 3)
    needed = {"target": QUICKSTART, "prompts": "p.jsonl"}
    given = needed | {"temperature": 0.5, "top_p": 0.9, "batch_size": 4}
    measured = options_from(EvaluateOptions, given)
    assert measured.temperature == [0.5] and measured.sampling.top_p == 0.9
    assert measured.batch_size == [4]
    config = QUICKSTART.parents[2] / "configs" / "eagle" / "quickstart.yaml"
    run = options_from(Run, {"optim.lr": 0.5, "out": "elsewhere"}, config)
    assert run.optim.lr == 0.5 and run.out == "elsewhere" and run.heads.norm_output
    assert run.data.held_out.sources == ["valid"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epohcs": 2}, "unknown option --epohcs; did you mean --epochs?"),
        ({"optim": {"learning_rate": 1}}, "unknown option --optim.learning-rate; did you mean"),
        ({"batch-rows": 2}, "unknown option --batch-rows; did you mean"),
        ({"epochs": object()}, "epochs takes a number, not object"),
        ({"epochs": "many"}, "epochs"),
        ({"optim": {"lr": "fast"}}, "lr"),
        ({"max_length": [object()]}, "did you mean --data.max-length?"),
    ],
)
def test_wrong_options_are_one_clear_line(values: dict, said: str) -> None:
    with pytest.raises(draftsmith.UserError) as raised:
        options_from(Run, {"target": "t", "data": "d.jsonl", "out": "o", **values})
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_drafter_from_pretrained_loads_copies_and_refuses_damage(tmp_path: Path) -> None:
    drafter = draftsmith.Drafter.from_pretrained(EAGLE3)
    assert (drafter.method, drafter.folder) == ("eagle", EAGLE3)
    shutil.copytree(EAGLE3, tmp_path / "copy")
    copied = draftsmith.Drafter.from_pretrained(tmp_path / "copy")
    words = questions("test", 1)[0]
    replies = [
        draftsmith.load(QUICKSTART, one, device="cpu").generate(words, 16)
        for one in (drafter, copied, EAGLE3)
    ]
    assert len({(reply.text, len(reply.rounds)) for reply in replies}) == 1
    weights = tmp_path / "copy" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(draftsmith.UserError, match="copy or save the drafter again"):
        draftsmith.Drafter.from_pretrained(tmp_path / "copy")
    with pytest.raises(draftsmith.UserError, match="is not a folder"):
        draftsmith.Drafter.from_pretrained("./nothing")


@pytest.mark.full
def test_a_profile_sets_the_tree(tmp_path: Path) -> None:
    prompts, profile = tmp_path / "prompts.jsonl", tmp_path / "profile.json"
    write_prompts(prompts, 4)
    done = run_cli(
        "tune", "--target", str(QUICKSTART), "--target.device", "cpu", "--drafter", "ngram",
        "--prompts", str(prompts), "--temperature", "0", "--batch-size", "1",
        "--budget", "0.1", "--out", str(profile),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(profile.read_text())["drafters"]["ngram"]
    decoder = draftsmith.load(QUICKSTART, "ngram", profile=profile, device="cpu")
    if "length" in row["setting"]:
        assert decoder.proposer.max_drafted == row["setting"]["length"]
    assert decoder.proposer.name == "ngram:tuned"
    with pytest.raises(draftsmith.UserError, match="knows no drafter none"):
        draftsmith.load(QUICKSTART, "none", profile=profile, device="cpu")


def test_train_evaluate_and_export_work_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole road from Python, with a loaded target in the middle."""
    rows, prompts = tmp_path / "replies.jsonl", tmp_path / "prompts.jsonl"
    decoder = draftsmith.load(QUICKSTART, device="cpu")
    words = questions("train", 12)
    replies = decoder.generate(words, 32)
    with rows.open("w") as file:
        for question, reply in zip(words, replies, strict=True):
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": reply.text},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    write_prompts(prompts, 3)
    out = tmp_path / "run"
    data = {"sources": rows, "max_length": 256, "held_out": {"share": 0.5}}
    asked = {"target": QUICKSTART, "out": out, "epochs": 1, "data": data | {"decontaminate": False}}
    asked["evaluation"] = {"max_new_tokens": 16}
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    most_drafts: list[int] = []

    def spied(emitted: Any, units: Any, drafts: int) -> tuple[float, float]:
        most_drafts.append(drafts)
        return tau_interval(emitted, units, drafts)

    monkeypatch.setattr(evaluation, "tau_interval", spied)
    best = draftsmith.train("medusa", **asked)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    # Medusa has four heads; the interval of few prompts would reach beyond what they can draft.
    assert most_drafts and set(most_drafts) <= {1, 2, 3, 4}
    assert draftsmith.train("medusa", **asked) == best  # there is nothing left to do
    assert best == out / "best" and draftsmith.Drafter.from_pretrained(best).method == "medusa"
    written = [json.loads(line) for line in rows.open()]
    again = {**asked, "data": data | {"sources": written}, "out": tmp_path / "again"}
    again["data.decontaminate"] = False
    assert draftsmith.train("medusa", **again) == tmp_path / "again" / "best"
    table_counts = [
        json.loads((tmp_path / name / "best" / "draftsmith.json").read_text())["provenance"]["data"]
        for name in ("run", "again")
    ]
    assert (
        table_counts[0] == table_counts[1]
        and table_counts[0]["sha256"]
        and "datasets" not in table_counts[0]
    )
    report = draftsmith.evaluate(
        decoder.target, [best, "ngram"], prompts, baselines=False, max_new_tokens=16, repeats=1
    )
    asked_in_python = draftsmith.evaluate(
        decoder.target, "ngram", questions("test", 3), baselines=False, max_new_tokens=4, repeats=1
    )
    assert asked_in_python.prompt_set.sha256 == report.prompt_set.sha256
    assert repr(report) == str(report) and len(repr(report).splitlines()) == 4
    (setting,) = report.settings
    assert list(setting.drafters) == ["plain", "medusa", "ngram"]
    assert all(f.equal_to_ar == f.requests == 3 for f in setting.drafters.values())
    with pytest.raises(draftsmith.UserError, match="is for the command"):
        draftsmith.evaluate(QUICKSTART, best, prompts, json="-")
    uploads: list[tuple[str, str]] = []
    monkeypatch.setattr(functions, "upload", lambda folder, name: uploads.append((folder, name)))
    draftsmith.export(best, "vllm", tmp_path / "export", push="me/mine")
    assert uploads == [(str(tmp_path / "export"), "me/mine")]
    command = draftsmith.export(best, "vllm", tmp_path / "export")
    assert command.startswith("vllm serve")
    with pytest.raises(draftsmith.UserError, match="llamacpp takes"):
        draftsmith.export(best, "llamacpp", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("config_class", "more", "full"),
    [
        (ExportOptions, {"drafter": "d", "to": "vllm", "out": "o"}, "bfloat16"),
        (ExtractOptions, {"config": "c.yaml", "out": "o"}, "bfloat16"),
    ],
)
def test_a_type_may_have_its_short_name(config_class: Any, more: dict[str, str], full: str) -> None:
    options = options_from(config_class, {**more, "dtype": "bf16"})
    words = [f"--{name}={value}" for name, value in more.items()]
    typed = parse(config_class, [*words, "--dtype", "bf16"], "draftsmith")
    assert options.dtype == typed.dtype == full


def test_errors_are_those_of_the_commands(tmp_path: Path) -> None:
    """Options are named as they are typed."""
    medusa = QUICKSTART.parent / "drafters" / "medusa"
    rows: Any = [{"problem": "1 + 1", "solution": "2"}]
    out, words = tmp_path / "run", "def a(self):"
    decoder: Any = draftsmith.load(QUICKSTART, device="cpu")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    table = type("DataFrame", (), {})()
    meant = r"unknown option --held-out; did you mean --data.held-out\?"
    calls: list[tuple[Any, str]] = [
        (lambda: draftsmith.load(medusa), "give it as --drafter, and its target as --target"),
        (lambda: draftsmith.evaluate(QUICKSTART, "ngram", ["a"], server="x"), "^--server 'x'"),
        (lambda: draftsmith.evaluate(QUICKSTART, "ngram", rows), "with --bad-rows skip"),
        (lambda: draftsmith.train("eagle", QUICKSTART), "--out and --data.sources are missing"),
        (lambda: draftsmith.train("eagle", QUICKSTART, rows, out), "logs-in-other-shapes"),
        (lambda: draftsmith.train("eagle", QUICKSTART, 3, out), "data is a path, a list of rows"),
        (lambda: draftsmith.export(medusa, "vllm", medusa), "name another --out"),
        (lambda: draftsmith.train("eagle", QUICKSTART, rows, out, held_out={}), meant),
        (
            lambda: draftsmith.train("eagle", QUICKSTART, {"sources": [[1]]}, out),
            "a row must be an object, not a list",
        ),
        (lambda: draftsmith.train("eagle", decoder, rows, out), "not a Decoder; save it with save"),
        (
            lambda: draftsmith.train("eagle", QUICKSTART, splits, out),
            "not DatasetDict; .* or one split of a DatasetDict$",
        ),
        (
            lambda: draftsmith.train("eagle", QUICKSTART, table, out),
            r'use df.to_dict\("records"\), or',
        ),
        (lambda: draftsmith.evaluate(decoder, "ngram", ["a"]), "target takes a text, not Decoder$"),
        (lambda: draftsmith.export(decoder, "vllm", out), "drafter takes a text, not Decoder$"),
        (lambda: draftsmith.evaluate(QUICKSTART, decoder, ["a"]), "a proposer, not Decoder$"),
        (
            lambda: draftsmith.evaluate(QUICKSTART, "ngram", words),
            r"into a list: \['def a\(self\):'\]",
        ),
    ]
    for call, said in calls:
        with pytest.raises(draftsmith.UserError, match=said) as raised:
            call()
        assert "\n" not in str(raised.value)
    with pytest.raises(draftsmith.UserError, match="path is missing .name is a label"):
        draftsmith.train("eagle", QUICKSTART, {"sources": [{"name": "me/sums"}]}, out)


def test_a_method_of_a_callback_that_is_never_called_is_named(tmp_path: Path) -> None:
    class Misspelt(draftsmith.Callback):
        def on_stp(self, step: int, metrics: Any) -> None: ...

    said = "Misspelt.on_stp is never called; the methods of a callback are on_step, on_evaluate, "
    with pytest.raises(draftsmith.UserError, match=said):
        draftsmith.train("eagle", QUICKSTART, "a.jsonl", tmp_path / "run", callbacks=Misspelt())


def test_train_has_the_signature_and_the_docstring_of_its_function() -> None:
    signature = inspect.signature(draftsmith.train)
    assert list(signature.parameters) == [
        "method", "target", "data", "out", "config", "callbacks", "options"
    ]  # fmt: skip
    assert (inspect.getdoc(draftsmith.train) or "").startswith("Train a drafter, and return")


def test_a_data_set_is_written_as_the_list_of_its_rows(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": words}]} for words in ("a", "b")]
    for name, data in (("list", rows), ("table", datasets.Dataset.from_list(rows))):
        write_rows(rows_in_memory(data, "data"), tmp_path / name)
    assert (tmp_path / "list").read_bytes() == (tmp_path / "table").read_bytes()
