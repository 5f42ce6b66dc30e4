"""Pages of the documents: their fenced blocks, what marks them, and the commands in them.

The word behind a block's language says how it is kept true:

    ```bash runnable            a test runs it, in the order of the page
    ```bash runnable full       only ./scripts/test.sh --all runs it
    ```bash checked             every draftsmith command in it is complete and would start
    ```bash not run: REASON     its draftsmith commands have only options that exist
    ```text wide: REASON        output with lines of more than 80 columns
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from draftsmith.command_line.fields import from_word
from draftsmith.command_line.parse import OptionValues, given_options
from draftsmith.commands.cli import GROUPS, options_of_verb
from draftsmith.heads.errors import UserError
from draftsmith.inference.proposers.registry import parse_spec
from draftsmith.train.methods.registry import METHODS, method_named, run_class_named
from tests.conftest import ROOT

HISTORY = {ROOT / "CHANGELOG.md", *(ROOT / "docs" / "log").glob("*.md")}
"""Pages whose older entries name what was there at the time."""
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[a-z]*/README.md")} - HISTORY
)
FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>[\w+-]*) *(?P<mark>[^\n]*)\n"
    r"(?P<text>(?:.*\n)*?)(?P=indent)(?P=fence) *$",
    re.MULTILINE,
)
MARK = re.compile(r"runnable(?: full)?|checked|not run: \S.*|wide: \S.*")
MARKED = ("bash", "python")  # languages of which every block has to say whether it runs
OUTPUT = ("text", "yaml", "json", "toml", "html", "bibtex", "mermaid")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    mark: str
    text: str
    """Without the indent of the fence."""
    printed: str | None = None
    """Block of text that stands directly behind it: lines that it prints."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def fault(self) -> str | None:
        """What is wrong with the language and the mark; None if nothing."""
        if self.language not in (*MARKED, *OUTPUT):
            return f"name a language: {', '.join((*MARKED, *OUTPUT))}"
        if self.mark and not MARK.fullmatch(self.mark):
            return f"unknown mark {self.mark!r}; see tests/helpers/pages.py"
        if self.language in MARKED and (not self.mark or self.mark.startswith("wide")):
            return "mark it runnable, checked or 'not run: REASON'"
        return None


def blocks_of(page: Path, source: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    source = page.read_text() if source is None else source
    blocks: list[Block] = []
    end = 0
    for found in FENCE.finditer(source):
        text = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        if found["language"] == "text" and blocks and source[end : found.start()] == "\n\n":
            blocks[-1] = replace(blocks[-1], printed=text)
        line = source.count("\n", 0, found.start()) + 1
        blocks.append(Block(page, line, found["language"], found["mark"].strip(), text))
        end = found.end()
    return blocks


def indented_blocks_of(page: Path) -> list[str]:
    """Return the places of code that is indented in place of fenced."""
    source = FENCE.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())
    places, in_list, after_empty = [], False, True
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() and not line.startswith(" "):
            in_list = bool(re.match(r"[-*] |\d+\. ", line))
        if line.startswith("    ") and line.strip() and after_empty and not in_list:
            places.append(f"{page.relative_to(ROOT)}:{number}")
        after_empty = not line.strip()
    return places


RECORDING = r"""
command_not_found_handle() { return 0; }
record() { printf '%s\0' "$#" "$BLOCK" "$@" >> "$RECORDS"; }
draftsmith() { record draftsmith "$@"; }
accelerate() { record accelerate "$@"; }
python() { record python "$@"; }
sbatch() { record sbatch "$@"; }
cd() { :; }; exec() { :; }; exit() { :; }; set() { :; }; source() { :; }; wait() { :; }
BLOCK=0
for block in "$@"; do eval "$block"; BLOCK=$((BLOCK + 1)); done
"""
"""Script that expands the blocks of a page as bash does and keeps the words of its commands.

No program can be found (`PATH` is empty), so that nothing else has an effect.
"""
INPUT = re.compile(r"(?<![<\d&])<(?![<&(]) *[\w./-]+")
"""Input from a file, which is not there when the words of a command are recorded."""
STARTS = re.compile(r"(?:^|[;&|({]|\b(?:do|then)) *(?:[A-Z_]+=\S+ +)*draftsmith +([a-z]+)", re.M)


