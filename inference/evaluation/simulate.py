"""`draftsmith simulate`: what an acceptance is worth, before anything is built. Arithmetic;
formulas in `gains.py`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from ...heads.documents import convert, read_document
from ...heads.errors import UserError
from ...heads.files import check_output, whole_file, write_json
from ..console import Console
from ..documents import ProfileFile, ReportFile
from .compare import load_measured
from .evaluate import numbers
from .gains import (
    GPUS,
    Model,
    best_length,
    break_even,
    chain_tokens,
    free_tokens,
    pass_seconds,
    profile_tokens,
    simulated_tokens,
    speedup,
    stretched,
)
from .options import SimulateOptions as Options
from .report.tables import factor, number
from .tuning.costs import between

GRID_ACCEPTANCE, GRID_LENGTH = (0.6, 0.7, 0.8, 0.9), (3, 5, 7)
COSTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
TRIALS = 200_000
AGAIN = "write the report again with draftsmith evaluate --json"


def run(options: Options) -> None:
    console = Console()
    check_output(options.json, "--json")
    if options.report is not None:
        found: dict[str, Any] = {"measured": from_report(options.report, options.longest)}
        show_measured(found["measured"], console)
    else:
        found = simulation(options)
        show(found, console)
    if options.json is not None:
        with whole_file(options.json) as aside:
            write_json(aside, {"options": asdict(options), **found})


def simulation(options: Options) -> dict[str, Any]:
    """Every number that is shown, from an assumed acceptance."""
    assert options.acceptance is not None
    profile = numbers(options.acceptance, "--acceptance", float)
    if not all(0 <= a <= 1 for a in profile):
        raise UserError("--acceptance must lie between 0 and 1")
    own = stretched(profile, options.draft_length)
    tokens = profile_tokens(own)
    best = best_length(profile, options.draft_cost, options.longest)
    found: dict[str, Any] = {
        "acceptance": own,
        "draft_length": options.draft_length,
        "draft_cost": options.draft_cost,
        "tokens": tokens,
        "speedup": speedup(tokens, options.draft_length, options.draft_cost),
        "best": asdict(best),
        "break_even_cost": break_even(profile, options.draft_length),
        "grid": {
            str(a): {str(k): chain_tokens(a, k) for k in GRID_LENGTH} for a in GRID_ACCEPTANCE
        },
        "costs": [
            {
                "draft_cost": cost,
                "speedup": speedup(tokens, options.draft_length, cost),
                "best": asdict(best_length(profile, cost, options.longest)),
            }
            for cost in COSTS
        ],
    }
    if len(set(own)) == 1:
        found["simulated_tokens"] = simulated_tokens(*_toy(own[0]), options.draft_length, TRIALS)
    if options.gpu is not None and options.params is not None:
        model = Model(
            options.params,
            options.weight_bytes,
            options.kv_bytes,
            options.expert_params,
            options.experts,
            options.active,
        )
        found["roofline"] = roofline(model, options, profile)
        if not model.experts:
            found["free_tokens"] = free_tokens(model, GPUS[options.gpu])
    if options.profile is not None:
        found["measured_verification"] = from_profile(options, profile)
    return found


def _toy(acceptance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two distributions whose overlap is `acceptance`."""
    drafter = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    return torch.tensor(
        [acceptance / 2, acceptance / 2, 1 - acceptance], dtype=torch.float64
    ), drafter


def roofline(model: Model, options: Options, acceptance: list[float]) -> list[dict[str, Any]]:
    """For each batch size and context: a plain step, what verification costs beside it, and the
    best chain."""
    assert options.gpu is not None
    gpu, rows = GPUS[options.gpu], []
    for batch in numbers(options.batch, "--batch", int, 1):
        for context in numbers(options.context, "--context", int, 0):
            seconds = [
                pass_seconds(model, gpu, batch, k + 1, context) for k in range(options.longest + 1)
            ]
            rows.append(_gains(options, acceptance, batch, context, seconds))
    return rows


def from_profile(options: Options, acceptance: list[float]) -> list[dict[str, Any]]:
    """As `roofline`, for the batch sizes and contexts at which a profile has timed verification.
    Raises `UserError`."""
    assert options.profile is not None
    _, found = read_document(
        Path(options.profile), ProfileFile, "write the profile again with draftsmith tune"
    )
    try:
        tables = [
            (
                int(batch),
                round(float(context)),
                {int(nodes): float(seconds) for nodes, seconds in sizes.items()},
            )
            for batch, contexts in found["verification_s"].items()
            for context, sizes in contexts.items()
        ]
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{options.profile} is not a profile with verification times ({error}); write one "
            "with draftsmith tune"
        ) from error
    lengths = range(options.longest + 1)
    return [
        _gains(options, acceptance, b, context, [between(sizes, k) for k in lengths])
        for b, context, sizes in tables
    ]


def _gains(
    options: Options, acceptance: list[float], batch: int, context: int, seconds: list[float]
) -> dict[str, Any]:
    """What drafting gains where verifying K drafts takes `seconds[K]`."""
    costs, length = [each / seconds[0] for each in seconds], options.draft_length
    return {
        "batch": batch,
        "context": context,
        "plain_s": seconds[0],
        "verify_cost": costs[length],
        "speedup": speedup(
            profile_tokens(stretched(acceptance, length)), length, options.draft_cost, costs[length]
        ),
        "best": asdict(best_length(acceptance, options.draft_cost, options.longest, costs)),
    }


