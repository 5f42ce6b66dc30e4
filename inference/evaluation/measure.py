"""Drafters beside plain decoding, on the same prompts, in the loop that users decode with: one
setting, measured.

Drafters take turns on each batch, so that a machine that slows down slows all of them. Of `repeats`
runs of a request the one of median decode time is kept; tokens and rounds are the same in all of
them.
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
    """How requests are decoded: what every drafter of a table has in common."""

    sampling: Sampling
    batch: int
    max_new_tokens: int
    repeats: int


@dataclass
class Turn:
    """One prompt, or a later turn of a conversation, and what became of it."""

    prompt: Prompt
    number: int
    """From 0."""
    generation: Generation


Results = dict[str, list[Turn]]
FEWEST = 5  # prompts, or batches, of which an interval means something
SAMPLES = 3  # replies of each drafter that are kept token by token
WARM_UP = 8  # tokens of a first run that is not counted


@runtime_checkable
class Loop(Protocol):
    """A way to decode other than a proposer in our loop as it stands."""

    name: str

    def generate(
        self, requests: Sequence[Request], max_new_tokens: int, sampling: Sampling
    ) -> list[Generation]:
        """As `decode.generate`."""
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
    """Decode every prompt in every way, the first of which is plain decoding.

    Later turns of a conversation follow on what plain decoding answered, so that all drafters go on
    from the same text. Batches that `journal` holds are not decoded again. `each` is called with
    what there is after every batch.
    """
    names = distinct_names(ways)
    results: Results = {name: [] for name in names}
    waiting, number = list(prompts), 0
    about = (
        target.tokenizer,
        target.name,
        target.eos_ids,
        target.max_positions - setting.max_new_tokens,
    )
    what = f"decoding at T = {setting.sampling.temperature:g}, batch {setting.batch}"
    progress = Progress(total=len(prompts), desc=what, show=progress_bar)
    while waiting:
        answered: list[Turn] = []
        for batch, found in _in_turns(
            target, dict(zip(names, ways, strict=True)), waiting, number, setting, journal
        ):
            for name, generations in found.items():
                turns = [Turn(p, number, g) for p, g in zip(batch, generations, strict=True)]
                results[name] += turns
                answered += turns if name == names[0] else []
            progress.update(len(batch) if number == 0 else 0)
            each(results)
        number += 1
        waiting = [
            following
            for turn in answered
            if (following := next_turn(turn.prompt, turn.generation.token_ids, *about)) is not None
        ]
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
    """Each batch of prompts with every way's replies, those of the run of median time."""
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
            for way in ways.values():
                _decode(
                    target,
                    way,
                    [Request(batch[0].token_ids, 0)],
                    min(setting.max_new_tokens, WARM_UP),
                    setting.sampling,
                )
        warm = True
        requests = [Request(prompt.token_ids, start + i, number) for i, prompt in enumerate(batch)]
        runs: dict[str, list[list[Generation]]] = {name: [] for name in ways}
        for _ in range(setting.repeats):
            for name, way in ways.items():
                runs[name].append(
                    _decode(target, way, requests, setting.max_new_tokens, setting.sampling)
                )
        chosen = {
            name: sorted(found, key=batch_seconds)[setting.repeats // 2]
            for name, found in runs.items()
        }
        if journal is not None:
            journal.put(key, as_json(chosen))
        yield batch, chosen


def _decode(
    target: Target, way: Way, requests: list[Request], max_new_tokens: int, sampling: Sampling
) -> list[Generation]:
    if isinstance(way, Loop):
        return way.generate(requests, max_new_tokens, sampling.resolved(target.repetition_penalty))
    return generate(target, way, requests, max_new_tokens, sampling)


def distinct_names(ways: Sequence[Way]) -> list[str]:
    """Their names; a second of one name is numbered."""
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
    """One request, in the names of evaluation.md section 2."""
    found, prompt = turn.generation, turn.prompt
    rounds = found.rounds
    equal = plain.token_ids == found.token_ids if comparable(found) else None
    index, gap = divergence(target, plain, found, sampling) if equal is False else (None, None)
    return {
        "id": prompt.id,
        "prompt": prompt.place,
        "category": prompt.category,
        "turn": turn.number,
        "n_prompt": len(found.prompt_ids),
        "n_out": len(found.token_ids),
        "n_rounds": len(rounds),
        "rounds": [[r.drafted or 0, r.accepted, len(r.tokens)] for r in rounds],
        "accepted_hist": _histogram([r.accepted for r in rounds]),
        "drafted_hist": _histogram([r.drafted or 0 for r in rounds]),
        "offered_hist": _histogram([r.offered for r in rounds]),
        "tau_incl_bonus": tau([emitted_per_round(found)]) if rounds else None,
        "ttft_s": found.ttft_s,
        "decode_s": found.decode_s,
        "tpot_s": time_per_token(found),
        "chunk_gap_s": quantiles([r.t_round_s for r in rounds], (0.5, 0.95)),
        "rb_tau": mean([r.expected for r in rounds]),
        "alpha": alpha([r.overlap for r in rounds]),
        **{f"t_{part}_s": seconds for part, seconds in split(rounds).items()},
        "finish_reason": found.finish_reason,
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
    """The numbers of every drafter in one setting; `settings_of`: what was chosen for a drafter, by
    its name, if anything was; `samples`: replies of each that are shown token by token."""
    settings_of = settings_of or {}
    first = next(iter(results))
    plain = [turn.generation for turn in results[first]]
    sampling = setting.sampling.resolved(target.repetition_penalty)
    drafters: dict[str, Any] = {}
    for name, turns in results.items():
        generations = [turn.generation for turn in turns]
        batches = batches_of(turns, setting.batch)
        summary = summarise(generations, batches, [turn.prompt.place for turn in turns])
        costs = [
            (*_cost([plain[i] for i in batch]), *_cost([generations[i] for i in batch]))
            for batch in batches
        ]
        summary["speedup"] = _ratio(costs)
        units = _by_prompt(costs, batches, turns)
        summary["speedup_ci95"] = (
            bootstrap(units, _ratio) if len(units) >= FEWEST else (float("nan"), float("nan"))
        )
        ratios = [_ratio([cost]) for cost in costs if all(cost)]
        summary["speedup_median"] = statistics.median(ratios) if ratios else None
        same = [
            a.token_ids == b.token_ids
            for a, b in zip(plain, generations, strict=True)
            if comparable(b)
        ]
        summary["equal_to_ar"] = sum(same) if len(same) == len(turns) else None
        summary["warnings"] = warnings_of(summary, generations)
        summary["by_category"] = by_category(turns)
        summary["per_request"] = [
            request_record(target, turn, a, sampling) for turn, a in zip(turns, plain, strict=True)
        ]
        if (chosen := settings_of.get(name)) is not None:
            summary["setting"] = chosen
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
    """Places of the requests that ran together: batches do not reach over turns."""
    found: list[list[int]] = []
    for place, turn in enumerate(turns):
        if not found or len(found[-1]) == size or turns[found[-1][0]].number != turn.number:
            found.append([])
        found[-1].append(place)
    return found


def by_category(turns: Sequence[Turn]) -> dict[str, Any]:
    """Tau with its interval for each category of prompts."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.prompt.category, []).append(turn)
    found = {}
    for name, group in sorted(groups.items()):
        kept = [emitted_per_round(turn.generation) for turn in group]
        if any(kept):
            interval = bootstrap(pooled(kept, [turn.prompt.place for turn in group]), tau)
            found[name] = {
                "requests": len(group),
                "tau_incl_bonus": tau(kept),
                "tau_ci95": interval,
            }
    return found


def _beside_plain(summary: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What a round costs in plain steps, and the speed-up that follows from it: tau over the cost
    of a round."""

    def each(s, part=None):
        return (s["split_s"][part] if part else sum(s["split_s"].values())) / max(s["rounds"], 1)

    if not summary["rounds"] or not plain["rounds"]:
        return {"verify_cost": None, "round_cost": None, "predicted_speedup": None}
    cost = each(summary) / each(plain)
    return {
        # not known of other people's loops
        "verify_cost": each(summary, "verify") / each(plain, "verify") or None,
        "round_cost": cost,
        "predicted_speedup": summary["tau_incl_bonus"] / plain["tau_incl_bonus"] / cost,
    }


DEFINITIONS = {
    "tau_incl_bonus": "tokens kept per round, the target's own included, the prefill's excluded, "
    "pooled over requests",
    "tau_ci95": "95% bootstrap interval over prompts (the turns of one go together), 1000 "
    "resamples",
    "tau_by_position": "tau of the rounds whose root stands below that position",
    "tau_macro": "mean of the requests' own taus; tau_by_request: their quantiles",
    "samples": "the first replies, token by token; came: depth of an accepted draft, 0 the "
    "target's own, -1 the prefill's",
    "rounds": "of each request: [nodes drafted, drafts accepted, tokens kept] of every round",
    "discarded_share": "share of all verified nodes, roots included, that were drafts and not "
    "accepted",
    "verify_cost": "a verification over a plain verification; round_cost: a whole round over a "
    "plain round",
    "predicted_speedup": "tau over round_cost; both over plain decoding's: what the split of "
    "these very rounds explains",
    "modelled_speedup": "foretold from the smallest batch's tau and draft time, and from plain "
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
    "both wrote the same text, the "
    "ratio of the times",
    "verify_mode": "the rule that decided: greedy, gumbel (coupled noise), match, block, "
    "traversal, rrs, or typical (lossy)",
    "rb_tau": "1 + sum of the target's probabilities of the drafted paths: tau in expectation; "
    "for fixed drafts at T > 0",
    "alpha": "mean sum of min(p, q) at each depth on accepted prefixes; rules that compare "
    "distributions "
    "only",
    "loop_share": "share of replies that repeat an 8-gram; loops flatter every drafter",
    "equal_to_ar": "replies equal to plain decoding with the same noise, token for token; null "
    "for rules that keep the distribution only",
    "first_divergence": "index of the first token that differs from plain decoding",
    "top2_gap": "the target's best logit minus its second best there: near-ties flip in low "
    "precision, others must not",
}


def warnings_of(summary: dict[str, Any], generations: Sequence[Generation]) -> list[str]:
    """What makes a figure doubtful (evaluation.md, section 2)."""
    found = []
    if cut := sum(g.finish_reason == "context" for g in generations):
        found.append(f"{cut} replies were cut where the target's positions end")
    if empty := sum(not g.rounds for g in generations):
        found.append(f"{empty} replies had no round: their only token is the prefill's")
    return found


def model_batches(settings: Sequence[dict[str, Any]]) -> None:
    """Add `modelled_speedup` to every drafter of settings that differ in batch size: what follows
    for each batch from the smallest one's acceptance and draft time, and from plain decoding's
    steps at all of them.

    A pass over n tokens in all takes what a plain step of n requests takes, between and beyond the
    batch sizes measured; drafting grows with the batch as a plain step does. Needs two batch sizes
    of one temperature.
    """
    for kind in {(s["temperature"], s["lossless"]) for s in settings}:
        same = sorted(
            (s for s in settings if (s["temperature"], s["lossless"]) == kind),
            key=lambda s: s["batch"],
        )
        steps = {
            s["batch"]: _round_seconds(plain)
            for s in same
            if (plain := s["drafters"]["plain"])["rounds"]
        }
        if len(steps) < 2:
            continue
        for setting in same:
            for name, summary in setting["drafters"].items():
                base = same[0]["drafters"].get(name)
                if base is not None and base["rounds"] and base["split_s"]["verify"]:
                    summary["modelled_speedup"] = _modelled(
                        base, same[0]["batch"], setting["batch"], steps
                    )


def _round_seconds(summary: dict[str, Any]) -> float:
    """Wall time of a round of the whole batch: `split_s` shares it among its rows."""
    return summary["decode_s"] / summary["steps"]


def _modelled(base: dict[str, Any], smallest: int, batch: int, steps: dict[int, float]) -> float:
    def pass_seconds(tokens):
        return _extended(steps, tokens)

    each = {part: seconds / base["steps"] for part, seconds in base["split_s"].items()}
    growth = pass_seconds(batch) / pass_seconds(smallest)
    cost = (
        each["draft"] * growth
        + pass_seconds(batch * (1 + base["mean_n_draft"]))
        + each["accept"]
        + each["kv"]
        + each["host"]
    )
    return base["tau_incl_bonus"] * pass_seconds(batch) / cost


def _extended(points: dict[int, float], at: float) -> float:
    """Linear through `points`, of which the last two go on."""
    places = sorted(points)
    low, high = next(((a, b) for a, b in pairwise(places) if at <= b), (places[-2], places[-1]))
    return points[low] + (points[high] - points[low]) * (at - low) / (high - low)


@torch.inference_mode()
def token_view(target: Target, turn: Turn, sampling: Sampling) -> dict[str, Any]:
    """A reply token by token: its text, how it came, and the target's probabilities there.

    `came`: the depth of an accepted draft, 0 for the target's own token at the end of a round, -1
    for the prefill's. `p`: the target's probability of it, and of its `best` three, as sampled from
    (at temperature 1 where decoding is greedy).
    """
    found, tokenizer = turn.generation, target.tokenizer
    came = [-1] * (len(found.token_ids) - sum(map(len, (r.tokens for r in found.rounds))))
    for r in found.rounds:
        came += [d if d <= r.accepted else 0 for d in range(1, len(r.tokens) + 1)]
    text = [*found.prompt_ids, *found.token_ids]
    ids: Any = torch.tensor([text], device=target.device)
    start = len(found.prompt_ids) - 1
    scores = target.head(target.forward(ids).last[0, start:-1]).float()
    # each place has a text of its own before it
    if (penalise := sampling.history_processor) is not None:
        scores = torch.cat(
            [penalise(ids[:, : start + 1 + i], scores[i : i + 1]) for i in range(len(scores))]
        )
    probs = sampling.warpers(ids, scores).softmax(-1)
    chances = probs.gather(1, ids[0, start + 1 :, None])[:, 0].tolist()
    best = probs.topk(min(3, probs.shape[-1]))

    def words(tokens):
        return [tokenizer.decode([token]) for token in tokens]

    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        "id": turn.prompt.id,
        "turn": turn.number,
        "prompt": tokenizer.decode(found.prompt_ids, skip_special_tokens=True),
        "tokens": words(found.token_ids),
        "came": came,
        "p": chances,
        "best": [
            [[word, p] for word, p in zip(words(indices), values, strict=True)]
            for indices, values in pairs
        ],
    }


Costs = tuple[float, int, float, int]
"""Seconds and tokens of a batch's rounds, plain and drafted."""


def _cost(generations: Sequence[Generation]) -> tuple[float, int]:
    return batch_seconds(generations), sum(sum(emitted_per_round(g)) for g in generations)


def _by_prompt(
    costs: Sequence[Costs], batches: Sequence[Sequence[int]], turns: Sequence[Turn]
) -> list[Any]:
    """Costs to resample: the turns of a conversation are added up where each ran alone."""
    found: dict[Any, list[Costs]] = {}
    for cost, batch in zip(costs, batches, strict=True):
        key = (turns[batch[0]].prompt.place,) if len(batch) == 1 else tuple(batch)
        found.setdefault(key, []).append(cost)
    return [tuple(map(sum, zip(*group, strict=True))) for group in found.values()]


def _ratio(costs: Sequence[Costs]) -> float:
    """Drafted tokens a second over plain ones; the ratio of the times where both wrote the same
    text."""
    plain_s, plain, drafted_s, drafted = map(sum, zip(*costs, strict=True))
    return (drafted / drafted_s) / (plain / plain_s) if drafted_s and plain else float("nan")


@torch.inference_mode()
def divergence(
    target: Target, plain: Generation, other: Generation, sampling: Sampling
) -> tuple[int, float | None]:
    """Index of the first token in which two replies differ, and by how much the target prefers its
    best token there.

    The preference is in logits after a penalty, and known for greedy decoding only.

    In low precision near-ties flip, because a tree is verified in another batch shape; a large gap
    would be a bug.
    """
    both = zip(plain.token_ids, other.token_ids, strict=False)
    index = next(
        (i for i, (a, b) in enumerate(both) if a != b),
        min(len(plain.token_ids), len(other.token_ids)),
    )
    if not sampling.greedy:
        return index, None
    ids: Any = torch.tensor([plain.prompt_ids + plain.token_ids[:index]], device=target.device)
    scores = target.head(target.forward(ids).last[:, -1]).float()
    if sampling.history_processor is not None:
        scores = sampling.history_processor(ids, scores)
    best = scores[0].topk(2).values
    return index, float(best[0] - best[1])


def comparable(generation: Generation) -> bool:
    """Whether plain decoding with the same noise must write the same text; rules that compare
    distributions keep the distribution, not the text."""
    return all(round_.rule in ("greedy", "gumbel", "match") for round_ in generation.rounds)


def _histogram(values: list[int]) -> list[int]:
    return [values.count(v) for v in range(max(values, default=-1) + 1)]
