"""Memory of training steps at the sizes of real targets, on a GPU that holds a whole target.

    python scripts/bench/memory_table.py
    python scripts/bench/memory_table.py --shapes qwen3-8b --lengths 32768 --methods eagle

One packed row in bf16 precision of documents of up to 4,096 tokens, all written by the target,
which runs live. EAGLE-3 (7 steps) drafts among 32,000 tokens, Medusa has heads of its own. Nothing
is run, and no GPU is needed (train/estimate.py); the figures are those of
`draftsmith data plan`, in GiB. `recompute` is `objective.recompute`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftsmith.train.config import TargetConfig
from draftsmith.train.data.config import Data, Source
from draftsmith.train.estimate import StepMemory, memory_of_step, run_sizes
from draftsmith.train.methods.registry import method_named

CONFIGS = Path(__file__).parents[2] / "draftsmith" / "commands" / "targets"
HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"draft_vocab_size": 32000},
    "dflash": {"mask_token": 0},
    "dspark": {"mask_token": 0},
    "medusa": {},
}
COLUMNS = ("target", "drafter", "moments", "features", "extraction", "activations", "step")


def memory(shape: str, method_name: str, length: int, recompute: bool) -> StepMemory:
    """Return the memory of a step for a target of the sizes of the folder `shape` in `CONFIGS`."""
    method = method_named(method_name)  # type: ignore[arg-type]
    run = method.run_class(
        out="-",
        target=TargetConfig(path=str(CONFIGS / shape)),
        data=Data(sources=[Source("-")], max_length=length),
        batch_rows=1,
        rows_per_step=1,
        precision="bf16",
    )
    for name, value in HEADS[method_name].items():
        setattr(run.heads, name, value)
    if recompute:
        run.objective.recompute = True
    return memory_of_step(run_sizes(method, run), run)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["qwen3-8b", "qwen3-32b"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 32768])
    parser.add_argument("--methods", nargs="+", default=list(HEADS), choices=list(HEADS))
    parser.add_argument("--json", help="write the bytes to this file")
    arguments = parser.parse_args()
    table = Table("target", "method", "S", "recompute", *COLUMNS, "peak")
    found: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        for method in arguments.methods:
            for length in arguments.lengths:
                for recompute in (False, True) if method != "medusa" else (False,):
                    sizes = memory(shape, method, length, recompute)
                    figures = [getattr(sizes, column) for column in COLUMNS]
                    cells = [f"{bytes_ / 2**30:.1f}" for bytes_ in (*figures, sizes.peak)]
                    again = "yes" if recompute else "no"
                    table.add_row(shape, method, f"{length:,}", again, *cells)
                    case = {"shape": shape, "method": method, "length": length}
                    case |= {"recompute": recompute, "peak": sizes.peak}
                    found.append(case | asdict(sizes))
    Console(width=120).print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
