"""The page of `draftsmith serve` in a real browser: send, stream, switch, reload, phone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from draftsmith.inference.api import load
from draftsmith.inference.targets.target import Target
from tests.helpers.browser import chromium
from tests.inference.serving.conftest import EAGLE3, Running, started

WORDS = "def add(a, b):"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])


@contextmanager
def opened(browser: Browser, address: str, **look: Any) -> Iterator[tuple[Page, list[str]]]:
    """The page in a browser, and what goes wrong there: errors, and requests to other places."""
    wrong: list[str] = []
    context = browser.new_context(**look)
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on(
        "request",
        lambda r: None if r.url.startswith((address, "data:")) else wrong.append(r.url),
    )
    page.goto(address)
    yield page, wrong
    context.close()


def send(page: Page, words: str) -> None:
    replies = page.locator(".reply").count()
    page.fill("#words", words)
    page.press("#words", "Enter")
    # The button is hidden from then on until the reply ends, which may be too short to be seen.
    expect(page.locator(".reply")).to_have_count(replies + 1, timeout=5_000)


def test_chat_page_shows_marked_reply_next_to_plain_one(
    server: Running, browser: Browser, quickstart: Target
) -> None:
    """A reply is the target's own, its accepted drafts are marked, and plain decoding writes the
    same beside it at the same time; a reload keeps both, and another drafter writes the same."""
    expected = load(quickstart, EAGLE3).generate(WORDS, 24)
    with opened(browser, server.address) as (page, wrong):
        expect(page.locator("#title")).to_have_text("quickstart/target")
        expect(page.locator("#about")).to_have_text(
            "llama, 8 layers, hidden size 192, float32, cpu"
        )
        names = page.locator("#model option").all_text_contents()
        assert names == ["eagle3", "ngram", "none (plain decoding)"]
        page.click("#settings summary")
        page.fill("#limit", "24")
        send(page, WORDS)
        expect(page.locator("#send")).to_be_visible()
        columns = page.locator(".column")
        heads = columns.locator("h2").all_text_contents()
        assert heads == ["eagle3", "Plain decoding"]
        assert columns.locator(".text").all_text_contents() == [expected.text] * 2
        marked = "".join(columns.first.locator(".drafted").all_text_contents())
        assert 0 < len(marked) < len(expected.text)
        assert columns.last.locator(".drafted").count() == 0
        figures = page.locator(".figures").all_text_contents()
        for line, tau in zip(figures, (expected.tau, 1.0), strict=True):
            assert re.match(
                rf"[\d.]+ tokens/s · {tau:.2f} tokens a round \(tau\) · 24 tokens", line
            )
        expect(columns.first).to_contain_text("cut at 24 tokens · drafts accepted, by position")
        said = page.locator(".verdict strong")
        expect(said).to_have_text(re.compile(r"Same text · [\d.]+x the speed of plain decoding"))
        expect(page.locator("#status")).to_contain_text("Same text")

        page.reload()
        expect(page.locator("#model option")).to_have_count(3)
        assert columns.locator(".text").all_text_contents() == [expected.text] * 2
        assert page.input_value("#limit") == "24"

        page.click("#fresh")
        page.uncheck("#compare")
        page.select_option("#model", label="ngram")
        page.reload()
        expect(page.locator("#model option")).to_have_count(3)
        assert page.locator("#model option:checked").text_content() == "ngram"
        send(page, WORDS)
        expect(page.locator("#send")).to_be_visible()
        assert columns.locator(".text").all_text_contents() == [expected.text]
        assert columns.locator("h2").all_text_contents() == ["ngram"]
        page.uncheck("#marks")
        mark = page.locator(".text .drafted").last
        assert mark.evaluate("e => getComputedStyle(e).boxShadow") == "none"
    assert not wrong


def test_examples_copy_retry_edit_and_shortcut_keys_work(server: Running, browser: Browser) -> None:
    with opened(browser, server.address, permissions=["clipboard-read", "clipboard-write"]) as (
        page,
        wrong,
    ):
        clipboard = "navigator.clipboard.readText()"
        page.uncheck("#compare")
        page.click("#settings summary")
        page.fill("#limit", "8")
        page.keyboard.press("Escape")
        expect(page.locator("#limit")).to_be_hidden()
        page.locator(".example").first.click()
        reply, asked = page.locator(".reply .text"), page.locator(".user .text")
        expect(page.locator(".copy")).to_be_visible()
        expect(page.locator("#intro")).to_be_hidden()
        assert asked.all_text_contents() == ["def __eq__(self, other):"]
        first = reply.text_content()
        page.click(".copy")
        expect(page.locator(".copy")).to_have_text("Copied")
        assert page.evaluate(clipboard) == first

        page.click(".retry")
        expect(page.locator(".copy")).to_be_visible()
        assert reply.all_text_contents() == [first]

        page.focus("#words")
        page.keyboard.press("ArrowUp")
        expect(page.locator("#editing")).to_be_visible()
        assert page.input_value("#words") == "def __eq__(self, other):"
        page.keyboard.press("Escape")
        expect(page.locator("#editing")).to_be_hidden()
        assert page.input_value("#words") == "" and reply.all_text_contents() == [first]
        page.click(".edit")
        page.fill("#words", WORDS)
        page.keyboard.press("Enter")
        expect(asked).to_have_text([WORDS])
        expect(page.locator(".copy")).to_be_visible()
        assert reply.count() == 1

        unnamed = "[...document.querySelectorAll('button, input, select, textarea')].filter(e => "
        unnamed += "!e.textContent.trim() && !e.labels?.length && !e.ariaLabel).length"
        assert page.evaluate(unnamed) == 0
    assert not wrong


HOSTILE = """# Title <img src=x onerror=alert(1)>

