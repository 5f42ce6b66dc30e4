"""Python functions as chat data: a user turn gives signature and docstring, the assistant writes
the body.

The quickstart needs prompts that exist on every machine without a download. The standard library is
one such corpus, so prompts are found at run time by parsing the modules of the running interpreter;
`make_target.py` also reads the installed packages. Modules, not functions, are split into `train`,
`valid` and `test`, by a hash of the module's dotted name, so the split is the same for every Python
version and no helper of a held-out module is ever seen in training.

    python scripts/quickstart/functions.py --split train --count 600 --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import sys
import sysconfig
import textwrap
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "valid", "test"]
HELD_OUT_PERCENT = {"test": 8, "valid": 6}
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "testing",
    "idle_test",
    "lib2to3",
    "site-packages",
    "__pycache__",
    "_vendor",
}
WORD = re.compile(r"\w+|[^\w\s]")
NGRAM = 13


@dataclass(frozen=True)
class Function:
    """One function or method: `prompt` (signature and docstring) and `body`, both dedented source
    text."""

    module: str
    name: str
    prompt: str
    body: str

    @property
    def split(self) -> Split:
        return split_of(self.module)


def split_of(module: str) -> Split:
    """The split that every function of `module` belongs to."""
    bucket = zlib.crc32(module.encode()) % 100
    for split, percent in HELD_OUT_PERCENT.items():
        if bucket < percent:
            return "test" if split == "test" else "valid"
        bucket -= percent
    return "train"


def stdlib_functions() -> list[Function]:
    """Every function of the running interpreter's standard library, in a fixed order, without its
    test suites."""
    return list(functions_under(Path(sysconfig.get_paths()["stdlib"])))


def functions_under(root: Path) -> Iterator[Function]:
    """Every function in the `.py` files below `root`; files that do not parse are passed over."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for file in sorted(name for name in files if name.endswith(".py")):
            path = Path(folder, file)
            module = ".".join(path.relative_to(root).with_suffix("").parts)
            yield from functions_in(path.read_bytes().decode("utf-8", errors="replace"), module)


def functions_in(source: str, module: str) -> Iterator[Function]:
    """The functions of one module's source text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = _cut(node, lines, module)
            if function is not None:
                yield function


def _cut(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], module: str
) -> Function | None:
    has_docstring = ast.get_docstring(node, clean=False) is not None
    statements = node.body[1:] if has_docstring else node.body
    if (
        not statements
        or node.body[0].lineno == node.lineno
        or statements[0].lineno == node.body[0].lineno == node.lineno
    ):
        return None
    first, last = node.body[0].lineno, statements[-1].end_lineno
    body_start = (node.body[0].end_lineno or first) + 1 if has_docstring else first
    signature = "".join(lines[node.lineno - 1 : first - 1])
    docstring = "".join(lines[first - 1 : body_start - 1]) if has_docstring else ""
    body = "".join(lines[body_start - 1 : last])
    if statements[0].lineno < body_start:  # a statement on the docstring's own line
        return None
    body = textwrap.dedent(body).strip("\n").rstrip()
    return (
        Function(module, node.name, textwrap.dedent(signature + docstring).rstrip(), body)
        if body
        else None
    )


def ngrams(text: str) -> set[int]:
    """Hashes of the 13-grams of words in `text`: the usual unit for finding held-out text in
    training data."""
    words = WORD.findall(text)
    return {
        zlib.crc32("\0".join(words[i : i + NGRAM]).encode()) for i in range(len(words) - NGRAM + 1)
    }


def select(
    functions: list[Function], split: Split, count: int, seed: int, min_body: int, max_chars: int
) -> list[Function]:
    """A seeded sample of `count` distinct functions of `split` that have a docstring and a body
    worth writing."""
    fits = {
        f.prompt: f
        for f in functions
        if f.split == split
        and len(f.body) >= min_body
        and len(f.prompt) <= max_chars
        and len(f.prompt) + len(f.body) <= 2 * max_chars
        and f.prompt.rstrip().endswith(('"""', "'''"))
    }
    chosen = list(fits.values())
    random.Random(seed).shuffle(chosen)
    if len(chosen) < count:
        raise SystemExit(
            f"error: only {len(chosen)} functions in split {split!r}; ask for at most that many "
            "with --count"
        )
    return chosen[:count]


def write_rows(functions: list[Function], path: Path, bodies: bool = False) -> None:
    """Write a conversation for each function, with its body as the reply or without a reply."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as out:
        for f in functions:
            messages = [{"role": "user", "content": f.prompt}]
            if bodies:
                messages.append({"role": "assistant", "content": f.body})
            out.write(json.dumps({"id": f"{f.module}.{f.name}", "messages": messages}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=["train", "valid", "test"], required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-body", type=int, default=80, help="characters")
    parser.add_argument("--max-chars", type=int, default=700, help="longest prompt, in characters")
    parser.add_argument(
        "--bodies", action="store_true", help="the functions' own bodies as replies: the raw corpus"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    chosen = select(
        stdlib_functions(), args.split, args.count, args.seed, args.min_body, args.max_chars
    )
    write_rows(chosen, args.out, args.bodies)
    print(f"{len(chosen)} prompts of split {args.split} -> {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
