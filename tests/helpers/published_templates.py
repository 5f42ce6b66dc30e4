"""Published chat templates, and rows in which every field has a word of its own.

The templates are those of the package `trl` and of this project. `python -m
tests.helpers.published_templates` prints the table of docs/reference/templates.md.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from draftsmith.inference.conversations.formats import conversation_of
from draftsmith.inference.conversations.messages import RowError
from draftsmith.inference.conversations.rows import SourceNotes
from draftsmith.train.data.templates import encode
from tests.conftest import ROOT, make_tokenizer

ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|return|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>",
    "<|eot|>", "<|end|>", "<|endoftext|>",
)  # fmt: skip
SPECIAL = re.compile(r"<\|[^|<>\s{}]+\|>|<\|?(?:start_of_turn|end_of_turn|turn|bos|eos)\|?>|</?s>")
WORD = re.compile(r"q[a-z]{4}z")


def files() -> dict[str, Path]:
    """Return the files of all templates by name."""
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None, "trl is in the extra dev"
    folder = Path(spec.origin).parent / "chat_templates"
    found = {path.stem: path for path in sorted(folder.glob("*.jinja"))}
    for path in sorted((ROOT / "tests" / "train" / "data" / "layouts").glob("*.jinja")):
        found[f"layouts/{path.stem}"] = path
    return found | {
        "quickstart": ROOT / "scripts" / "quickstart" / "target" / "chat_template.jinja"
    }


@cache
def tokenizer_of(name: str) -> Any:
    """A tokenizer with a published template, which knows the special tokens that it writes."""
    source = files()[name].read_text()
    special = sorted({"<|pad|>", "<|endoftext|>", *ENDS, *SPECIAL.findall(source)})
    eos = next(end for end in ENDS if end in source or end == ENDS[-1])
    tokenizer: Any = make_tokenizer(special, source, eos, "<|pad|>", vocab_size=400)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


class Words:
    """Words that occur nowhere else: qaaaaz, qaaabz and so on."""

    def __init__(self) -> None:
        self._numbers = count()
        self.all: list[str] = []
        self.written: list[str] = []
        """Those of replies, which are learned."""

    def __call__(self, written: bool = False) -> str:
        number, letters = next(self._numbers), ""
        for _ in range(4):
            number, letter = divmod(number, 26)
            letters = chr(ord("a") + letter) + letters
        self.all.append(word := f"q{letters}z")
        if written:
            self.written.append(word)
        return word


def user(words: Words, parts: int = 0) -> dict[str, Any]:
    return {"role": "user", "content": content(words, parts, False)}


def reply(words: Words, parts: int = 0, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content(words, parts, True), **more}


def content(words: Words, parts: int, written: bool) -> Any:
    if not parts:
        return f"{words(written)} {words(written)}"
    return [{"type": "text", "text": words(written)} for _ in range(parts)]


def call(words: Words, as_text: bool = False) -> dict[str, Any]:
    name = words(True)
    arguments: Any = {
        words(True): words(True),
        words(True): {words(True): [words(True), words(True)]},
        words(True): 4711,
        words(True): True,
    }
    function = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
    return {"id": "call00001", "type": "function", "function": function}


def calls(words: Words, number: int = 1, as_text: bool = False) -> dict[str, Any]:
    made = [call(words, as_text) for _ in range(number)]
    return {"role": "assistant", "content": None, "tool_calls": made}


def tool(words: Words) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"town": {"type": "string"}}}
    function = {"name": words(), "description": words(), "parameters": parameters}
    return {"type": "function", "function": function}


def result(words: Words) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call00001", "content": words()}


def row_of(kind: str, words: Words) -> dict[str, Any]:
    """Return a row in which one thing is tried, for a column of the table."""
    match kind:
        case "reply":
            return {"messages": [user(words), reply(words)]}
        case "system":
            return {"system": words(), "messages": [user(words), reply(words)]}
        case "developer":
            developer = {"role": "developer", "content": words()}
            return {"messages": [developer, user(words), reply(words)]}
        case "later system":
            later = {"role": "system", "content": words()}
            return {"messages": [user(words), reply(words), later, user(words), reply(words)]}
        case "parts":
            return {"messages": [user(words, 3), reply(words, 2)]}
        case "reasoning":
            return {"messages": [user(words), reply(words, reasoning_content=words(True))]}
        case "call":
            return {"messages": [user(words), calls(words)]}
        case "call with text":
            return {"messages": [user(words), {**calls(words), "content": words(True)}]}
        case "two calls":
            return {"messages": [user(words), calls(words, 2)]}
        case "tools":
            return {"tools": [tool(words), tool(words)], "messages": [user(words), reply(words)]}
        case "result":
            return {"messages": [user(words), calls(words), result(words), reply(words)]}
        case _:
            raise AssertionError(kind)


COLUMNS = (
    "reply", "system", "developer", "later system", "parts", "reasoning", "call", "call with text",
    "two calls", "tools", "result",
)  # fmt: skip


def read(name: str, row: dict[str, Any]) -> tuple[str, str, SourceNotes]:
    """Return a row as the template `name` makes it: all of it, what is learned, and notes.

    Raises `RowError`.
    """
    tokenizer, notes = tokenizer_of(name), SourceNotes()
    ends = frozenset({tokenizer.eos_token_id})
    parts = encode(conversation_of(row), tokenizer, ends, name, {}, notes)
    learned = [
        tokenizer.decode([i for i, on in zip(part.token_ids, part.mask, strict=True) if on])
        for part in parts
    ]
    return " ".join(tokenizer.decode(part.token_ids) for part in parts), " ".join(learned), notes


def taken(name: str, kind: str) -> bool:
    """Return whether a template takes what a column is about; false if the row is refused."""
    try:
        read(name, row_of(kind, Words()))
    except RowError:
        return False
    return True


def table() -> str:
    """Return the table of docs/reference/templates.md: which template refuses what."""
    lines = ["| template | refused |", "|---|---|"]
    by_outcome: dict[tuple[bool, ...], list[str]] = {}
    for name in files():
        if name.endswith("_training") or "/" in name or name == "quickstart":
            continue
        by_outcome.setdefault(tuple(taken(name, kind) for kind in COLUMNS), []).append(name)
    for outcome, names in by_outcome.items():
        takes = [kind for kind, yes in zip(COLUMNS, outcome, strict=True) if yes]
        refused = ", ".join(kind for kind in COLUMNS if kind not in takes) or "nothing"
        if len(takes) < 2:
            refused = " but ".join(["all", *takes])
        lines.append(f"| {', '.join(names)} | {refused} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
