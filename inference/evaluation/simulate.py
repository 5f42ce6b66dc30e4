"""`draftsmith simulate`: tokens per round and speed-up of a drafter before anything is built.

It is arithmetic on assumed or measured acceptances; the formulas are in `inference/costs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from math import sqrt
from pathlib import Path

from rich.table import Table

from ...heads.errors import UserError
from ...heads.files import JsonObject, check_json, output_json
from ..console import Console, plain_table
from ..costs import (
    GPUS,
    Roofline,
    best_length,
    break_even,
    chain_tokens,
    speedup,
    stretched,
)
from .checks import numbers
from .options import SimulateOptions as Options
from .report.tables import factor, number
from .results import AGAIN, DrafterFigures, Report, read_measured

LONGEST = 16  # chains that are tried: servers take no longer ones
COSTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # draft costs of the table, in plain steps
BATCHES = (1, 16, 64, 256, 512)  # requests at once of the roofline; a server of one GPU runs fewer
# Shares of the data sheet's peaks that servers' kernels usually reach.
COMPUTE_SHARE, BANDWIDTH_SHARE = 0.5, 0.8
# Keys and values of a position: 8 heads of 128 in bfloat16 are 4 KB a layer; of targets with 8e9
# parameters, which have 32 layers, and others the number of layers grows with the root of their
# size (64 at 32e9).
KV_BYTES, KV_PARAMS = 131072, 8e9


def run(options: Options) -> None:
    """Compute and print the gains, and write the JSON file, if any. Raises `UserError`."""
    console = Console()
    check_json(options.json)
    results: JsonObject = {}
    name, measured = None, None
    if Path(options.acceptance).is_file():
        report = read_measured(options.acceptance)
        results["measured"] = measured = from_report(report, options.acceptance)
        if options.gpu is not None:
            name, given = longest_chain(report, options.acceptance)
            results |= simulation(options, given, len(given))
    else:
        results |= simulation(options, assumed(options.acceptance))
    if output_json(options.json, {"options": asdict(options), **results}):
        return
    if measured is not None:
        show_measured(measured, console)
    if "tokens" in results:
        if name is not None:
            shares = ", ".join(f"{share:.2f}" for share in results["acceptance"])
            console.print(f"\nWith the acceptances of {name}, {shares}:")
        show(results, console)


def assumed(acceptance: str) -> list[float]:
    """Return the acceptances that a user wrote. Raises `UserError`."""
    given = numbers(acceptance, "--acceptance", float)
    if not all(0 <= share <= 1 for share in given):
        raise UserError("--acceptance must lie between 0 and 1")
    return given


def simulation(options: Options, given: list[float], longest: int = LONGEST) -> JsonObject:
    """Return every number that is shown for the acceptances `given`.

    Chains of at most `longest` drafts are tried: of a report no longer ones than the drafter's.
    """
    length, cost = min(options.length, longest), options.draft_cost
    by_position = stretched(given, length)
    tokens = chain_tokens(by_position)
    costs = []
    for each in COSTS:
        gain, best = speedup(tokens, length * each), best_length(given, each, longest)
        costs.append({"draft_cost": each, "speedup": gain, "best": asdict(best)})
    results: JsonObject = {
        "acceptance": by_position,
        "length": length,
        "draft_cost": cost,
        "tokens": tokens,
        "speedup": speedup(tokens, length * cost),
        "best": asdict(best_length(given, cost, longest)),
        "break_even_cost": break_even(given, length),
        "costs": costs,
    }
    if options.gpu is not None and options.params is not None:
        kv_bytes = KV_BYTES * sqrt(options.params / KV_PARAMS)
        model = Roofline(
            GPUS[options.gpu], options.params, kv_bytes, COMPUTE_SHARE, BANDWIDTH_SHARE
        )
        rows = [on_gpu(model, options, given, longest, batch) for batch in BATCHES]
        ranges = by_load(model, options, given, longest)
        results["roofline"] = rows
        results["by_load"] = [{"context": options.context, "ranges": ranges}]
        results["free_tokens"] = model.free_tokens
    return results


def longest_chain(report: Report, path: str) -> tuple[str, list[float]]:
    """Return the drafter of the longest chain in a report, and its acceptances.

    Raises `UserError` if none drafts chains.
    """
    found: dict[str, list[float]] = {}
    for setting in report.settings:
        for name, drafter in setting.drafters.items():
            seen = list(takewhile(lambda share: share is not None, drafter.cond_accept))
            # Of a tree the acceptances are those of several tokens at a depth.
            if seen and drafts_chains(drafter):
                found.setdefault(name, [share for share in seen if share is not None])
    if not found:
        raise UserError(
            f"{path} has no acceptances of a drafter that drafts chains; evaluate one with --like "
            "vllm:drafts=5"
        )
    return max(found.items(), key=lambda item: len(item[1]))


def drafts_chains(drafter: DrafterFigures) -> bool:
    """Return true for figures of chains, as far as a report tells.

    An engine's setting says how wide it drafts; a tree has more nodes than levels.
    """
    if drafter.setting is not None:
        return drafter.setting.get("width", 1) == 1
    drafted = max((n for r in drafter.per_request for n, *_ in r.rounds), default=0)
    return drafter.kind in ("ngram", "suffix") or drafted <= len(drafter.cond_accept)


def on_gpu(
    model: Roofline, options: Options, given: Sequence[float], longest: int, batch: int
) -> JsonObject:
    """Return the gains of drafting for `batch` requests at once, by the roofline.

    The keys are `batch`, `context`, `plain_s` (seconds of a plain step), `verify_cost` (in plain
    steps) and `speedup` of a chain of `length`, and `best`, the best chain.
    """
    length = min(options.length, longest)
    # verifying k drafts runs k + 1 tokens of each request through the target
    tokens = range(1, longest + 2)
    seconds = [model.pass_seconds(batch, number, options.context) for number in tokens]
    costs = [taken / seconds[0] for taken in seconds]
    emitted = chain_tokens(stretched(given, length))
    return {
        "batch": batch,
        "context": options.context,
        "plain_s": seconds[0],
        "verify_cost": costs[length],
        "speedup": speedup(emitted, length * options.draft_cost, costs[length]),
        "best": asdict(best_length(given, options.draft_cost, longest, costs)),
    }


def by_load(
    model: Roofline, options: Options, given: Sequence[float], longest: int
) -> list[list[int]]:
    """Return `[first, last, drafts]` for requests from `first` to `last`, as vLLM takes them.

    `drafts` is the best chain for each of these numbers of requests at once.
    """
    ranges: list[list[int]] = []
    for batch in range(1, max(BATCHES) + 1):
        drafts = on_gpu(model, options, given, longest, batch)["best"]["length"]
        if ranges and ranges[-1][2] == drafts:
            ranges[-1][1] = batch
        else:
            ranges.append([batch, batch, drafts])
    return ranges


def from_report(report: Report, path: str) -> dict[str, JsonObject]:
    """Return the model's figures and the measured ones for each drafter and setting of a report.

    Raises `UserError` for a report that lacks times or acceptances. The best chain is None where
    what was drafted is not a chain.
    """
    rows = {}
    for setting in report.settings:
        plain = setting.plain
        plain_seconds = sum(plain.split.values())
        for name, drafter in setting.drafters.items():
            if not drafter.cond_accept:
                continue
            acceptance = [share for share in drafter.cond_accept if share is not None]
            levels, split = len(drafter.cond_accept), drafter.split
            timed = plain_seconds and plain.rounds and drafter.rounds
            if not (timed and {"draft", "verify"} <= split.keys()):
                raise UserError(
                    f"{path} does not say how long the rounds of {name} and of plain decoding "
                    f"took; {AGAIN}"
                )
            if len(acceptance) < levels or drafter.tau_incl_bonus is None:
                raise UserError(f"{path} does not say what of {name} was accepted; {AGAIN}")
            # drafting time of a round, in plain steps, shared equally among the levels
            step = split["draft"] / drafter.rounds / (plain_seconds / plain.rounds) / levels
            drafted = [drafted for r in drafter.per_request for drafted, *_ in r.rounds]
            best = None
            # only of a chain, and only up to the depths whose acceptance was seen; loops that do
            # not report the time of a verification are left out
            if split["verify"] > 0 and max(drafted, default=0) == levels:
                best = asdict(best_length(acceptance, step, min(LONGEST, levels)))
            label = name
            if len(report.settings) > 1:
                label += f", T = {setting.temperature:g}, batch {setting.batch}"
            rows[label] = {
                "tokens": chain_tokens(acceptance),
                "tau_untruncated": drafter.tau_untruncated,
                "tau": drafter.tau_incl_bonus,
                "round_cost": drafter.round_cost,
                "speedup_predicted": drafter.predicted_speedup,
                "speedup_measured": drafter.speedup,
                "draft_step_cost": step,
                "best_chain": best,
            }
    return rows


def show(found: JsonObject, console: Console) -> None:
    """Print the results of `simulation` as sentences and tables."""
    console.print(
        f"{found['tokens']:.3f} tokens a round, {found['speedup']:.2f}x at draft cost "
        f"{found['draft_cost']:g}."
    )
    best = found["best"]
    console.print(
        f"Best length {best['length']}: {best['speedup']:.2f}x. "
        f"With {found['length']} drafts nothing is gained from a draft cost of "
        f"{found['break_even_cost']:.2f} on.\n"
    )
    costs = _table("speed-up by draft cost", "cost", f"K = {found['length']}", "best K", "speed-up")
    for row in found["costs"]:
        costs.add_row(f"{row['draft_cost']:g}", *_gain_cells(row))
    console.print(costs)
    if "roofline" not in found:
        return
    title = (
        f"roofline, context {found['by_load'][0]['context']:,}: a pass is free up to about "
        f"{found['free_tokens']:.0f} tokens in all (at {COMPUTE_SHARE:.0%} of the data sheet's "
        f"FLOP/s and {BANDWIDTH_SHARE:.0%} of its bandwidth)"
    )
    table = _table(title, "batch", "plain step", "verify", "speed-up", "best K", "speed-up")
    for row in found["roofline"]:
        plain, verify = f"{1e3 * row['plain_s']:.2f} ms", f"{row['verify_cost']:.2f} steps"
        table.add_row(str(row["batch"]), plain, verify, *_gain_cells(row))
    console.print(table)
    (load,) = found["by_load"]
    parts = [
        f"{drafts} up to {last}" if first == 1 else f"{drafts} from {first} to {last}"
        for first, last, drafts in load["ranges"]
    ]
    console.print(f"drafts by requests at once, context {load['context']:,}: {', '.join(parts)}")
    console.print("As the engine takes it: draftsmith export --by-load FILE, with the --json.")


def _gain_cells(row: JsonObject) -> tuple[str, str, str]:
    """Return the cells of a row's speed-up, and of its best chain and what that gains."""
    best = row["best"]
    return f"{row['speedup']:.2f}x", str(best["length"]), f"{best['speedup']:.2f}x"


def show_measured(found: dict[str, JsonObject], console: Console) -> None:
    """Print the rows of `from_report`: model and measurement side by side."""
    columns = ("drafter", "tau", "by products", "round cost", "predicted", "measured", "best chain")
    table = _table("from measured acceptance", *columns)
    for name, row in found.items():
        best = row["best_chain"]
        table.add_row(
            name, f"{row['tau']:.2f}", f"{row['tokens']:.2f}", number(row["round_cost"]),
            factor(row["speedup_predicted"]), factor(row["speedup_measured"]),
            f"{best['length']}: {best['speedup']:.2f}x" if best is not None else "-",
        )  # fmt: skip
    console.print(table)
    console.print(
        "tau: tokens emitted per round. By products: 1 + sum of products of the measured "
        "acceptances, before cuts. Round cost: in plain "
        "steps. Predicted: tau over round cost. Best chain: with this draft step, if verification "
        "costs a plain step."
    )


def _table(title: str, *columns: str) -> Table:
    """Return an empty table whose first column is text and whose other columns are numbers."""
    table = plain_table(title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table