1. **Use** `a < b` and [a link](https://example.org/a) but [no](javascript:alert(1))
2. *second* <script>alert(2)</script> ![image](https://example.org/i.png)
   - nested [data](data:text/html,x) <https://example.org/b>

| one | two |
|-----|----:|
| 1 | **2** <svg onload=alert(3)> |

> quoted
> text &lt;b&gt;

```py" onclick="alert(4)
x = "<b>"
y = 2
```

<div onclick="alert(5)">block</div>
<iframe src="javascript:alert(6)"></iframe>
"""


def events(pieces: list[dict[str, Any]], seconds: float) -> str:
    """A streamed reply of these pieces, each of a round of its own."""
    lines = []
    for number, piece in enumerate(pieces):
        end = "stop" if number == len(pieces) - 1 else None
        spent = {"tokens": 1, "seconds": seconds if number else 0.0}
        choice = {"index": 0, "finish_reason": end, "pieces": [piece], "round": spent}
        lines.append(f"data: {json.dumps({'choices': [choice]})}\n\n")
    return "".join([*lines, "data: [DONE]\n\n"])


def test_markdown_is_rendered_without_executing_its_html(server: Running, browser: Browser) -> None:
    """Drafted words stay marked inside the rendered Markdown; two texts that differ are said to."""
    words = re.findall(r"\s*\S+\s*", HOSTILE)
    pieces = [{"text": word, "drafted": n % 3 > 0} for n, word in enumerate(words)]
    other = [{"text": piece["text"], "drafted": False} for piece in pieces[:-1]]

    def answer(route: Route) -> None:
        plain = (route.request.post_data_json or {})["model"].endswith(":plain")
        body = events(other, 0.25) if plain else events(pieces, 0.125)
        route.fulfill(body=body, content_type="text/event-stream")

    with opened(browser, server.address) as (page, wrong):
        page.route("**/v1/chat/completions", answer)
        expect(page.locator("#model option")).to_have_count(3)
        assert not page.is_checked("#markdown")  # the target writes code
        send(page, WORDS)
        expect(page.locator(".verdict strong")).to_have_text(
            re.compile(
                r'The texts differ from character 442 on: "src=.*" with drafts, "" without .*'
            )
        )
        expect(page.locator(".verdict strong")).to_contain_text("2.00x the speed")
        assert page.locator(".reply .text").first.text_content() == HOSTILE
        page.check("#markdown")
        text = page.locator(".reply .text").first
        for found in ("h3", "ol > li", "li li", "strong", "em", "li code", "td.right", ".code pre"):
            assert text.locator(found).count(), found
        links = text.locator("a").evaluate_all("links => links.map(a => a.href)")
        assert links == ["https://example.org/a", "https://example.org/b"]
        allowed = "H3 OL UL LI P STRONG EM CODE SPAN A TABLE THEAD TBODY TR TH TD DIV PRE BR BUTTON"
        tags = text.locator("*").evaluate_all("all => [...new Set(all.map(e => e.tagName))]")
        assert {*tags} <= {*allowed.split(), "BLOCKQUOTE"}
        attributes = text.locator("*").evaluate_all(
            "all => all.flatMap(e => e.getAttributeNames())"
        )
        assert not [name for name in attributes if name.startswith("on")]
        for shown in ("<img src=x onerror=alert(1)>", "<script>alert(2)</script>", "![image]"):
            expect(text).to_contain_text(shown)
    assert not wrong


def test_marks_are_those_of_the_words_in_markdown_too(server: Running, browser: Browser) -> None:
    source = (
        "# w0 w1\n\n1. w2 **w3 w4** `w5 w6`\n   - w7 *w8*\n2. w9\n\n| w10 | w11 |\n|--|--|\n"
        "| w12 | **w13** w14 |\n\n> w15\n> w16 \\* w17\n\n```py\nw18\n\n  w19\n```\n\n"
        "[w20 w21](https://example.org) <b>w22</b>\nw23\n"
    )
    pieces = [
        {"text": text, "drafted": text[0] == "w" and int(text[1:]) % 3 > 0}
        for text in re.findall(r"w\d+|[^w]+", source)
    ]
    script = """async (pieces) => {
      const { formatted } = await import("/markdown.js");
      const shown = document.createElement("article");
      shown.append(...formatted(pieces));
      document.body.append(shown);
    }"""
    with opened(browser, server.address) as (page, wrong):
        page.evaluate(script, pieces)
        marked = page.locator("article .drafted").all_text_contents()
        shown = re.findall(r"w\d+", page.locator("article").text_content() or "")
    assert shown == [f"w{number}" for number in range(24)]
    assert marked == [word for word in shown if int(word[1:]) % 3 > 0]
    assert not wrong


def test_columns_are_shown_at_the_same_time_on_their_clocks(
    server: Running, browser: Browser
) -> None:
    """What one column has ahead of the other's clock waits; a round's seconds are its own alone."""
    script = """async () => {
      const { advance, newColumn, receive, speed, tau, textOf } = await import("/columns.js");
      const columns = ["eagle", "plain"].map((drafter) => newColumn({ title: drafter, drafter }));
      const seen = [];
      const step = (place, text, tokens, seconds, finish = null) => {
        const round = { tokens, seconds };
        const pieces = [{ text, drafted: false }];
        receive(columns[place], { choices: [{ pieces, round, finish_reason: finish }] });
        advance(columns);
        seen.push(columns.map(textOf).join("|"));
      };
      step(0, "a", 1, 0);
      step(0, "bc", 2, 3);
      step(1, "a", 1, 0);
      step(1, "b", 1, 2);
      step(0, "d", 1, 3, "stop");
      step(1, "c", 1, 2);
      step(1, "d", 1, 2, "stop");
      return [seen, columns.map(tau), columns.map(speed)];
    }"""
    with opened(browser, server.address) as (page, wrong):
        seen, tau, speed = page.evaluate(script)
    assert seen == ["a|", "a|", "a|a", "a|ab", "a|ab", "abc|abc", "abcd|abcd"]
    assert (tau, speed) == ([1.5, 1.0], [0.5, 0.5])
    assert not wrong


def test_a_reply_is_stopped_and_texts_are_never_markup(server: Running, browser: Browser) -> None:
    evil = "<img src=x onerror=alert(1)> \u202e\u0645\u0631\u062d\u0628\u0627 \u4f60\u597d"
    with opened(browser, server.address, viewport={"width": 390, "height": 780}) as (page, wrong):
        page.click("#settings summary")
        page.fill("#limit", "900")
        page.fill("#temperature", "0")  # a reply that is long for certain
        send(page, evil)
        page.locator(".reply span").first.wait_for()
        page.keyboard.press("Escape")  # closes the settings
        page.keyboard.press("Escape")
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator(".notes").last).to_contain_text("stopped")
        assert page.locator(".verdict").count() == 0
        assert page.locator(".user .text").last.text_content() == evil
        assert page.locator("img").count() == 0
        # Nothing is wider than a phone.
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        for name in ("#model", "#send", "#fresh", "#words"):
            box = page.locator(name).bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert not wrong


@pytest.mark.full
def test_the_page_asks_for_a_key_and_says_what_is_wrong(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    process, address = started("--api-key-file", str(tmp_path / "key"))
    try:
        with opened(browser, address, color_scheme="dark") as (page, _):
            # Who opens the page has made no mistake yet: the field asks for the key, and has the
            # cursor.
            expect(page.locator("#key")).to_be_focused()
            expect(page.locator("#key-row")).to_contain_text("asks for an API key")
            expect(page.locator("#error")).to_be_hidden()
            page.fill("#key", "wrong")
            page.press("#key", "Enter")
            expect(page.locator("#error")).to_contain_text("API key is missing or wrong")
            page.fill("#key", "secret")
            page.press("#key", "Tab")
            expect(page.locator("#model option")).to_have_count(1)
            expect(page.locator("#error")).to_be_hidden()
            expect(page.locator("#key-row")).to_be_hidden()
            page.reload()
            expect(page.locator("#model option")).to_have_count(1)
            expect(page.locator("#key-row")).to_be_hidden()
            send(page, WORDS)
            expect(page.locator("#send")).to_be_visible()
            assert page.locator(".reply .text").last.text_content()
            process.terminate()
            process.wait(timeout=60)
            page.fill("#words", WORDS)
            page.click("#send")
            expect(page.locator("#error")).to_contain_text("Error:")
            # What could not be sent can be sent again.
            assert page.input_value("#words") == WORDS
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") != (
                "rgb(255, 255, 255)"
            )
    finally:
        if process.poll() is None:
            process.kill()
