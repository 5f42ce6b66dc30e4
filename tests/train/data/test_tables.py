"""Rows that are read, kept, held out and lost, with every loss counted and named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.commands.cli import main
from draftsmith.heads.errors import UserError
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.conversations.sources import rows_of
from draftsmith.train.data.batches import PADDING, Batches, collate, pack_rows
from draftsmith.train.data.config import Data, HeldOutConfig, Source
from draftsmith.train.data.tables import TokenTable, build, load, prepare, table_counts, tables_key
from draftsmith.train.data.templates import Encoded
from draftsmith.train.evaluation import held_out_prompts
from tests.conftest import tiny_target
from tests.helpers.rows import chat, write

TARGET = tiny_target()


def data(tmp_path: Path, rows: list[Any], held: list[Any] | None = None, **options: Any) -> Data:
    sources = [Source(write(tmp_path / "train.jsonl", rows), name="train")]
    held_rows = [chat("held out", "words of the held out reply")] if held is None else held
    sources.append(Source(write(tmp_path / "held.jsonl", held_rows), name="held"))
    return Data(sources, held_out=HeldOutConfig("source", sources=["held"]), **options)


GOOD = [chat(f"question {i}", f"reply number {i}") for i in range(200)]


def test_every_row_is_accounted_for(tmp_path: Path) -> None:
    long = " ".join(str(i) for i in range(400))
    rows = [
        *GOOD,
        "{broken",
        chat("x", long),
        chat("a", "b") | {"messages": [{"role": "user", "content": "no reply"}]},
        GOOD[3],
    ]
    tables = build(
        data(tmp_path, rows, max_length=128, max_lost_share=0.05, bad_rows="skip"), TARGET, seed=0
    )
    count = tables.counts["train"]
    assert count == {
        "read": 204, "malformed": 1, "overlong": 1, "nothing to learn": 1, "duplicates": 1,
        "train": 200,
    }  # fmt: skip


def test_more_than_one_percent_lost_is_an_error_that_names_a_row(tmp_path: Path) -> None:
    lost = r"would lose 3 of 203 rows \(3 malformed\); the first is train.jsonl:201 .*lost_share"
    with pytest.raises(UserError, match=lost):
        build(data(tmp_path, [*GOOD, "{", "[1]", '{"a": 1}'], bad_rows="skip"), TARGET, seed=0)


def test_a_malformed_row_ends_the_command_unless_it_is_to_be_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One option, one default: training, prompts, regeneration."""
    with pytest.raises(
        UserError, match=r"row train.jsonl:201: .*leave out such rows with --data.bad-rows skip"
    ):
        build(data(tmp_path, [*GOOD, "{"]), TARGET, seed=0)
    path = write(tmp_path / "p.jsonl", [GOOD[0], {"messages": 3}, GOOD[1]])
    with pytest.raises(
        UserError, match=r"row p.jsonl:2: .*leave out such rows with --bad-rows skip"
    ):
        read_prompts(path, TARGET.tokenizer, TARGET.name)
    assert [p.id for p in read_prompts(path, TARGET.tokenizer, TARGET.name, bad_rows="skip")] == [
        "p.jsonl:1",
        "p.jsonl:3",
    ]
    assert "row p.jsonl:2 is left out" in caplog.text
    regenerate = [
        "data",
        "regenerate",
        "--target",
        "no-such-name",
        "--data",
        path,
        "--out",
        str(tmp_path / "o.jsonl"),
    ]
    for more, says in (([], "row p.jsonl:2"), (["--bad-rows", "skip"], "is no folder here")):
        with pytest.raises(SystemExit):
            main([*regenerate, *more])
        assert says in capsys.readouterr().err


def test_nothing_left_and_empty_sources_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train is empty"):
        build(data(tmp_path, []), TARGET, seed=0)
    said = "not one of 1 rows can be used.*no message of role assistant; the roles are human, bot"
    roles = [{"role": role, "content": "x"} for role in ("human", "bot", "human")]
    with pytest.raises(UserError, match=said):
        build(data(tmp_path, [{"messages": roles}]), TARGET, seed=0)


