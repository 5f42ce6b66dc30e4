"""Measurement of drafters beside plain decoding in one setting, in the loop that users decode with.

All ways to decode take turns on each batch of prompts, so that a machine that slows down slows all
of them. Of `repeats` runs of a batch the one of median decode time counts; tokens and rounds are
the same in all of them. docs/metrics.md defines the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch

from ..console import Progress
from ..conversations.prompts import Prompt, next_turn
from ..decode import Generation, Request, generate
from ..metrics import (
    alpha,
    batch_seconds,
    bootstrap,
    emitted_per_round,
    mean,
    pooled,
    quantiles,
    split,
    summarise,
    tau,
    time_per_token,
)
from ..proposer import Proposer
from ..settings import Sampling
from ..target import Target
from .journal import Journal, as_json, from_json


@dataclass
class Setting:
    """Conditions of decoding that all drafters of a table have in common."""

    sampling: Sampling
    batch: int
    """Requests decoded together."""
    max_new_tokens: int
    repeats: int
    """Timed runs of every batch."""


@dataclass
class Turn:
    """A prompt, or a later turn of a conversation, with its reply."""

    prompt: Prompt
    number: int
    """Number of the turn in its conversation, from 0."""
    generation: Generation


Results = dict[str, list[Turn]]
"""Turns by the name of the way that decoded them, plain decoding first."""
FEWEST = 5  # prompts, or batches, for which an interval of the speed-up is given
SAMPLES = 3  # replies of each drafter that the report shows token by token
WARM_UP = 8  # tokens of a first run that is not counted


@runtime_checkable
class Loop(Protocol):
    """Way to decode that is not just a proposer in draftsmith's loop."""

    name: str

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """Return the reply to each request, as `decode.generate` does."""
        ...


Way = Proposer | Loop


def compare(
    target: Target,
    ways: Sequence[Way],
    prompts: Sequence[Prompt],
    setting: Setting,
    progress_bar: bool = True,
    journal: Journal | None = None,
    each: Callable[[Results], None] = lambda results: None,
) -> Results:
    """Decode every prompt in every way, of which the first is plain decoding.

    Later turns of a conversation follow on what plain decoding answered, so that all drafters go on
    from the same text. Batches that `journal` holds are not decoded again. `each` is called after
    every batch with the results so far.
    """
    names = distinct_names(ways)
    by_name = dict(zip(names, ways, strict=True))
    results: Results = {name: [] for name in names}
    waiting, number = list(prompts), 0
    room = target.max_positions - setting.max_new_tokens
    description = f"decoding at T = {setting.sampling.temperature:g}, batch {setting.batch}"
    progress = Progress(total=len(prompts), desc=description, show=progress_bar)
    while waiting:
        answered: list[Turn] = []
        for batch, replies in _in_turns(target, by_name, waiting, number, setting, journal):
            for name, generations in replies.items():
                turns = [Turn(p, number, g) for p, g in zip(batch, generations, strict=True)]
                results[name] += turns
                if name == names[0]:
                    answered += turns
            # the bar counts prompts: how many later turns there will be is not known
            progress.update(len(batch) if number == 0 else 0)
            each(results)
        number += 1
        waiting = []
        for turn in answered:
            reply = turn.generation.token_ids
            following = next_turn(
                turn.prompt, reply, target.tokenizer, target.name, target.eos_ids, room
            )
            if following is not None:
                waiting.append(following)
    progress.close()
    return results


def _in_turns(
    target: Target,
    ways: dict[str, Way],
    prompts: Sequence[Prompt],
    number: int,
    setting: Setting,
    journal: Journal | None,
) -> Iterator[tuple[Sequence[Prompt], dict[str, list[Generation]]]]:
    """Yield each batch of prompts with every way's replies, those of the run of median time.

    `number` is that of the turn. It is the sample number of the requests as well, so that the turns
    of a conversation have noise of their own, and the same in all ways.
    """
    warm = False
    for start in range(0, len(prompts), setting.batch):
        batch = prompts[start : start + setting.batch]
        key = (
            f"T {setting.sampling.temperature:g}, batch {setting.batch}, turn {number}, prompt "
            f"{start}"
        )
        if journal is not None and (stored := journal.get(key)) is not None:
            yield batch, from_json(stored)
            continue
        if not warm and number == 0:
            first, tokens = Request(batch[0].token_ids, 0), min(setting.max_new_tokens, WARM_UP)
            for way in ways.values():
                _decode(target, way, [first], tokens, setting.sampling)
        warm = True
        requests = [Request(prompt.token_ids, start + i, number) for i, prompt in enumerate(batch)]
        runs: dict[str, list[list[Generation]]] = {name: [] for name in ways}
        for _ in range(setting.repeats):
            for name, way in ways.items():
                runs[name].append(
                    _decode(target, way, requests, setting.max_new_tokens, setting.sampling)
                )
        median = setting.repeats // 2
        chosen = {name: sorted(runs[name], key=batch_seconds)[median] for name in ways}
        if journal is not None:
            journal.put(key, as_json(chosen))
        yield batch, chosen


