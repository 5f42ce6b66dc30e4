"""`draftsmith mtp doctor`: examines the MTP layer of a target by its tau in decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ....heads.errors import UserError
from ....heads.layout import place
from ....heads.mtp import MtpDrafter
from ....inference.console import Progress
from ....inference.conversations.formats import Conversation
from ....inference.conversations.prompts import read_prompts
from ....inference.conversations.rendering import prompt_ids
from ....inference.conversations.templates import plain_ids
from ....inference.decode import generate
from ....inference.evaluation.intervals import tau_interval
from ....inference.evaluation.results import FEWEST
from ....inference.metrics import tau
from ....inference.proposers.eagle import EagleProposer
from ....inference.settings import RowSource
from ....inference.targets.target import Target, load_target
from ....inference.targets.target_files import base_and_adapter
from ....inference.tree_settings import TreeSettings
from .extract import StoredLayer, find_layer, read_for, rest_hash
from .options import ExamineOptions as Options

BATCH = 8
DRAFTS = 3  # of a round, as engines draft by default
LIMIT = 16  # prompts: enough for an interval of tau, and quick
MAX_NEW_TOKENS = 64
DEAD = 1.02  # tau up to which a layer is of no use
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into French: The library opens at nine o'clock.",
    "List five fruits in alphabetical order.",
    "A train travels 120 km in 90 minutes. What is its average speed in km/h?",
    "Summarise the plot of Romeo and Juliet.",
    "Write a polite e-mail that moves a meeting to Thursday.",
    "What is the difference between a list and a tuple in Python?",
)


@dataclass
class Examined:
    """Result of an examination."""

    tau: float
    """With the layer as engines serve it; NaN if no reply had a round."""
    interval: tuple[float, float]
    """95% interval over prompts; NaN for too few of them."""
    remarks: list[str]
    """What is wrong with the layer, or with the measurement."""

    @property
    def dead(self) -> bool:
        """True if drafts of the layer are as good as never accepted."""
        return self.tau <= DEAD


def run(options: Options) -> None:
    """Examine the layer and print the report; exit with status 2 if it has no use.

    Raises `UserError` if there is no layer.
    """
    found = examined(options)
    low, high = found.interval
    ends = "" if math.isnan(low) else f" ({low:.2f}-{high:.2f})"
    status = "error" if found.dead else "warning" if found.remarks else "ok"
    print(f"tau with the layer as engines serve it: {found.tau:.2f}{ends}")
    print(f"{status}: {'; '.join(found.remarks) or 'the layer is alive'}")
    if found.dead:
        raise SystemExit(2)


def examined(options: Options) -> Examined:
    """Return what is found of the layer. Raises `UserError` if there is none."""
    path, _ = base_and_adapter(options.target)
    # Found before the target is loaded, which takes longer.
    layer = find_layer(path, trust=options.target.trust_remote_code)
    remedy = "name as --base a model that has one, or leave --base out"
    base = None if options.base is None else find_layer(options.base, remedy)
    if base is not None and base.folder.resolve() == layer.folder.resolve():
        raise UserError(f"--base {options.base} is the target; name the model it was tuned from")
    target = load_target(options.target)
    drafter, prompts = drafter_of(layer, target), prompts_of(options, target)
    proposer = EagleProposer(drafter, TreeSettings(width=1, length=DRAFTS))
    emitted = []
    for start in Progress(range(0, len(prompts), BATCH), desc="decoding", unit=" batches"):
        batch = prompts[start : start + BATCH]
        for result in generate(target, proposer, batch, MAX_NEW_TOKENS):
            emitted.append([len(each.tokens) for each in result.rounds])
    found = Examined(tau(emitted), tau_interval(emitted, drafts=DRAFTS), [])
    if found.dead:
        found.remarks.append(
            f"the layer is of no use as it is served (tau {found.tau:.2f}): it was lost or "
            "written with other weights; take the base model's (draftsmith mtp extract --base) or "
            "train it"
        )
    elif math.isnan(found.interval[0]):
        found.remarks.append(f"too few replies to judge by; give {FEWEST} prompts or more")
    ours = drafter.serving_state()
    if not all(bool(tensor.isfinite().all()) for tensor in ours.values()):
        found.remarks.append("it has numbers that are not finite; copy or download it again")
    if base is not None and rest_hash(base) != rest_hash(layer):
        theirs = drafter_of(base, target).serving_state()
        if all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()):
            found.remarks.append(
                f"the layer is that of {options.base}: it was not tuned with the target; train it "
                "on (draftsmith train mtp)"
            )
    return found


def drafter_of(layer: StoredLayer, target: Target) -> MtpDrafter:
    """Return a layer as a drafter of `target`, in the target's type."""
    drafter = read_for(layer, target)[0].drafter
    place(drafter, target.device, target.dtype)
    return drafter.eval().requires_grad_(False)


def prompts_of(options: Options, target: Target) -> list[list[int]]:
    """Return the token ids of the prompts."""
    if options.prompts is not None:
        source = RowSource(options.prompts)
        found = read_prompts(source, target.tokenizer, target.name, LIMIT)
        return [prompt.token_ids for prompt in found]
    if not target.tokenizer.chat_template:
        return [plain_ids(target.tokenizer, text) for text in PROMPTS]
    conversations = [Conversation(messages=[{"role": "user", "content": text}]) for text in PROMPTS]
    return [prompt_ids(each, target.tokenizer, target.name) for each in conversations]
