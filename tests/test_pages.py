"""Pages work as printed: every block says how it is kept true, runs or would start."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from draftsmith.heads.errors import UserError
from tests.conftest import PYTHON, QUICKSTART, ROOT
from tests.helpers.pages import (
    PAGES,
    Block,
    blocks_of,
    check_command,
    check_yaml,
    commands_of,
    indented_blocks_of,
)

BLOCKS = {page: blocks_of(page) for page in PAGES}
MOST_COLUMNS = 80
SPEED = re.compile(r"[\d,]+ tokens/s|\d+\.\d+x")
STAND_INS = {"Qwen/Qwen3-0.6B": QUICKSTART, "Qwen/Qwen3-8B": QUICKSTART}
"""Models of the hub that runnable blocks name, and what they find in place of them."""
SHELL = r"""
set -euo pipefail
draftsmith() {
    local run='from draftsmith.commands.cli import main; main()'
    if [ "$1" != serve ]; then "$PYTHON" -c "$run" "$@"; return; fi
    [[ "$*" == *" --port "* ]] || set -- "$@" --port "$PORT"
    "$PYTHON" -c "$run" "$@" > "$BLOCKS/server" 2>&1 &
    server=$!
    until curl -sf "http://127.0.0.1:$PORT/v1/models" > /dev/null; do
        kill -0 $server
        sleep 0.1
    done
}
vllm() { kill ${server:-} 2> /dev/null || true; draftsmith serve --target "$2" --drafter ngram; }
accelerate() { shift; "$PYTHON" -m accelerate.commands.launch "$@"; }
python() { "$PYTHON" "$@"; }
trap '[ $? = 0 ] || tail -n 30 "$BLOCKS"/{out,err}' EXIT
"""
"""Stands before the blocks of a page. A server goes on in the background; it answers on `PORT`."""
SERVER = re.compile(r"^((?:draftsmith|vllm) serve .*(?:\\\n.*)*?) &$", re.MULTILINE)


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_block_declares_how_it_is_checked() -> None:
    faults = [f"{b.place}: {b.fault}" for blocks in BLOCKS.values() for b in blocks if b.fault]
    faults += [f"{place}: fence it" for page in PAGES for place in indented_blocks_of(page)]
    assert not faults, "\n".join(faults)


def test_blocks_are_as_wide_as_the_site_shows() -> None:
    wide = []
    for block in (block for blocks in BLOCKS.values() for block in blocks):
        lines = [line for line in block.text.splitlines() if len(line) > MOST_COLUMNS]
        if lines and not block.mark.startswith("wide: "):
            wide.append(f"{block.place}: {len(lines)} lines, one has {len(max(lines, key=len))}")
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_of_pages_exist_with_their_options(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    faults, checked = [], set()
    for block, words in commands_of(BLOCKS[page], tmp_path):
        checked.add(block.line)
        try:
            check_command(words, block.mark == "checked")
        except (UserError, AssertionError, KeyError) as error:
            faults.append(f"{block.place}: {' '.join(words)}\n    {error}")
    for block in BLOCKS[page]:
        if block.mark == "checked" and block.language == "bash" and block.line not in checked:
            faults.append(f"{block.place}: there is nothing to check; say why it is not run")
        faults += [f"{block.place}: {fault}" for fault in faults_of(block)]
    assert not faults, "\n".join(faults)


def faults_of(block: Block) -> list[str]:
    """Faults of a block of YAML, and of Python that is checked: names that cannot be imported."""
    if block.language == "yaml":
        try:
            return check_yaml(block.text) or []
        except UserError as error:
            return [str(error)]
    if block.language != "python" or block.mark != "checked":
        return []
    faults = []
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftsmith"):
            module = importlib.import_module(node.module or "")
            faults += [
                f"no {a.name} in {node.module}" for a in node.names if not hasattr(module, a.name)
            ]
    return faults


def test_the_checks_find_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    source = """```bash checked
D=scripts/quickstart/drafters
gain() {
    draftsmith evaluate --target T --drafter $D/eagle3:width=1,width=2 \\
        --prompts $1 > runs/docs/out.json
}
for n in 1 2; do draftsmith generate --target T --tempersture $n; done
draftsmith train eagle --config configs/eagle/quickstart.yaml --epochs some
```

  ```bash not run: needs a GPU
  gain a.jsonl; ./scripts/none.sh && curl http://127.0.0.1:8000 | vllm serve
  accelerate launch -m draftsmith.train eagle --config mine.yaml --heads.layer 2
  draftsmith evaluate --target T --repeats 1
  ```

