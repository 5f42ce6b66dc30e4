"""Documents: every reference resolves inside the repository, every block marked runnable runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest

from draftsmith.train.command_line.fields import fields_of, positional
from draftsmith.train.command_line.parse import given_options
from draftsmith.train.commands.verbs import GROUPS, options_of_verb
from draftsmith.train.method import METHODS, method_named, run_class_named
from tests.conftest import PYTHON, ROOT

DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")})
LOGS = ("CHANGELOG.md", "EXPERIMENTS.md")  # their older entries name what was there at the time
CODE = sorted(
    file
    for folder in ("heads", "inference", "distill", "train", "scripts", "tests", "configs")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in (".py", ".sh", ".yaml", ".md") and ".path" not in file.parts
)
REFERENCE = re.compile(r"\bdocs/([\w-]+\.md)(?:#([\w-]+))?")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
BLOCK = re.compile(
    r"^```(bash|python) runnable\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE
)
"""Block that runs, and the output that stands behind it, if any does."""
COMMANDS = """
set -euo pipefail
draftsmith() { "$PYTHON" -c 'from draftsmith.train.commands.cli import main; main()' "$@"; }
accelerate() { shift; "$PYTHON" -m accelerate.commands.launch "$@"; }
python() { "$PYTHON" "$@"; }
"""


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


def missing(path: Path, anchor: str | None) -> str | None:
    """Return what is wrong with a reference; None if it resolves."""
    if not path.exists():
        return f"there is no {path.relative_to(ROOT)}"
    if anchor and path.suffix == ".md" and anchor not in anchors_of(path):
        return f"{path.relative_to(ROOT)} has no heading #{anchor}"
    return None


def test_references_in_code_resolve() -> None:
    wrong = []
    for file in [*CODE, *DOCUMENTS]:
        if file.name in LOGS:
            continue
        for name, anchor in REFERENCE.findall(file.read_text()):
            if reason := missing(ROOT / "docs" / name, anchor):
                wrong.append(f"{file.relative_to(ROOT)}: {reason}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_documents_resolve(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    wrong = []
    for name, anchor in LINK.findall(text):
        target = (document.parent / name).resolve() if name else document
        if document.name not in LOGS and (reason := missing(target, anchor)):
            wrong.append(reason)
    assert not wrong, wrong


def tables_of(document: Path) -> list[list[list[str]]]:
    """The tables of a document as rows of cells, the heading first."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", document.read_text(), re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]
        tables.append([[cell.strip() for cell in row] for row in (rows[0], *rows[2:])])
    return tables


def keys_of(table: list[list[str]], values: set[str]) -> set[str]:
    """Keys of a config that a table names: by section, or each with its meaning."""
    (first, second, *_), *rows = table
    found = set()
    for left, right, *_ in rows:
        words = re.findall(r"`([\w.]+)`", left)
        if second.startswith("keys"):
            while right != (right := re.sub(r"\([^()]*\)", "", right)):  # defaults
                pass
            section = f"{words[0]}." if words else ""
            found |= {section + key for key in re.findall(r"`(\w+)`", right) if key not in values}
        elif ("key of `" in first and "metrics" not in first) or first == "EAGLE key":
            section = ""
            for word in words:  # `objective.loss`, `weighting`: of one section
                section = word.rpartition(".")[0] or section
                found.add(f"{section}.{word.rpartition('.')[2]}".removeprefix("."))
    return found


def test_the_keys_of_a_config_that_documents_name_exist() -> None:
    types = {one.name: one.kind for m in METHODS for one in fields_of(run_class_named(m))}
    values = {str(value) for kind in types.values() for value in get_args(kind)}
    named: set[str] = set()
    for name in ("training.md", "data.md"):
        for table in tables_of(ROOT / "docs" / name):
            prefix = "data." if table[0][0] == "key of `data`" else ""
            named |= {prefix + key for key in keys_of(table, values)}
    assert {"out", "optim.lr", "data.held_out.by", "heads.markov_rank", "data.sources"} < named
    assert not named - types.keys()


