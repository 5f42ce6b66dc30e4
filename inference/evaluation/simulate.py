"""`draftsmith simulate`: tokens per round and speed-up of a drafter before anything is built.

It is arithmetic on assumed or measured acceptances; the formulas are in `inference/base/costs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

from ...heads.errors import UserError
from ...heads.files import JsonObject
from ..base.console import OutputConsole
from ..base.costs import (
    GPUS,
    Roofline,
    best_length,
    break_even,
    chain_tokens,
    extend_acceptances,
    speedup,
)
from ..base.output_paths import check_json, output_json
from .drafter_names import BASELINES
from .figure_text import ratio_text
from .options import SimulateOptions as Options
from .results import DrafterFigures, read_measured
from .tables import table_of

LONGEST = 16  # longest chain that is tried, which is the longest that servers accept
USUAL_COST = 0.05  # of a draft, in plain steps: one layer and the head of a target of 30 layers
BATCHES = (1, 16, 64, 256, 512)  # requests at once of the roofline; a server of one GPU runs fewer
# Shares of the data sheet's peaks that kernels of servers usually reach.
COMPUTE_SHARE, BANDWIDTH_SHARE = 0.5, 0.8
# Keys and values of a position: 8 heads of 128 in bfloat16 are 4 KB a layer. Targets of 8e9
# parameters have 32 layers; the number grows with the square root of the size (64 at 32e9).
KV_BYTES, KV_PARAMS = 131072, 8e9


def run(options: Options) -> None:
    """Compute and print the gains, and write the JSON file, if any. Raises `UserError`."""
    console = OutputConsole()
    check_json(options.json)
    if not Path(options.acceptance).is_file():
        chain = Chain(None, assumed(options.acceptance), USUAL_COST)
        found = simulation(options, chain)
    else:
        chain = longest_chain(options.acceptance)
        found = simulation(options, chain, len(chain.acceptances))
    if output_json(options.json, {"options": asdict(options), **found}):
        return
    if chain.name is not None:
        shares = ", ".join(f"{share:.2f}" for share in chain.acceptances)
        console.print(f"\nWith the acceptances of {chain.name}, {shares}:")
    show(found, console)


@dataclass
class Chain:
    """Acceptances of a chain."""

    name: str | None
    """Name of a measured drafter; None for assumed acceptances."""
    acceptances: list[float]
    draft_cost: float
    """Time of a draft step over that of a plain step of the target."""


def assumed(acceptance: str) -> list[float]:
    """Return the acceptances that a user wrote. Raises `UserError`."""
    try:
        shares = [float(share) for share in acceptance.split(",")]
    except ValueError as error:
        raise UserError(
            f"--acceptance takes numbers with commas between them, not {acceptance!r}"
        ) from error
    if not all(0 <= share <= 1 for share in shares):
        raise UserError("--acceptance must lie between 0 and 1")
    return shares


def simulation(options: Options, chain: Chain, longest: int = LONGEST) -> JsonObject:
    """Return every number that is shown for the acceptances and the cost of `chain`.

    Chains of at most `longest` drafts are tried. The option `draft_cost` replaces a measured cost.
    With a GPU, `roofline` has a row for each of `BATCHES`, and `by_load` the best numbers of drafts
    by concurrent requests.
    """
    given, length = chain.acceptances, min(options.length, longest)
    cost = chain.draft_cost if options.draft_cost is None else options.draft_cost
    by_position = extend_acceptances(given, length)
    tokens = chain_tokens(by_position)
    results: JsonObject = {
        "acceptance": by_position,
        "length": length,
        "draft_cost": cost,
        "tokens": tokens,
        "speedup": speedup(tokens, length * cost),
        "best": asdict(best_length(given, cost, longest)),
        "break_even_cost": break_even(given, length),
    }
    if options.gpu is None or options.params is None:
        return results
    kv_bytes = KV_BYTES * sqrt(options.params / KV_PARAMS)
    model = Roofline(GPUS[options.gpu], options.params, kv_bytes, COMPUTE_SHARE, BANDWIDTH_SHARE)
    rows = []
    for batch in range(1, max(BATCHES) + 1):
        # verifying k drafts runs k + 1 tokens of each request through the target
        sizes = range(1, longest + 2)
        seconds = [model.pass_seconds(batch, size, options.context) for size in sizes]
        costs = [taken / seconds[0] for taken in seconds]
        rows.append({
            "batch": batch,
            "plain_s": seconds[0],
            "verify_cost": costs[length],
            "speedup": speedup(tokens, length * cost, costs[length]),
            "best": asdict(best_length(given, cost, longest, costs)),
        })  # fmt: skip
    return results | {
        "context": options.context,
        "free_tokens": model.free_tokens,
        "roofline": [rows[batch - 1] for batch in BATCHES],
        "by_load": by_load([row["best"]["length"] for row in rows]),
    }


def longest_chain(path: str) -> Chain:
    """Return the longest chain in a report, with its name and cost as measured.

    Raises `UserError` if no chain has times and acceptances.
    """
    found: list[Chain] = []
    for setting in read_measured(path).settings:
        plain = setting.plain
        for name, drafter in setting.drafters.items():
            seen = [share for share in drafter.cond_accept if share is not None]
            timed = plain.rounds and drafter.rounds and "draft" in drafter.split
            plain_s = sum(plain.split.values())
            # The acceptances of a tree are those of several tokens at a depth.
            if not (seen and timed and plain_s and drafts_chains(drafter)):
                continue
            # drafting time of a round, in plain steps, shared equally among the levels
            drafting = drafter.split["draft"] / drafter.rounds / (plain_s / plain.rounds)
            found.append(Chain(name, seen, drafting / len(drafter.cond_accept)))
    if not found:
        raise UserError(
            f"{path} has no acceptances and times of a drafter that drafts chains; evaluate one "
            "with --like vllm:drafts=5"
        )
    return max(found, key=lambda chain: len(chain.acceptances))


def drafts_chains(drafter: DrafterFigures) -> bool:
    """Return True for figures of chains, as far as a report shows.

    An engine's setting holds the width of its drafts; a tree has more nodes than levels.
    """
    if drafter.setting is not None:
        return drafter.setting.get("width", 1) == 1
    drafted = max((n for r in drafter.per_request for n, *_ in r.rounds), default=0)
    return drafter.kind in BASELINES or drafted <= len(drafter.cond_accept)


def by_load(drafts: Sequence[int]) -> list[list[int]]:
    """Return `[first, last, drafts]` for each row of equal numbers, as vLLM takes them.

    Example: [3, 3, 1] are [[1, 2, 3], [3, 3, 1]].
    """
    ranges: list[list[int]] = []
    for batch, number in enumerate(drafts, 1):
        if ranges and ranges[-1][2] == number:
            ranges[-1][1] = batch
        else:
            ranges.append([batch, batch, number])
    return ranges


def show(found: JsonObject, console: OutputConsole) -> None:
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
    if "roofline" not in found:
        return
    title = (
        f"roofline, context {found['context']:,}: a pass is free up to about "
        f"{found['free_tokens']:.0f} tokens in all (at {COMPUTE_SHARE:.0%} of the data sheet's "
        f"FLOP/s and {BANDWIDTH_SHARE:.0%} of its bandwidth)"
    )
    rows = []
    for row in found["roofline"]:
        rows.append({
            "batch": str(row["batch"]),
            "plain step": f"{1e3 * row['plain_s']:.2f} ms",
            "verify": f"{row['verify_cost']:.2f} steps",
            "speed-up": ratio_text(row["speedup"]),
            "best K": str(row["best"]["length"]),
            "its speed-up": ratio_text(row["best"]["speedup"]),
        })  # fmt: skip
    console.print(table_of(title, rows).terminal())
    parts = [
        f"{drafts} up to {last}" if first == 1 else f"{drafts} from {first} to {last}"
        for first, last, drafts in found["by_load"]
    ]
    console.print(f"drafts by requests at once, context {found['context']:,}: {', '.join(parts)}")
    console.print("docs/serving.md shows how an engine takes them.")
