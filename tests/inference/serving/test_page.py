"""The page of `draftsmith serve` in a real browser: send, stream, switch, reload, phone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Page, expect, sync_playwright

from draftsmith.inference.api import load
from draftsmith.inference.targets.target import Target
from tests.inference.evaluation.test_report_browser import chromium
from tests.inference.serving.conftest import EAGLE3, Running, started

WORDS = "def add(a, b):"


@contextmanager
def opened(address: str, **look: Any) -> Iterator[tuple[Page, list[str]]]:
    """The page in a browser, and what goes wrong there: errors, and requests to other places."""
    wrong: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_context(**look).new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on(
            "request",
            lambda r: None if r.url.startswith((address, "data:")) else wrong.append(r.url),
        )
        page.goto(address)
        yield page, wrong
        browser.close()


def send(page: Page, words: str) -> None:
    replies = page.locator(".reply").count()
    page.fill("#words", words)
    page.press("#words", "Enter")
    # The button is hidden from then on until the reply ends, which may be too short to be seen.
    expect(page.locator(".reply")).to_have_count(replies + 1, timeout=5_000)


def test_chat(server: Running, quickstart: Target) -> None:
    """A reply is the target's own, its accepted drafts are marked, plain decoding stands beside it;
    a reload keeps the conversation, and another drafter writes the same."""
    expected = load(quickstart, EAGLE3).generate(WORDS, 64)
    with opened(server.address) as (page, wrong):
        expect(page.locator("#title")).to_have_text("target")
        names = page.locator("#model option").all_text_contents()
        assert names == ["eagle3", "ngram", "none (plain decoding)"]
        page.click("#settings summary")
        page.fill("#limit", "64")
        send(page, WORDS)
        expect(page.locator("#send")).to_be_visible()
        reply = page.locator(".reply .text").last
        assert reply.text_content() == expected.text
        marked = "".join(reply.locator(".drafted").all_text_contents())
        assert 0 < len(marked) < len(expected.text)
        figures = page.locator(".figures").last
        expect(figures).to_contain_text(f"eagle3: {expected.tau:.2f} tokens a round")
        expect(figures).to_contain_text("with drafts, the same text")

        page.reload()
        expect(page.locator("#model option")).to_have_count(3)
        assert page.locator(".reply .text").last.text_content() == expected.text
        assert page.input_value("#limit") == "64"

        page.click("#fresh")
        page.select_option("#model", label="ngram")
        page.reload()
        expect(page.locator("#model option")).to_have_count(3)
        assert page.locator("#model option:checked").text_content() == "ngram"
        send(page, WORDS)
        expect(page.locator("#send")).to_be_visible()
        assert page.locator(".reply .text").last.text_content() == expected.text
        expect(page.locator(".figures").last).to_contain_text("ngram: ")
        page.uncheck("#colours")
        mark = page.locator(".drafted").last
        assert mark.evaluate("e => getComputedStyle(e).borderBottomWidth") == "0px"
    assert not wrong


def test_a_reply_is_stopped_and_texts_are_never_markup(server: Running) -> None:
    evil = "<img src=x onerror=alert(1)> \u202e\u0645\u0631\u062d\u0628\u0627 \u4f60\u597d"
    with opened(server.address, viewport={"width": 390, "height": 780}) as (page, wrong):
        page.click("#settings summary")
        page.fill("#limit", "900")
        page.fill("#temperature", "2")
        send(page, evil)
        page.locator(".reply span").first.wait_for()
        page.click("#stop")
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator(".figures").last).to_contain_text("stopped")
        assert page.locator(".user .text").last.text_content() == evil
        assert page.locator("img").count() == 0
        # Nothing is wider than a phone.
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        for name in ("#model", "#send", "#fresh", "#words"):
            box = page.locator(name).bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390
    assert not wrong


def test_the_page_asks_for_a_key_and_says_what_is_wrong() -> None:
    process, address = started("--api-key", "secret")
    try:
        with opened(address, color_scheme="dark") as (page, _):
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
