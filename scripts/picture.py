"""Draw the picture of the README: the chat page while it writes one reply with drafts and without.

    python scripts/picture.py --out docs/page.png

It needs a Chromium, the packages of the extra dev, and SmolLM2-135M-Instruct
(scripts/smollm2/get.sh), which drafts with the EAGLE-3 of this repository, greedy. The picture is
taken when the reply with drafts has ended.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

TARGET = Path("models/smollm2-135m-instruct")
DRAFTER = Path("scripts/smollm2/drafter")
PROMPT = "Write a Python function that returns the largest number of a list."
TAU = "3.03 tokens a round"
"""What the page shows then, and the caption in the README says."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="PNG file to write")
    out = parser.parse_args().out
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: Chromium is missing; install the package chromium")
    if not TARGET.is_dir():
        sys.exit(f"error: {TARGET} is missing; run scripts/smollm2/get.sh")
    command = [sys.executable, "-c", "from draftsmith.commands.cli import main; main()"]
    command += ["serve", "--target", str(TARGET), "--target.device", "cpu"]
    command += ["--drafter", str(DRAFTER), "--port", "0"]
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
    """Send the prompt on the page, and save a screenshot when the reply with drafts has ended."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1060, "height": 730}, device_scale_factor=1.5)
        page.goto(address)
        page.locator(".example").first.wait_for()
        page.fill("#words", PROMPT)
        page.press("#words", "Enter")
        drafted = page.locator(".column").first
        drafted.locator(".notes").wait_for(timeout=300_000)
        page.screenshot(path=out)
        expect(drafted.locator(".figures")).to_contain_text(TAU)
        browser.close()


if __name__ == "__main__":
    main()
