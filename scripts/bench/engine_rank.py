"""Run under `torchrun` as one of several CPU ranks: training under FSDP2 or DeepSpeed, which
accelerate's launcher keeps to GPUs.

    torchrun --standalone --nproc_per_node 2 scripts/bench/engine_rank.py \
        fsdp2|zero2|zero3 METHOD --config FILE --rows-per-step N ...

Only the launch is another: with the process group there first, accelerate takes these engines on a
CPU as well.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import tempfile
from pathlib import Path

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
# by default DeepSpeed's stage 3 leaves tensors below 100,000 numbers whole
ZERO = {"stage3_param_persistence_threshold": 0}


def main() -> None:
    engine, *arguments = sys.argv[1:]
    if engine == "fsdp2":
        os.environ |= FSDP2 | {"ACCELERATE_USE_CPU": "true"}
    else:
        # with it, accelerate takes no notice of DeepSpeed, and says nothing
        os.environ.pop("ACCELERATE_USE_CPU", None)
        file = Path(tempfile.gettempdir(), f"draftsmith-{engine}-{os.getpid()}.json")
        file.write_text(json.dumps({"zero_optimization": ZERO | {"stage": int(engine[-1])}}))
        atexit.register(file.unlink)
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file),
            "DS_ACCELERATOR": "cpu",
        }
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True)
    if engine == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    from draftsmith.commands.cli import train_main

    train_main(arguments)


if __name__ == "__main__":
    main()
