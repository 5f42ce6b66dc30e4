"""Measurement of drafters and plain decoding in one setting, in the loop that users decode with.

All ways to decode take turns on each batch of prompts, so that a slower machine slows all of them.
Their order is drawn for each run, so that none always follows the same other one. Of `repeats` runs
of a batch, the one of median decode time counts; tokens and rounds are the same in all of them.
docs/metrics.md defines the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from msgspec import convert, to_builtins

from ...heads.files import JsonObject
from ...heads.layout import dtype_name
from ..base.console import ProgressReporter
from ..base.settings import Rule, Sampling
from ..conversations.prompts import Prompt, next_turn
from ..decode import Generation, Request, generate
from ..metrics import batch_seconds
from ..proposers.contract import DrafterSpec, Proposer
from ..rounds.noise import row_keys
from ..rounds.sampling import Draws
from ..targets.masks import with_replies
from ..targets.target import Target
from .drafter_names import distinct_names
from .journal import Journal


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
WARM_UP = 8  # tokens of a first run that is not counted


@dataclass
class ChosenWay:
    """Drafter as a way to decode, with settings that a profile, an engine or `tune` chose."""

    name: str
    make: Callable[[], Proposer]
    """Returns its proposer, set up for the next batch."""
    setting: JsonObject
    drafter: str = ""
    """Spec of the drafter for which the settings were chosen."""
    spec: DrafterSpec | None = None
    """Spec and suffix that it is named after, in place of `name`."""
    rule: Rule | None = None
    """Acceptance rule at T > 0, in place of the sampling's."""

    def generate(
        self,
        target: Target,
        requests: Sequence[Request],
        max_new_tokens: int,
        sampling: Sampling,
    ) -> list[Generation]:
        """Return the reply to each request, as `decode.generate` does."""
        if self.rule is not None and not sampling.greedy:
            sampling = replace(sampling, rule=self.rule)
        return generate(target, self.make(), requests, max_new_tokens, sampling)


Way = Proposer | ChosenWay


def decode_alternately(
    target: Target,
    ways: Sequence[Way],
    prompts: Sequence[Prompt],
    setting: Setting,
    progress: ProgressReporter | None = None,
    journal: Journal | None = None,
) -> Results:
    """Decode every prompt in every way, of which the first is plain decoding.

    Later turns of a conversation continue plain decoding's reply, so that all drafters get the same
    text; `progress` does not count them, since their number is not known. Batches that `journal`
    holds are not decoded again.
    """
    names = distinct_names(ways)
    by_name = dict(zip(names, ways, strict=True))
    results: Results = {name: [] for name in names}
    waiting, number = list(prompts), 0
    room = target.max_positions - setting.max_new_tokens
    while waiting:
        found = _alternately(target, by_name, waiting, number, setting, journal)
        for batch, replies, decoded in found:
            for name, generations in replies.items():
                pairs = zip(batch, generations, strict=True)
                results[name] += [Turn(prompt, number, reply) for prompt, reply in pairs]
            if progress is not None and number == 0:
                (progress.update if decoded else progress.skip)(len(batch))
        number += 1
        answered = results[names[0]][-len(waiting) :]
        waiting = []
        for turn in answered:
            reply = turn.generation.token_ids
            following = next_turn(
                turn.prompt, reply, target.tokenizer, target.name, target.eos_ids, room
            )
            if following is not None:
                waiting.append(following)
    return results


