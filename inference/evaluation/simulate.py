"""`draftsmith simulate`: tokens per round and speed-up of a drafter before anything is built.

It is arithmetic on assumed or measured acceptances; the formulas are in `gains.py`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import takewhile
from pathlib import Path

from rich.table import Table

from ...heads.documents import read_document
from ...heads.errors import UserError
from ...heads.files import JsonObject, check_json, output_json
from ..console import Console, plain_table
from ..profile import ProfileFile
from . import gains
from .checks import numbers
from .options import SimulateOptions as Options
from .report.tables import factor, number
from .results import AGAIN, DrafterFigures, read_measured
from .tuning.costs import between

MOST_REQUESTS = 1024  # at once, for which a number of drafts is given
COSTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # draft costs of the table, in plain steps


def run(options: Options) -> None:
    """Compute and print the gains, and write the JSON file, if any. Raises `UserError`."""
    console = Console()
    check_json(options.json)
    results: JsonObject = {}
    if options.report is not None:
        results["measured"] = from_report(options.report, options.longest)
    if options.report is None or options.gpu is not None or options.profile is not None:
        results |= simulation(options)
    if output_json(options.json, {"options": asdict(options), **results}):
        return
    if "measured" in results:
        show_measured(results["measured"], console)
    if "tokens" in results:
        show(results, console)


def simulation(options: Options) -> JsonObject:
    """Return every number that is shown, from an assumed or measured acceptance.

    Of a report no longer chains are tried than the drafter's was. Raises `UserError`.
    """
    name, given = acceptance_of(options)
    if name is not None:
        options = replace(
            options,
            draft_length=min(options.draft_length, len(given)),
            longest=min(options.longest, len(given)),
        )
    length, longest = options.draft_length, options.longest
    by_position = gains.stretched(given, length)
    tokens = gains.profile_tokens(by_position)
    costs = []
    for cost in COSTS:
        best = asdict(gains.best_length(given, cost, longest))
        costs.append(
            {"draft_cost": cost, "speedup": gains.speedup(tokens, length, cost), "best": best}
        )
    results: JsonObject = {
        "drafter": name,
        "acceptance": by_position,
        "draft_length": length,
        "draft_cost": options.draft_cost,
        "tokens": tokens,
        "speedup": gains.speedup(tokens, length, options.draft_cost),
        "best": asdict(gains.best_length(given, options.draft_cost, longest)),
        "break_even_cost": gains.break_even(given, length),
        "costs": costs,
    }
    if options.gpu is not None and options.params is not None:
        model = gains.Model(
            options.params,
            options.weight_bytes,
            options.kv_bytes,
            options.expert_params,
            options.experts,
            options.active,
        )
        results["roofline"] = roofline(model, options, given)
        results["by_load"] = by_load(model, options, given)
        # more tokens read more experts, so that no number of them is free
        if not model.experts:
            results["free_tokens"] = gains.free_tokens(model, gpu_of(options))
    if options.profile is not None:
        results["measured_verification"] = from_profile(options, given)
    return results


def acceptance_of(options: Options) -> tuple[str | None, list[float]]:
    """Return the acceptances of the options, and the drafter's name if a report has them.

    Of several drafters it is the one that is named, or the one of the longest chain. Raises
    `UserError` if there is none.
    """
    if options.acceptance is not None:
        given = numbers(options.acceptance, "--acceptance", float)
        if not all(0 <= a <= 1 for a in given):
            raise UserError("--acceptance must lie between 0 and 1")
        return None, given
    assert options.report is not None
    found: dict[str, list[float]] = {}
    for setting in read_measured(options.report).settings:
        for name, drafter in setting.drafters.items():
            seen = list(takewhile(lambda share: share is not None, drafter.cond_accept))
            # Of a tree the acceptances are those of several tokens at a depth.
            if seen and drafts_chains(drafter) and options.drafter in (None, name):
                found.setdefault(name, [share for share in seen if share is not None])
    if not found:
        wanted = "drafter" if options.drafter is None else repr(options.drafter)
        raise UserError(
            f"{options.report} has no acceptances of a {wanted} that drafts chains; evaluate one "
            "with --like vllm:drafts=5"
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


def gpu_of(options: Options) -> gains.Gpu:
    """Return what the GPU of the options reaches."""
    assert options.gpu is not None
    return gains.GPUS[options.gpu].reached(options.compute_share, options.bandwidth_share)


def roofline(model: gains.Model, options: Options, acceptance: list[float]) -> list[JsonObject]:
    """Return a row for each batch size and context, with times from the GPU's data sheet.

    The keys are those of `_gains`. Raises `UserError` for lists that are not numbers.
    """
    return [
        _gains(options, acceptance, batch, context, pass_times(model, options, batch, context))
        for batch in numbers(options.batch, "--batch", int, 1)
        for context in numbers(options.context, "--context", int, 0)
    ]


def pass_times(model: gains.Model, options: Options, batch: int, context: int) -> list[float]:
    """Return the seconds of verifying 0, 1, .. `longest` drafts of each request."""
    gpu = gpu_of(options)
    # verifying k drafts runs k + 1 tokens of each request through the target
    tokens = range(1, options.longest + 2)
    return [gains.pass_seconds(model, gpu, batch, number, context) for number in tokens]


def by_load(model: gains.Model, options: Options, acceptance: list[float]) -> list[JsonObject]:
    """Return the best chain for every number of requests up to the largest batch, by context.

    There are none for more than `MOST_REQUESTS`, which no server runs at once.
    `ranges` has `[first, last, drafts]` for requests from `first` to `last`, as vLLM takes them.
    """
    most = max(numbers(options.batch, "--batch", int, 1))
    found = []
    for context in numbers(options.context, "--context", int, 0):
        ranges: list[list[int]] = []
        for batch in range(1, min(most, MOST_REQUESTS) + 1):
            seconds = pass_times(model, options, batch, context)
            drafts = _gains(options, acceptance, batch, context, seconds)["best"]["length"]
            if ranges and ranges[-1][2] == drafts:
                ranges[-1][1] = batch
            else:
                ranges.append([batch, batch, drafts])
        found.append({"context": context, "ranges": ranges})
    return found


def from_profile(options: Options, acceptance: list[float]) -> list[JsonObject]:
    """Return a row for each batch size and context at which a profile has timed verification.

    The keys are those of `_gains`. Raises `UserError` for a file that is no such profile.
    """
    assert options.profile is not None
    _, profile = read_document(
        Path(options.profile), ProfileFile, "write the profile again with draftsmith tune"
    )
    tables = []
    try:
        for batch, contexts in profile["verification_s"].items():
            for context, sizes in contexts.items():
                # JSON has made texts of the numbers that were keys
                seconds = {int(nodes): float(taken) for nodes, taken in sizes.items()}
                tables.append((int(batch), round(float(context)), seconds))
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{options.profile} is not a profile with verification times ({error}); write one "
            "with draftsmith tune"
        ) from error
    rows = []
    for batch, context, seconds in tables:
        by_length = [between(seconds, drafts) for drafts in range(options.longest + 1)]
        rows.append(_gains(options, acceptance, batch, context, by_length))
    return rows


def _gains(
    options: Options, acceptance: list[float], batch: int, context: int, seconds: list[float]
) -> JsonObject:
    """Return the gains of drafting where verifying K drafts takes `seconds[K]`.

    The keys are `batch`, `context`, `plain_s` (seconds of a plain step), `verify_cost` (in plain
    steps) and `speedup` of a chain of `draft_length`, and `best`, the best chain.
    """
    length = options.draft_length
    costs = [taken / seconds[0] for taken in seconds]  # in plain steps, which verify 0 drafts
    tokens = gains.profile_tokens(gains.stretched(acceptance, length))
    return {
        "batch": batch,
        "context": context,
        "plain_s": seconds[0],
        "verify_cost": costs[length],
        "speedup": gains.speedup(tokens, length, options.draft_cost, costs[length]),
        "best": asdict(gains.best_length(acceptance, options.draft_cost, options.longest, costs)),
    }


def from_report(path: str, longest: int) -> dict[str, JsonObject]:
    """Return the model's figures and the measured ones for each drafter and setting of a report.

    Raises `UserError` for a report that lacks times or acceptances. The best chain is None where
    what was drafted is not a chain.
    """
    settings = read_measured(path).settings
    rows = {}
    for setting in settings:
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
                best = asdict(gains.best_length(acceptance, step, min(longest, levels)))
            label = name
            if len(settings) > 1:
                label += f", T = {setting.temperature:g}, batch {setting.batch}"
            rows[label] = {
                "tokens": gains.profile_tokens(acceptance),
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
    if found["drafter"] is not None:
        shares = ", ".join(f"{share:.2f}" for share in found["acceptance"])
        console.print(f"\nWith the acceptances of {found['drafter']}, {shares}:")
    console.print(
        f"{found['tokens']:.3f} tokens a round, {found['speedup']:.2f}x at draft cost "
        f"{found['draft_cost']:g}."
    )
    best = found["best"]
    console.print(
        f"Best length {best['length']}: {best['speedup']:.2f}x. "
        f"With {found['draft_length']} drafts nothing is gained from a draft cost of "
        f"{found['break_even_cost']:.2f} on.\n"
    )
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
    console.print(costs)
    free = ""
    if "free_tokens" in found:
        free = f": a pass is free up to about {found['free_tokens']:.0f} tokens in all"
    titles = {
        "roofline": f"roofline{free} (by data sheet and the assumed shares of its peaks)",
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
    if "by_load" in found:
        show_by_load(found["by_load"], console)


def show_by_load(found: list[JsonObject], console: Console) -> None:
    """Print the best chain by the number of requests at once."""
    for row in found:
        parts = [
            f"{drafts} up to {last}" if first == 1 else f"{drafts} from {first} to {last}"
            for first, last, drafts in row["ranges"]
        ]
        console.print(f"drafts by requests at once, context {row['context']:,}: {', '.join(parts)}")
    console.print(
        "As the engine takes it: draftsmith export --by-load FILE, with the --json of one context."
    )


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
