"""The installed package: the wheel holds what the tree holds, and works without the checkout and
without the packages that only training needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.conftest import QUICKSTART, ROOT
from tests.helpers.rows import chat, write

PACKAGES = ("draftsmith", "heads", "inference", "distill", "train")
BESIDES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
EAGLE3 = QUICKSTART.parent / "drafters" / "eagle3"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BROKEN = """
import sys
from importlib.machinery import ModuleSpec

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("datasets", "deepspeed", "wandb"):
            return ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        raise ImportError(f"{module.__name__} was built for another system")

sys.meta_path.insert(0, Broken())
"""
COMMANDS = """
import contextlib, io, json, sys
from draftsmith.commands.cli import main
for words in json.loads(sys.argv[1]):
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree as git knows it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        wanted = name.startswith(PACKAGES) or name in BESIDES
        if wanted and (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, tree]
    subprocess.run([sys.executable, *build], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_files_of_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert b"draftsmith = draftsmith.commands.cli:main" in archive.read(entry)
    tree = wheel.parent / "tree"
    files = {str(f.relative_to(tree)) for p in PACKAGES for f in (tree / p).rglob("*.*")}
    files = {name for name in files if (tree / name).is_file()}
    files = {name.removeprefix("draftsmith/") for name in files}
    assert inside == {f"draftsmith/{name}" for name in files}
    report = "draftsmith/inference/evaluation/report"
    assert {f"{report}/page.html", f"{report}/plot.umd.min.js", f"{report}/d3.LICENSE"} <= inside
    assert {"draftsmith/py.typed", "draftsmith/inference/serving/page/page.js"} <= inside


@pytest.fixture(scope="module")
def sdist(wheel: Path) -> Path:
    """The source distribution, built from the same copy."""
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    tree = wheel.parent / "tree"
    subprocess.run(
        [sys.executable, "-c", build, str(wheel.parent)], cwd=tree, check=True, capture_output=True
    )
    (built,) = wheel.parent.glob("*.tar.gz")
    return built


def test_the_source_distribution_holds_what_the_wheel_is_made_of(wheel: Path, sdist: Path) -> None:
    assert sdist.name == f"draftsmith-{VERSION}.tar.gz"
    tree = wheel.parent / "tree"
    with tarfile.open(sdist) as archive:
        files = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    made = {name for name in files if ".egg-info" in name} | {"PKG-INFO", "setup.cfg"}
    listed = {str(f.relative_to(tree)) for f in tree.rglob("*") if f.is_file()}
    kept = {name for name in listed if name.split("/")[0] in (*PACKAGES, *BESIDES)}
    assert files - made == {name for name in kept if ".egg-info" not in name}


def test_citation_version_matches_package_version() -> None:
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, which borrows the dependencies of this one."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (here,) = {p for p in sys.path if p.endswith("site-packages") and "draftsmith" not in p}
    # A path in a .pth file is searched, but the .pth files in it, such as that of the checkout's
    # own editable install, are not read.
    (site / "dependencies.pth").write_text(f"{here}\n")
    install = ["-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps"]
    subprocess.run([sys.executable, *install, "--no-index", wheel], check=True)
    return folder / "bin"


def python(
    installed: Path, folder: Path, *words: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python of that environment in `folder`, far from the checkout."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(path or "")}
    return subprocess.run(
        [installed / "python", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_wheel_works_far_from_the_checkout(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, "-c", "import draftsmith; print(draftsmith.__file__)")
    assert done.stdout.startswith(str(installed.parent)), done.stderr
    command = subprocess.run(
        [installed / "draftsmith", "--version"], cwd=tmp_path, capture_output=True, text=True
    )
    assert command.stdout == f"draftsmith {VERSION}\n", command.stderr


@pytest.mark.full
def test_decoding_needs_neither_datasets_nor_deepspeed_nor_wandb(
    installed: Path, tmp_path: Path
) -> None:
    """Packages that are there and cannot be imported, as after a failed build."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(BROKEN)
    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    question = [{"role": "user", "content": "def f():"}]
    prompts.write_text(json.dumps({"messages": question}) + "\n")
    write(rows, [chat(f"def f{n}():", f"return {n}") for n in range(16)])
    target, drafter = f"--target {QUICKSTART}", f"--drafter {EAGLE3}"
    train = f"train medusa {target} --out run --data.sources"
    expected = {
        f"generate {target} {drafter} --prompt f --max-new-tokens 4": (0, "tau"),
        f"evaluate {target} {drafter} --no-baselines --prompts {prompts} --max-new-tokens 8 "
        "--repeats 1": (0, ""),
        f"export {drafter} --to vllm --out export": (0, ""),
        f"import --from export {target} --out imported": (0, ""),
        f"{train} owner/set": (2, "owner/set is read by the package datasets, which cannot be"),
        f"{train} {rows} --tracker wandb": (2, "tracker is wandb, but it cannot be imported"),
    }
    words = json.dumps([command.split() for command in expected])
    done = python(installed, tmp_path, "-c", COMMANDS, words, path=broken)
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) == len(expected), done.stderr
    for (code, said), (command, (wanted, text)) in zip(ends, expected.items(), strict=True):
        assert code == wanted and text in said, (command, said)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_packages_install_alone(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    """A clean environment with nothing but what the package asks for: the wheel, then the sdist."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    folder = tmp_path / "venv" / "bin"
    pip = [folder / "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = [line for line in lines if line.startswith("torch==")]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, wheel], check=True)
    decodes_and_evaluates(folder, tmp_path)
    subprocess.run([*pip, f"{wheel}[train,serve]"], check=True)
    subprocess.run([folder / "pip", "check"], check=True)
    works_alone(folder, tmp_path)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", sdist], check=True)
    works_alone(folder, tmp_path)


def decodes_and_evaluates(folder: Path, elsewhere: Path) -> None:
    """Decode and evaluate in an environment that has the core alone."""
    for extra in ("datasets", "deepspeed", "wandb", "starlette"):
        found = subprocess.run([folder / "python", "-c", f"import {extra}"], capture_output=True)
        assert found.returncode == 1, f"{extra} was installed with the core"
    prompt = ["--prompt", "def add(a, b):", "--max-new-tokens", "8"]
    prompts = elsewhere / "prompts.jsonl"
    prompts.write_text('{"prompt": "def add(a, b):"}\n{"prompt": "class Stack:"}\n')
    models = ["--target", QUICKSTART, "--drafter", EAGLE3]
    run(folder, elsewhere, ["generate", *models, *prompt], "tau")
    evaluated = ["--prompts", prompts, "--max-new-tokens", "8", "--repeats", "1"]
    run(folder, elsewhere, ["evaluate", *models, *evaluated], "tau")


def works_alone(folder: Path, elsewhere: Path) -> None:
    """Run a command of each kind from an environment, outside of the checkout."""
    models = ["--target", QUICKSTART, "--drafter", EAGLE3]
    prompt = ["--prompt", "def add(a, b):", "--max-new-tokens", "8"]
    run(folder, elsewhere, ["--version"], f"draftsmith {VERSION}")
    run(folder, elsewhere, ["serve", "--help"], "usage: draftsmith serve")
    run(folder, elsewhere, ["doctor", "--target", QUICKSTART], "torch")
    run(folder, elsewhere, ["generate", *models, *prompt], "tau")


def run(folder: Path, elsewhere: Path, words: list[str | Path], said: str) -> None:
    """Run a command that has to succeed and to print `said`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [folder / "draftsmith", *words], cwd=elsewhere, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and said in done.stdout + done.stderr, (words, done)
