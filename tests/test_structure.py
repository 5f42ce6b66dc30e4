"""The structure of the package: imports point one way, the wheel holds what the tree holds, every
shipped config parses."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import draftsmith
from draftsmith.command_line.fields import options_of_class
from draftsmith.command_line.help_text import help_page
from draftsmith.command_line.parse import options_from, parse
from draftsmith.commands.cli import VERBS, options_of_verb
from draftsmith.train.methods.registry import METHODS, method_named
from tests.conftest import ROOT
from tests.promises import PROMISES

ROOTS = ("heads", "inference", "distill", "train")
LAYERS = (  # a package may import itself and all above
    "heads",
    "heads.exchange.engines",
    "heads.exchange",
    "inference.base",
    "inference.kernels",
    "inference.rounds",
    "inference.targets",
    "inference.conversations",
    "inference.proposers",
    "inference",
    "inference.evaluation",
    "inference.evaluation.report",
    "inference.serving",
    "distill",
    "command_line",
    "train.data",
    "train",
    "train.losses",
    "train.methods.dflash",
    "train.methods.distill",
    "train.methods.dspark",
    "train.methods.eagle",
    "train.methods.medusa",
    "train.methods.mtp",
    "train.methods",
    "commands",
    "draftsmith",
)
LAYER = {package: level for level, package in enumerate(LAYERS)}
FILES = sorted(file for root in ROOTS for file in (ROOT / root).rglob("*.py"))
FILES += sorted(
    file
    for file in (ROOT / "draftsmith").rglob("*.py")
    if file.relative_to(ROOT).parts[1] not in ROOTS  # links to them
)
IMPORTED_BY_NAME = {
    "draftsmith": lambda: [*draftsmith._MODULES.values(), ".train"],
    "commands.cli": lambda: [
        *(f"..{module}" for module in VERBS.values()),
        *(options_of_verb(verb).__module__.replace("draftsmith", ".", 1) for verb in VERBS),
    ],
}
"""What the modules import whose `import_module` is given no literal name."""


def parts_of(path: Path) -> list[str]:
    """Return the names of a path below `draftsmith`, whose folders the four roots are."""
    parts = [*path.relative_to(ROOT).parts]
    return parts[1:] if parts[0] == "draftsmith" else parts


def module_of(file: Path) -> str:
    """`inference/proposers/eagle.py` -> `inference.proposers.eagle`; a package is its
    `__init__.py`."""
    parts = parts_of(file.with_suffix(""))
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "draftsmith"


def package_of(file: Path) -> str:
    return ".".join(parts_of(file.parent)) or "draftsmith"


MODULES = {module_of(file): file for file in FILES}


def full_name(name: str, level: int, file: Path) -> list[str]:
    """Return the parts of a module's name that `file` gives relatively, with `level` dots."""
    parts = parts_of(file.parent)
    return parts[: len(parts) - level + 1] + (name.split(".") if name else [])


def imported_modules(file: Path) -> set[str]:
    """Modules of ours that a file imports, inside functions and by `import_module` too. Absolute
    imports of our own are errors."""
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = full_name(node.module or "", node.level, file)
            for alias in node.names:
                nested = ".".join([*parts, alias.name])
                modules.add(nested if nested in MODULES else ".".join(parts) or "draftsmith")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            for name in names:
                assert name.split(".")[0] not in (*ROOTS, "draftsmith"), (
                    f"{file}: import relatively inside the package"
                )
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            modules |= imported_by_name(node, file)
    return modules


def imported_by_name(call: ast.Call, file: Path) -> set[str]:
    """Return the modules of ours that an `import_module` may import.

    A name that is put together stands for its literal beginning's package, `f".{method}"` for the
    file's own; the rest is in `IMPORTED_BY_NAME`. A call without `__package__` imports what a user
    names.
    """
    name, *package = call.args
    table = IMPORTED_BY_NAME.get(module_of(file))
    if table is None and not package and "__" not in ast.unparse(name):
        return set()
    names = table() if table else [str(ast.literal_eval(_beginning(name)))]
    return {
        ".".join(full_name(one.lstrip("."), len(one) - len(one.lstrip(".")), file)) for one in names
    }


def _beginning(name: ast.expr) -> ast.expr:
    """Return the literal beginning of an f-string, without a name that it cuts off."""
    if not isinstance(name, ast.JoinedStr):
        return name
    first = name.values[0]
    literal = str(first.value) if isinstance(first, ast.Constant) else "."
    dots = len(literal) - len(literal.lstrip("."))
    return ast.Constant("." * dots + literal[dots:].rpartition(".")[0])


IMPORTS = {module: imported_modules(file) - {module} for module, file in MODULES.items()}


def test_the_packages_are_those_of_the_layers() -> None:
    assert {package_of(file) for file in FILES} == set(LAYER)


def test_table_of_packages_in_contributing_equals_layers() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| package | contains |")[2]
    rows = re.findall(r"^\| `([\w/<>]+)/` \|", table.partition("\n\n")[0], re.MULTILINE)
    named = [re.sub(r"^draftsmith/", "", row).replace("/", ".") for row in rows]
    layers = [re.sub(r"^train\.methods\.\w+", "train.methods.<method>", one) for one in LAYERS]
    assert named == [*dict.fromkeys(layers)]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    # They hand over to the commands: `python -m draftsmith.train` and `draftsmith.train(...)`.
    if module in ("train", "train.__main__"):
        return
    own = LAYER[package_of(MODULES[module])]
    # A package stands for its modules where a name is put together.
    packages = {
        other: other if other in LAYER else package_of(MODULES[other]) for other in IMPORTS[module]
    }
    upwards = [other for other, package in packages.items() if LAYER[package] > own]
    assert not upwards, f"{module} imports {upwards}"


