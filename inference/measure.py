"""Drafters beside plain decoding, on the same prompts, in the loop that users decode with: one setting, measured.

Drafters take turns on each batch, so that a machine that slows down slows all of them. Of `repeats` runs of a request the one
of median decode time is kept; tokens and rounds are the same in all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from .decode import Generation, Request, generate
from .metrics import alpha, batch_seconds, bootstrap, kept_per_round, mean, split, summarise, tau, time_per_token
from .proposer import Proposer
from .rows import Prompt, next_turn
from .sampling import Sampling
from .target import Target


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


def compare(target: Target, proposers: Sequence[Proposer], prompts: Sequence[Prompt], setting: Setting) -> Results:
    """Decode every prompt with every proposer, the first of which is plain decoding.

    Later turns of a conversation follow on what plain decoding answered, so that all drafters go on from the same text.
    """
    names = _distinct_names(proposers)
    for proposer in proposers:  # warm up
        first = Request(prompts[0].token_ids, 0)
        generate(target, proposer, [first], min(setting.max_new_tokens, 8), setting.sampling)
    results: Results = {name: [] for name in names}
    waiting, number = list(prompts), 0
    about = target.tokenizer, target.name, target.eos_ids, target.max_positions - setting.max_new_tokens
    progress = tqdm(total=len(prompts), desc="decoding", unit=" prompts", disable=None, leave=False)
    while waiting:
        answered: list[Turn] = []
        for batch, found in _in_turns(target, dict(zip(names, proposers, strict=True)), waiting, number, setting):
            for name, generations in found.items():
                turns = [Turn(p, number, g) for p, g in zip(batch, generations, strict=True)]
                results[name] += turns
                answered += turns if name == names[0] else []
            progress.update(len(batch) if number == 0 else 0)
        number += 1
        waiting = [
            following for turn in answered if (following := next_turn(turn.prompt, turn.generation.token_ids, *about)) is not None
        ]
    progress.close()
    return results


def _in_turns(
    target: Target, proposers: dict[str, Proposer], prompts: Sequence[Prompt], number: int, setting: Setting
) -> Iterator[tuple[Sequence[Prompt], dict[str, list[Generation]]]]:
    """Each batch of prompts with every proposer's replies, those of the run of median time."""
    for start in range(0, len(prompts), setting.batch):
        batch = prompts[start : start + setting.batch]
        requests = [Request(prompt.token_ids, start + i, number) for i, prompt in enumerate(batch)]
        runs: dict[str, list[list[Generation]]] = {name: [] for name in proposers}
        for _ in range(setting.repeats):
            for name, proposer in proposers.items():
                runs[name].append(generate(target, proposer, requests, setting.max_new_tokens, setting.sampling))
        yield batch, {name: sorted(found, key=batch_seconds)[setting.repeats // 2] for name, found in runs.items()}


def _distinct_names(proposers: Sequence[Proposer]) -> list[str]:
    names: list[str] = []
    for proposer in proposers:
        name, number = proposer.name, 2
        while name in names:
            name, number = f"{proposer.name}-{number}", number + 1
        names.append(name)
    return names


def request_record(target: Target, turn: Turn, plain: Generation, sampling: Sampling) -> dict[str, Any]:
    """One request, in the names of evaluation.md section 2."""
    found, prompt = turn.generation, turn.prompt
    rounds = found.rounds
    equal = plain.token_ids == found.token_ids if comparable(found) else None
    index, gap = divergence(target, plain, found, sampling) if equal is False else (None, None)
    return {
        "id": prompt.id,
        "category": prompt.category,
        "turn": turn.number,
        "n_prompt": len(found.prompt_ids),
        "n_out": len(found.token_ids),
        "n_rounds": len(rounds),
        "rounds": [[r.drafted or 0, r.accepted, len(r.tokens)] for r in rounds],
        "accepted_hist": _histogram([r.accepted for r in rounds]),
        "drafted_hist": _histogram([r.drafted or 0 for r in rounds]),
        "tau_incl_bonus": tau([kept_per_round(found)]) if rounds else None,
        "ttft_s": found.ttft_s,
        "decode_s": found.decode_s,
        "tpot_s": time_per_token(found),
        "rb_tau": mean([r.expected for r in rounds]),
        "alpha": alpha([r.overlap for r in rounds]),
        **{f"t_{part}_s": seconds for part, seconds in split(rounds).items()},
        "finish_reason": found.finish_reason,
        "equal_to_ar": equal,
        "first_divergence": index,
        "top2_gap": gap,
        "verify_mode": rounds[0].rule if rounds else None,
    }


def measured(target: Target, results: Results, setting: Setting) -> dict[str, Any]:
    """The numbers of every drafter in one setting."""
    first = next(iter(results))
    plain = [turn.generation for turn in results[first]]
    sampling = setting.sampling.resolved(target.repetition_penalty)
    drafters: dict[str, Any] = {}
    for name, turns in results.items():
        generations = [turn.generation for turn in turns]
        summary = summarise(generations, batches_of(turns, setting.batch))
        seconds = [
            (batch_seconds([plain[i] for i in batch]), batch_seconds([generations[i] for i in batch]))
            for batch in batches_of(turns, setting.batch)
        ]
        summary["speedup"] = _ratio(seconds)
        summary["speedup_ci95"] = bootstrap(seconds, _ratio)
        summary["speedup_median"] = statistics.median(a / b for a, b in seconds if b)
        same = [a.token_ids == b.token_ids for a, b in zip(plain, generations, strict=True) if comparable(b)]
        summary["equal_to_ar"] = sum(same) if same else None
        summary["by_category"] = by_category(turns, plain)
        summary["per_request"] = [request_record(target, turn, a, sampling) for turn, a in zip(turns, plain, strict=True)]
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


def by_category(turns: Sequence[Turn], plain: Sequence[Generation]) -> dict[str, Any]:
    """Tau with its interval for each category of prompts."""
    groups: dict[str, list[list[int]]] = {}
    for turn in turns:
        groups.setdefault(turn.prompt.category, []).append(kept_per_round(turn.generation))
    return {
        name: {"requests": len(kept), "tau_incl_bonus": tau(kept), "tau_ci95": bootstrap(kept, tau)}
        for name, kept in sorted(groups.items())
        if any(kept)
    }


def _beside_plain(summary: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """What a round costs in plain steps, and the speed-up that follows from it: tau over the cost of a round."""
    each = lambda s, part=None: (s["split_s"][part] if part else sum(s["split_s"].values())) / max(s["rounds"], 1)  # noqa: E731
    if not summary["rounds"] or not plain["rounds"]:
        return {"verify_cost": None, "round_cost": None, "predicted_speedup": None}
    cost = each(summary) / each(plain)
    return {
        "verify_cost": each(summary, "verify") / each(plain, "verify"),
        "round_cost": cost,
        "predicted_speedup": summary["tau_incl_bonus"] / plain["tau_incl_bonus"] / cost,
    }


DEFINITIONS = {
    "tau_incl_bonus": "tokens kept per round, the target's own included, the prefill's excluded, pooled over requests",
    "tau_ci95": "95% bootstrap interval over requests (each turn is one), 1000 resamples",
    "tau_by_position": "tau of the rounds whose root stands below that position",
    "tau_macro": "mean of the requests' own taus; tau_by_request: their quantiles",
    "rounds": "of each request: [nodes drafted, drafts accepted, tokens kept] of every round",
    "discarded_share": "share of all verified nodes, roots included, that were drafts and not accepted",
    "verify_cost": "a verification over a plain verification; round_cost: a whole round over a plain round",
    "predicted_speedup": "tau over round_cost; both over plain decoding's",
    "ttft_s": "time to the first token; tpot: time per later token, of each request; quantiles over requests, nearest rank",
    "survival": "share of rounds that accepted at least d drafts",
    "cond_accept": "survival at d over survival at d - 1",
    "tokens_s": "tokens of all rounds / their wall time, prefill excluded",
    "speedup": "sum of plain decode times / sum of this drafter's over the same prompts, prefill excluded",
    "verify_mode": "the rule that decided: greedy, gumbel (coupled noise), match, block, traversal, rrs, or typical (lossy)",
    "rb_tau": "1 + sum of the target's probabilities of the drafted paths: tau in expectation; for fixed drafts at T > 0",
    "alpha": "mean sum of min(p, q) at each depth on accepted prefixes; rules that compare laws only",
    "loop_share": "share of replies that repeat an 8-gram; loops flatter every drafter",
    "equal_to_ar": "replies equal to plain decoding with the same noise, token for token; null for rules that keep the law only",
    "first_divergence": "index of the first token that differs from plain decoding",
    "top2_gap": "the target's best logit minus its second best there: near-ties flip in low precision, others must not",
}


def _ratio(seconds: Sequence[tuple[float, float]]) -> float:
    drafted = sum(b for _, b in seconds)
    return sum(a for a, _ in seconds) / drafted if drafted else float("nan")


@torch.inference_mode()
def divergence(target: Target, plain: Generation, other: Generation, sampling: Sampling) -> tuple[int, float | None]:
    """Index of the first token in which two replies differ, and by how much the target prefers its best token there.

    The preference is in logits after a penalty, and known for greedy decoding only.

    In low precision near-ties flip, because a tree is verified in another batch shape; a large gap would be a bug.
    """
    both = zip(plain.token_ids, other.token_ids, strict=False)
    index = next((i for i, (a, b) in enumerate(both) if a != b), min(len(plain.token_ids), len(other.token_ids)))
    if not sampling.greedy:
        return index, None
    ids: Any = torch.tensor([plain.prompt_ids + plain.token_ids[:index]], device=target.device)
    scores = target.head(target.forward(ids).last[:, -1]).float()
    if sampling.history_processor is not None:
        scores = sampling.history_processor(ids, scores)
    best = scores[0].topk(2).values
    return index, float(best[0] - best[1])


def comparable(generation: Generation) -> bool:
    """Whether plain decoding with the same noise must write the same text; rules that compare laws keep the law, not the text."""
    return all(round_.rule in ("greedy", "gumbel", "match") for round_ in generation.rounds)


def _histogram(values: list[int]) -> list[int]:
    return [values.count(v) for v in range(max(values, default=-1) + 1)]
