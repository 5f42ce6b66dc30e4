"""Data sets as people name them: files, folders that `datasets` and git wrote, names on the hub,
and objects of Python."""

from __future__ import annotations

import copy
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import RowSource
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.conversations.rows import rows_in_memory, write_rows
from draftsmith.inference.conversations.sources import rows_of
from draftsmith.train.provenance import data_sets
from tests.conftest import QUICKSTART, ROOT
from tests.helpers.hub import DataHub

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
- config_name: other
  data_files: other/*
---
"""
SHARDS = 6


def rows(*names: str) -> list[dict[str, Any]]:
    return [{"prompt": name, "id": name} for name in names]


def lines(*names: str) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows(*names)).encode()


def texts(source: Any) -> list[str]:
    return [row["prompt"] for _, row in rows_of(source)]


def parquet(folder: Path, *names: str) -> bytes:
    datasets.Dataset.from_list(rows(*names)).to_parquet(str(folder / "shard.parquet"))
    return (folder / "shard.parquet").read_bytes()


def repository(folder: Path, mark: str = "") -> dict[str, bytes]:
    """A data set of two configurations, the first of two splits, and of several parquet files."""
    files = {"README.md": CARD.encode(), "dataset_infos.json": b"{}"}
    for number in range(SHARDS):
        pair = [f"{mark}{n}" for n in (2 * number, 2 * number + 1)]
        files[f"data/train-0000{number}.parquet"] = parquet(folder, *pair)
    files["data/test-0.parquet"] = parquet(folder, "test")
    return files | {"other/a.parquet": parquet(folder, "other")}


def written(folder: Path, files: dict[str, bytes]) -> str:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def refused(source: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as refusal:
        list(rows_of(source))
    assert "\n" not in str(refusal.value)


# Folders


def test_what_save_to_disk_wrote_is_refused_with_what_to_do(tmp_path: Path) -> None:
    train = datasets.Dataset.from_list(rows("a", "b"))
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": train}).save_to_disk(str(tmp_path / "both"))
    for name in ("one", "both"):
        refused(str(tmp_path / name), r"holds no .*load_from_disk\(..\).to_parquet writes one")


def test_a_clone_is_refused_because_its_card_names_the_files(tmp_path: Path) -> None:
    refused(written(tmp_path / "clone", repository(tmp_path)), "is a clone of a data set, .*; name")


def test_metadata_files_in_a_data_folder_are_skipped(tmp_path: Path) -> None:
    files = {
        "dataset_infos.json": b"{}",
        "state.json": b"{}",
        "._a.jsonl": b"\0",
        "a.jsonl": lines("a"),
    }
    assert texts(written(tmp_path, files)) == ["a"]


@pytest.mark.parametrize("setting", ["config_name", "revision", "split"])
def test_settings_of_data_sets_are_refused_for_files(setting: str, tmp_path: Path) -> None:
    folder = written(tmp_path, {"a.jsonl": lines("a")})
    for path, what in ((folder, "a folder of files"), (f"{folder}/a.jsonl", "a file")):
        refused(RowSource(path, **{setting: "x"}), f"{what}, which has no {setting} ")  # type: ignore[arg-type]


# Files


def test_gzipped_ndjson_and_multiline_json_are_read(tmp_path: Path) -> None:
    files = {
        "a.jsonl.gz": gzip.compress(lines("a")),
        "b.ndjson": lines("b"),
        "c.json": lines("c", "d"),
    }
    assert texts(written(tmp_path, files)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.parquet", b"PAR1", "it is damaged, or not a parquet file"),
        ("a.csv", b"prompt\nx\n", "a file must end in .*; convert it"),
        ("a.arrow", b"x", "a file must end in .*; convert it"),
        ("a.jsonl", '{"prompt": "é"}'.encode("latin-1"), "convert it to UTF-8"),
        ("a.jsonl.gz", lines("a"), "it is not compressed by gzip"),
        (
            "a.jsonl.gz",
            gzip.compress(lines("a"), mtime=0)[:-9],
            "it is damaged or cut off; copy it again",
        ),
        ("a.json", b'[{"prompt": "a"}', "a.json is not valid JSON"),
    ],
)
def test_other_files_are_refused_with_a_remedy(
    name: str, content: bytes, says: str, tmp_path: Path
) -> None:
    refused(f"{written(tmp_path, {name: content})}/{name}", says)


def test_a_folder_without_rows_says_what_it_holds(tmp_path: Path) -> None:
    refused(
        written(tmp_path, {"a.csv": b"x", "b/c.jsonl": lines("c")}), "but a.csv, b; name a file"
    )


# The hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataHub]:
    folder = tmp_path_factory.mktemp("hub")
    sums = {"main": repository(folder), "v1": repository(folder, "old ")}
    script = {"main": {"script.py": b"raise SystemExit('this ran')"}}
    server = DataHub({"me/sums": sums, "me/script": script, "me/empty": {"main": {"a.md": b""}}})
    yield server
    server.server.shutdown()


SCRIPT = """
import json, sys
from itertools import islice
from draftsmith.heads.errors import UserError
from draftsmith.inference.conversations.sources import rows_of
from draftsmith.inference.base.settings import RowSource
for take, source in json.loads(sys.argv[1]):
    try:
        print(json.dumps([row["prompt"] for _, row in islice(rows_of(RowSource(**source)), take)]))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def environment_of(url: str, home: Path) -> dict[str, str]:
    """The environment of a process that asks the stand-in and keeps its copies in `home`."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return environment | {"HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}


def from_hub(
    url: str, home: Path, *asked: dict[str, Any], take: int | None = None, offline: bool = False
) -> list[Any]:
    """What `rows_of` gives of each source, or its refusal, in a process that asks the stand-in."""
    environment = environment_of(url, home) | {"HF_HUB_OFFLINE": str(int(offline))}
    words = [sys.executable, "-c", SCRIPT, json.dumps([(take, source) for source in asked])]
    done = subprocess.run(
        words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_hub_serves_configurations_splits_and_revisions(hub: DataHub, tmp_path: Path) -> None:
    sums = {"path": "me/sums", "config_name": "main"}
    train, test, other, old, part = from_hub(
        hub.url, tmp_path, sums, sums | {"split": "test"}, sums | {"config_name": "other"},
        sums | {"revision": "v1"}, sums | {"split": "train[:3]"},
    )  # fmt: skip
    assert train == [str(n) for n in range(2 * SHARDS)] and part == train[:3]
    # of which the last copy is read without a network
    cached, unknown, split = from_hub(
        "http://127.0.0.1:9", tmp_path, sums, sums | {"revision": "v1"}, sums | {"split": "x"},
        offline=True,
    )  # fmt: skip
    assert cached in (train, old) and "no split x; give one as split (--split): train" in split
    assert "the hub cannot be reached for its revision v1; check the network" in unknown
    assert (test, other) == (["test"], ["other"]) and old == [f"old {text}" for text in train]


def test_what_the_hub_does_not_have_is_named(hub: DataHub, tmp_path: Path) -> None:
    sums = {"path": "me/sums", "config_name": "main"}
    said = from_hub(
        hub.url, tmp_path, {"path": "me/sums"}, sums | {"config_name": "x"}, sums | {"split": "x"},
        sums | {"revision": "x"}, {"path": "me/none"},
        {"path": "me/script"}, {"path": "me/empty"},
    )  # fmt: skip
    several, config, split, revision, none, script, empty = said
    assert "Please pick one among the available configs: ['main', 'other']" in several
    assert "'x' not found. Available: ['main', 'other']" in config
    assert split == ("data set me/sums has no split x; give one as split (--split): train, test")
    assert "revision 'x'" in revision.lower() or "x" in revision
    assert "me/none" in none and "scripts are no longer supported" in script
    for one in (several, config, revision, none, script, empty):
        assert one.endswith("config_name (--config-name), revision (--revision) and the network")
        assert "\n" not in one


COMMAND = """
import sys
from draftsmith.commands.cli import main
words = ["data", "regenerate", "--target", sys.argv[1], "--out", sys.argv[2], "--data", "me/sums"]
words += ["--split", "test", "--max-new-tokens", "2"]
main([*words, "--config-name", "main", "--limit", "1"])
main(words)
"""


@pytest.mark.full
def test_the_command_line_names_a_data_set(hub: DataHub, tmp_path: Path) -> None:
    words = [sys.executable, "-c", COMMAND, str(QUICKSTART), str(tmp_path / "out.jsonl")]
    done = subprocess.run(
        words, env=environment_of(hub.url, tmp_path), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "Please pick one among the available configs" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    (row,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["text"].startswith("test")
    # The card of a drafter that learns these replies names the data set.
    assert data_sets([RowSource(str(tmp_path / "out.jsonl")), RowSource("me/sums")]) == ["me/sums"]
    assert data_sets([RowSource("me/other")]) == ["me/other"]


def test_missing_network_is_reported_in_one_line(tmp_path: Path) -> None:
    """`HF_HUB_OFFLINE` fails at once; another network is tried again for half a minute."""
    (said,) = from_hub("http://127.0.0.1:9", tmp_path, {"path": "me/sums"}, offline=True)
    assert "neither a local file or folder nor" in said and said.endswith("and the network")


def test_configuration_appended_to_dataset_name_is_refused() -> None:
    refused("openai/gsm8k:main", r"does not exist; .* given as config_name \(--config-name\)")


# Objects of Python


def test_lists_and_data_sets_are_sources() -> None:
    table = datasets.Dataset.from_list(rows("a", "b"))
    split = datasets.DatasetDict({"train": table, "test": table.select([1])})
    for given in (rows("a", "b"), table, table.to_iterable_dataset()):
        found = list(rows_of(rows_in_memory(given, "data")))
        assert [name for name, _ in found] == ["data[0]", "data[1]"]
        assert [row["prompt"] for _, row in found] == ["a", "b"]
    for wrong, says in (
        (split, "not DatasetDict; .* or one split of a DatasetDict"),
        (iter([]), "a list of rows, or a Dataset of the package datasets, not list_iterator"),
        (3, "not int"),
    ):
        with pytest.raises(UserError, match=says):
            rows_in_memory(wrong, "data")


def test_rows_are_written_the_same_each_time(tmp_path: Path) -> None:
    import datetime

    import numpy as np

    given = [
        {"prompt": "é", "n": np.arange(2), "time": datetime.date(2026, 1, 2), "x": float("nan")}
    ]
    file = tmp_path / "rows.jsonl"
    write_rows(rows_in_memory(given, "data"), file)
    os.utime(file, ns=(5, 5))
    write_rows(rows_in_memory(given, "data"), file)
    assert file.stat().st_mtime_ns == 5
    row = {"prompt": "é", "n": [0, 1], "time": "2026-01-02", "x": None}
    assert [one for _, one in rows_of(str(file))] == [row]
    with pytest.raises(UserError, match=r"data\[1\] holds more than"):
        write_rows(rows_in_memory([given[0], {"a": object()}], "data"), file)
    assert [one for _, one in rows_of(str(file))] == [row]


def test_texts_are_what_a_user_says(quickstart: Any) -> None:
    tokenizer, name = quickstart.tokenizer, quickstart.name
    asked = [{"messages": [{"role": "user", "content": "def f():"}]}, {"text": "def f():"}]
    chat, plain = read_prompts(rows_in_memory(asked, "prompts"), tokenizer, name)
    without = copy.deepcopy(tokenizer)
    without.chat_template = None
    for one, expected in ((tokenizer, chat), (without, plain)):
        (found,) = read_prompts(rows_in_memory(["def f():"], "prompts"), one, name)
        assert found.token_ids == expected.token_ids and found.id == "prompts[0]"
