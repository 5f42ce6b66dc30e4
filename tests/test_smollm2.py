"""The data of `scripts/smollm2`: prompts that are split by their sources, and packed replies."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftsmith.heads.exchange.exporter import load_without_target
from tests.conftest import ROOT

SCRIPTS = ROOT / "scripts" / "smollm2"
SPLITS = ("train", "valid", "test")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts whose questions are made up here: in place of the target's own."""
    folder = tmp_path_factory.mktemp("smollm2")
    seed = run(SCRIPTS / "prompts" / "make.py", "seeds", "--count", "1", "--out", folder / "s")
    assert seed.returncode == 0, seed.stderr
    (first,) = rows_of(folder / "s")
    questions = folder / "questions.jsonl"
    with questions.open("w") as file:
        for number in range(3000):
            text = f"{first['prompt']}What is the {number}th letter of a text?"
            row = {"text": text, "finish_reasons": ["stop"]}
            # Cut off, and too short: neither is a question.
            file.write(json.dumps(row) + "\n")
            file.write(
                json.dumps(row | {"finish_reasons": ["length"], "text": text + " and"}) + "\n"
            )
            file.write(json.dumps(row | {"text": first["prompt"] + "Why?"}) + "\n")
    made = run(
        SCRIPTS / "prompts" / "make.py", "prompts", "--questions", questions, "--out", folder
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.full
def test_no_source_is_in_two_splits(prompts: Path) -> None:
    sources: dict[str, set[str]] = {}
    texts: dict[str, set[str]] = {}
    for split in SPLITS:
        rows = rows_of(prompts / f"{split}.prompts.jsonl")
        assert {row["category"] for row in rows} == {"chat", "reasoning", "code", "documents"}
        sources[split] = {row["source"] for row in rows if "source" in row}
        texts[split] = {row["messages"][0]["content"] for row in rows}
        assert len({row["id"] for row in rows}) == len(rows) == len(texts[split])
        assert not any(text == "Why?" or text.endswith(" and") for text in texts[split])
    for one, other in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not sources[one] & sources[other] and not texts[one] & texts[other]
    test = [row["category"] for row in rows_of(prompts / "test.prompts.jsonl")]
    assert test == ["chat", "code", "documents", "reasoning"] * 40, "they take turns"
    greedy = rows_of(prompts / "train-greedy.prompts.jsonl")
    assert {row["messages"][0]["content"] for row in greedy} <= texts["train"]
    long = rows_of(prompts / "long.prompts.jsonl")
    assert {row["source"] for row in long}.isdisjoint(sources["train"])


@pytest.mark.full
def test_word_problems_have_no_field_left(prompts: Path) -> None:
    rows = [r for r in rows_of(prompts / "train.prompts.jsonl") if r["category"] == "reasoning"]
    for row in rows:
        assert not re.search(r"[{}]", row["messages"][0]["content"]), row
    assert len({row["source"] for row in rows}) == 27, "each template is used"


def test_broad_prompts_exclude_leaks_and_share_no_source(tmp_path: Path) -> None:
    """Begun prompts become ones if they end; none shares 13 words with a file that is left out, and
    no source is in two splits."""
    make, seeds = SCRIPTS / "prompts" / "make.py", tmp_path / "seeds.jsonl"
    assert run(make, "broad-seeds", "--out", seeds).returncode == 0
    begun = rows_of(seeds)
    questions, left_out = tmp_path / "questions.jsonl", tmp_path / "left-out.jsonl"
    leaked = "a lake in the mountains, where two old friends met again after very many years"
    with questions.open("w") as file:
        for number, row in enumerate(begun):
            text = f"{row['prompt']} {leaked if number == 7 else f'the number {number}'}"
            ended = ["length" if number % 10 == 0 else "stop"]
            file.write(json.dumps({"id": row["id"], "text": text, "finish_reasons": ended}) + "\n")
    left_out.write_text(json.dumps({"turns": [leaked]}) + "\n")
    made = run(make, "broad", "--questions", questions, "--out", tmp_path, "--leave-out", left_out)
    assert made.returncode == 0, made.stderr
    assert "1 prompts of train hold 13 words" in made.stdout
    splits = {split: rows_of(tmp_path / f"{split}-broad.prompts.jsonl") for split in SPLITS[:2]}
    texts = [row["messages"][0]["content"] for rows in splits.values() for row in rows]
    assert not any(leaked in text for text in texts) and len(texts) > 0.9 * len(begun)
    assert not any(text.endswith(" the number 10") for text in texts), "it was cut off"
    one, other = ({r["source"] for r in rows if "source" in r} for rows in splits.values())
    assert one and other and not one & other
    assert {r["category"] for r in splits["train"]} >= {"summaries", "translation", "records"}

    parts = ("--parts", "1", "2")
    assert run(make, "broad-seeds", *parts, "--out", seeds).returncode == 0
    later = rows_of(seeds)
    assert len(later) == len(begun) and {r["id"] for r in later}.isdisjoint(r["id"] for r in begun)
    made = run(make, "broad", *parts, "--questions", questions, "--out", tmp_path)
    assert made.returncode == 0, made.stderr
    wide = rows_of(tmp_path / "train-wide.prompts.jsonl")
    retrieval = [row for row in wide if row["category"] == "retrieval"]
    assert retrieval and all(len(row["source"].split(", ")) <= 3 for row in retrieval)
    text = retrieval[0]["messages"][0]["content"]
    assert all(f"] {name}: " in text for name in retrieval[0]["source"].split(", "))
    quoted = {r["messages"][0]["content"] for r in wide if "licence" in r}
    assert len({r["messages"][0]["content"] for r in wide}) == len(wide)
    assert quoted and quoted.isdisjoint(r["messages"][0]["content"] for r in splits["train"])
    assert {r["id"] for r in wide}.isdisjoint(r["id"] for rows in splits.values() for r in rows)


def test_packed_replies_unpack_to_the_original_rows(tmp_path: Path) -> None:
    reply = {
        "id": "a",
        "token_ids": [5, 7, 2],
        "response_spans": [[1, 3]],
        "text": "x",
        "messages": [],
    }
    prompt = {"id": "b", "messages": [{"role": "user", "content": "ü"}]}
    (tmp_path / "shares").mkdir()
    for name in ("one", "two"):
        row = json.dumps(reply | {"id": name})
        (tmp_path / "shares" / f"{name}.jsonl").write_text(row + "\n")
    (tmp_path / "test.prompts.jsonl").write_text(json.dumps(prompt) + "\n")
    script, packed = SCRIPTS / "replies.py", tmp_path / "packed"
    files = [tmp_path / "shares", tmp_path / "test.prompts.jsonl"]
    assert run(script, "pack", "--out", packed, *files).returncode == 0
    assert run(script, "unpack", "--out", tmp_path / "out", packed).returncode == 0
    expected = {key: reply[key] for key in ("token_ids", "response_spans")}
    assert rows_of(tmp_path / "out" / "shares.jsonl") == [
        {"id": name, **expected} for name in ("one", "two")
    ]
    assert rows_of(tmp_path / "out" / "test.prompts.jsonl") == [prompt]
    damaged = packed / "shares.jsonl.xz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    failed = run(script, "unpack", "--out", tmp_path / "again", packed)
    assert failed.returncode == 2 and re.fullmatch(r"error: .* is damaged; .*\n", failed.stderr)
    assert not list((tmp_path / "again").glob("shares*"))


def test_the_replies_that_come_with_the_project_are_whole() -> None:
    """Each has a prompt and a reply in ids of the target, and none answers a held-out prompt."""
    ids: dict[str, set[str]] = {}
    for path in sorted((SCRIPTS / "data").glob("*.xz")):
        rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
        ids[path.name] = {row["id"] for row in rows}
        for row in rows:
            if "token_ids" not in row:
                assert row["messages"]
                continue
            assert all(0 <= token < 49152 for token in row["token_ids"])
            ends = [0, *(place for span in row["response_spans"] for place in span)]
            assert ends == sorted(ends) and ends[-1] == len(row["token_ids"])
    assert sum(path.stat().st_size for path in (SCRIPTS / "data").glob("*.xz")) <= 6e6
    assert ids["valid.jsonl.xz"].isdisjoint(ids["train.jsonl.xz"])
    assert all("-train-" in name for name in ids["train.jsonl.xz"])


def test_the_drafter_that_comes_with_the_project_reads_back() -> None:
    folder = SCRIPTS / "drafter"
    artifact = load_without_target(folder)
    assert artifact.method == "eagle" and artifact.fingerprint.vocab_size == 49152
    state = artifact.drafter.state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in state.values())
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 12e6
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card and "| T | batch | tau" in card and "/tmp/" not in card


