"""Questions about the standard library of the running interpreter: its functions, and its
documentation to summarise or to answer from.

The source of a question is the module, or the chapter of the language reference, that it quotes;
sources are split, so that nothing quoted in a held-out question is quoted in training. All of it is
under the licence of the Python Software Foundation.
"""

from __future__ import annotations

import ast
import pydoc_data.topics
import random
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "quickstart"))
import functions

Question = tuple[str, str]
"""Source and text."""
CODE = (
    "Explain what this Python function does:\n\n{}",
    "Write the body of this Python function:\n\n{}",
    "Write a short example that calls this function, and say what it returns.\n\n{}",
    "Write three unit tests for the following function.\n\n{}",
    "What can go wrong when somebody calls this function?\n\n{}",
    "Rewrite this docstring in simpler words:\n\n{}",
)
DOCUMENTS = (
    "Summarise the following text in two sentences.\n\n{}",
    "Summarize this text:\n\n{}",
    "List the key points of the text below.\n\n{}",
    "What is the following text about?\n\n{}",
    "Write three questions that this text answers, with the answers.\n\n{}",
    "Extract every name of a class, function or option from this text, as a list.\n\n{}",
    "Explain the following to a beginner.\n\n{}",
    "Use this text to answer: when would I need this, and what should I be careful about?\n\n{}",
)
MODULES = (
    "Explain what this Python module does.\n\n```python\n{}\n```",
    "List the functions of this module and what each is for.\n\n```python\n{}\n```",
)
SHORTEST, LONGEST = 300, 1800
"""Characters of a passage."""


def code_questions(split: str, count: int, seed: int) -> list[Question]:
    """Return `count` questions about functions that have a docstring."""
    draw = random.Random(f"code {split} {seed}")
    chosen = {
        f.prompt: f
        for f in all_functions()
        if f.split == split and 150 <= len(f.prompt) <= 900 and f.prompt.endswith(('"""', "'''"))
    }
    quoted = [(f.module, f"```python\n{f.prompt}\n```") for f in chosen.values()]
    return asked(quoted, CODE, count, draw)


def document_questions(split: str, count: int, seed: int) -> list[Question]:
    """Return `count` questions about passages of documentation, in the order of a draw."""
    draw = random.Random(f"documents {split} {seed}")
    quoted = [pair for pair in all_passages() if functions.split_of(pair[0]) == split]
    return asked(quoted, DOCUMENTS, count, draw)


def module_questions(split: str, count: int, seed: int, characters: int) -> list[Question]:
    """Return `count` questions about the beginnings of modules, each of so many characters."""
    draw = random.Random(f"modules {split} {seed} {characters}")
    quoted = [
        (module, text[:characters])
        for module, text in modules(Path(sysconfig.get_paths()["stdlib"]))
        if functions.split_of(module) == split
        and len(text) >= characters
        and not module.startswith("encodings.")  # tables of numbers
    ]
    return asked(quoted, MODULES, count, draw)


def asked(
    quoted: list[Question], kinds: tuple[str, ...], count: int, draw: random.Random
) -> list[Question]:
    """Return `count` questions: each quotation once, then each again with another kind."""
    draw.shuffle(quoted)
    pairs = [
        (source, kinds[(number + again) % len(kinds)].format(text))
        for again in range(len(kinds))
        for number, (source, text) in enumerate(quoted)
    ]
    if len(pairs) < count:
        raise SystemExit(f"error: there are only {len(pairs)} questions; ask for fewer")
    return pairs[:count]


@cache
def all_functions() -> list[functions.Function]:
    """Return the functions of the standard library."""
    return functions.stdlib_functions()


@cache
def all_passages() -> list[tuple[str, str]]:
    """Return what `passages` yields."""
    return list(passages())


def passages() -> Iterator[tuple[str, str]]:
    """Yield the source and the text of passages of documentation, each once."""
    texts = [*language_reference(), *docstrings(Path(sysconfig.get_paths()["stdlib"]))]
    seen: set[str] = set()
    for source, text in texts:
        for passage in cut(textwrap.dedent(text).strip()):
            if passage not in seen:
                seen.add(passage)
                yield source, passage


def language_reference() -> Iterator[tuple[str, str]]:
    """Yield the chapters that Python's `help` shows."""
    for name, text in sorted(pydoc_data.topics.topics.items()):
        yield f"topics.{name}", text


def modules(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of the modules below a folder."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if functions.SKIPPED_FOLDERS.intersection(parts) or parts == ("pydoc_data", "topics"):
            continue
        yield ".".join(parts), path.read_bytes().decode("utf-8", errors="replace")


def docstrings(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the docstrings of the modules and classes below a folder."""
    for module, text in modules(root):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's strings
                tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef):
                docstring = ast.get_docstring(node)
                if docstring:
                    yield module, docstring


def cut(text: str) -> Iterator[str]:
    """Yield pieces of `SHORTEST` to `LONGEST` characters that end with a paragraph."""
    piece = ""
    for paragraph in re.split(r"\n\s*\n", text):
        if piece and len(piece) + len(paragraph) > LONGEST:
            if len(piece) >= SHORTEST:
                yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
    if SHORTEST <= len(piece) <= LONGEST:
        yield piece
