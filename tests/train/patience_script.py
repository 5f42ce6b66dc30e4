"""Script for `accelerate launch` with two ranks: how long each waits for the other."""

from __future__ import annotations

import time
from datetime import timedelta

from accelerate import Accelerator

from draftsmith.inference.targets import spread as ranks
from draftsmith.train import parallel


def main() -> None:
    parallel.PROCESS_GROUP.timeout, ranks.PREPARING = timedelta(seconds=4), timedelta(minutes=2)
    accelerator = Accelerator(kwargs_handlers=[parallel.PROCESS_GROUP])

    def prepare() -> str:
        time.sleep(8)
        return "prepared"

    print(ranks.on_first(prepare), flush=True)
    if accelerator.is_main_process:
        begin = time.monotonic()
        try:
            accelerator.wait_for_everyone()
        except RuntimeError:
            print(f"noticed after {time.monotonic() - begin:.1f} s", flush=True)
    else:
        time.sleep(15)


if __name__ == "__main__":
    main()
