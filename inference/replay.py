"""Estimated tau: the rounds that decoding would take over a known text, replayed on teacher-forced
correctness.

The average over all rows is another number: decoding visits positions that its own accepts select.
In trials the row average was 4 to 13% too high. On target-greedy text in fp32 the replay below
counts exactly what the decode loop counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .accept import match
from .cache import TreeCache
from .proposer import Accepted, Prompts, Proposer
from .sampling import Draws
from .settings import GREEDY
from .target import Hidden


def replay(accepted: Sequence[int], start: int, end: int) -> list[int]:
    """Tokens kept in each round when decoding writes positions `start + 1 .. end - 1` of a text.

    `accepted[n]` is how many drafts are right when position n is the root; `start` is the first
    response position (chosen by the prefill, produced by no round), `end` the length of the text. A
    round at n keeps its accepted drafts and the target's next token, cut at the end of the text,
    and the next root stands at n + accepted + 1.
    """
    kept = []
    root = start
    while root < end - 1:
        kept.append(min(accepted[root] + 1, end - 1 - root))
        root += accepted[root] + 1
    return kept


def rank_accuracy(texts: Sequence[tuple[Tensor, int]], ranks: int) -> tuple[list[list[float]], int]:
    """How often the rank-r draft is right at each depth, r < `ranks`, and over how many roots.

    `texts`: teacher-forced ranks `[S, D]` (-1: none of the best) and the start of the reply. Only
    roots with a token at every depth count, so that the depths are comparable.
    """
    depths = texts[0][0].shape[1]
    rows = torch.cat([found[start : max(len(found) - depths, start)] for found, start in texts])
    return [
        [int((rows[:, d] == r).sum()) / max(len(rows), 1) for r in range(ranks)]
        for d in range(depths)
    ], len(rows)


@torch.inference_mode()
def rounds_on_text(proposer: Proposer, ids: Tensor, start: int, hidden: Hidden) -> list[int]:
    """Tokens kept in each round when `proposer` drafts greedily along a known text, its features
    standing in for the target.

    `ids` `[S]` and `hidden` `[S, H]` of them; the reply begins at `start`. For drafters that read
    features only, trees that follow their confidence included: the target itself is not needed, so
    stored features can score a drafter.
    """
    end, root = len(ids), start
    text = [*ids.tolist(), *[UNKNOWN] * (proposer.max_drafted + 2)]

    def part(a, b):
        return Hidden(hidden.last[None, a:b], tuple(tap[None, a:b] for tap in hidden.taps))

    length = torch.tensor([start], device=ids.device)
    draws = Draws(GREEDY, torch.zeros_like(length), ids[None], length)
    proposer.prefill(
        Prompts([text[: start + 1]], ids[None, :start], length, part(0, start), TreeCache(0, 0))
    )
    kept = []
    while root < end - 1:
        tree = proposer.propose(ids[root : root + 1], draws)
        coming = torch.tensor(text[root + 1 : root + 2 + tree.levels], device=ids.device)
        node = int(match(tree, coming[tree.tables.depths]))
        path = [n for n in tree.tables.paths[0, node].tolist() if n >= 0]
        kept.append(min(len(path), end - 1 - root))
        past = root + len(path)
        count = torch.tensor([len(path)], device=ids.device)
        if past < end:
            proposer.commit(
                Accepted(
                    [text[root + 1 : past + 1]],
                    [path],
                    torch.tensor([path], device=ids.device),
                    ids[None, root:past],
                    count,
                    part(root, past),
                )
            )
            draws.extend(ids[None, root:past], count)
        root = past
    proposer.finish()
    return kept


UNKNOWN = -2  # what stands past the end of a text: equal to no token and to no missing node
