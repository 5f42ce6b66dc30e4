"""The Python API, and text as it streams."""

from __future__ import annotations

import doctest
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.heads.errors import UserError
from draftsmith.heads.exchange import hub
from draftsmith.inference import api, load
from draftsmith.inference.base.detokenize import StreamedText
from draftsmith.inference.proposers.ngram import NgramLookup
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART, ROOT, tiny_target
from tests.helpers.trained import questions

PROMPT = "def add(a, b):"


def test_the_examples_in_the_docstrings_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for module, examples in ((api, 10), (hub, 2)):
        results = doctest.testmod(module)
        assert results.attempted >= examples and results.failed == 0


def test_generate_accepts_text_ids_messages_and_arrays(quickstart: Target) -> None:
    decoder = load(quickstart, "ngram")
    ids = decoder.encode(PROMPT)
    one = decoder.generate(PROMPT, 20)
    assert (
        one.token_ids
        == decoder.generate(ids, 20).token_ids
        == decoder.generate([{"role": "user", "content": PROMPT}], 20).token_ids
    )
    assert decoder.encode(PROMPT, raw=True) == quickstart.tokenizer(PROMPT)["input_ids"] != ids
    row: Any = decoder.generate(torch.tensor(ids), 20)
    assert row.token_ids == one.token_ids
    assert decoder.generate(torch.tensor([ids, ids]).numpy(), 20)[1].token_ids == one.token_ids
    several = decoder.generate([PROMPT, ids, "def f():"], 20)
    assert [r.token_ids for r in several[:2]] == [one.token_ids] * 2 and len(several) == 3
    assert one.text == quickstart.tokenizer.decode(
        [t for t in one.token_ids if t not in quickstart.eos_ids]
    )


def test_a_reply_says_its_speed_and_acceptance(quickstart: Target) -> None:
    reply = load(quickstart, "ngram").generate(PROMPT, 40)
    counts = [round_.accepted for round_ in reply.rounds]
    assert reply.acceptance[0] == pytest.approx(sum(n >= 1 for n in counts) / len(counts))
    assert len(reply.acceptance) == max(counts)
    emitted = len(reply.token_ids) - 1  # the first token comes with the prefill
    assert reply.tokens_per_second == pytest.approx(emitted / reply.decode_s)
    written = json.loads(json.dumps(reply.to_dict()))
    assert written["text"] == reply.text and written["tau"] == pytest.approx(reply.tau)
    assert [round_["accepted"] for round_ in written["rounds"]] == counts
    short = load(quickstart).generate(PROMPT, 1).to_dict()  # no round
    assert short["tau"] is None and short["tokens_per_second"] is None and short["rounds"] == []


def test_seeded_samples_do_not_depend_on_batch_size(quickstart: Target) -> None:
    decoder = load(quickstart, "ngram")
    options: dict = {"max_new_tokens": 16, "samples": 3, "temperature": 1.0, "seed": 4}
    found = decoder.generate([PROMPT, "def f():"], **options)
    assert len(found) == 6 and len({tuple(r.token_ids) for r in found}) > 3
    assert [r.token_ids for r in found] == [
        r.token_ids for r in decoder.generate([PROMPT, "def f():"], batch_size=2, **options)
    ]
    assert [r.token_ids for r in decoder.generate(PROMPT, **options)] == [
        r.token_ids for r in found[:3]
    ]


def test_streamed_text_is_the_text(quickstart: Target) -> None:
    decoder = load(quickstart, "ngram")
    for stop in ((), ("\n",), ("return", "zzz")):
        whole = decoder.generate(PROMPT, 40, stop=stop, temperature=0.8)
        assert "".join(decoder.stream(PROMPT, 40, stop=stop, temperature=0.8)) == whole.text
        assert not any(s in whole.text for s in stop)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(4, 260), max_size=30), st.lists(st.integers(1, 4), min_size=1, max_size=30)
)
def test_pieces_are_never_taken_back(tokens: list[int], sizes: list[int]) -> None:
    """Any bytes, in any portions: the pieces add up to the text, and none ends within a character
    that comes later."""
    tokenizer = tiny_target().tokenizer
    streamed, pieces, start = StreamedText(tokenizer, ["he", "th"]), [], 0
    for size in sizes:
        pieces.append(streamed.add(tokens[start : start + size]))
        start += size
    pieces.append(streamed.add(tokens[start:], last=True))
    text = tokenizer.decode(tokens)
    ends = [place for stop in ("he", "th") if (place := text.find(stop)) >= 0]
    assert "".join(pieces) == text[: min(ends, default=len(text))]