def test_rows_that_share_a_13_gram_with_held_out_rows_are_removed(tmp_path: Path) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    rows = [
        *GOOD,
        chat("x", f"so {words} it goes"),
        chat("x", f"so {words.rsplit(' ', 1)[0]} it goes"),
    ]
    system = {"role": "system", "content": f"always {words} always"}
    shared = [r | {"messages": [system, *r["messages"]]} for r in rows[:3]]
    held = [
        chat("y", f"and {words} again") | {},
        chat("z", "other") | {"messages": [system, *chat("z", "other")["messages"]]},
    ]
    tables = build(data(tmp_path, [*rows, *shared], held), TARGET, seed=0)
    # and no row for its system prompt
    assert tables.counts["train"]["shares words with held-out rows"] == 1


def test_phrases_shared_by_many_rows_are_not_contamination(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An instruction in 60% of the prompts, a disclaimer in 20% of the replies."""
    asked = "answer the following question as well as you can and in no more than three words"
    warned = "please note that this is not advice and that you should ask a doctor before it"
    rows = []
    for i in range(200):
        prompt = f"{asked}: question {i}" if i % 5 < 3 else f"question {i}"
        rows.append(chat(prompt, f"reply number {i}" + f" {warned}" * (i % 5 == 0)))
    held = HeldOutConfig("row", share=0.1)
    with caplog.at_level("INFO"):
        tables = build(Data([Source(write(tmp_path / "a.jsonl", rows))], held), TARGET, seed=0)
    assert len(tables.train) + len(tables.held_out) == 200
    assert "runs of 13 words, each in more than 10 conversations" in caplog.text


def test_contamination_above_a_share_is_an_error_that_names_the_words(tmp_path: Path) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    rows = [chat(f"question {i}", f"{words} {i}" if i < 8 else f"reply {i}") for i in range(60)]
    held = [chat("another", f"{words} again")]
    said = rf'8 of 60 training rows share words with held-out rows \(such as "{words}"\)'
    with pytest.raises(UserError, match=said):
        build(data(tmp_path, rows, held), TARGET, seed=0)
    tables = build(data(tmp_path, rows, held, max_contaminated_share=0.14), TARGET, seed=0)
    assert tables.counts["train"]["shares words with held-out rows"] == 8


def test_a_question_that_leaked_into_many_rows_is_contamination(tmp_path: Path) -> None:
    """It is in one held-out row only, so it is not a template."""
    asked = "how many of the seventeen little words in this question are there in the benchmark"
    leaked = [chat(f"tell me {i}: {asked}", f"answer {i}") for i in range(15)]
    tables = build(data(tmp_path, [*GOOD, *leaked], [chat(asked, "seventeen")]), TARGET, seed=0)
    assert tables.counts["train"]["shares words with held-out rows"] == 15


def test_a_short_prompt_of_a_held_out_row_is_not_learned(tmp_path: Path) -> None:
    held = [chat("question 7", "another reply")]
    tables = build(data(tmp_path, GOOD, held), TARGET, seed=0)
    assert tables.counts["train"]["shares words with held-out rows"] == 1


def test_replies_to_one_prompt_and_parts_of_a_conversation_stay_together(tmp_path: Path) -> None:
    """Five replies to each prompt of few words, each with an id of its own."""
    rows = [chat(f"question {i}", f"reply {i} {k}") for i in range(60) for k in range(5)]
    numbered = [row | {"id": f"p:{n}"} for n, row in enumerate(rows)]
    parts = [chat(f"other {i}", "a") for i in range(40)]
    parts += [
        {"messages": [*part["messages"], *chat("and then", "b")["messages"]]} for part in parts
    ]
    config = Data(
        [Source(write(tmp_path / "a.jsonl", [*numbered, *parts]), name="a")],
        HeldOutConfig("row", share=0.2), decontaminate=False, deduplicate=False,
    )  # fmt: skip
    tables = build(config, TARGET, seed=0)
    held_out, train = set(tables.held_out.units.tolist()), set(tables.train.units.tolist())
    assert len(held_out) > 10 and not held_out & train and len(held_out | train) == 100


def test_held_out_prompts_come_from_every_source_and_category(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three sources, the first of which has enough rows."""
    sources = []
    for name in ("chat", "code", "math"):
        rows = [
            chat(f"{name} question {i}", f"reply {i}", category="long" if i % 4 else "short")
            for i in range(120)
        ]
        sources.append(Source(write(tmp_path / f"{name}.jsonl", rows), name=name))
    tables = build(Data(sources, HeldOutConfig("row", share=0.5)), TARGET, seed=0)
    with caplog.at_level("INFO"):
        prompts = held_out_prompts(tables, 12, 100)
    assert caplog.messages[-1] == "held-out prompts: " + ", ".join(
        f"2 {name}/{category}"
        for name in ("chat", "code", "math")
        for category in ("long", "short")
    )
    assert len({prompt.unit for prompt in prompts}) == 12
    texts = [TARGET.tokenizer.decode(prompt.token_ids) for prompt in prompts]
    assert [sum(name in text for text in texts) for name in ("chat", "code", "math")] == [4] * 3


def test_held_out_by_row_is_a_seeded_share(tmp_path: Path) -> None:
    config = Data(
        [Source(write(tmp_path / "a.jsonl", GOOD))], held_out=HeldOutConfig("row", share=0.2)
    )
    tables = build(config, TARGET, seed=0)
    assert 20 < len(tables.held_out) < 60 and len(tables.train) + len(tables.held_out) == 200
    assert not np.array_equal(build(config, TARGET, seed=1).held_out.ids, tables.held_out.ids)


def test_a_share_of_few_prompts_holds_one_out(tmp_path: Path) -> None:
    """The one that a larger share holds out first; a source's weight does not copy it."""
    held_out = []
    for share in (0.001, 0.01, 0.2):
        path = write(tmp_path / "a.jsonl", GOOD[:12])
        config = Data([Source(path, weight=2)], HeldOutConfig("row", share=share))
        tables = build(config, TARGET, seed=0)
        assert len(tables.train) + len(tables.held_out) == 12
        assert {*tables.train.copies} == {2} and {*tables.held_out.copies} == {1}
        held_out.append({*tables.held_out.units.tolist()})
    assert len(held_out[0]) == 1 and held_out[0] == held_out[1] < held_out[2]
    for single in (GOOD[:1], [chat("question", f"reply {i}") for i in range(3)]):
        config = Data([Source(write(tmp_path / "b.jsonl", single))])
        with pytest.raises(
            UserError, match="give two prompts or more, .* or another --data.held-out.share"
        ):
            build(config, TARGET, seed=0)


def test_mixture_weights_take_shares_and_copies(tmp_path: Path) -> None:
    held = write(tmp_path / "h.jsonl", [chat("held", "out")])
    for weight, low, high in ((0.5, 70, 130), (2.0, 400, 400), (1.5, 270, 330)):
        sources = [Source(write(tmp_path / "a.jsonl", GOOD), weight=weight), Source(held, name="h")]
        tables = build(
            Data(sources, held_out=HeldOutConfig("source", sources=["h"])), TARGET, seed=0
        )
        assert low <= int(tables.train.copies.sum()) <= high


def test_rows_of_one_id_are_on_one_side(tmp_path: Path) -> None:
    """Rows of one id are one conversation: all of them are held out, or none."""
    same = write(tmp_path / "same.jsonl", [row | {"id": 0} for row in GOOD[:40]])
    with pytest.raises(UserError, match="no rows are left held out.* different id or without one"):
        build(Data([Source(same, name="same")]), TARGET, seed=0)
    other = write(tmp_path / "other.jsonl", GOOD[40:])
    held_out = HeldOutConfig("row", share=0.2)
    tables = build(Data([Source(same, name="same"), Source(other)], held_out), TARGET, seed=0)
    assert len(tables.train) and len(tables.held_out)


def test_exact_tokens_of_another_tokenizer_or_vocabulary_are_refused(tmp_path: Path) -> None:
    row = {
        "token_ids": [5, 6, 7, 8],
        "response_spans": [[1, 4]],
        "regenerated": {"tokenizer_hash": "other"},
    }
    with pytest.raises(UserError, match="another tokenizer"):
        build(data(tmp_path, [row]), TARGET, seed=0)
    with pytest.raises(UserError, match="outside the target's vocabulary"):
        build(
            data(tmp_path, [{**row, "regenerated": None, "token_ids": [5, 6, 7, 999]}]),
            TARGET,
            seed=0,
        )


def test_line_separators_inside_a_text_do_not_end_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps(chat("a\u2028b", "c\x85d"), ensure_ascii=False) + "\n", encoding="utf-8"
    )
    assert [row["messages"][0]["content"] for _, row in rows_of(str(tmp_path / "a.jsonl"))] == [
        "a\u2028b"
    ]


