"""Report sizes of the package, for a person to read: no limit is set, and nothing fails.

    python scripts/structure.py [--root CHECKOUT]

Lines and modules by folder, the lengths of functions, the longest files, how often `Any` and names
of modes and methods occur, the share of docstrings, and the options of all commands and runs.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOTS = ("heads", "inference", "distill", "train", "draftsmith")
LONGEST = 8  # files that are listed
ENGINES = "vllm|sglang|llamacpp|trtllm|tgi|speculators"
OPTIONS = """
import dataclasses, typing
from draftsmith.commands.cli import VERBS, options_of_verb
from draftsmith.train.methods.registry import METHODS, run_class_named
found = set()
def take(config_class):
    hints = typing.get_type_hints(config_class)
    for owner in config_class.__mro__:
        for name in set(owner.__dict__.get("__annotations__", {})) & {*hints}:
            kinds = [hints[name], *typing.get_args(hints[name])]
            parts = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
            for part in parts:
                take(part)
            if not parts and "ClassVar" not in str(hints[name]):
                found.add((owner.__module__, owner.__qualname__, name))
for config_class in (*map(options_of_verb, VERBS), *map(run_class_named, METHODS)):
    take(config_class)
print(len(found))
"""
"""Prints the number of fields that the dataclasses of all commands and runs declare: each once, in
the class that declares it, without those that are parts. Run in the checkout that is counted."""
PATTERNS = {
    "Any": r"\bAny\b",
    "hasattr, getattr": r"\b(?:has|get)attr\(",
    "static": r"\b_?static\b",
    "method ==, method in": r"\bmethod (?:==|!=|in|not in) ",
    "engine ==, engine in": rf"\b(?:engine|name) (?:==|!=|in|not in) [\"(](?=.*(?:{ENGINES}))",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    root = parser.parse_args().root
    # `rglob` does not follow the links in draftsmith/ to the other roots.
    files = [file for name in ROOTS for file in sorted((root / name).rglob("*.py"))]
    texts = {file.relative_to(root): file.read_text() for file in files}
    console = Console()
    console.print(by_folder(texts))
    lengths = sorted(length for text in texts.values() for length in functions(text))
    tenths = statistics.quantiles(lengths, n=10)
    console.print(
        f"{len(lengths)} functions: lines p50 {tenths[4]:.0f}, p90 {tenths[8]:.0f}, most "
        f"{lengths[-1]}"
    )
    docstrings = sum(map(documented, texts.values()))
    console.print(f"docstrings: {docstrings / sum(map(lines, texts.values())):.1%} of all lines")
    counted = subprocess.run(
        [sys.executable, "-c", OPTIONS], cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    console.print(f"options: {counted.stdout.strip() or counted.stderr.strip()}")
    longest = sorted(texts, key=lambda name: -lines(texts[name]))[:LONGEST]
    console.print("longest files:", ", ".join(f"{name} {lines(texts[name])}" for name in longest))
    for name, pattern in PATTERNS.items():
        found = Counter({file: len(re.findall(pattern, text)) for file, text in texts.items()})
        most = ", ".join(f"{file} {count}" for file, count in found.most_common(4) if count)
        console.print(f"{name}: {found.total()} ({most})", highlight=False)


def by_folder(texts: dict[Path, str]) -> Table:
    """Return a table of lines and modules by folder."""
    table = Table(box=None, pad_edge=False)
    for title in ("folder", "modules", "lines", "code"):
        table.add_column(title, justify="left" if title == "folder" else "right")
    folders = sorted({file.parent for file in texts})
    for folder in folders:
        own = [text for file, text in texts.items() if file.parent == folder]
        table.add_row(
            str(folder), str(len(own)), f"{sum(map(lines, own)):,}", f"{sum(map(code, own)):,}"
        )
    every = texts.values()
    table.add_row(
        "all", str(len(texts)), f"{sum(map(lines, every)):,}", f"{sum(map(code, every)):,}"
    )
    return table


def lines(text: str) -> int:
    return text.count("\n")


def code(text: str) -> int:
    """Return the lines that are neither empty, nor comments, nor docstrings."""
    counted = {
        n for n, line in enumerate(text.splitlines(), 1) if line.strip()[:1] not in ("", "#")
    }
    return len(counted - docstring_lines(text))


def documented(text: str) -> int:
    """Return the number of lines of docstrings, those of fields included."""
    return len(docstring_lines(text))


def docstring_lines(text: str) -> set[int]:
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    spans = ((one.lineno, one.end_lineno) for one in nodes if isinstance(one.value, ast.Constant))
    return {n for first, last in spans for n in range(first, (last or first) + 1)}


def functions(text: str) -> list[int]:
    """Return the lengths of the functions of a file in lines."""
    found = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, found)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in nodes]


if __name__ == "__main__":
    main()