def test_mistakes_are_user_errors(quickstart: Target) -> None:
    decoder = load(quickstart)
    for call, message in (
        (lambda: decoder.generate(" "), "empty"),
        (lambda: decoder.generate([]), "list of prompts is empty"),
        (lambda: decoder.generate(PROMPT, samples=0), "at least 1"),
        (lambda: decoder.generate(PROMPT, temperature=-1), "temperature"),
        (lambda: decoder.generate(PROMPT, top_p=0.9), "means nothing at temperature 0"),
        (lambda: decoder.generate(quickstart.tokenizer("hello")), "the input_ids"),
        (lambda: decoder.generate([[5, 10**6]]), "no token id"),
        (lambda: decoder.generate(PROMPT, samples=3), "equal at temperature 0"),
        (lambda: decoder.generate(PROMPT, samples="4"), "whole number"),  # type: ignore[arg-type]
        (lambda: decoder.generate(PROMPT, temprature=0.7), "did you mean temperature"),
        (lambda: decoder.generate(PROMPT, max_tokens=12), "did you mean max_new_tokens"),
        (lambda: load(quickstart, NgramLookup(), profile="p.json"), "not with a proposer"),
        (lambda: decoder.generate(PROMPT, repetition_penalty="a"), "must be a number"),
        (lambda: decoder.generate(PROMPT, stop=""), "at least one character"),
        (lambda: decoder.generate(PROMPT, stop=5), "a text or a list of texts"),  # type: ignore[arg-type]
        (lambda: decoder.generate(b"def"), "not bytes"),
        (lambda: decoder.generate(None), "not NoneType"),  # type: ignore[arg-type]
        (lambda: decoder.generate(torch.tensor([0.5])), "not float"),
        (lambda: decoder.generate([{"content": "x"}]), r"messages\[0\].role is missing"),
        (lambda: load(quickstart, None), "must be named"),  # type: ignore[arg-type]
        (lambda: load(str(QUICKSTART), dtyp="float32"), "did you mean dtype"),
        (lambda: load(str(QUICKSTART), drafters="ngram"), "did you mean drafter?"),
        (lambda: decoder.generate(prompt=PROMPT), "did you mean prompts?"),  # type: ignore[call-overload]
        (lambda: decoder.stream(PROMPT, stops=["a"]), "did you mean stop?"),
        (lambda: load(quickstart, device="cuda"), "takes no options"),
        (lambda: load(str(QUICKSTART), device="mps"), "not supported"),
        (lambda: load("no/such/target/folder"), "check the path"),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_a_drafter_works_on_one_batch_at_a_time(quickstart: Target) -> None:
    """A second one is refused; one that was given up is no hindrance."""
    for drafter in ("ngram", str(QUICKSTART.parent / "draft_model")):
        decoder = load(quickstart, drafter)
        whole = decoder.generate(PROMPT, 24).text
        pieces = decoder.stream(PROMPT, 24)
        first = next(pieces)
        with pytest.raises(UserError, match="in use for another batch"):
            decoder.generate(PROMPT, 24)
        assert first + "".join(pieces) == whole
        pieces = decoder.stream(PROMPT, 24)
        next(pieces)
        del pieces
        assert decoder.generate(PROMPT, 24).text == whole


def test_a_dtype_may_be_torchs_own() -> None:
    assert load(str(QUICKSTART), device="cpu", dtype=torch.bfloat16).target.dtype == torch.bfloat16


def test_compilation_without_a_compiler_is_a_clear_error(
    quickstart: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/g++")
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler, and there is no /no/g\+\+"):
        load(quickstart, compile=True)
    assert not quickstart.static


@pytest.mark.full
def test_a_compiled_target_writes_the_same_text() -> None:
    """Few compilations, whatever the lengths of prompts and the sizes of trees, and while a batch
    shrinks."""
    plain = load(str(QUICKSTART), device="cpu")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = load(str(QUICKSTART), "ngram:length=4", device="cpu", compile=True)
    prompts = [PROMPT + " " + "x" * 4 * i for i in range(12)]
    for batch in (1, 8):
        texts = [d.generate(prompts, 24, batch_size=batch) for d in (plain, compiled)]
        assert [r.token_ids for r in texts[0]] == [r.token_ids for r in texts[1]]
    assert len({len(r.token_ids) for r in texts[0]}) > 1, "rows must leave at different times"
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["medusa", "eagle3", "dspark", "distill"])
def test_compiled_rounds_of_trained_drafters_write_the_same_text(drafter: str) -> None:
    """By inductor, as users compile: the other tests of compiled rounds stop at dynamo."""
    folder = str(QUICKSTART.parent / "drafters" / drafter)
    found = []
    for compiled in (False, True):
        decoder = load(str(QUICKSTART), folder, device="cpu", compile=compiled)
        drawn: tuple[dict[str, Any], ...] = (
            {},
            {"temperature": 0.8},
            {"temperature": 0.8, "rule": "rejection"},
        )
        found.append([decoder.generate(PROMPT, 40, **how).token_ids for how in drawn])
    assert found[0] == found[1]


def test_a_batch_streams_and_its_replies_are_those_of_generate(quickstart: Target) -> None:
    decoder = load(quickstart, "ngram")
    words = questions("test", 3)
    stream = decoder.stream(words, 24, temperature=0.8, seed=4)
    texts = ["", "", ""]
    for index, piece in stream:
        texts[index] += piece
    expected = decoder.generate(words, 24, temperature=0.8, seed=4)
    assert texts == [reply.text for reply in expected]
    for found, reply in zip(stream.replies, expected, strict=True):
        assert (found.text, found.token_ids, found.finish_reason) == (
            reply.text, reply.token_ids, reply.finish_reason,
        )  # fmt: skip
        assert found.tau == reply.tau or not reply.rounds
    # A stream that is closed leaves the drafter free.
    given_up = decoder.stream(words[0], 24)
    next(given_up)
    given_up.close()
    assert decoder.generate(words[0], 4).token_ids