def commands_of(blocks: list[Block], folder: Path) -> list[tuple[Block, list[str]]]:
    """Return the words of the commands in the bash blocks of one page, variables replaced.

    `folder` has to be empty. Raises `AssertionError` where a block cannot be read, or has a command
    that was not reached.
    """
    scripts = [block for block in blocks if block.language == "bash"]
    records = folder / "records"
    for name in ("runs/docs", "exports"):  # commands write into them
        (folder / name).mkdir(parents=True)
    texts = [INPUT.sub("< /dev/null", block.text) for block in scripts]
    done = subprocess.run(
        ["/bin/bash", "-c", RECORDING, "bash", *texts],
        cwd=folder, env={"PATH": "", "RECORDS": str(records), "HOME": str(folder)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert "syntax error" not in done.stderr, f"{scripts[0].page}: {done.stderr}"
    words = records.read_text().split("\0") if records.exists() else [""]
    found = []
    while len(words) > 1:
        count = int(words[0])
        found.append((scripts[int(words[1])], words[2 : 2 + count]))
        del words[: 2 + count]
    reached = Counter(words[1] for _, words in found if words[0] == "draftsmith" and words[1:])
    written = Counter(
        verb for block in scripts for verb in STARTS.findall(block.text.replace("\\\n", " "))
    )
    assert not written - reached, f"{scripts[0].page}: not reached: {written - reached}"
    return found


def options_of(words: list[str]) -> tuple[Any, list[str]] | None:
    """Return the class of a command's options and the words behind its name; None for a form.

    None too for a command that has none of our options: another program, or a script.
    """
    if words[0] == "sbatch":
        at = next((n for n, word in enumerate(words) if word.endswith("train.sbatch")), None)
        words = [] if at is None else ["draftsmith", "train", *words[at + 1 :]]
    elif words[0] in ("accelerate", "python"):
        at = words.index("draftsmith.train") if "draftsmith.train" in words else None
        words = [] if at is None else ["draftsmith", "train", *words[at + 1 :]]
        if words[2:4] == ["data", "extract"]:
            words = ["draftsmith", *words[2:]]
    if len(words) < 2 or words[1].startswith("-") or words[1] == "COMMAND":
        return None
    if {"METHOD", "..."} & {*words[2:4]} or words[1:3] in (["train", "--help"], ["train", "-h"]):
        return None
    if words[1] == "train":
        return method_named(words[2]).run_class, words[3:]
    count = 2 if words[1] in GROUPS and not words[2].startswith("-") else 1
    return options_of_verb(" ".join(words[1 : 1 + count])), words[1 + count :]


def check_command(words: list[str], complete: bool) -> None:
    """Raise `UserError` for a command that would end with a mistake in its options.

    Without `complete` a file of options may be missing, as may options that have to be given.
    """
    if (found := options_of(words)) is None:
        return
    config_class, argv = found
    values, given = OptionValues(config_class), set[str]()
    for name, value in given_options(argv, values):
        kind = values.types.get(name)
        if name == "config" and kind is None:
            if complete or Path(value).exists():
                values.read(value)
        elif (
            kind is not None or "." in name
        ) and name not in values.run_types.keys() - values.types:
            kind = kind or Any
            plain = from_word(kind, value) if isinstance(value, str) else value
            values.put(name, plain, name in given)
        if name == "drafter":
            parse_spec(value)
        given.add(name)
    if complete and not {"print_config"} & given:
        values.check_complete()
        values.made()


def check_yaml(text: str) -> None:
    """Raise `UserError` where a block is a run configuration with unknown keys or wrong values."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(str(error)) from None
    if not isinstance(content, dict) or not {"target", "data", "out"} <= content.keys():
        return
    mistakes = []
    for method in METHODS:
        values = OptionValues(run_class_named(method))
        try:
            for name, value in content.items():
                values.put(name, value)
            values.made()
            return
        except UserError as error:
            mistakes.append(f"{method}: {error}")
    raise UserError("; ".join(mistakes))


def module_of(script: str) -> Any:
    """Return a script of the checkout as a module."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