def test_a_prompt_without_a_completion_is_nothing_to_learn(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no token of the assistant's"):
        build(data(tmp_path, [{"prompt": "hello there"}]), TARGET, seed=0)


def test_json_parquet_and_folders_are_read(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps(GOOD[:2]))
    datasets.Dataset.from_list(GOOD[2:5]).to_parquet(str(folder / "b.parquet"))
    write(folder / "c.jsonl", GOOD[5:6])
    assert [row["messages"][0]["content"] for _, row in rows_of(str(folder))] == [
        f"question {i}" for i in range(6)
    ]


@pytest.mark.parametrize(
    "path", ["missing.jsonl", "./missing", "/missing/folder", "a/b/c", "def a(b):", "a:"]
)
def test_a_missing_path_is_not_asked_of_the_hub(path: str) -> None:
    with pytest.raises(UserError, match="does not exist"):
        list(rows_of(path))


def test_tables_are_reused_until_something_changes(tmp_path: Path) -> None:
    config = data(tmp_path, GOOD)
    first = prepare(config, TARGET, tmp_path / "cache", seed=0)
    stamp = (tmp_path / "cache" / "train.safetensors").stat().st_mtime_ns
    again = prepare(config, TARGET, tmp_path / "cache", seed=0)
    assert (tmp_path / "cache" / "train.safetensors").stat().st_mtime_ns == stamp
    assert np.array_equal(first.train.ids, again.train.ids) and first.counts == again.counts
    write(tmp_path / "train.jsonl", GOOD[:100])
    assert len(prepare(config, TARGET, tmp_path / "cache", seed=0).train) == 100


def test_the_key_of_tables_has_the_settings_and_files_of_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    write(tmp_path / "saved" / "rows.jsonl", GOOD[:2])
    saved = str(tmp_path / "saved")
    named = [Source("me/sums"), Source("me/sums", "test"), Source("me/sums", config_name="main")]
    named += [Source("me/sums", revision="v1"), Source(saved)]
    keys = [tables_key(Data([source]), TARGET, seed=0) for source in named]
    assert len({*keys}) == len(keys)
    os.utime(tmp_path / "saved" / "rows.jsonl", ns=(5, 5))
    assert tables_key(Data([Source(saved)]), TARGET, seed=0) != keys[-1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_packs_hold_every_document_once_and_never_overflow(
    lengths: list[int], capacity: int
) -> None:
    packs = pack_rows(lengths, capacity)
    assert sorted(i for p in packs for i in p) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in p) <= capacity for p in packs)
    assert len(packs) < 2 * sum(lengths) / capacity + 1


