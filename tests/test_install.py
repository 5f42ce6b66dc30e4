"""What is installed: the wheel holds what the tree holds, and works without the checkout and
without the packages that only training needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import QUICKSTART, ROOT

PACKAGES = ("heads", "inference", "distill", "train")
EAGLE3 = QUICKSTART.parent / "drafters" / "eagle3"
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree as git knows it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        wanted = name.startswith(PACKAGES) or name in ("pyproject.toml", "README.md", "LICENSE")
        if wanted and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, tree]
    subprocess.run([sys.executable, *build], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_files_of_the_tree(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        (entry,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert b"draftsmith = draftsmith.train.commands.cli:main" in archive.read(entry)
    tree = wheel.parent / "tree"
    files = {str(f.relative_to(tree)) for p in PACKAGES for f in (tree / p).rglob("*.*")}
    files = {name for name in files if (tree / name).is_file()}
    assert inside == {f"draftsmith/{name}".replace("train/toplevel/", "") for name in files}
    assert {"draftsmith/py.typed", "draftsmith/inference/serving/page/page.js"} <= inside


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


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Run:
    """Run `draftsmith` of that environment, far from the checkout."""

    def command(*words: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(path or "")}
        return subprocess.run(
            [installed / "draftsmith", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )

    return command


def test_the_wheel_works_far_from_the_checkout(run: Run, installed: Path, tmp_path: Path) -> None:
    where = subprocess.run(
        [installed / "python", "-c", "import draftsmith; print(draftsmith.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert where.startswith(str(installed.parent))
    assert run("--version").stdout.startswith("draftsmith ")
    prompt = ("--prompt", "def add(a, b):", "--max-new-tokens", "8")
    done = run("generate", "--target", QUICKSTART, "--drafter", EAGLE3, *prompt)
    assert done.returncode == 0 and "tau" in done.stderr, done.stderr


def test_decoding_needs_neither_datasets_nor_deepspeed_nor_wandb(run: Run, tmp_path: Path) -> None:
    """Packages that are there and cannot be imported, as after a failed build."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(BROKEN)
    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "def f():"}]}) + "\n")
    conversation = json.loads(prompts.read_text())["messages"]
    conversation += [{"role": "assistant", "content": "return 1"}]
    rows.write_text("".join(json.dumps({"messages": conversation}) + "\n" for _ in range(4)))
    target = ("--target", QUICKSTART)
    done = run(
        "evaluate", *target, "--drafter", EAGLE3, "--no-baselines", "--prompts", prompts,
        "--max-new-tokens", "8", "--repeats", "1", path=broken,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in (
        ("export", "--drafter", EAGLE3, "--to", "vllm", "--out", "export"),
        ("import", "--from", "export", *target, "--out", "imported"),
    ):
        done = run(*words, path=broken)
        assert done.returncode == 0, done.stderr
    train = ("train", "medusa", *target, "--out", "run", "--data.sources")
    cases = [
        ((*train, "owner/set"), "owner/set is read by the package datasets, which cannot be"),
        ((*train, rows, "--tracker", "wandb"), "tracker is wandb, but it cannot be imported"),
    ]
    for words, said in cases:
        done = run(*words, path=broken)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_the_wheel_installs_from_the_registry(wheel: Path, tmp_path: Path) -> None:
    """A clean environment with nothing but what the wheel asks for."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv" / "bin" / "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    (torch,) = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    ]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, f"{wheel}[serve]"], check=True)
    subprocess.run([tmp_path / "venv" / "bin" / "pip", "check"], check=True)
    done = subprocess.run(
        [tmp_path / "venv/bin/draftsmith", "generate", "--target", QUICKSTART, "--drafter", EAGLE3,
         "--prompt", "def add(a, b):", "--max-new-tokens", "8"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "tau" in done.stderr