def _decode(
    target: Target, way: Way, requests: list[Request], max_new_tokens: int, sampling: Sampling
) -> list[Generation]:
    # transformers' loop does not fill in the target's own penalty, as `decode` does
    if isinstance(way, Loop):
        return way.generate(requests, max_new_tokens, sampling.resolved(target.repetition_penalty))
    return generate(target, way, requests, max_new_tokens, sampling)


def distinct_names(ways: Sequence[Way]) -> list[str]:
    """Return the names of `ways` in order; the second of one name ends in -2, and so on."""
    names: list[str] = []
    for way in ways:
        name, number = way.name, 2
        while name in names:
            name, number = f"{way.name}-{number}", number + 1
        names.append(name)
    return names


def request_record(
    target: Target, turn: Turn, plain: Generation, sampling: Sampling
) -> dict[str, Any]:
    """Return an entry of `per_request`, with the keys of docs/metrics.md#report-keys.

    `plain` is plain decoding's reply to the same prompt.
    """
    reply, prompt = turn.generation, turn.prompt
    rounds = reply.rounds
    equal = plain.token_ids == reply.token_ids if comparable(reply) else None
    index, gap = divergence(target, plain, reply, sampling) if equal is False else (None, None)
    return {
        "id": prompt.id,
        "prompt": prompt.place,
        "category": prompt.category,
        "turn": turn.number,
        "n_prompt": len(reply.prompt_ids),
        "n_out": len(reply.token_ids),
        "n_rounds": len(rounds),
        "rounds": [[r.drafted or 0, r.accepted, len(r.tokens)] for r in rounds],
        "accepted_hist": _histogram([r.accepted for r in rounds]),
        "drafted_hist": _histogram([r.drafted or 0 for r in rounds]),
        "offered_hist": _histogram([r.offered for r in rounds]),
        "tau_incl_bonus": tau([emitted_per_round(reply)]) if rounds else None,
        "ttft_s": reply.ttft_s,
        "decode_s": reply.decode_s,
        "tpot_s": time_per_token(reply),
        "chunk_gap_s": quantiles([r.t_round_s for r in rounds], (0.5, 0.95)),
        "rb_tau": mean([r.expected for r in rounds]),
        "alpha": alpha([r.overlap for r in rounds]),
        **{f"t_{part}_s": seconds for part, seconds in split(rounds).items()},
        "finish_reason": reply.finish_reason,
        "equal_to_ar": equal,
        "first_divergence": index,
        "top2_gap": gap,
        "verify_mode": rounds[0].rule if rounds else None,
    }


def measured(
    target: Target,
    results: Results,
    setting: Setting,
    settings_of: Mapping[str, dict[str, Any]] | None = None,
    samples: int = SAMPLES,
) -> dict[str, Any]:
    """Return an entry of `settings`: the numbers of every way to decode in one setting.

    `settings_of` has tree settings by the name of the way, where a profile or an engine chose them.
    The first `samples` replies of each way are shown token by token. The keys are those of
    docs/metrics.md#report-keys.
    """
    settings_of = settings_of or {}
    first = next(iter(results))
    plain = [turn.generation for turn in results[first]]
    sampling = setting.sampling.resolved(target.repetition_penalty)
    drafters: dict[str, Any] = {}
    for name, turns in results.items():
        generations = [turn.generation for turn in turns]
        batches = batches_of(turns, setting.batch)
        summary = summarise(generations, batches, [turn.prompt.place for turn in turns])
        costs: list[Costs] = []
        for batch in batches:
            plain_cost = _cost([plain[i] for i in batch])
            costs.append((*plain_cost, *_cost([generations[i] for i in batch])))
        summary["speedup"] = _ratio(costs)
        units = _by_prompt(costs, batches, turns)
        summary["speedup_ci95"] = (
            bootstrap(units, _ratio) if len(units) >= FEWEST else (float("nan"), float("nan"))
        )
        # a batch without a round has neither time nor tokens, and no ratio
        ratios = [_ratio([cost]) for cost in costs if all(cost)]
        summary["speedup_median"] = statistics.median(ratios) if ratios else None
        equal = 0
        for expected, reply in zip(plain, generations, strict=True):
            equal += expected.token_ids == reply.token_ids
        # not counted unless the rule promises equality of every reply
        summary["equal_to_ar"] = equal if all(map(comparable, generations)) else None
        summary["warnings"] = warnings_of(summary, generations)
        summary["by_category"] = by_category(turns)
        summary["per_request"] = [
            request_record(target, turn, expected, sampling)
            for turn, expected in zip(turns, plain, strict=True)
        ]
        if name in settings_of:
            summary["setting"] = settings_of[name]
        summary["samples"] = [token_view(target, turn, sampling) for turn in turns[:samples]]
        summary["accepted_hist"] = _histogram([r.accepted for g in generations for r in g.rounds])
        drafters[name] = summary
    for summary in drafters.values():
        summary |= _beside_plain(summary, drafters[first])
    return {
        "temperature": sampling.temperature,
        "batch": setting.batch,
        "lossless": sampling.lossless,
        "drafters": drafters,
    }


