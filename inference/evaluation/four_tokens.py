"""Time of a target's pass over four tokens, which tells how free a verification is here."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

from ...heads.vocabulary import spread_ids
from ..decode import Request, Round, decode
from ..proposer import Prompts, Proposer
from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree, TreeShape
from ..settings import GREEDY
from ..targets.target import Target

CONTEXT = 64  # positions of the prompt
SAMPLES, FEWEST = 9, 3  # rounds of each of the two sizes, and the fewest that a median needs
SETTLE = 2  # rounds of each size that are not counted: the first ones after a prefill are slower
SECONDS = 10.0  # after which `FEWEST` rounds do


class FixedSizes(Proposer):
    """Proposer whose drafts are never right and cost nothing to make.

    Rounds have no draft and `drafts` of them in turn, and emit exactly one token.
    """

    name = "fixed sizes"

    def __init__(self, drafts: int) -> None:
        self.max_drafted = drafts
        self._shapes = [TreeShape((NO_NODE, *[0] * size)) for size in (0, drafts)]
        self._round = 0

    def prefill(self, prompts: Prompts) -> None:
        self._round = 0

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        shape = self._shapes[self._round % 2]
        self._round += 1
        tokens = torch.full((len(root), shape.nodes), NO_NODE, device=root.device)
        tokens[:, 0] = root
        return DraftTree(tokens, shape)


def four_tokens(target: Target) -> float | None:
    """Return the time of a pass over four tokens as a multiple of one over one token.

    It is a median over rounds of both kinds in turn, one request, `CONTEXT` positions; None for a
    target with fewer, for a compiled one, whose compiler would take minutes, or on a device that
    has not reported its times. It takes a second, or ten of a slow target.
    """
    rounds = 2 * (SETTLE + SAMPLES)
    if target.compiled or target.max_positions < CONTEXT + rounds + 4:
        return None
    request = Request(spread_ids(target.vocab_size, CONTEXT).tolist(), 0)
    until = time.monotonic() + SECONDS
    records: list[Round] = []
    steps = decode(target, FixedSizes(3), [request], rounds + 1, GREEDY, frozenset())
    for done in steps:
        record = done[0][1]
        if record.drafted is not None:  # not the prefill
            records.append(record)
        if len(records) >= 2 * (SETTLE + FEWEST) and time.monotonic() > until:
            break
    # The loop may be left in the middle: `close` runs the `finally` of `decode`.
    steps.close()
    counted = records[2 * SETTLE :]
    # A time is 0 where a device has not reported it yet.
    one, four = ([r.t_verify_s for r in counted[kind::2] if r.t_verify_s] for kind in (0, 1))
    return statistics.median(four) / statistics.median(one) if one and four else None