def test_the_index_of_scripts_is_whole() -> None:
    index = (ROOT / "scripts" / "README.md").read_text()
    for folder in (ROOT / "scripts", ROOT / "scripts" / "bench"):
        for script in [*folder.glob("*.py"), *folder.glob("*.sh")]:
            assert f"`{script.name}`" in index, script


def test_no_document_outside_of_the_repository_is_cited() -> None:
    """Notes that the code once rested on, by their names."""
    names = ("drafter-" + "recipes", "verification-and-" + "trees", "reference/" + "checkpoint")
    cited = [f for f in [*CODE, *DOCUMENTS] if any(name in f.read_text() for name in names)]
    assert not [file for file in cited if file.name not in LOGS]


def commands_of(text: str) -> list[list[str]]:
    """Return the words of every draftsmith command in the blocks of a document.

    Variables that the document sets to options, such as `SAMPLING="--top-k 20"`, are replaced.
    """
    for name, options in re.findall(r'^([A-Z]+)="(--[^"]*)"', text, flags=re.MULTILINE):
        text = text.replace(f"${name}", options)
    fenced = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in fenced.findall(text) if language == "bash"]
    blocks += re.findall(r"\n    ((?:draftsmith|accelerate launch) .*)", fenced.sub("", text))
    commands = []
    for block in blocks:
        lines = re.sub(r"\\\n", " ", block).split("\n")
        for line in lines:
            if not re.match(r"\s*(draftsmith|accelerate launch|python -m draftsmith.train) ", line):
                continue
            words = shlex.split(line, comments=True)
            end = next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";")), None)
            commands.append(words[:end])
    return commands


def options_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the class of a command's options, and the words behind the command."""
    if words[:2] == ["draftsmith", "train"]:
        return method_named(words[2]).run_class, words[3:]
    if words[0] == "draftsmith":
        count = 2 if words[1] in GROUPS else 1
        return options_of_verb(" ".join(words[1 : 1 + count])), words[1 + count :]
    at = words.index("draftsmith.train") + 1
    if words[at : at + 2] == ["data", "extract"]:
        return options_of_verb("data extract"), words[at + 2 :]
    return method_named(words[at]).run_class, words[at + 1 :]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_of_documents_exist_with_their_options(document: Path) -> None:
    if document.name in LOGS:
        return
    for words in commands_of(document.read_text()):
        if "METHOD" in words or "..." in words or len(words) < 2:
            continue  # a form, not a command
        options, arguments = options_of(words)
        arguments = arguments[: arguments.index("&")] if "&" in arguments else arguments
        types = {option.name: option.kind for option in fields_of(options)}
        # raises an error where an option does not exist
        assert [*given_options(arguments, types, positional(options))] or not arguments


RUNNABLE = [file for file in DOCUMENTS if BLOCK.search(file.read_text())]


@pytest.mark.parametrize("document", RUNNABLE, ids=lambda p: p.stem)
def test_runnable_blocks_run(document: Path, tmp_path: Path) -> None:
    """In the order of the document, from a folder that looks like the checkout's root."""
    for name in ("scripts", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs" / "docs").mkdir(parents=True)
    environment = {**os.environ, "PYTHON": PYTHON, "ACCELERATE_USE_CPU": "true"}
    for language, block, printed in BLOCK.findall(document.read_text()):
        command = ["bash", "-c", COMMANDS + block] if language == "bash" else [PYTHON, "-c", block]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert not printed or done.stdout == printed, block


def test_the_picture_of_the_readme_shows_what_the_code_does() -> None:
    """scripts/picture.py draws it, and fails unless the page shows the caption's figure."""
    (caption,) = re.findall(
        r"^!\[(.*)\]\(docs/page.png\)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    script = (ROOT / "scripts" / "picture.py").read_text()
    (prompt,) = re.findall(r'reply to "(.*)"', caption)
    (figure,) = re.findall(r"[\d.]+ tokens a round", caption)
    assert f'PROMPT = "{prompt}"' in script and f'TAU = "{figure}"' in script
