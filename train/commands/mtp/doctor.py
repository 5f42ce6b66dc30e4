"""`draftsmith mtp doctor`: examines the MTP layer of a target by its tau in decoding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import torch
from rich.markup import escape
from rich.table import Table

from ....heads.errors import UserError
from ....heads.files import check_json, output_json
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
from ....inference.targets.target import Target, load_target
from ....inference.targets.target_files import base_and_adapter
from ....inference.tree_settings import TreeSettings
from .layers import StoredLayer, find_layer, read_for, rest_hash
from .options import ExamineOptions as Options

BATCH = 8
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


@dataclass
class Examined:
    """Result of an examination."""

    status: Literal["ok", "warning", "error"]
    remarks: list[str]
    findings: list[Measured]


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
    check_json(options.json)
    path, _ = base_and_adapter(options.target)
    # Found before the target is loaded, which takes longer.
    layer = find_layer(path, trust=options.target.trust_remote_code)
    remedy = "name as --base a model that has one, or leave --base out"
    base = None if options.base is None else find_layer(options.base, remedy)
    if base is not None and base.folder.resolve() == layer.folder.resolve():
        raise UserError(f"--base {options.base} is the target; name the model it was tuned from")
    target = load_target(options.target)
    drafter = drafter_of(layer, target)
    prompts = prompts_of(options, target)
    findings = measured(target, drafter, prompts, options)
    remarks = about(findings, drafter)
    stale = base is not None and same(drafter, drafter_of(base, target))
    if base is not None and stale and rest_hash(base) != rest_hash(layer):
        remarks.append(
            f"the layer is that of {options.base}: it was not tuned with the target; train it on "
            "(draftsmith train mtp)"
        )
    status = "ok" if len(remarks) == 0 else "warning"
    if dead(findings[0]):
        status = "error"
    report = Examined(status, remarks, findings)
    if not output_json(options.json, asdict(report)):
        show(report, len(prompts))
    if report.status == "error":
        raise SystemExit(2)


def drafter_of(layer: StoredLayer, target: Target) -> MtpDrafter:
    """Return a layer as a drafter of `target`, in the target's type."""
    drafter = read_for(layer, target)[0].drafter
    place(drafter, target.device, target.dtype)
    return drafter.eval().requires_grad_(False)


def prompts_of(options: Options, target: Target) -> list[list[int]]:
    """Return the token ids of the prompts."""
    if options.prompts is not None:
        source = options.source(options.prompts)
        found = read_prompts(source, target.tokenizer, target.name, options.limit)
        return [prompt.token_ids for prompt in found]
    texts = PROMPTS[: options.limit]
    if not target.tokenizer.chat_template:
        return [plain_ids(target.tokenizer, text) for text in texts]
    conversations = [Conversation(messages=[{"role": "user", "content": text}]) for text in texts]
    return [prompt_ids(each, target.tokenizer, target.name) for each in conversations]


def measured(
    target: Target, drafter: MtpDrafter, prompts: Sequence[list[int]], options: Options
) -> list[Measured]:
    """Return tau of each variant of the layer with greedy chains; the first is as served."""
    findings, settings = [], TreeSettings(width=1, length=options.drafts)
    ways = variants(target.final_norm_weight())
    for name, change in Progress(ways.items(), desc="examining", unit=" variants"):
        varied = copy.deepcopy(drafter)
        change(varied)
        proposer, results = EagleProposer(varied, settings), []
        for start in range(0, len(prompts), BATCH):
            batch = list(prompts[start : start + BATCH])
            results += generate(target, proposer, batch, options.max_new_tokens)
        emitted = [[len(each.tokens) for each in result.rounds] for result in results]
        figures = (tau(emitted), *tau_interval(emitted, drafts=options.drafts))
        findings.append(Measured(name, *(None if math.isnan(one) else one for one in figures)))
    return findings


def dead(served: Measured) -> bool:
    """Return true if drafts of the layer are as good as never accepted."""
    return served.tau is not None and served.tau <= DEAD


def about(findings: Sequence[Measured], drafter: MtpDrafter) -> list[str]:
    """Return what is wrong with the layer, or with the measurement, by tau of its variants."""
    served, best = findings[0], max(findings, key=lambda finding: finding.tau or 0.0)
    remarks = []
    if dead(served):
        remarks.append(
            f"the layer is of no use as it is served (tau {served.tau:.2f}): it was lost or "
            "written with other weights; graft one (draftsmith mtp graft) or train it"
        )
    elif served.low is None:
        remarks.append(
            f"too few replies to compare the readings by; give {FEWEST} prompts or more that have "
            "longer ones (--prompts, --limit)"
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


def same(one: MtpDrafter, other: MtpDrafter) -> bool:
    """Return whether two layers have the same tensors."""
    theirs = other.serving_state()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.serving_state().items())


def show(report: Examined, prompts: int) -> None:
    """Print the report."""
    table = Table("how the layer is run", "tau", "95% interval")
    for finding in report.findings:
        ends = "" if finding.low is None else f"{finding.low:.2f}-{finding.high:.2f}"
        table.add_row(escape(finding.variant), f"{finding.tau or math.nan:.2f}", ends)
    console = Console()
    console.print(table)
    color = {"ok": "green", "warning": "yellow", "error": "red"}[report.status]
    text = "; ".join(report.remarks) or f"alive, and read as it was trained ({prompts} prompts)"
    console.print(f"[{color}]{report.status}[/]: {escape(text)}")