```bash
ls
```

```sh runnable
```

```bash not run
```
"""
    blocks = blocks_of(ROOT / "page.md", source)
    said = []
    for block, words in commands_of(blocks, tmp_path):
        try:
            check_command(words, block.mark == "checked")
        except UserError as error:
            said.append((block.line, str(error).partition(";")[0]))
    assert said == [
        (1, "unknown option --tempersture"),
        (1, "unknown option --tempersture"),
        (1, "--epochs takes a number, not some"),
        (11, "drafter 'scripts/quickstart/drafters/eagle3:width=1,width=2': width is given twice"),
        (11, "unknown option --heads.layer"),
    ]
    assert [block.fault is None for block in blocks] == [True, True, False, False, False]
    hidden = Block(ROOT / "page.md", 1, "bash", "checked", "f() { draftsmith generate; }\n")
    with pytest.raises(AssertionError, match="not reached"):
        commands_of([hidden], tmp_path / "again")


def pages_with(*marks: str) -> list[Path]:
    return [page for page, blocks in BLOCKS.items() if {b.mark for b in blocks} & {*marks}]


@pytest.mark.parametrize("page", pages_with("runnable"), ids=ids)
def test_runnable_blocks_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, ("runnable",))


@pytest.mark.full
@pytest.mark.parametrize("page", pages_with("runnable full"), ids=ids)
def test_all_runnable_blocks_run(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path, ("runnable", "runnable full"))


def run_page(page: Path, folder: Path, marks: tuple[str, ...]) -> None:
    """Run the blocks with one of the marks in one shell, in a folder like the checkout's root.

    It has to print the lines that stand as `text` directly behind it, but for measured speeds.
    """
    prepare(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    blocks = [block for block in BLOCKS[page] if block.mark in marks]
    script = SHELL
    for number, block in enumerate(blocks):
        text = re.sub(r"(127\.0\.0\.1:|localhost:|--port )8000", rf"\g<1>{port}", block.text)
        text = SERVER.sub(r"\1", text)
        if block.language == "python":
            (folder / f".blocks/{number}.py").write_text(text)
            text = f'python -c "$(cat "$BLOCKS/{number}.py")"\n'
        script += f'echo "{block.place}:" > "$BLOCKS/err"\n'
        script += f'{{\n{text}}} > "$BLOCKS/out" 2>> "$BLOCKS/err"\n'
        script += f'for one in out err; do cp "$BLOCKS/$one" "$BLOCKS/{number}.$one"; done\n'
    environment = {
        **os.environ, "PYTHON": PYTHON, "PORT": port, "BLOCKS": str(folder / ".blocks"),
        "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / ".hub"),
    }  # fmt: skip
    shell = subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        said, _ = shell.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):  # a server that goes on
            os.killpg(shell.pid, signal.SIGTERM)
    assert shell.returncode == 0, said
    for number, block in enumerate(blocks):
        said = "".join((folder / f".blocks/{number}.{one}").read_text() for one in ("out", "err"))
        lines = SPEED.sub("N", block.printed or "").splitlines()
        missing = [line for line in lines if line not in SPEED.sub("N", said).splitlines()]
        assert not missing, f"{block.place} prints {said!r}, without {missing}"


def prepare(folder: Path) -> None:
    """Fill a folder with what the blocks of pages name."""
    for name in ("scripts", "configs", "models"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)
    for name in ("runs/docs", ".blocks"):
        (folder / name).mkdir(parents=True)
    for name, stand_in in STAND_INS.items():
        model = folder / ".hub" / f"models--{name.replace('/', '--')}"
        for one in ("refs", "snapshots"):
            (model / one).mkdir(parents=True)
        (model / "refs" / "main").write_text("0" * 40)
        (model / "snapshots" / ("0" * 40)).symlink_to(stand_in)
