"""Worker of `train_step.py --against`: steps of a checkout's own code, one for each input line.

    python scripts/bench/steps_of.py CHECKOUT WEIGHTS CASE [--recompute]

The checkout has to be importable as `draftsmith`. Its drafter begins with the same weights and the
same batch as any other checkout's, however it would begin in training. The CPU-seconds of each step
are printed; after 20 steps the weights are written to the file WEIGHTS.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from draftsmith.heads.eagle import EagleDrafter
from draftsmith.train.methods.eagle import method as eagle


def main(checkout: str, weights: str, case: str, *options: str) -> None:
    torch.set_num_threads(1)
    parts: list[torch.Tensor] = []

    class Noted(torch.optim.AdamW):
        def __init__(self, parameters, **settings):
            parts.extend(parameters)
            super().__init__(parts, **settings)

    torch.optim.AdamW = Noted  # type: ignore[misc]
    # In earlier checkouts it is a method of the drafter.
    name = "first_weights" if hasattr(eagle, "first_weights") else "start_from"
    owner = eagle if hasattr(eagle, name) else EagleDrafter
    begin = getattr(owner, name)

    def first_weights(drafter: EagleDrafter, *values: Any) -> None:
        begin(drafter, *values)
        torch.manual_seed(1)
        for weight in drafter.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    setattr(owner, name, first_weights)
    there = runpy.run_path(str(Path(checkout, "scripts/bench/train_step.py")))
    step = there["make_step"](there["Case"](**json.loads(case)), bool(options))
    for turn, _ in enumerate(sys.stdin, 1):
        start = time.process_time()
        step()
        print(time.process_time() - start, flush=True)
        if turn == 20:
            torch.save([part.detach() for part in parts], weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
