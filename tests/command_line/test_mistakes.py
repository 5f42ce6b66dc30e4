"""Mistakes in command lines and config files: one line without Python's types, exit code 2."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from draftsmith.commands.cli import main
from draftsmith.heads.exchange.engines import ENGINES
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.bad_input import expect, quick

HF_NAMES = {
    "report_to": "--tracker", "bf16": "--precision", "fp16": "--precision",
    "gradient_checkpointing": "--objective.recompute", "dataset_name": "--data.sources",
    "model_name_or_path": "--target", "num_train_epochs": "--epochs", "max_length":
    "--data.max-length", "logging_steps": "--log-every", "save_steps": "--checkpoints.every",
    "eval_steps": "--evaluation.every", "max_seq_length": "--data.max-length",
    "warmup_ratio": "--optim.warmup-share", "lr_scheduler_type": "--optim.schedule",
    "weight_decay": "--optim.weight-decay",
    "dataset": "--data.sources", "per_device_train_batch_size": "--batch-rows",
}  # fmt: skip
EAGLE = "train eagle --config configs/eagle/quickstart.yaml"
WRONG = [
    (
        f"{EAGLE} --heads.taps 2,x",
        "--heads.taps takes whole numbers with commas between them, not 2",
    ),
    (f"{EAGLE} --max-steps x", "--max-steps takes a whole number, not x"),
    (f"{EAGLE} --steps x", "unknown option --steps; did you mean --max-steps"),
    (f"{EAGLE} --optim.steps x", "unknown option --optim.steps; did you mean --max-steps"),
    ("export --push-to-hub x", "did you mean --push?"),
    ("evaluate --model x", "unknown option --model; did you mean --target?"),
    ("generate --max-tokens 5", "did you mean --max-new-tokens?"),
    (f"{EAGLE} --optim.learning-rate 1", "did you mean --optim.lr?"),
    (f"{EAGLE} --output-dir x", "did you mean --out?"),
    (f"{EAGLE} --optim.lr fast", "--optim.lr takes a number, not fast"),
    (f"{EAGLE} --optim.betas 1", "--optim.betas takes two numbers with commas between them, not 1"),
    (f"{EAGLE} --seed 1.5", "--seed takes a whole number, not 1.5"),
    (f"{EAGLE} --precision fp12", "--precision takes no or bf16, not fp12"),
    (f"{EAGLE} --heads.norm-output maybe", "--heads.norm-output takes true or false, not maybe"),
    (f"{EAGLE} --heads 5", "--heads takes options of its own, such as --heads.version, not 5"),
    (
        f"{EAGLE} --data.sources '{{a: 1}}'",
        "--data.sources takes files with commas between them, or",
    ),
    (f"{EAGLE} --data.sources [5]", "a list such as [{path: a.jsonl, weight: 2}], not 5"),
    (f"{EAGLE} --data.sources '[{{path: 5}}]'", "--data.sources: path takes a text, not 5"),
    (
        f"{EAGLE} --data.sources '[{{path: x, wheight: 5}}]'",
        "has an unknown key 'wheight'; did you mean weight?",
    ),
    (f"{EAGLE} --data.chat-template-kwargs 5", "takes a table, such as"),
    ("train distill --draft-model.layers x", "takes a whole number or whole numbers with commas"),
    (
        "generate --target T --prompt x --temperature warm",
        "--sampling.temperature takes a number, not",
    ),
    ("generate --target T --prompt", "--prompt needs a value: a text"),
    ("generate --target T hello", "as in --prompt hello; put quotes around a value with spaces"),
    ("generate T hello", "'T' belongs to no option: a value follows the name of its option, as in"),
    (f"{EAGLE} optim.lr=1e-4", "'optim.lr=1e-4' lacks two hyphens; did you mean --optim.lr 1e-4?"),
    (f"{EAGLE} +rows-per-step=8", "did you mean --rows-per-step 8?"),
    *((f"{EAGLE} --{name} x", f"; did you mean {ours}? (see") for name, ours in HF_NAMES.items()),
    ("generate --target T --raw", "there is no option --raw any more: give a JSON row"),
    (f"{EAGLE} --target.fused false", "there is no option --target.fused any more: an attention"),
    ("evaluate --target T --no-fused", "there is no option --no-fused any more: an attention"),
    (
        "train eagle --data.sources '[{path: a, streaming: true}]'",
        "there is no option 'streaming' any more: save the rows that you need as JSONL",
    ),
    ("evaluate --target T --prompts x --limit many", "--limit takes a whole number, not many"),
    ("evaluate --target T --prompts x --baselines maybe", "--baselines takes true or false, not"),
    ("export --drafter x", "--to and --out are missing"),
    (
        "export --drafter x --to no --out y",
        f"--to takes {', '.join([*ENGINES][:-1])} or {[*ENGINES][-1]}",
    ),
    ("data plan --config x --tokens lots", "--tokens takes a number, not lots"),
    ("data plan --tokens 1e6", "--config is missing"),
    *(
        (f"data plan --config x --{given} 8", f"unknown option --{given}{says}")
        for given, says in (
            ("nodes", " (see"),
            ("rows-per-stp", "; did you mean --rows-per-step? (see"),
        )
    ),
    (
        "tune --target T --prompts x --out y --drafter ngram --budget soon",
        "--budget takes a number",
    ),
    ("report --format pdf x", "--format takes html or md, not pdf"),
    ("train eagle --config no.yaml", "no.yaml does not exist; check the path"),
    ("train eagle --config configs", "--config takes a YAML file, not configs"),
    ("train eagle --config", "--config needs a value: a YAML file"),
    ("train eagle --config README.md", "README.md is not valid YAML: "),
    *(
        (f"{verb} --json", "--json needs a value: a file to write, or - for standard output")
        for verb in (
            "doctor",
            "evaluate --target T",
            "simulate",
            "data plan --config x",
        )
    ),
]


@pytest.mark.parametrize(("words", "says"), WRONG)
def test_mistakes_are_explained_without_python_type_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, says: str
) -> None:
    monkeypatch.chdir(ROOT)
    done = quick(capsys, *shlex.split(words))
    expect(done, says, "--help)")
    assert len(done.stderr.splitlines()) == 1
    for python in (
        "Union",
        "NoneType",
        "Literal",
        "<class",
        "Expected a",
        "Parser key",
        "subclass",
    ):
        assert python not in done.stderr


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("regenerate", "did you mean 'data regenerate'?"),
        ("extract", "did you mean 'data extract' or 'mtp extract'?"),
        ("eagle", "did you mean 'train eagle'?"),
        ("chat", "did you mean 'serve'?"),
        ("bench", "did you mean 'evaluate'?"),
        ("version", "did you mean '--version'?"),
        ("evalute", "did you mean 'evaluate'?"),
        ("xyzzy", "there are: recipe, data plan, "),
    ],
)
def test_an_unknown_command_is_answered_with_ours(
    word: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expect(quick(capsys, word), f"unknown command {word!r}; {says}")


@pytest.mark.parametrize("word", ["-h", "--help-all"])
def test_training_without_a_method_lists_the_methods(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["train", word])
    said = capsys.readouterr().out
    assert "  eagle    Train an EAGLE drafter" in said and "train METHOD --help-all" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "heads: {taps: [1, x]}",
            "c.yaml: heads.taps takes whole numbers with commas between them, not 1,x",
        ),
        ("foo: 1", "c.yaml has an unknown key 'foo'"),
        ("data: {max_lenght: 5}", "unknown key 'data.max_lenght'; did you mean data.max_length?"),
        ("data: {sources: [{path: a, wheight: 1}]}", "c.yaml: data.sources has an unknown key"),
        (
            "out: x\n  foo: [1",
            "c.yaml is not valid YAML: mapping values are not allowed in this "
            "context (line 2, column 6)",
        ),
    ],
)
def test_a_mistake_in_a_config_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    expect(quick(capsys, "train", "eagle", "--config", tmp_path / "c.yaml"), says)


@pytest.mark.full
def test_json_option_dash_writes_to_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of the tables, in the form of the file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "def add(a, b):"}) + "\n")
    base = ("--target", str(QUICKSTART), "--drafter", "ngram", "--no-baselines", "--repeats", "1")
    evaluate = ("evaluate", *base, "--prompts", "p.jsonl", "--max-new-tokens", "4")
    main([*evaluate, "--json", "-"])
    assert json.loads(capsys.readouterr().out)["settings"][0]["batch"] == 1
    main([*evaluate, "--json", "a.json"])
    capsys.readouterr()
    main(["simulate", "--acceptance", "0.8", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["acceptance"][0] == 0.8
    config = str(ROOT / "configs" / "eagle" / "qwen3-32b.yaml")
    main(["data", "plan", "--config", config, "--target-shape", "qwen3-0.6b", "--json", "-"])
    assert json.loads(capsys.readouterr().out)["verdict"]["fits"]
    main(["doctor", "--json", "-"])
    assert json.loads(capsys.readouterr().out)[0]["check"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "p.jsonl"]
