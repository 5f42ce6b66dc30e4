"""Figures of drafters, computed from the replies of `measure.decode_alternately`.

docs/metrics.md defines each of them; their types are in `results.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from .. import metrics
from ..base.settings import Sampling
from ..decode import Generation, Round
from ..targets.masks import with_replies
from ..targets.target import Target
from .intervals import LEVEL, interval, pooled, summed, tau_interval
from .measure import Results, Setting, Turn, comparable, first_difference
from .results import (
    NAN,
    CategoryFigures,
    DrafterFigures,
    RequestRecord,
    Sample,
    SettingFigures,
)


def figures_of_setting(
    target: Target,
    results: Results,
    setting: Setting,
    samples: int,
) -> SettingFigures:
    """Return the figures of every way to decode, `samples` replies of each token by token."""
    plain = next(iter(results.values()))
    sampling = setting.sampling.resolved(target.repetition_penalty)
    drafters = {}
    for name, turns in results.items():
        figures = figures_of_drafter(turns, plain, setting.batch)
        figures.per_request = [
            request_record(target, turn, expected.generation, sampling)
            for turn, expected in zip(turns, plain, strict=True)
        ]
        figures.samples = [token_view(target, turn, sampling) for turn in turns[:samples]]
        drafters[name] = figures
    plain_figures = next(iter(drafters.values()))
    for figures in drafters.values():
        _compare_rounds(figures, plain_figures)
    return SettingFigures(
        temperature=sampling.temperature,
        batch=setting.batch,
        drafters=drafters,
    )


def figures_of_drafter(turns: Sequence[Turn], plain: Sequence[Turn], size: int) -> DrafterFigures:
    """Return the figures of one way to decode in batches of `size`, next to `plain` decoding."""
    generations = [turn.generation for turn in turns]
    batches = batches_of(turns, size)
    figures = figures_of_replies(generations, batches, [turn.prompt.unit for turn in turns])
    figures.speedup, figures.speedup_ci95 = gain(turns, plain, size)
    # counted only if the rule promises equality of every reply
    if all(map(comparable, generations)):
        pairs = zip(plain, generations, strict=True)
        figures.equal_to_ar = sum(a.generation.token_ids == b.token_ids for a, b in pairs)
    figures.warnings = warnings_of(generations)
    figures.by_category = by_category(turns)
    return figures


def figures_of_replies(
    generations: Sequence[Generation],
    batches: Sequence[Sequence[int]] | None = None,
    units: Sequence[int] | None = None,
) -> DrafterFigures:
    """Return the figures of requests that need no comparison with plain decoding.

    `batches`: indices of the requests that ran together; each alone if not given. `units`: the
    unit that each request belongs to (`Prompt.unit`), for intervals; each its own if not given.
    """
    count = len(generations)
    rounds: list[Round] = []
    for g in generations:
        rounds += g.rounds
    emitted = [metrics.emitted_per_round(g) for g in generations]
    accepted = [r.accepted for r in rounds]
    drafted = sum(r.drafted or 0 for r in rounds)
    levels = max(accepted, default=0)
    survived = metrics.survival(accepted, levels)
    roots = [len(g.prompt_ids) for g in generations]
    decode_s = steps = 0
    for batch in batches if batches is not None else [[i] for i in range(count)]:
        together = [generations[i] for i in batch]
        decode_s += metrics.batch_seconds(together)
        # a batch runs until its last request has finished
        steps += max(len(g.rounds) for g in together)
    return DrafterFigures(
        requests=count,
        rounds=len(rounds),
        steps=steps,
        tokens=sum(len(g.token_ids) for g in generations),
        tau_incl_bonus=metrics.tau(emitted),
        tau_ci95=tau_interval(emitted, units, most_drafts(rounds)),
        tau_by_position=metrics.tau_by_position(list(zip(roots, emitted, strict=True))),
        tau_untruncated=_share(sum(accepted) + len(rounds), len(rounds), NAN),
        survival=survived,
        cond_accept=metrics.conditional(survived),
        cond_offered=metrics.offered_conditional(accepted, [r.offered for r in rounds], levels),
        accept_rate=_share(sum(accepted), drafted),
        mean_n_draft=_share(drafted, len(rounds)),
        accepted_hist=_histogram(accepted),
        alpha=metrics.alpha([r.overlap for r in rounds]),
        verify_mode=sorted({r.rule for r in rounds}),
        loop_share=sum(metrics.repeats_itself(g.token_ids) for g in generations) / count,
        tokens_s=_share(sum(map(sum, emitted)), decode_s, NAN),
        ttft_s=sum(g.ttft_s for g in generations) / count,
        ttft_quantiles_s=metrics.quantiles([g.ttft_s for g in generations]),
        tpot_quantiles_s=metrics.quantiles([metrics.time_per_token(g) for g in generations]),
        chunk_gap_quantiles_s=metrics.quantiles([r.t_round_s for r in rounds]),
        split_s=metrics.split(rounds),
        decode_s=decode_s,
    )


def most_drafts(rounds: Iterable[Round]) -> int:
    """Return the largest number of nodes that a round drafted, which bounds its path."""
    return max((r.drafted or 0 for r in rounds), default=0)


def _share(count: float, of: float, of_nothing: float = 0.0) -> float:
    """Return `count / of`, and `of_nothing` where `of` is 0."""
    return count / of if of else of_nothing


def request_record(
    target: Target, turn: Turn, plain: Generation, sampling: Sampling
) -> RequestRecord:
    """Return the record of one reply; `plain` is plain decoding's reply to the same prompt."""
    reply, prompt = turn.generation, turn.prompt
    rounds = reply.rounds
    equal = plain.token_ids == reply.token_ids if comparable(reply) else None
    index, gap = None, None
    if equal is False:
        index, gap = first_difference(target, plain, reply, sampling)
    return RequestRecord(
        id=prompt.id,
        prompt=prompt.place,
        unit=prompt.unit,
        category=prompt.category,
        turn=turn.number,
        n_prompt=len(reply.prompt_ids),
        n_out=len(reply.token_ids),
        rounds=[(r.drafted or 0, r.accepted, len(r.tokens)) for r in rounds],
        offered_hist=_histogram([r.offered for r in rounds]),
        tau_incl_bonus=metrics.tau([metrics.emitted_per_round(reply)]) if rounds else None,
        ttft_s=reply.ttft_s,
        decode_s=reply.decode_s,
        tpot_s=metrics.time_per_token(reply),
        finish_reason=reply.finish_reason,
        equal_to_ar=equal,
        first_divergence=index,
        top2_gap=gap,
        verify_mode=rounds[0].rule if rounds else None,
    )