def _alternately(
    target: Target,
    ways: dict[str, Way],
    prompts: Sequence[Prompt],
    number: int,
    setting: Setting,
    journal: Journal | None,
) -> Iterator[tuple[Sequence[Prompt], dict[str, list[Generation]], bool]]:
    """Yield each batch of prompts with every way's replies, those of the run of median time.

    The third value is False for replies from `journal`. `number` is the turn's number and also the
    requests' sample number, so that each turn has its own noise, the same in all ways.
    """
    warm = False
    for start in range(0, len(prompts), setting.batch):
        batch = prompts[start : start + setting.batch]
        key = (
            f"T {setting.sampling.temperature:g}, batch {setting.batch}, turn {number}, prompt "
            f"{start}"
        )
        if journal is not None and (stored := journal.get(key)) is not None:
            yield batch, convert(stored, dict[str, list[Generation]]), False
            continue
        if not warm and number == 0:
            first, tokens = Request(batch[0].token_ids, 0), min(setting.max_new_tokens, WARM_UP)
            for way in ways.values():
                _decode(target, way, [first], tokens, setting.sampling)
        warm = True
        requests = []
        for place, prompt in enumerate(batch, start):
            requests.append(Request(prompt.token_ids, place, number))
        runs: dict[str, list[list[Generation]]] = {name: [] for name in ways}
        for repeat in range(setting.repeats):
            for name, way in Random(f"{key}, run {repeat}").sample([*ways.items()], len(ways)):
                runs[name].append(
                    _decode(target, way, requests, setting.max_new_tokens, setting.sampling)
                )
        # of an even number, the slower one of the middle two
        median = setting.repeats // 2
        chosen = {}
        for name, runs_of_way in runs.items():
            chosen[name] = sorted(runs_of_way, key=batch_seconds)[median]
        if journal is not None:
            journal.put(key, to_builtins(chosen))
        yield batch, chosen, True


def _decode(
    target: Target, way: Way, requests: list[Request], max_new_tokens: int, sampling: Sampling
) -> list[Generation]:
    if isinstance(way, ChosenWay):
        return way.generate(target, requests, max_new_tokens, sampling)
    return generate(target, way, requests, max_new_tokens, sampling)


@torch.inference_mode()
def first_difference(
    target: Target,
    plain: Generation,
    other: Generation,
    sampling: Sampling,
    request: tuple[int, int] | None = None,
) -> tuple[int, float | None]:
    """Return the index of the first token in which two replies differ, and the top-2 gap there.

    The gap is the target's best logit, after a penalty, minus its second best, with the noise of
    coupled decoding if `request`, the request's id and sample, is given. It is None for sampled
    decoding without that noise. Near-ties flip in low precision, because a tree is verified in
    another shape than a single token; a large gap would be a bug.
    """
    # If one reply is a prefix of the other, they differ after it.
    index = min(len(plain.token_ids), len(other.token_ids))
    for position, (a, b) in enumerate(zip(plain.token_ids, other.token_ids, strict=False)):
        if a != b:
            index = position
            break
    sampling = sampling.resolved(target.repetition_penalty)
    if not sampling.greedy and (request is None or not sampling.coupled):
        return index, None
    ids = torch.tensor([plain.prompt_ids + plain.token_ids[:index]], device=target.device)
    layout = with_replies([len(plain.prompt_ids)], ids.shape[1])
    logits = target.head(target.forward(ids, layout).last[:, -1:])
    keys = row_keys(sampling.seed, [request or (0, 0)], ids.device)
    # The last token is the root, the only one of its path. A penalty depends only on whether a
    # token occurs, so the root may be in both.
    draws = Draws(sampling, keys, ids, torch.tensor([ids.shape[1] - 1], device=ids.device))
    return index, float(draws.margins(logits, ids[:, None, -1:])[0])


def difference(
    target: Target,
    plain: Generation,
    other: Generation,
    sampling: Sampling,
    request: tuple[int, int],
) -> str:
    """Return a phrase that says whether a reply equals plain decoding's, or where they differ.

    `request` is as in `first_difference`.
    """
    if plain.token_ids == other.token_ids:
        return "the same text"
    index, gap = first_difference(target, plain, other, sampling, request)
    where = f"another text from token {index + 1} on"
    if not comparable(other) or gap is None:
        return f"{where}, as {other.rounds[0].rule} does, which keeps only the distribution"
    apart = f"{where}, where the target's two best logits are {gap:.2g} apart"
    if target.dtype.itemsize < 4:
        return f"{apart} (near-ties flip in {dtype_name(target.dtype)})"
    return f"{apart} (near-ties flip by rounding, others must not)"


def comparable(generation: Generation) -> bool:
    """Return True if plain decoding with the same noise must write the same text.

    Rules that compare distributions keep only the distribution.
    """
    return all(round_.rule in ("greedy", "gumbel", "match") for round_ in generation.rounds)