def test_measure_script_rejects_invalid_requests_in_one_line(tmp_path: Path) -> None:
    runs, target = tmp_path / "runs", tmp_path / "target"
    runs.mkdir()

    def mistake(*parts: str) -> str:
        done = subprocess.run(
            [SCRIPTS / "measure.sh", *parts],
            env={**os.environ, "SMOLLM2_RUNS": str(runs), "SMOLLM2": str(target)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert not (runs / "figures").exists()
        return done.stderr

    assert "name what to measure: table temperatures" in mistake()
    assert "there is no part tables; there are table temperatures" in mistake("exact", "tables")
    assert "there is no part table exact; there are" in mistake("table exact")
    assert "assisted needs" in mistake("exact", "assisted")
    assert "is not there; make it by ./scripts/smollm2/get.sh" in mistake("counts")
    target.mkdir()
    (target / "config.json").touch()
    for name in ("test.prompts", "valid.prompts", "long.prompts", "valid", "train-greedy"):
        assert f"has no {name}.jsonl; unpack it by ./scripts/smollm2/data.sh" in mistake("counts")
        (runs / f"{name}.jsonl").touch()


# Scripts that take options, with one that each refuses; None where others take the options.
SHELL_SCRIPTS: dict[str, str | None] = {
    "smollm2/get.sh": "--hob",
    "smollm2/data.sh": "--rewrite",
    "smollm2/measure.sh": "--tables",
    "check_target.sh": "--shapes=x",
    "check_llamacpp.sh": None,
    "check_vllm.sh": None,
    "llamacpp/environment.sh": "--folder",
    "vllm/environment.sh": "--folder",
    "vllm/hidden_states.sh": None,
    "quickstart.sh": "--quick",
    "quickstart/make_drafters.sh": None,
    "quickstart/hybrid.sh": None,
    "bench/gpu_wheels.sh": "--out",
    "bench/peers/environments.sh": "--folder",
    "equal_data.sh": "--seeds",
    "site.sh": "--open",
    "test.sh": None,
    "types.sh": None,
}


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_options_of_a_script_are_looked_at_before_an_environment_is_made(
    script: str, tmp_path: Path
) -> None:
    def ended(*words: str) -> subprocess.CompletedProcess[str]:
        # Interpreters that say that they were asked to install something, and fail.
        tools = tmp_path / "tools"
        tools.mkdir(exist_ok=True)
        for name in ("python3", "python3.11", "pip"):
            (tools / name).write_text(
                f'#!/bin/sh\ncase "$*" in *arguments.py*) exec {sys.executable} "$@" ;; esac\n'
                "echo an environment would be made >&2\nexit 9\n"
            )
            (tools / name).chmod(0o755)
        env = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin", "DRAFTSMITH_VENV": str(tmp_path)}
        env.pop("PYTHON", None)
        path = ROOT / "scripts" / script
        command = ["bash", str(path), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env
        )

    for option in ("--help", "-h"):
        done = ended(option)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert Path(script).name in done.stdout
        assert "set -euo" not in done.stdout and "#!" not in done.stdout
    if (wrong := SHELL_SCRIPTS[script]) is not None:
        done = ended(wrong)
        assert done.returncode == 2, done.stderr
        assert wrong in done.stderr and "error: " in done.stderr
    assert not (tmp_path / "--help").exists() and not (tmp_path / "runs").exists()


def test_every_shell_script_is_tried() -> None:
    found = {
        str(path.relative_to(ROOT / "scripts")) for path in (ROOT / "scripts").rglob("*.sh")
    } - {"environment.sh", "usage.sh"}
    assert found == set(SHELL_SCRIPTS)
