"""The kernels compile for GPUs, and fit them. No GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("triton")
SHARED = 99 << 10
"""Bytes of shared memory that a block may have on the smallest of these GPUs (sm_86 and sm_89)."""

HALVES_AND_WHOLE = ["bfloat16", "float16", "float32"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("architecture", "dtypes", "sizes"),
    [(number, HALVES_AND_WHOLE, [64, 128, 256]) for number in ("80", "86", "90", "100", "120")],
)
def test_kernels_fit_a_gpu(
    architecture: str, dtypes: list[str], sizes: list[int], tmp_path: Path
) -> None:
    """One node, 8 and 60, with and without a window."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.helpers.compiled_kernels", architecture]
    command += [*dtypes, *map(str, sizes)]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    # For each type and size of heads four ways of attention and of merging; for each type two norms
    # in one name, gate and rotation.
    assert len(found) == len(dtypes) * (2 * 4 * len(sizes) + 3)
    for kernel, facts in found.items():
        assert facts["shared"] <= SHARED, kernel
        # Heads of 256 fill the registers; float32 has no tensor cores, and spills more.
        if "float32, heads of 256" not in kernel:
            assert facts["spilled"] <= 16 * ("heads of 256" in kernel), (kernel, facts)