def test_collation_restarts_positions_and_marks_padding() -> None:
    row = [(np.array([7, 8]), np.array([False, True])), (np.array([9]), np.array([True]))]
    batch = collate([row, [(np.arange(5), np.ones(5, bool))]])
    assert batch.ids[0].tolist() == [7, 8, 9, 0, 0]
    assert batch.positions[0].tolist() == [0, 1, 0, 0, 1]
    assert batch.documents[0].tolist() == [0, 0, 1, PADDING, PADDING]
    assert batch.mask[0].tolist() == [False, True, True, False, False]


def table(count: int) -> TokenTable:
    return TokenTable.of([Encoded([i] * 4, [True] * 4) for i in range(count)], [1] * count)


def test_two_ranks_see_in_a_step_what_one_rank_sees_with_twice_the_accumulation() -> None:
    one = Batches(table(24), 8, rows=2, accumulation=4, ranks=1, seed=3)
    two = Batches(table(24), 8, rows=2, accumulation=2, ranks=2, seed=3)
    for step in range(5):
        seen_by_one = [one.micro_batch(step, a, 0).ids.tolist() for a in range(4)]
        seen_by_two = [two.micro_batch(step, a, r).ids.tolist() for a in range(2) for r in range(2)]
        assert seen_by_one == seen_by_two


