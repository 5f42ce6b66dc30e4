"""`draftsmith mtp graft`: makes a drafter for a target of the MTP layer of its base model."""

from __future__ import annotations

from .layers import make_drafter
from .options import GraftOptions as Options


def run(options: Options) -> None:
    """Write the drafter, and print how to train it on. Raises `UserError`."""
    remedy = "name a model that has one, or train one (draftsmith train mtp without --init-from)"
    make_drafter(options.from_, options.onto, options.out, remedy)
    print(f"drafter: {options.out}; it is {options.from_}'s, for another target: train it on\n")
    print(
        f"draftsmith train mtp --target {options.onto} --init-from {options.out} --data.sources "
        "REPLIES.jsonl --out runs/mtp"
    )
