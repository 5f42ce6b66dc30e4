"""Text of tokens as it is streamed and stopped: stop strings against transformers' own criteria,
bytes that are no text, and special tokens."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from draftsmith.inference.api import Decoder, load
from draftsmith.inference.base.detokenize import StopStrings, StreamedText, special_ids
from draftsmith.inference.decode import Generation
from draftsmith.inference.targets.target import Target
from tests.conftest import make_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁a", "b", "ab", "▁ab", "ba", "\n", "▁▁", "aab", "é", "你"]


def with_byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer of Llama 2's kind: bytes as tokens of their own, spaces as U+2581."""
    vocabulary = {token: number for number, token in enumerate(["<s>", *BYTES, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


TOKENIZERS: dict[str, Any] = {
    "byte-level": make_tokenizer(["<p>", "<e>"], None, eos="<e>"),
    "byte-fallback": with_byte_fallback(),
}
TEXTS = ["hello there, how", "ab aab ba\n\nab", "你好 😀😀 é", "the <e> the", "  a  b \ufffd"]


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]


def test_stop_strings_end_texts_where_transformers_ends_them(tokenizer: Any) -> None:
    """Random ends of random tokens: stops are taken out of texts, so that about half are found."""
    draw = random.Random(5)
    found = 0
    for trial in range(60):
        text = draw.choice(TEXTS) * 2
        tokens = [draw.randrange(len(tokenizer)) for _ in range(3)]
        tokens += tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens.insert(draw.randrange(len(tokens)), draw.randrange(len(tokenizer) + 3))
        stops = []
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(len(text))
            stops.append(text[start : start + draw.randint(1, 7)])
        wanted, ours = StopStringCriteria(tokenizer, stops), StopStrings(tokenizer, stops)
        for end in range(1, len(tokens) + 1):
            ids: Any = torch.tensor([tokens[:end]])
            expected = bool(wanted(ids, None))
            assert ours.end_with(tokens[:end]) is expected, (trial, stops, tokens[:end])
            found += expected
    assert found > 100


def test_a_stop_string_costs_nothing_before_it_is_looked_for(tokenizer: Any) -> None:
    """transformers' table took 13 s for this one at 2,048 tokens, and the review's server stood."""
    started = time.perf_counter()
    assert not StopStrings(tokenizer, ["ab" * 10_000]).end_with([5] * 100)
    assert time.perf_counter() - started < 0.5


def test_invalid_utf8_is_streamed_without_delay(tokenizer: Any) -> None:
    """4,000 tokens of invalid UTF-8 with text behind: shown soon, and as fast as text."""
    name = BYTES[0xFF] if "<0xFF>" in tokenizer.get_vocab() else "ÿ"
    wrong = tokenizer.convert_tokens_to_ids(name)
    end = tokenizer(" ab", add_special_tokens=False)["input_ids"]
    tokens = [*[wrong] * 4000, *end]
    streamed = StreamedText(tokenizer)
    started = time.perf_counter()
    shown = ""
    for number, token in enumerate(tokens):
        shown += streamed.add([token], number == len(tokens) - 1)
        assert len(shown) >= number - 4
    assert shown == tokenizer.decode(tokens)
    assert time.perf_counter() - started < 1.5


def test_characters_of_several_tokens_are_never_shown_in_parts(tokenizer: Any) -> None:
    """Text with characters of two to four bytes, token by token, in one run longer than the window;
    behind bytes that are no text, too."""
    text = "a😀é你" * 30
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > 128
    streamed = StreamedText(tokenizer)
    shown = "".join(streamed.add([token]) for token in tokens) + streamed.add([], True)
    assert shown == tokenizer.decode(tokens)
    runs = tokenizer("😀你" * 40, add_special_tokens=False)["input_ids"]
    streamed = StreamedText(tokenizer)
    shown = "".join(streamed.add([token]) for token in runs) + streamed.add([], True)
    assert shown == tokenizer.decode(runs)


def test_invalid_bytes_before_a_character_leave_it_whole() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    wrong = tokenizer.convert_tokens_to_ids("ÿ")
    character = tokenizer("😀", add_special_tokens=False)["input_ids"]
    assert len(character) == 4
    for count in range(1, 9):
        tokens = [*[wrong] * count, *character, *character]
        streamed = StreamedText(tokenizer)
        shown = "".join(streamed.add([token]) for token in tokens) + streamed.add([], True)
        assert shown == "\ufffd" * count + "😀😀"


@pytest.fixture(scope="module")
def decoder(quickstart: Target) -> Decoder:
    return load(quickstart, "ngram")


def test_special_tokens_are_left_out_of_reply_text(decoder: Decoder) -> None:
    """`Reply.text` is transformers' own text without special tokens, also where one stands in the
    middle of a reply."""
    tokenizer = decoder.target.tokenizer
    words = tokenizer(" the list", add_special_tokens=False)["input_ids"]
    special = sorted(special_ids(tokenizer))
    assert len(special) > len(decoder.target.eos_ids)
    for token in special:
        ids = [*words, token, *words, token]
        text = decoder._text(Generation([1], token_ids=ids), ())
        assert text == tokenizer.decode(ids, skip_special_tokens=True) == " the list the list"


def test_stop_string_split_by_special_token_does_not_stop(tiny: Target) -> None:
    """The token is no text, so that the text holds the string, and the reply goes on all the
    same: nothing of it is lost."""
    tokenizer = tiny.tokenizer
    first, second = tokenizer.encode("hello"), tokenizer.encode(" there you")
    special = tokenizer.convert_tokens_to_ids("<u>")
    tokens = [*first, special, *second]
    stops = StopStrings(tokenizer, ["hello there"])
    assert not any(stops.end_with(tokens[: end + 1]) for end in range(len(tokens)))
    streamed, shown = StreamedText(tokenizer, ["hello there"]), ""
    for number, token in enumerate(tokens):
        last = number == len(tokens) - 1
        shown += streamed.add([] if token == special else [token], last, stopped=False)
    assert shown == "hello there you"
