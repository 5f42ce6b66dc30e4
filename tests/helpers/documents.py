"""Headings of the documents."""

from __future__ import annotations

import re
from pathlib import Path


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    anchors: dict[str, int] = {}
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set()
    for heading in re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        count = anchors.get(anchor, 0)
        anchors[anchor] = count + 1
        found.add(f"{anchor}-{count}" if count else anchor)
    return found
