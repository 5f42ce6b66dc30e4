"""`draftsmith mtp extract`: makes a drafter of the MTP layer in a target's checkpoint."""

from __future__ import annotations

from .layers import make_drafter
from .options import ExtractLayerOptions as Options


def run(options: Options) -> None:
    """Write the drafter, and print what to do with it. Raises `UserError`."""
    make_drafter(options.from_, options.from_, options.out)
    print(f"drafter: {options.out}\n")
    print(
        f"draftsmith evaluate --target {options.from_} --drafter {options.out}:width=1,length=3 "
        "--prompts HELD_OUT.jsonl"
    )
