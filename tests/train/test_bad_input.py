"""Mistakes as a new user makes them: one clear line, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.commands.cli import main
from draftsmith.heads.artifact import Artifact
from tests.conftest import (
    PYTHON,
    QUICKSTART,
    STORIES,
    make_tokenizer,
    random_heads,
    tiny_target,
)
from tests.helpers.bad_input import expect, quick
from tests.helpers.rows import chat, write
from tests.helpers.training import environment, make_config

Command = Callable[..., subprocess.CompletedProcess[str]]
TRAIN = ("draftsmith.train", "medusa", "--config")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--optim.learning-rate", "1"), ("optim.learning-rate", "--help")),
        (("--optim.lr", "fast"), ("--optim.lr takes a number, not fast",)),
        (("--optim.lr", "-1"), ("optim.lr",)),
        (("--optim.schedule", "linear"), ("optim.schedule", "cosine")),
        (("--heads.num-heads", "0"), ("num_heads",)),
        (("--data.sources", "[{path: x, wheight: 2}]"), ("wheight",)),
        (("--data.held-out.share", "2", "--data.held-out.by", "row"), ("held_out.share",)),
        (("--target.path", "/no/such/folder"), ("/no/such/folder does not exist",)),
        (("--target.path", "no-such-name"), ("'no-such-name' is no folder here",)),
        (("--target.device", "tpu9"), ("tpu9",)),
        (("--target.dtype", "float8"), ("float8",)),
        (("--init-from", "/no/drafter"), ("/no/drafter is not a drafter",)),
        (
            ("--data.max-length", "999"),
            ("data.max_length is 999, but the target has 256 positions",),
        ),
        (("--seed", "-1"), ("seed",)),
    ],
)
def test_wrong_training_option_is_one_line_without_checkpoint(
    tmp_path: Path,
    saved_tiny: Path,
    command: Command,
    options: tuple[str, ...],
    says: tuple[str, ...],
) -> None:
    config = make_config(tmp_path, saved_tiny)
    expect(command(*TRAIN, config, *options), *says)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_wrong_key_in_the_file_is_named(
    tmp_path: Path, saved_tiny: Path, command: Command
) -> None:
    config = make_config(tmp_path, saved_tiny, optim={"lr": 0.001, "momentun": 0.9})
    expect(command(*TRAIN, config), "momentun")
    config = make_config(tmp_path, saved_tiny, evalution={"every": 3})
    expect(command(*TRAIN, config), "evalution")
    config.write_text("optim: [")
    expect(command(*TRAIN, config), "config")
    expect(command(*TRAIN, tmp_path / "none.yaml"), "none.yaml")
    expect(command("draftsmith.train", "medusa"), "--out, --target and --data.sources")
    expect(command("draftsmith.train", "medussa"), "medusa")
    expect(command("draftsmith.train"), "medusa")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "train is empty"),
        (
            [{"messages": [{"role": "user", "content": "no reply"}]}],
            "no message of role assistant; the roles are user",
        ),
        ([{"mesages": []}], "none of the keys messages"),
        (["not json"], "not valid JSON"),
        ([chat("x", "the " * 500)], "data.max_length is 160"),
    ],
)
def test_data_without_anything_to_learn_is_refused(
    tmp_path: Path, saved_tiny: Path, command: Command, rows: list[Any], says: str
) -> None:
    config = make_config(tmp_path, saved_tiny)
    write(tmp_path / "train.jsonl", rows)
    expect(command(*TRAIN, config), says)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_chat_data_is_refused_without_a_chat_template(tmp_path: Path, command: Command) -> None:
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "target")
    make_tokenizer(["<p>", "<e>", "<u>", "<a>"], None, "<e>").save_pretrained(tmp_path / "target")
    expect(command(*TRAIN, make_config(tmp_path, tmp_path / "target")), "has no chat template")
    if STORIES.is_dir():
        expect(command(*TRAIN, make_config(tmp_path, STORIES)), "has no chat template")


def test_heads_trained_for_another_target_are_refused(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_target(hidden_size=64)
    Artifact(
        random_heads(other), other.fingerprint(), {"rank_accuracy": [[0.5]], "tree_nodes": 1}
    ).save(tmp_path / "heads")
    prompts = write(tmp_path / "p.jsonl", [chat("hello", "x")])
    base = ("--target", saved_tiny, "--target.device", "cpu")
    options = ("--drafter", tmp_path / "heads", "--prompts", prompts, "--json", tmp_path / "o.json")
    expect(
        quick(capsys, "evaluate", *base, *options),
        "was trained for another target",
        "hidden_size is 64",
    )
    assert not (tmp_path / "o.json").exists()
    expect(
        quick(capsys, "generate", *base, "--drafter", tmp_path / "heads", "--prompt", "x"),
        "another target",
    )
    expect(
        quick(capsys, "generate", *base, "--drafter", tmp_path / "none", "--prompt", "x"),
        "is not a drafter",
    )


def test_wrong_input_of_other_commands_is_one_line(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("--target", saved_tiny, "--target.device", "cpu")
    prompts = write(tmp_path / "p.jsonl", [chat("hello", "x"), {"messages": 3}])
    empty = write(tmp_path / "e.jsonl", [])
    expect(quick(capsys, "evaluat"), "unknown command 'evaluat'", "evaluate")
    expect(quick(capsys, "data", "regen"), "unknown command 'data regen'")
    expect(quick(capsys, "evaluate", *base, "--prompts", tmp_path / "none.jsonl"), "none.jsonl")
    expect(quick(capsys, "evaluate", *base, "--prompts", prompts), "p.jsonl:2")
    expect(quick(capsys, "evaluate", *base, "--prompts", empty), "holds no prompts")
    expect(quick(capsys, "evaluate", *base, "--prompts", empty, "--max-tokens", "3"), "max-tokens")
    good = write(tmp_path / "g.jsonl", [chat("hello", "x")])
    for option, value, message in (
        ("--temperature", "-1", "temperature must be 0 or more, not -1"),
        ("--top-p", "1.5", "top_p must be above 0 and at most 1"),
        ("--rule", "exact", "recursive"),
        (
            "--drafter",
            "ngram:size=3",
            "drafter ngram has no setting 'size'; there are: length, longest, shortest",
        ),
        ("--drafter", "ngrams", "ngrams"),
        ("--drafter", "ngram:length=3,length=4", "length is given twice"),
        ("--batch-size", "0", "at least 1"),
        ("--limit", "-1", "--limit must be at least 1, not -1"),
        ("--max-new-tokens", "0", "--max-new-tokens must be at least 1"),
    ):
        expect(quick(capsys, "evaluate", *base, "--prompts", good, option, value), message)
    expect(
        quick(capsys, "generate", *base, "--prompt", "x", "--drafter", "ngram:length"),
        "ngram:length",
    )
    expect(
        quick(
            capsys, "generate", *base, "--prompt", "x", "--drafter", "ngram", "--drafter", "none"
        ),
        "given twice",
    )
    expect(quick(capsys, "generate", *base, "--stop", "x"), "no option --stop any more: give stop")
    expect(
        quick(
            capsys,
            "evaluate",
            *base,
            "--prompts",
            good,
            "--json",
            tmp_path,
            "--max-new-tokens",
            "4",
        ),
        "cannot write",
    )
    expect(
        quick(capsys, "data", "regenerate", *base, "--data", good, "--out", good), "another file"
    )
    expect(quick(capsys, "generate", *base, "--prompt", ""), "empty")
    expect(quick(capsys, "generate", *base, "--prompt", "the " * 400), "leaves no room")
    expect(
        quick(capsys, "data", "regenerate", *base, "--data", empty, "--out", tmp_path / "r.jsonl"),
        "holds no rows",
    )
    expect(
        quick(
            capsys, "data", "regenerate", *base, "--data", "no.jsonl", "--out", tmp_path / "r.jsonl"
        ),
        "does not exist",
    )
    expect(
        quick(
            capsys,
            "data",
            "regenerate",
            *base,
            "--data",
            prompts,
            "--out",
            tmp_path / "r.jsonl",
            "--sampling.temperature",
            "-1",
        ),
        "temperature",
    )
    assert not (tmp_path / "r.jsonl").exists()


def test_negated_switches_and_repeated_list_options_are_accepted(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--no-NAME, --flag and a list option given twice."""
    target = tiny_target()
    for name in ("a", "b"):
        artifact = Artifact(
            random_heads(target),
            target.fingerprint(),
            {"rank_accuracy": [[0.5, 0.1]] * 4, "tree_nodes": 3},
        )
        artifact.save(tmp_path / name)
    base = ("--target", str(saved_tiny), "--target.device", "cpu")
    prompts = write(tmp_path / "g.jsonl", [chat("hello", "x")])
    both = ("--drafter", str(tmp_path / "a"), "--drafter", str(tmp_path / "b"))
    main(
        [
            "evaluate",
            *base,
            *both,
            "--prompts",
            prompts,
            "--json",
            str(tmp_path / "o.json"),
            "--max-new-tokens",
            "8",
            "--no-baselines",
        ]
    )
    report = json.loads((tmp_path / "o.json").read_text())
    assert list(report["settings"][0]["drafters"]) == ["plain", "a", "b"]
    (record,) = report["settings"][0]["drafters"]["a"]["per_request"]
    assert record["id"] == "g.jsonl:1" and record["equal_to_ar"]


