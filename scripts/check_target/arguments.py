"""Options of `scripts/check_target.sh`, which looks at them before it makes an environment.

Nothing that has to be installed is imported here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

DESCRIPTION = "Does everything work with this model? A little of each command, on one target."
CONFIGS = Path(__file__).parents[2] / "draftsmith" / "commands" / "targets"


def known_shapes() -> list[str]:
    """Names of the models whose config.json is at hand."""
    return sorted(path.name for path in CONFIGS.iterdir())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check_target.sh", description=DESCRIPTION)
    parser.add_argument("target", nargs="?", help="a model folder, or a name on the hub")
    parser.add_argument(
        "--shape", help=f"instead: random weights in the sizes of {', '.join(known_shapes())}"
    )
    parser.add_argument("--layers", type=int, help="with --shape: so many decoder layers only")
    parser.add_argument(
        "--dtype",
        default="auto",
        help="as --target.dtype of every command (float32 on a CPU if not given)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for all that is made (runs/check/NAME); emptied first"
    )
    parser.add_argument("--tokens", type=int, default=8, help="longest reply of a step (8)")
    parser.add_argument("--steps", type=int, default=4, help="optimiser steps of each training (4)")
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="processes of the trainings that share work; 1 leaves them out",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one method only, no ranks, one export"
    )
    parser.add_argument(
        "--only", help="steps whose names begin with one of these, with commas between them"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=1800,
        help="seconds after which a command is given up (1800)",
    )
    options = parser.parse_args()
    if (options.target is None) == (options.shape is None):
        parser.error("give a target, or --shape NAME")
    if options.layers is not None and options.shape is None:
        parser.error("--layers goes with --shape")
    if min(options.tokens, options.ranks) < 1 or options.steps < 2:
        parser.error("--tokens and --ranks must be at least 1, --steps at least 2")
    return options


if __name__ == "__main__":
    parsed()
