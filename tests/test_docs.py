"""Documents: every reference resolves inside the repository, every key that is named exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from draftsmith.command_line.fields import fields_of
from draftsmith.train.methods.registry import METHODS, run_class_named
from tests.conftest import ROOT
from tests.helpers.documents import anchors_of
from tests.helpers.pages import HISTORY, PAGES, module_of

DOCUMENTS = [*PAGES, *sorted(HISTORY)]
CODE = sorted(
    file
    for folder in ("heads", "inference", "distill", "train", "scripts", "tests", "configs")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in (".py", ".sh", ".yaml", ".md") and ".path" not in file.parts
)
REFERENCE = re.compile(r"\bdocs/([\w/-]+\.md)(?:#([\w-]+))?")
LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")


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
        if file in HISTORY:
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
        if document not in HISTORY and (reason := missing(target, anchor)):
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
    assert {"heads.taps", "heads.markov_rank", "draft_model.path"} < named
    assert not named - types.keys()


CITED = re.compile(r"(?<![\w./{}*-])((?:[\w-]+/)*[a-z_][\w-]*\.py)\b(?!\()")
FOREIGN = {"convert_hf_to_gguf.py", "own.py"}  # llama.cpp's, and one that a reader writes


def test_modules_that_pages_and_code_cite_exist() -> None:
    """By the end of their path, such as `rounds/cache.py`; engines' files cite engines' sources."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    parts = [("draftsmith/" + file).split("/") for file in listed.splitlines()]
    known = {"/".join(one[start:]) for one in parts for start in range(len(one))}
    package = [
        file
        for folder in ("heads", "inference", "distill", "train", "draftsmith/commands",
                       "draftsmith/command_line")
        for file in (ROOT / folder).rglob("*.py")
        if "engines" not in file.parts
    ]  # fmt: skip
    wrong = []
    for file in [*PAGES, *package]:
        cited = (
            {one for one in CITED.findall(file.read_text()) if "NAME" not in one} - known - FOREIGN
        )
        wrong += [f"{file.relative_to(ROOT)}: {name}" for name in sorted(cited)]
    assert not wrong, "\n".join(wrong)


def test_scripts_readme_lists_every_script() -> None:
    index = (ROOT / "scripts" / "README.md").read_text()
    for folder in (ROOT / "scripts", ROOT / "scripts" / "bench"):
        for script in [*folder.glob("*.py"), *folder.glob("*.sh")]:
            assert f"`{script.name}`" in index, script


def test_no_document_outside_of_the_repository_is_cited() -> None:
    """Notes that the code once rested on, by their names."""
    names = ("drafter-" + "recipes", "verification-and-" + "trees", "reference/" + "checkpoint")
    cited = [f for f in [*CODE, *DOCUMENTS] if any(name in f.read_text() for name in names)]
    assert not [file for file in cited if file not in HISTORY]


def test_the_site_has_every_page() -> None:
    """All pages are in its navigation, and it names no page that there is not."""
    navigation = (ROOT / "scripts/site/mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = {str(page.relative_to(ROOT)) for page in DOCUMENTS} - {"scripts/README.md"}
    made = {f"docs/{name}.md" for name in ("api", "notebook")}  # by scripts/site.sh
    assert {*re.findall(r"[\w./-]+\.md\b", navigation)} == pages | made


def test_the_site_shows_marks_and_notices_as_its_markdown_reads_them() -> None:
    hooks = module_of("scripts/site/hooks.py")
    page = """> **Status: new.** Little
> has run.

```bash not run: needs a GPU
ls > out
```

> A quotation.
"""
    file = SimpleNamespace(src_uri="README.md")
    shown = hooks.on_page_markdown(
        page, SimpleNamespace(file=file), SimpleNamespace(repo_url="https://x")
    )
    assert (
        shown
        == """!!! warning "Status"

    **new.** Little
    has run.

```bash
ls > out
```

> A quotation.
"""
    )


def test_the_picture_of_the_readme_shows_what_the_code_does() -> None:
    """scripts/picture.py draws it, and fails unless the page shows the caption's figure."""
    (caption,) = re.findall(
        r"^!\[(.*)\]\(docs/page.png\)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    script = (ROOT / "scripts" / "picture.py").read_text()
    (prompt,) = re.findall(r'reply to "(.*)"', caption)
    (figure,) = re.findall(r"[\d.]+ tokens a round", caption)
    assert f'PROMPT = "{prompt}"' in script and f'TAU = "{figure}"' in script