def batches_of(turns: Sequence[Turn], size: int) -> list[list[int]]:
    """Return the indices of the turns that ran together, in batches of at most `size`.

    Batches do not reach from one turn of the conversations to the next.
    """
    batches: list[list[int]] = []
    for index, turn in enumerate(turns):
        if not batches or len(batches[-1]) == size or turns[batches[-1][0]].number != turn.number:
            batches.append([])
        batches[-1].append(index)
    return batches


def by_category(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return tau with its interval for each category of prompts that has a round."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.prompt.category, []).append(turn)
    figures = {}
    for name, group in sorted(groups.items()):
        emitted = [emitted_per_round(turn.generation) for turn in group]
        if any(emitted):
            interval = bootstrap(pooled(emitted, [turn.prompt.place for turn in group]), tau)
            figures[name] = {
                "requests": len(group),
                "tau_incl_bonus": tau(emitted),
                "tau_ci95": interval,
            }
    return figures


def _beside_plain(summary: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return the costs of a round and a verification in plain steps, and what follows from them.

    The predicted speed-up is tau over the cost of a round, both over plain decoding's.
    """
    if not summary["rounds"] or not plain["rounds"]:
        return {"verify_cost": None, "round_cost": None, "predicted_speedup": None}

    def per_round(drafter, name):
        return drafter["split_s"][name] / drafter["rounds"]

    def round_seconds(drafter):
        return sum(drafter["split_s"].values()) / drafter["rounds"]

    cost = round_seconds(summary) / round_seconds(plain)
    return {
        # a loop that is not draftsmith's does not report it: 0 becomes None
        "verify_cost": per_round(summary, "verify") / per_round(plain, "verify") or None,
        "round_cost": cost,
        "predicted_speedup": summary["tau_incl_bonus"] / plain["tau_incl_bonus"] / cost,
    }


DEFINITIONS = {
    "tau_incl_bonus": "tokens emitted per round, the target's own included, the prefill's "
    "excluded, pooled over requests",
    "tau_ci95": "95% bootstrap interval over prompts (the turns of one go together), 1000 "
    "resamples",
    "tau_by_position": "tau of the rounds whose root stands below that position",
    "tau_macro": "mean of the requests' own taus; tau_by_request: their quantiles",
    "samples": "the first replies, token by token; came: depth of an accepted draft, 0 the "
    "target's own, -1 the prefill's",
    "rounds": "of each request: [nodes drafted, drafts accepted, tokens emitted] of every round",
    "discarded_share": "share of all verified nodes, roots included, that were drafts and not "
    "accepted",
    "verify_cost": "a verification over a plain verification; round_cost: a whole round over a "
    "plain round",
    "predicted_speedup": "tau over round_cost; both over plain decoding's: what the split of "
    "these very rounds explains",
    "modelled_speedup": "predicted from the smallest batch's tau and draft time, and from plain "
    "decoding's steps at all sizes",
    "ttft_s": "time to the first token; tpot: time per later token, of each request; quantiles "
    "over requests, nearest rank",
    "survival": "share of rounds that accepted at least d drafts",
    "cond_accept": "survival at d over survival at d - 1; cond_offered: among the rounds that had "
    "a draft at d",
    "chunk_gap": "seconds between the pieces that a reader of the stream sees: one a round",
    "tokens_s": "tokens of all rounds / their wall time, prefill excluded",
    "speedup_ci95": "over prompts; over batches where several prompts ran together; not given for "
    "fewer than five of them",
    "speedup": "tokens a second over plain decoding's, the same prompts, prefill excluded; where "
    "both wrote the same text, the ratio of the times",
    "verify_mode": "the rule that decided: greedy, gumbel (coupled noise), match, block, "
    "traversal, rrs, or typical (lossy)",
    "rb_tau": "1 + sum of the target's probabilities of the drafted paths: tau in expectation; "
    "for fixed drafts at T > 0",
    "alpha": "mean sum of min(p, q) at each depth on accepted prefixes; rules that compare "
    "distributions only",
    "loop_share": "share of replies that repeat an 8-gram; loops flatter every drafter",
    "equal_to_ar": "replies equal to plain decoding with the same noise, token for token; null "
    "for rules that keep the distribution only",
    "first_divergence": "index of the first token that differs from plain decoding",
    "top2_gap": "the target's best logit minus its second best there: near-ties flip in low "
    "precision, others must not",
}
"""Short definitions of the figures, for the report; docs/metrics.md has the whole ones."""


def warnings_of(summary: dict[str, Any], generations: Sequence[Generation]) -> list[str]:
    """Return the signs that make figures doubtful (docs/metrics.md#doubtful-figures)."""
    warnings = []
    if cut := sum(g.finish_reason == "context" for g in generations):
        warnings.append(f"{cut} replies were cut where the target's positions end")
    if empty := sum(not g.rounds for g in generations):
        warnings.append(f"{empty} replies had no round: their only token is the prefill's")
    return warnings


def model_batches(settings: Sequence[dict[str, Any]]) -> None:
    """Add `modelled_speedup` to every drafter of settings that differ in batch size only.

    It follows for each batch size from acceptance and draft time at the smallest one, and from
    plain decoding's steps at all of them (`_modelled`). Settings of a temperature that has one
    batch size are left as they are.
    """
    for kind in {(s["temperature"], s["lossless"]) for s in settings}:
        alike = [s for s in settings if (s["temperature"], s["lossless"]) == kind]
        alike.sort(key=lambda setting: setting["batch"])
        smallest = alike[0]
        steps = {}
        for setting in alike:
            plain = setting["drafters"]["plain"]
            if plain["rounds"]:
                steps[setting["batch"]] = _round_seconds(plain)
        if len(steps) < 2:
            continue
        for setting in alike:
            for name, summary in setting["drafters"].items():
                base = smallest["drafters"].get(name)
                # only of loops that report the time of a verification
                if base is not None and base["rounds"] and base["split_s"]["verify"]:
                    summary["modelled_speedup"] = _modelled(
                        base, smallest["batch"], setting["batch"], steps
                    )


def _round_seconds(summary: dict[str, Any]) -> float:
    """Return the mean wall time of a round of a whole batch, in seconds."""
    return summary["decode_s"] / summary["steps"]


def _modelled(base: dict[str, Any], smallest: int, batch: int, steps: dict[int, float]) -> float:
    """Return the modelled speed-up of a drafter at a batch size.

    `base` are its figures at the batch size `smallest`, and `steps` the seconds of plain steps by
    batch size. A pass over n tokens in all takes what a plain step of n requests takes; drafting
    grows with the batch as a plain step does, and the rest of a round does not grow.
    """

    def pass_seconds(tokens):
        return _extended(steps, tokens)

    # `split_s` shares a batch's round among its rows, so its sums are those of whole batches
    per_step = {name: seconds / base["steps"] for name, seconds in base["split_s"].items()}
    growth = pass_seconds(batch) / pass_seconds(smallest)
    cost = (
        per_step["draft"] * growth
        + pass_seconds(batch * (1 + base["mean_n_draft"]))
        + per_step["accept"]
        + per_step["kv"]
        + per_step["host"]
    )
    return base["tau_incl_bonus"] * pass_seconds(batch) / cost


def _extended(points: dict[int, float], at: float) -> float:
    """Return the value at `at` of the line through the two `points` around it.

    Beyond the ends the line through the first two or the last two points goes on.
    """
    sizes = sorted(points)
    low, high = sizes[-2:]
    for left, right in pairwise(sizes):
        if at <= right:
            low, high = left, right
            break
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


@torch.inference_mode()
def token_view(target: Target, turn: Turn, sampling: Sampling) -> dict[str, Any]:
    """Return a reply token by token: its text, its origin, and the target's probabilities.

    `came` is the depth of an accepted draft, 0 for the target's own token at the end of a round,
    and -1 for the prefill's. `p` is the target's probability of the token, and `best` has the three
    likeliest tokens with theirs: as sampled from, or at temperature 1 where decoding is greedy.
    """
    reply, tokenizer = turn.generation, target.tokenizer
    came = [-1] * (len(reply.token_ids) - sum(emitted_per_round(reply)))
    for r in reply.rounds:
        came += [d if d <= r.accepted else 0 for d in range(1, len(r.tokens) + 1)]
    text = [*reply.prompt_ids, *reply.token_ids]
    ids: Any = torch.tensor([text], device=target.device)
    # a position predicts the token after it: those before each reply token, not the last one
    start = len(reply.prompt_ids) - 1
    scores = target.head(target.forward(ids).last[0, start:-1]).float()
    # the penalty is about the text before each token, so that every row has its own
    if (penalise := sampling.history_processor) is not None:
        scores = torch.cat(
            [penalise(ids[:, : start + 1 + i], scores[i : i + 1]) for i in range(len(scores))]
        )
    probs = sampling.warpers(ids, scores).softmax(-1)
    chances = probs.gather(1, ids[0, start + 1 :, None])[:, 0].tolist()
    best = probs.topk(min(3, probs.shape[-1]))

    def words(tokens):
        return [tokenizer.decode([token]) for token in tokens]

    likeliest = []
    for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        likeliest.append([[word, p] for word, p in zip(words(tokens), values, strict=True)])
    return {
        "id": turn.prompt.id,
        "turn": turn.number,
        "prompt": tokenizer.decode(reply.prompt_ids, skip_special_tokens=True),
        "tokens": words(reply.token_ids),
        "came": came,
        "p": chances,
        "best": likeliest,
    }


Costs = tuple[float, int, float, int]
"""Seconds and tokens of a batch's rounds: first of plain decoding, then of the drafter."""


def _cost(generations: Sequence[Generation]) -> tuple[float, int]:
    """Return seconds and tokens of a batch's rounds."""
    return batch_seconds(generations), sum(sum(emitted_per_round(g)) for g in generations)


def _by_prompt(
    costs: Sequence[Costs], batches: Sequence[Sequence[int]], turns: Sequence[Turn]
) -> list[Any]:
    """Return the costs to resample for an interval, one for each prompt or batch.

    The turns of a conversation are correlated and are added up where each ran alone; the prompts of
    a larger batch share its time, so that the batch cannot be divided.
    """
    groups: dict[Any, list[Costs]] = {}
    for cost, batch in zip(costs, batches, strict=True):
        key = (turns[batch[0]].prompt.place,) if len(batch) == 1 else tuple(batch)
        groups.setdefault(key, []).append(cost)
    return [tuple(map(sum, zip(*group, strict=True))) for group in groups.values()]


def _ratio(costs: Sequence[Costs]) -> float:
    """Return the drafter's tokens per second over plain decoding's, NaN where there are none.

    It is the ratio of the times where both wrote the same text.
    """
    plain_s, plain, drafted_s, drafted = map(sum, zip(*costs, strict=True))
    return (drafted / drafted_s) / (plain / plain_s) if drafted_s and plain else float("nan")


@torch.inference_mode()
def divergence(
    target: Target, plain: Generation, other: Generation, sampling: Sampling
) -> tuple[int, float | None]:
    """Return the index of the first token in which two replies differ, and the top-2 gap there.

    The gap is the target's best logit, after a penalty, minus its second best; None where decoding
    is not greedy. Near-ties flip in low precision, because a tree is verified in another shape than
    a single token; a large gap would be a bug.
    """
    index = min(len(plain.token_ids), len(other.token_ids))
    for position, (a, b) in enumerate(zip(plain.token_ids, other.token_ids, strict=False)):
        if a != b:
            index = position
            break
    if not sampling.greedy:
        return index, None
    ids: Any = torch.tensor([plain.prompt_ids + plain.token_ids[:index]], device=target.device)
    scores = target.head(target.forward(ids).last[:, -1]).float()
    if sampling.history_processor is not None:
        scores = sampling.history_processor(ids, scores)
    best = scores[0].topk(2).values
    return index, float(best[0] - best[1])


def comparable(generation: Generation) -> bool:
    """Return whether plain decoding with the same noise must write the same text.

    Rules that compare distributions keep the distribution, not the text.
    """
    return all(round_.rule in ("greedy", "gumbel", "match") for round_ in generation.rounds)


def _histogram(values: list[int]) -> list[int]:
    """Return how many of `values` are 0, 1, 2 and so on."""
    return [values.count(v) for v in range(max(values, default=-1) + 1)]
