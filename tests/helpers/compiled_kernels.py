"""Compiles the kernels for a GPU, without one.

    python -m tests.helpers.compiled_kernels ARCHITECTURE DTYPE.. SIZE..

for example `90 bfloat16 128` for sm_90 and heads of 128.

It prints JSON: registers, bytes of spilled registers and of shared memory, by kernel and sizes. The
kernels are launched by the operators as always, and compiled instead of run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from draftsmith.inference.kernels import operators

BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


class Compiler:
    """In place of a launch: compiles the kernel for an architecture, and notes what it takes."""

    def __init__(self, architecture: int) -> None:
        self.target, self.found = GPUTarget("cuda", architecture, 32), {}
        self.case = ""

    def run(self, function: Any, *args: Any, **options: Any) -> None:
        settings = {
            name: options.pop(name) for name in ("num_warps", "num_stages") if name in options
        }
        values = dict(zip(function.arg_names, args, strict=False)) | options
        signature, constants, aligned = {}, {}, {}
        for place, name in enumerate(function.arg_names):
            value = values[name]
            if isinstance(value, Tensor):
                signature[name] = f"*{NAMES[value.dtype]}"
            elif isinstance(value, float):
                signature[name] = "fp32"
            elif isinstance(value, int) and place < len(args):
                signature[name] = "i32"
            else:
                signature[name], constants[name] = "constexpr", value
            multiple = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
            special = multiple and name not in (function.do_not_specialize or ())
            if special and signature[name] != "constexpr":
                aligned[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(function, signature, constants, aligned)
        made = triton.compile(source, target=self.target, options=settings)
        self.found[f"{function.__name__} {self.case}"] = {
            "shared": made.metadata.shared,
            **assembled(made.asm["ptx"]),
        }


def assembled(ptx: str) -> dict[str, int]:
    """Return the registers of a kernel, and the bytes of them that are spilled."""
    (goal,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        # Triton brings an assembler for sm_100 and newer.
        newest = int(re.findall(r"\d+", goal)[0]) >= 100
        command = [
            str(BINARIES / ("ptxas-blackwell" if newest else "ptxas")),
            "-v",
            f"--gpu-name={goal}",
            file.name,
            "-o",
            "/dev/null",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", said)
    return {"registers": int(registers), "spilled": int(spilled)}


def main(architecture: int, dtypes: list[torch.dtype], sizes: list[int]) -> None:
    compiler = Compiler(architecture)
    with patch.object(
        triton.runtime.jit.JITFunction,
        "run",
        lambda self, *args, grid, warmup, **options: compiler.run(self, *args, **options),
    ):
        for dtype in dtypes:
            for size in sizes:
                for count in (1, 8, 60):
                    for window in (0, 1024) if count == 8 else (0,):
                        compiler.case = f"{dtype}, heads of {size}, {count} nodes, window {window}"
                        attend(count, size, dtype, window)
            compiler.case = str(dtype)
            layer(dtype)
    print(json.dumps(compiler.found, indent=1))


def attend(count: int, size: int, dtype: torch.dtype, window: int) -> None:
    """Attention of 32 heads with 8 key-value heads."""
    queries = torch.empty(1, count, 32, size, dtype=dtype)
    keys = torch.empty(1, 8, 4096, size, dtype=dtype)
    visible, starts = (
        torch.ones(1, count, count, dtype=torch.bool),
        torch.zeros(1, dtype=torch.long),
    )
    depths = torch.zeros(1, count, dtype=torch.long)
    parts = {1: 64, 8: 32, 60: 8}[count]
    operators.attend(queries, keys, keys, starts, visible, depths, window, parts)


def layer(dtype: torch.dtype) -> None:
    """The other kernels, at the sizes of an 8B model."""
    states, weight = torch.empty(1, 8, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    operators.norm(states, weight, 1e-6)
    operators.add_norm(states, states, weight, 1e-6)
    operators.gate(torch.empty(1, 8, 2 * 12288, dtype=dtype))
    keys = torch.empty(1, 8, 4096, 128, dtype=dtype)
    angles = torch.empty(1, 8, 1, 128, dtype=dtype)
    starts, head = torch.zeros(1, dtype=torch.long), torch.empty(128, dtype=dtype)
    qkv = torch.empty(1, 8, 48 * 128, dtype=dtype)
    operators.rotate(qkv, keys, keys.clone(), starts, 0, angles, angles, head, head, 1e-6)


if __name__ == "__main__":
    architecture, *words = sys.argv[1:]
    main(
        int(architecture),
        [getattr(torch, word) for word in words if not word.isdigit()],
        [int(word) for word in words if word.isdigit()],
    )
