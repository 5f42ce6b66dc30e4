"""Run under `torchrun` as one of several CPU ranks: training under FSDP2 or DeepSpeed, which accelerate's launcher keeps to GPUs.

    torchrun --standalone --nproc_per_node 2 scripts/bench/engine_rank.py fsdp2|zero2|zero3 METHOD --config FILE ...

Only the launch is another: with the process group there first, accelerate takes these engines on a CPU as well.
"""

from __future__ import annotations

import os
import sys

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def main() -> None:
    engine, *arguments = sys.argv[1:]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if engine == "fsdp2":
        os.environ |= FSDP2
    else:
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": engine[-1],
            "DS_ACCELERATOR": "cpu",
        }
    from accelerate import DistributedType, PartialState

    PartialState(cpu=True)
    if engine == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    from draftsmith.train.cli import train_main

    train_main(arguments)


if __name__ == "__main__":
    main()
