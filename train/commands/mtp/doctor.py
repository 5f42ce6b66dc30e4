"""`draftsmith mtp doctor`: examines the MTP layer of a target by its tau in decoding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from rich.markup import escape
from rich.table import Table

from ....heads.errors import UserError
from ....heads.layout import place
from ....heads.mtp import MtpDrafter
from ....inference.console import Console, Progress
from ....inference.conversations.formats import Conversation
from ....inference.conversations.plain import plain_ids
from ....inference.conversations.prompts import read_prompts
from ....inference.conversations.rendering import prompt_ids
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
class Measured:
    """One way to run the layer, and its tau."""

    variant: str
    tau: float | None
    """None if no reply had a round."""
    low: float | None
    high: float | None
    """Ends of the 95% interval over prompts; None for too few of them."""


AS_SERVED = "as engines serve it"


def variants(scale: torch.Tensor | None) -> dict[str, Callable[[MtpDrafter], None]]:
    """Return the ways to run a layer: functions that change a copy of it, by name.

    `scale` is the weight of the target's final norm, without which that norm cannot be undone.
    """
    found: dict[str, Callable[[MtpDrafter], None]] = {
        AS_SERVED: lambda drafter: None,
        "own state before the layer's norm": recycle_residual,
        "embedding and state exchanged": exchange_halves,
        "their norms exchanged": exchange_norms,
    }
    if scale is not None:
        found["target's state before its final norm"] = partial(read_residual, scale)
    return found


def read_residual(scale: torch.Tensor, drafter: MtpDrafter) -> None:
    """Let the layer read the target's states from before the final norm, of the weight `scale`."""
    drafter.shape = replace(drafter.shape, reads="residual")
    drafter.final_scale = scale.to(drafter.fc.weight.device, torch.float32)


def recycle_residual(drafter: MtpDrafter) -> None:
    """Let the layer's output from before its norm be its next state."""
    drafter.shape = replace(drafter.shape, recycles="residual")


def exchange_halves(drafter: MtpDrafter) -> None:
    """Exchange the columns for the embedding and for the state."""
    first, second = drafter.fc.weight.chunk(2, dim=1)
    drafter.fc.weight = torch.nn.Parameter(torch.cat([second, first], 1), requires_grad=False)


def exchange_norms(drafter: MtpDrafter) -> None:
    """Exchange the norms of the embedding and of the state."""
    drafter.enorm, drafter.hnorm = drafter.hnorm, drafter.enorm


def run(options: Options) -> None:
    """Examine the layer and print the report; exit with status 2 if it has no use.

    Raises `UserError` if there is no layer.
    """
    findings, remarks = examined(options)
    table = Table("how the layer is run", "tau", "95% interval")
    for finding in findings:
        ends = "" if finding.low is None else f"{finding.low:.2f}-{finding.high:.2f}"
        table.add_row(escape(finding.variant), f"{finding.tau or math.nan:.2f}", ends)
    console = Console()
    console.print(table)
    dead = never_accepted(findings[0])
    status = "[red]error[/]" if dead else "[yellow]warning[/]" if remarks else "[green]ok[/]"
    text = "; ".join(remarks) or "alive, and read as it was trained"
    console.print(f"{status}: {escape(text)}")
    if dead:
        raise SystemExit(2)


def examined(options: Options) -> tuple[list[Measured], list[str]]:
    """Return tau of each way to run the layer, as served first, and what is wrong with the layer.

    Raises `UserError` if there is no layer.
    """
    path, _ = base_and_adapter(options.target)
    # Found before the target is loaded, which takes longer.
    layer = find_layer(path, trust=options.target.trust_remote_code)
    remedy = "name as --base a model that has one, or leave --base out"
    base = None if options.base is None else find_layer(options.base, remedy)
    if base is not None and base.folder.resolve() == layer.folder.resolve():
        raise UserError(f"--base {options.base} is the target; name the model it was tuned from")
    target = load_target(options.target)
    drafter = drafter_of(layer, target)
    findings = measured(target, drafter, prompts_of(options, target))
    remarks = diagnosed(findings, drafter)
    if base is not None and rest_hash(base) != rest_hash(layer):
        ours, theirs = drafter.serving_state(), drafter_of(base, target).serving_state()
        if all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items()):
            remarks.append(
                f"the layer is that of {options.base}: it was not tuned with the target; train it "
                "on (draftsmith train mtp)"
            )
    return findings, remarks


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


def measured(target: Target, drafter: MtpDrafter, prompts: Sequence[list[int]]) -> list[Measured]:
    """Return tau of each variant of the layer with greedy chains; the first is as served."""
    findings, settings = [], TreeSettings(width=1, length=DRAFTS)
    ways = variants(target.final_norm_weight())
    for name, change in Progress(ways.items(), desc="examining", unit=" variants"):
        varied = copy.deepcopy(drafter)
        change(varied)
        proposer, results = EagleProposer(varied, settings), []
        for start in range(0, len(prompts), BATCH):
            batch = list(prompts[start : start + BATCH])
            results += generate(target, proposer, batch, MAX_NEW_TOKENS)
        emitted = [[len(each.tokens) for each in result.rounds] for result in results]
        figures = (tau(emitted), *tau_interval(emitted, drafts=DRAFTS))
        findings.append(Measured(name, *(None if math.isnan(one) else one for one in figures)))
    return findings


def never_accepted(served: Measured) -> bool:
    """Return true if drafts of the layer are as good as never accepted."""
    return served.tau is not None and served.tau <= DEAD


def diagnosed(findings: Sequence[Measured], drafter: MtpDrafter) -> list[str]:
    """Return what is wrong with the layer, or with the measurement, by tau of its variants."""
    served, best = findings[0], max(findings, key=lambda finding: finding.tau or 0.0)
    remarks = []
    if never_accepted(served):
        remarks.append(
            f"the layer is of no use as it is served (tau {served.tau:.2f}): it was lost or "
            "written with other weights; take the base model's (draftsmith mtp extract --base) or "
            "train it"
        )
    elif served.low is None:
        remarks.append(
            f"too few replies to compare the readings by; give {FEWEST} prompts or more that have "
            "longer ones (--prompts)"
        )
    if best.low is not None and served.tau is not None and best.low > served.tau:
        remarks.append(
            f"with another reading ({best.variant}) tau is {best.tau:.2f} instead of "
            f"{served.tau:.2f}: the layer was trained on another graph than engines serve; train "
            "it on (draftsmith train mtp)"
        )
    if not all(bool(tensor.isfinite().all()) for tensor in drafter.serving_state().values()):
        remarks.append("it has numbers that are not finite; copy or download it again")
    return remarks
