"""Running a module of this folder in a process of its own, which the device guard stays in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import PYTHON, ROOT


def run_with_guard(folder: Path, module: str, *options: str) -> dict[str, Any]:
    """Return the JSON that `tests.fake_cuda.MODULE` prints; `folder` is for the compiled guard."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    library, home = folder / "guard.so", Path(torch.__file__).parent
    subprocess.run(
        [
            *("g++", "-shared", "-fPIC", "-std=c++20", f"-I{home / 'include'}"),
            *(str(ROOT / "tests/fake_cuda/guard.cpp"), "-o", str(library)),
            *(f"-L{home / 'lib'}", "-lc10"),
        ],
        check=True,
    )
    command = [PYTHON, "-m", f"tests.fake_cuda.{module}", str(library), *options]
    ran = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout)