def test_doctor_says_what_is_wrong_and_exits_with_2(
    tmp_path: Path, saved_tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path, saved_tiny)
    main(["doctor", "--config", str(config), "--json", "-"])
    findings = {f["check"]: f for f in json.loads(capsys.readouterr().out)}
    assert {f["status"] for f in findings.values()} <= {"ok", "warning"}
    assert "two<e>" in findings["chat template"]["found"] and findings["config"]["status"] == "ok"
    given = config.read_text()
    for wrong, says in (
        (given.replace("160", "999"), "data.max_length is 999, but the target has 256 positions"),
        (given + "for: [sglang]\n", "(--for sglang)"),
    ):
        config.write_text(wrong)
        done = quick(capsys, "doctor", "--config", config, "--json", "-")
        (error,) = (f for f in json.loads(done.stdout) if f["status"] == "error")
        assert done.returncode == 2 and error["check"] == "config"
        assert says in error["found"]
    for extra, says in (
        (("--set", "data.max_length=999"), "the target has 256 positions"),
        (("--target", QUICKSTART, "--set", "data.max_length=2000"), "has 1024 positions"),
    ):
        config.write_text(given)
        done = quick(capsys, "doctor", "--config", config, "--json", "-", *extra)
        (error,) = (f for f in json.loads(done.stdout) if f["status"] == "error")
        assert error["check"] == "config" and says in error["found"]
    expect(quick(capsys, "doctor", "--set", "epochs=2"), "name it with --config")
    write(tmp_path / "train.jsonl", [])
    done = quick(capsys, "doctor", "--config", config, "--json", "-")
    assert done.returncode == 2
    (error,) = (f for f in json.loads(done.stdout) if f["status"] == "error")
    assert error["check"] == "config" and "train.jsonl holds no rows" in error["found"]
    done = quick(capsys, "doctor", "--target", "/no/such/folder", "--json", "-")
    assert done.returncode == 2 and "does not exist" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
