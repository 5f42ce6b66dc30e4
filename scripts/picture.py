"""Draw the picture of the README: the chat page with one reply, in a Chromium of this machine.

    python scripts/picture.py --out docs/page.png

It needs the packages of the extra dev. The target is the quickstart's with its committed EAGLE-3
drafter, greedy.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

QUICKSTART = Path("scripts/quickstart")
PROMPT = "def __eq__(self, other):"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="PNG file to write")
    out = parser.parse_args().out
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: there is no Chromium; install the package chromium")
    command = [sys.executable, "-c", "from draftsmith.train.commands.cli import main; main()"]
    command += ["serve", "--target", str(QUICKSTART / "target"), "--target.device", "cpu"]
    command += ["--drafter", str(QUICKSTART / "drafters" / "eagle3"), "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        draw(address_of(server), chromium, out)
    finally:
        server.terminate()
        server.wait()


def address_of(server: subprocess.Popen[str]) -> str:
    """Return the address that a server prints when it is ready."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.match(r"page: (\S+)", line):
            return found[1]
    sys.exit("error: the server did not start")


def draw(address: str, chromium: str, out: str) -> None:
    """Send the prompt on the page, wait for the figures of the reply, and save a screenshot."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 860, "height": 430})
        page.goto(address)
        page.click("#settings summary")
        page.fill("#limit", "64")
        page.fill("#temperature", "0")
        page.click("#settings summary")
        page.fill("#words", PROMPT)
        page.press("#words", "Enter")
        expect(page.locator(".figures").last).to_contain_text("with drafts", timeout=60_000)
        page.screenshot(path=out)
        browser.close()


if __name__ == "__main__":
    main()
