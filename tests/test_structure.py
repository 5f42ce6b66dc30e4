"""The plan of the house: imports point one way, the wheel holds what the tree holds, every shipped config parses."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from draftsmith.train.arguments import parse
from draftsmith.train.cli import VERBS
from draftsmith.train.methods import METHODS, method_module

from tests.conftest import ROOT

ROOMS = ("heads", "inference", "distill", "train")  # each may import those before it
MODULES = [(room, file) for room in ROOMS for file in sorted((ROOT / room).glob("*.py"))]


def imported_rooms(room: str, file: Path) -> set[str]:
    """Rooms that a file imports from; relative imports are resolved, absolute ones of our own are errors."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = (node.module or "").split(".")
            found.add(room if node.level == 1 else parts[0])
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                assert name.split(".")[0] not in (*ROOMS, "draftsmith"), f"{file.name}: import relatively inside the package"
    return found


@pytest.mark.parametrize(("room", "file"), MODULES, ids=lambda value: getattr(value, "stem", value))
def test_imports_point_one_way(room: str, file: Path) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    assert imported_rooms(room, file) <= allowed


def test_rooms_are_flat() -> None:
    for room in ROOMS:
        nested = [p for p in (ROOT / room).iterdir() if p.is_dir() and p.name != "__pycache__"]
        assert not nested, "a nested package is silently left out of the wheel"


def test_files_and_functions_stay_small() -> None:
    for _, file in MODULES:
        text = file.read_text()
        assert text.count("\n") <= 500, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 70, f"{file.name}: {node.name}"


def test_decoding_and_evaluation_import_neither_datasets_nor_deepspeed_nor_wandb() -> None:
    names = ["train.cli", *(f"inference.{file.stem}" for room, file in MODULES if room == "inference")]
    code = "".join(f"import draftsmith.{name.removesuffix('.__init__')}\n" for name in names)
    code += "import sys; print([m for m in ('datasets', 'deepspeed', 'wandb') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_wheel_holds_the_modules_of_the_tree(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.endswith(".py")}
        entry = next(archive.read(n).decode() for n in archive.namelist() if n.endswith("entry_points.txt"))
    assert inside == {f"draftsmith/{room}/{file.name}" for room, file in MODULES}
    assert "draftsmith = draftsmith.train.cli:main" in entry


CONFIGS = sorted(p for p in (ROOT / "configs").glob("*/*.yaml") if p.parent.name != "accelerate")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_config_parses(path: Path) -> None:
    method = method_module(path.parent.name)
    run, dumped = parse(method.Run, ["--config", str(path)], "test")
    assert run.output and "target:" in dumped


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_a_config_is_explained(name: str) -> None:
    from draftsmith.train.arguments import build_parser

    text = " ".join(build_parser(method_module(name).Run, "x").format_help().split())
    assert "--optim.warmup-share" in text and "--optim.warmup_share" not in text
    assert "Share of the steps over which the rate rises from zero" in text
    assert "example:" in text


ANSWERED_AT_ONCE = [
    ("--version", 0, "draftsmith 0."),
    ("evalute", 2, "did you mean 'evaluate'?"),
    ("data plam", 2, "did you mean 'data plan'?"),
    ("evaluate --drafters x", 2, "did you mean --drafter?"),
    ("generate --temprature 1", 2, "did you mean --sampling.temperature?"),
    ("data --help", 0, "data regenerate"),
    *((f"{verb} --help", 0, "example:") for verb in VERBS),
]


@pytest.mark.parametrize(("words", "code", "said"), ANSWERED_AT_ONCE, ids=lambda value: str(value).replace(" ", "_"))
def test_help_and_mistakes_are_answered_without_torch(words: str, code: int, said: str) -> None:
    """Counted in imports, not in seconds: torch and transformers together take four."""
    asked = "import sys; from draftsmith.train.cli import main\n"
    asked += f"try: main({words.split()!r})\nexcept SystemExit as e: code = e.code\n"
    asked += "else: code = 0\nheavy = {'torch', 'transformers', 'accelerate', 'datasets', 'pandas', 'scipy'} & {*sys.modules}\n"
    asked += "assert not heavy, heavy\nassert len(sys.modules) < 700, len(sys.modules)\nsys.exit(code)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stdout + done.stderr