def test_each_epoch_sees_every_row_once_in_new_order() -> None:
    batches = Batches(table(20), 4, rows=5, accumulation=1, ranks=1, seed=0)
    epochs = [
        [
            row[0]
            for step in range(4)
            for row in batches.micro_batch(4 * e + step, 0, 0).ids.tolist()
        ]
        for e in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20)) and epochs[0] != epochs[1]


@pytest.mark.parametrize("file", ["train.safetensors", "held_out.safetensors", "counts.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "a folder"])
def test_damaged_tables_are_built_again_and_nothing_else_is(
    tmp_path: Path, file: str, how: str, caplog
) -> None:
    config, folder = data(tmp_path, GOOD), tmp_path / "run" / "data"
    first = prepare(config, TARGET, folder, seed=0)
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = folder / file
    if how == "truncated":
        path.write_bytes(sound[file][:-7])
    elif how == "flipped":
        path.write_bytes(
            sound[file].replace(b'"key"', b'"kez"', 1)
            if file == "counts.json"
            else sound[file][:-9] + b"\7" * 9
        )
    else:
        path.unlink()
        if how == "a folder":
            path.mkdir()
    if how != "missing" or file != "counts.json":
        with pytest.raises(
            UserError, match="delete .*data and run the command that wrote it again"
        ):
            load(folder)
    again = prepare(config, TARGET, folder, seed=0)
    assert {
        path.name: path.read_bytes() for path in folder.iterdir()
    } == sound and "rebuilding the tables" in caplog.text
    assert np.array_equal(again.train.ids, first.train.ids) and again.counts == first.counts


def test_a_source_that_was_touched_gives_tables_of_the_same_identity(tmp_path: Path) -> None:
    config, folder = data(tmp_path, GOOD), tmp_path / "run" / "data"
    seen: list[str] = []
    prepare(config, TARGET, folder, 0, seen.append)
    key = table_counts(folder).key
    os.utime(tmp_path / "train.jsonl", (1, 1))
    prepare(config, TARGET, folder, 0, seen.append)
    assert seen[-1] == seen[-2] == table_counts(folder).identity
    assert table_counts(folder).key != key, "found without reading the sources again"
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refuse(identity: str) -> None:
        assert identity not in seen
        raise UserError("other data")

    write(tmp_path / "train.jsonl", GOOD[:100])
    with pytest.raises(UserError, match="other data"):
        prepare(config, TARGET, folder, 0, refuse)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == sound
    assert [path.name for path in folder.parent.iterdir()] == ["data"]