@pytest.mark.parametrize("kilobytes", [4, pytest.param(40, marks=pytest.mark.full)])
def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, saved_tiny: Path, kilobytes: int
) -> None:
    """Files may not grow beyond a limit: writes fail in the middle, as on a full disk."""
    config = make_config(tmp_path, saved_tiny)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kilobytes * 1024, kilobytes * 1024))

    done = subprocess.run(
        [sys.executable, "-m", *TRAIN, str(config)],
        env=environment(), capture_output=True, text=True, timeout=240, preexec_fn=limit,
    )  # fmt: skip
    expect(done, "cannot write")
    left = [
        p
        for p in (tmp_path / "run").rglob("*")
        if p.is_file() and p.name not in ("config.yaml", "metrics.jsonl")
    ]
    assert all("data" in p.parts[-2:] for p in left), left


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_found_before_anything_is_loaded(
    full_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Command
) -> None:
    prompts = write(tmp_path / "p.jsonl", [chat("hello", "x")])
    base = ("--target", "no-such-name")  # it would be looked for first
    says = (
        "0.1 MB are free there and 1.0 MB are needed; free some space, or name another place with"
    )
    expect(
        quick(capsys, "evaluate", *base, "--prompts", prompts, "--json", full_disk / "o.json"),
        says + " --json",
    )
    expect(
        quick(
            capsys, "data", "regenerate", *base, "--data", prompts, "--out", full_disk / "o.jsonl"
        ),
        says + " --out",
    )
    expect(
        quick(
            capsys,
            "tune",
            *base,
            "--drafter",
            "ngram",
            "--prompts",
            prompts,
            "--out",
            full_disk / "p",
        ),
        says,
    )
    config = make_config(tmp_path, tmp_path / "no-such-target", out=str(full_disk / "run"))
    expect(command(*TRAIN, config), says + " --out")
    assert not list(full_disk.iterdir())


def test_interrupted_training_saves_and_explains_how_to_resume(
    tmp_path: Path, saved_tiny: Path
) -> None:
    config = make_config(
        tmp_path,
        saved_tiny,
        max_steps=100_000,
        evaluation={"every": 100_000, "limit": 2, "max_new_tokens": 4},
    )
    process = subprocess.Popen(
        [PYTHON, "-m", *TRAIN, str(config)], env=environment(PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's background jobs ignore it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=60)
    assert (
        process.returncode == 130
        and "asked to stop: saved step" in errors
        and "Traceback" not in errors
    )


def test_under_a_launcher_the_line_is_printed_once(tmp_path: Path, saved_tiny: Path) -> None:
    """accelerate adds a traceback of its own and exits with 1: the line is there once, before any
    model loads."""
    from tests.helpers.training import launch

    config = make_config(tmp_path, saved_tiny)
    for ranks in (1, 2):
        done = launch("-m", *TRAIN, config, "--optim.lr", "-1", ranks=ranks)
        assert done.returncode != 0
        assert sum(line.startswith("error: optim.lr") for line in done.stderr.splitlines()) == 1


def test_a_nan_in_the_target_is_found_before_training(tmp_path: Path, command: Command) -> None:
    target = tiny_target()
    with torch.no_grad():
        target.head_weight[3, 3] = float("nan")
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    expect(command(*TRAIN, make_config(tmp_path, tmp_path / "target")), "logits")


@pytest.mark.parametrize("seconds", [0.7, 1.4])
def test_an_interrupt_is_answered_while_the_imports_still_run(
    saved_tiny: Path, seconds: float
) -> None:
    command = [sys.executable, "-c", "from draftsmith.commands.cli import main; main()"]
    process = subprocess.Popen(
        [*command, "generate", "--target", str(saved_tiny), "--prompt", "x"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "interrupted; nothing was written\n", errors