def from_report(path: str, longest: int) -> dict[str, dict[str, Any]]:
    """What the model says of each drafter and setting that a report measured, beside what was
    measured."""
    settings = convert(load_measured(path), ReportFile).settings
    found = {}
    for setting in settings:
        plain = setting.drafters["plain"]
        for name, drafter in setting.drafters.items():
            if not drafter.cond_accept:
                continue
            acceptance = [share for share in drafter.cond_accept if share is not None]
            levels = len(drafter.cond_accept)
            whole, parts = sum((plain.split_s or {}).values()), drafter.split_s or {}
            if not (
                whole and plain.rounds and drafter.rounds and {"draft", "verify"} <= parts.keys()
            ):
                raise UserError(
                    f"{path} does not say how long the rounds of {name} and of plain decoding "
                    f"took; {AGAIN}"
                )
            if len(acceptance) < levels or drafter.tau_incl_bonus is None:
                raise UserError(f"{path} does not say what of {name} was accepted; {AGAIN}")
            step = parts["draft"] / drafter.rounds / (whole / plain.rounds) / levels
            # Only where what was drafted is a chain, and no longer than what was seen of it.
            longest_draft = max(
                (drafted for request in drafter.per_request for drafted, *_ in request.rounds),
                default=0,
            )
            chain = parts["verify"] > 0 and longest_draft == levels
            best = asdict(best_length(acceptance, step, min(longest, levels))) if chain else None
            label = (
                name
                if len(settings) == 1
                else f"{name}, T = {setting.temperature:g}, batch {setting.batch}"
            )
            found[label] = {
                "tokens": profile_tokens(acceptance),
                "tau_untruncated": drafter.tau_untruncated,
                "tau": drafter.tau_incl_bonus,
                "round_cost": drafter.round_cost,
                "speedup_predicted": drafter.predicted_speedup,
                "speedup_measured": drafter.speedup,
                "draft_step_cost": step,
                "best_chain": best,
            }
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """Print what a person looks at."""
    played = found.get("simulated_tokens")
    checked = f" (played {TRIALS:,} times: {played:.3f})" if played is not None else ""
    console.print(
        f"{found['tokens']:.3f} tokens a round{checked}, {found['speedup']:.2f}x at draft cost "
        f"{found['draft_cost']:g}."
    )
    best = found["best"]
    console.print(
        f"Best length {best['length']}: {best['speedup']:.2f}x. "
        f"With {found['draft_length']} drafts nothing is gained from a draft cost of "
        f"{found['break_even_cost']:.2f} on.\n"
    )
    grid = _table("tokens a round", "acceptance", *(f"K = {k}" for k in GRID_LENGTH))
    for acceptance, row in found["grid"].items():
        grid.add_row(acceptance, *(f"{row[str(k)]:.3f}" for k in GRID_LENGTH))
    costs = _table(
        "speed-up by draft cost", "cost", f"K = {found['draft_length']}", "best K", "speed-up"
    )
    for row in found["costs"]:
        costs.add_row(
            f"{row['draft_cost']:g}",
            f"{row['speedup']:.2f}x",
            str(row["best"]["length"]),
            f"{row['best']['speedup']:.2f}x",
        )
    console.print(grid, costs)
    free = (
        f": a pass is free up to about {found['free_tokens']:.0f} tokens in all"
        if "free_tokens" in found
        else ""
    )
    titles = {
        "roofline": f"roofline{free} (data-sheet peaks; expect half)",
        "measured_verification": "with verification as timed by draftsmith tune",
    }
    for name, title in titles.items():
        if name not in found:
            continue
        table = _table(
            title, "batch", "context", "plain step", "verify", "speed-up", "best K", "speed-up"
        )
        for row in found[name]:
            table.add_row(
                str(row["batch"]), f"{row['context']:,}", f"{1e3 * row['plain_s']:.2f} ms",
                f"{row['verify_cost']:.2f} steps",
                f"{row['speedup']:.2f}x", str(row["best"]["length"]),
                f"{row['best']['speedup']:.2f}x",
            )  # fmt: skip
        console.print(table)


def show_measured(found: dict[str, dict[str, Any]], console: Console) -> None:
    """Model and measurement side by side."""
    table = _table(
        "from measured acceptance",
        "drafter",
        "tau",
        "by products",
        "round cost",
        "predicted",
        "measured",
        "best chain",
    )
    for name, row in found.items():
        best = row["best_chain"]
        table.add_row(
            name, f"{row['tau']:.2f}", f"{row['tokens']:.2f}", number(row["round_cost"]),
            factor(row["speedup_predicted"]), factor(row["speedup_measured"]),
            f"{best['length']}: {best['speedup']:.2f}x" if best is not None else "-",
        )  # fmt: skip
    console.print(table)
    console.print(
        "tau: tokens kept. By products: 1 + sum of products of the measured acceptances, before "
        "cuts. Round cost: in plain "
        "steps. Predicted: tau over round cost. Best chain: with this draft step, if verification "
        "costs a plain step."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=place > 0)
    return table
