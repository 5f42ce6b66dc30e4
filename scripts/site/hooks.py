"""Hooks of the site's build: what GitHub reads in another way than this Markdown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# What stands behind a block's language for the tests, see tests/helpers/pages.py.
MARK = re.compile(r"^( *```\w+) .+$", re.MULTILINE)
# A quotation that begins with a bold title: a box.
NOTICE = re.compile(r"^> \*\*([^*:.]+)[:.]?(.*?)\*\*(.*\n(?:>.*\n)*)", re.MULTILINE)
MADE_HERE = ("api.md", "notebook.md")  # pages that have no source to edit


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page's Markdown without the marks of its blocks, its notices as boxes."""
    if Path(page.file.src_uri).name in MADE_HERE or not config.repo_url:
        page.edit_url = None
    return NOTICE.sub(boxed, MARK.sub(r"\1", markdown))


def boxed(notice: re.Match[str]) -> str:
    """Return a notice as an admonition; what was bold behind the title stays bold."""
    title, bold, rest = notice.groups()
    text = (f"**{bold.strip()}**" if bold.strip() else "") + re.sub(r"^> ?", "", rest, flags=re.M)
    kind = "warning" if title == "Status" else "note"
    return f'!!! {kind} "{title}"\n\n' + "".join(f"    {line}\n" for line in text.splitlines())