def test_no_module_imports_itself_through_others() -> None:
    """`TopologicalSorter` raises `CycleError`, which names the circle."""
    assert len([*graphlib.TopologicalSorter(IMPORTS).static_order()]) == len(MODULES)


SHARED = {
    "dflash": {"heads/dspark.py", "inference/proposers/dspark.py", "train/methods/dspark/config.py",
               "train/methods/dspark/method.py", "train/losses/blocks.py"},
    "eagle": {"inference/proposers/mtp.py", "train/losses/calibration.py"},
    "mtp": {"draftsmith/commands/mtp.py"},
}  # fmt: skip
"""Files that build on a method: DSpark extends DFlash, an MTP layer drafts as EAGLE does, and MTP
layers have commands."""


@pytest.mark.parametrize("method", ["medusa", "eagle", "mtp", "dflash", "dspark"])
def test_a_method_is_in_its_folder_and_two_files(method: str) -> None:
    """Identifiers and imports are searched; layouts of engines and the registry name methods."""
    own = (f"train/methods/{method}/", f"heads/{method}.py", f"inference/proposers/{method}.py")
    others = ("heads/exchange/", "train/methods/registry.py")
    found = set()
    for file in FILES:
        path = str(file.relative_to(ROOT))
        names = [
            getattr(node, key)
            for node in ast.walk(ast.parse(file.read_text()))
            for key in ("id", "attr", "name", "module", "arg")
            if isinstance(getattr(node, key, None), str)
        ]
        if not path.startswith((*own, *others)) and re.search(method, " ".join(names), re.I):
            found.add(path)
    assert found == SHARED.get(method, set())


def test_no_test_file_imports_another() -> None:
    """What several test files need is in tests/helpers."""
    pattern = re.compile(
        r"^\s*(?:from|import) (?:tests\.)?[\w.]*\btest_\w+ import|^from tests[\w.]* import test_",
        re.M,
    )
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    assert [str(file) for file in files if pattern.search(file.read_text())] == []


def test_every_test_of_a_promise_exists() -> None:
    for test in [one for tests in PROMISES.values() for one in tests]:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), test


def test_decoding_and_evaluation_import_neither_datasets_nor_deepspeed_nor_wandb() -> None:
    names = [
        "commands.cli",
        "commands.generate",
        *(name for name in MODULES if name.startswith("inference")),
    ]
    code = "".join(f"import draftsmith.{name}\n" for name in names)
    code += "import sys; print([m for m in ('datasets', 'deepspeed', 'wandb') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


CONFIGS = sorted(p for p in (ROOT / "configs").glob("*/*.yaml") if p.parent.name != "accelerate")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_config_parses_and_is_written_back(path: Path, tmp_path: Path) -> None:
    method = method_named(path.parent.name)
    run = parse(method.run_class, ["--config", str(path)], "test")
    written = tmp_path / "config.yaml"
    written.write_text(run.as_yaml())
    assert run.out and options_from(method.run_class, {}, written) == run


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_a_config_is_explained(name: str) -> None:
    run_class = method_named(name).run_class
    text = " ".join(help_page(run_class, "x", everything=True).split())
    assert "--optim.warmup-share" in text and "--optim.warmup_share" not in text
    assert "Share of the steps over which the rate rises from zero" in text
    assert all(option.text for option in options_of_class(run_class) if option.name != "target")


ANSWERED_AT_ONCE = [
    ("--version", 0, "draftsmith 0."),
    ("evalute", 2, "did you mean 'evaluate'?"),
    ("data plam", 2, "did you mean 'data plan'?"),
    ("evaluate --drafters x", 2, "did you mean --drafter?"),
    ("generate --temprature 1", 2, "did you mean --sampling.temperature?"),
    ("data --help", 0, "data regenerate"),
    ("train --help", 0, "medusa   Train"),
    ("train egle", 2, "did you mean 'eagle'?"),
    *((f"train {name} --help", 0, "examples:") for name in METHODS),
    ("train eagle --optim.learning-rate 1", 2, "did you mean --optim.lr?"),
    ("train eagle", 2, "are missing"),
    ("", 0, "the usual steps, in order:"),
    *((f"{verb} --help", 0, "examples:") for verb in VERBS),
]


@pytest.mark.parametrize(
    ("words", "code", "said"), ANSWERED_AT_ONCE, ids=lambda value: str(value).replace(" ", "_")
)
def test_help_and_mistakes_are_answered_without_torch(words: str, code: int, said: str) -> None:
    """Counted in imports, not in seconds: torch and transformers together take four."""
    asked = "import sys; from draftsmith.commands.cli import main\n"
    asked += f"try: main({words.split()!r})\nexcept SystemExit as e: code = e.code\n"
    asked += (
        "else: code = 0\nheavy = {'torch', 'transformers', 'accelerate', 'datasets', 'pandas', "
        "'scipy'} & {*sys.modules}\n"
    )
    asked += (
        "assert not heavy, heavy\nassert len(sys.modules) < 700, len(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stdout + done.stderr