def batches_of(turns: Sequence[Turn], size: int) -> list[list[int]]:
    """Return the indices of the turns that ran together: at most `size`, of one turn number."""
    batches: list[list[int]] = []
    for index, turn in enumerate(turns):
        if not batches or len(batches[-1]) == size or turns[batches[-1][0]].number != turn.number:
            batches.append([])
        batches[-1].append(index)
    return batches


def by_category(turns: Sequence[Turn]) -> dict[str, CategoryFigures]:
    """Return tau with its interval for each category of prompts that has a round."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.prompt.category, []).append(turn)
    figures = {}
    for name, group in sorted(groups.items()):
        emitted = [metrics.emitted_per_round(turn.generation) for turn in group]
        if any(emitted):
            figures[name] = CategoryFigures(
                requests=len(group),
                tau_incl_bonus=metrics.tau(emitted),
                tau_ci95=tau_interval(
                    emitted,
                    [turn.prompt.unit for turn in group],
                    most_drafts(chain.from_iterable(turn.generation.rounds for turn in group)),
                ),
            )
    return figures


def _compare_rounds(figures: DrafterFigures, plain: DrafterFigures) -> None:
    """Set the costs of a round and of a verification in plain steps, if there are rounds."""
    if not figures.rounds or not plain.rounds:
        return
    plain_round = sum(plain.split.values()) / plain.rounds
    figures.round_cost = sum(figures.split.values()) / figures.rounds / plain_round
    verify = figures.split["verify"] / figures.rounds
    # Loops other than draftsmith's do not report it: 0 becomes None.
    figures.verify_cost = verify / (plain.split["verify"] / plain.rounds) or None


def warnings_of(generations: Sequence[Generation]) -> list[str]:
    """Return the signs that make figures doubtful (docs/metrics.md#doubtful-figures)."""
    warnings = []
    if cut := sum(g.finish_reason == "context" for g in generations):
        warnings.append(f"replies cut where the target's positions end: {cut}")
    if empty := sum(not g.rounds for g in generations):
        warnings.append(f"replies without a round, whose only token is the prefill's: {empty}")
    return warnings


@torch.inference_mode()
def token_view(target: Target, turn: Turn, sampling: Sampling) -> Sample:
    """Return a reply token by token: its text, its origin, and the target's probabilities.

    The probabilities are those sampled from, or those at temperature 1 if decoding is greedy.
    """
    reply, tokenizer = turn.generation, target.tokenizer
    # tokens that no round emitted are the prefill's
    came = [-1] * (len(reply.token_ids) - sum(metrics.emitted_per_round(reply)))
    for r in reply.rounds:
        for depth in range(1, len(r.tokens) + 1):
            came.append(depth if depth <= r.accepted else 0)
    text = [*reply.prompt_ids, *reply.token_ids]
    ids: Any = torch.tensor([text], device=target.device)
    # A position predicts the token after it, so the last one is left out.
    start = len(reply.prompt_ids) - 1
    states = target.forward(ids, with_replies([start + 1], ids.shape[1])).last
    scores = target.head(states[0, start:-1]).float()
    # The penalty depends on the text before each token, so every row has its own.
    if (penalise := sampling.history_processor) is not None:
        penalised = []
        for i in range(len(scores)):
            text_before = ids[:, : start + 1 + i]
            penalised.append(penalise(text_before, scores[i : i + 1]))
        scores = torch.cat(penalised)
    probs = sampling.warpers(ids, scores).softmax(-1)
    # With 3 prompt tokens and 2 of the reply, the rows are positions 2 and 3, the tokens 3 and 4.
    chances = probs.gather(1, ids[0, start + 1 :, None])[:, 0].tolist()
    best = probs.topk(min(3, probs.shape[-1]))

    def words(tokens):
        return [tokenizer.decode([token]) for token in tokens]

    likeliest = []
    for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        likeliest.append(list(zip(words(tokens), values, strict=True)))
    return Sample(
        id=turn.prompt.id,
        turn=turn.number,
        prompt=tokenizer.decode(reply.prompt_ids, skip_special_tokens=True),
        tokens=words(reply.token_ids),
        came=came,
        p=chances,
        best=likeliest,
    )


class Gain(NamedTuple):
    """Tokens per second of one way to decode over those of another, on the same requests."""

    ratio: float
    """Ratio of the times if both wrote the same text; NaN without tokens."""
    interval: tuple[float, float]
    """NaN for fewer than `FEWEST` prompts or batches."""


def gain(turns: Sequence[Turn], other: Sequence[Turn], size: int, level: float = LEVEL) -> Gain:
    """Return the gain of a way to decode over another, from its replies in batches of `size`.

    `other` are the other's replies to the same requests. Units are prompts if each request ran
    alone; the prompts of a larger batch share its time, so the batch is the unit.
    """
    costs: list[tuple[float, int, float, int]] = []
    units: list[tuple[int, ...]] = []
    for batch in batches_of(turns, size):
        costs.append((*_cost([other[i] for i in batch]), *_cost([turns[i] for i in batch])))
        # a prompt's unit, or the batch itself
        units.append((turns[batch[0]].prompt.unit,) if len(batch) == 1 else tuple(batch))
    return Gain(_ratio(*summed(costs)), interval(pooled(costs, units), _ratio, level))


def _cost(turns: Sequence[Turn]) -> tuple[float, int]:
    """Return seconds and tokens of a batch's rounds."""
    generations = [turn.generation for turn in turns]
    tokens = sum(sum(metrics.emitted_per_round(generation)) for generation in generations)
    return metrics.batch_seconds(generations), tokens


def _ratio(other_s: float, other: float, own_s: float, own: float) -> float:
    """Return tokens per second over those of another way to decode; NaN without tokens."""
    return own * other_s / (own_s * other) if own_s and other else NAN


def _histogram(values: list[int]) -> list[int]:
    """Return how many of `values` are 0, 1, 2 and so on."""
    return [values.count(v) for v in range(max(values, default=-1) + 1)]
