"""Rows of chats, and files of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def chat(user: str, reply: str, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": reply}],
        **more,
    }


def write(path: Path, rows: list[Any]) -> str:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)
