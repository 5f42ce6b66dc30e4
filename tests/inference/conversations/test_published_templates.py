"""No text of a row is lost without a word: on every published template that is at hand, each is in
the rendering and, where the target wrote it, in what is learned, or the row is refused by the name
of a field."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.inference.conversations.formats import conversation_of
from draftsmith.inference.conversations.messages import RowError
from draftsmith.inference.conversations.rendering import prompt_ids
from tests.conftest import ROOT
from tests.helpers.published_templates import (
    COLUMNS,
    WORD,
    Words,
    call,
    files,
    read,
    reply,
    result,
    row_of,
    table,
    tokenizer_of,
    tool,
    user,
)

NAMES = list(files())
FIELD = re.compile(
    r"^(?:(?:messages\[\d+\]|tools\[\d\])(?:\.(?:content(?:\[\d\])?|role|reasoning_content|reasoning"
    r"|tool_calls(?:\[\d\]\.function\.(?:name|arguments[\w.\[\]]*))?|function\.(?:name"
    r"|description)))?|system|system_prompt|tools): "
)


def check(name: str, row: dict[str, Any], words: Words) -> bool:
    """Return whether a row is read, all of whose words are there then; false if it is refused by
    the name of a field."""
    try:
        text, learned, _ = read(name, row)
    except RowError as error:
        assert FIELD.match(str(error)), error
        return False
    assert {*WORD.findall(text)} == {*words.all}
    assert {*WORD.findall(learned)} == {*words.written}, "and nothing that others said"
    if "4711" in str(row):
        assert "4711" in learned
    assert not re.search(r"<think>\s*</think>|^\s*</think>", learned), "of rows without reasoning"
    return True


@pytest.mark.parametrize("name", NAMES)
def test_each_field_is_there_and_learned_or_refused_by_name(name: str) -> None:
    for kind in COLUMNS:
        words = Words()
        row = row_of(kind, words)
        if check(name, row, words):
            # What is asked is checked where there is no reply too.
            prompt_ids(conversation_of(row), tokenizer_of(name), name)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[dict[str, Any], Words]:
    """Conversations of one to three questions with anything that rows have, in random shapes."""
    words = Words()
    row: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    first = draw(st.sampled_from(["", "system", "developer", "column"]))
    if first == "column":
        row["system_prompt"] = words()
    elif first:
        messages.append({"role": first, "content": words()})
    if draw(st.booleans()):
        row["tools"] = [tool(words) for _ in range(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(1, 3))):
        if messages and draw(st.integers(0, 5)) == 0:
            role = draw(st.sampled_from(["system", "developer", "critic"]))
            messages.append({"role": role, "content": words()})
        messages.append(user(words, draw(st.integers(0, 3))))
        if draw(st.booleans()):
            turn = reply(words) if draw(st.booleans()) else {"role": "assistant", "content": ""}
            as_text = draw(st.booleans())
            made = [call(words, as_text) for _ in range(draw(st.integers(1, 2)))]
            messages += [{**turn, "tool_calls": made}, result(words)]
        more: dict[str, Any] = {"tool_calls": []} if draw(st.booleans()) else {"refusal": None}
        if draw(st.booleans()):
            more[draw(st.sampled_from(["reasoning", "reasoning_content"]))] = words(True)
        messages.append(reply(words, draw(st.integers(0, 2)), **more))
    return row | {"messages": messages}, words


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_training")])
@given(made=conversations())
@settings(max_examples=8, deadline=None)
def test_no_text_of_a_random_row_is_lost(name: str, made: tuple[dict[str, Any], Words]) -> None:
    check(name, *made)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
@given(made=conversations())
@settings(max_examples=300, deadline=None)
def test_no_text_of_many_random_rows_is_lost(name: str, made: tuple[dict[str, Any], Words]) -> None:
    check(name, *made)


def test_documented_template_table_matches_the_findings() -> None:
    document = (ROOT / "docs" / "reference" / "templates.md").read_text()
    assert table() in document, "python -m tests.helpers.published_templates prints it"
