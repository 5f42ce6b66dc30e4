"""Estimated tau by replay: the rounds of decoding over a known text, from teacher-forced drafts.

The average over all positions is another number: decoding visits positions that its own accepted
drafts select. In trials the average over positions was 4 to 13% too high. On target-greedy text in
float32 the replay below counts exactly the rounds of the decode loop (docs/metrics.md#tau).

Shapes: S positions of a text, D drafts, K best tokens of a draft, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .base.settings import GREEDY
from .proposers.contract import Accepted, Prompts, Proposer
from .rounds.accept import match
from .rounds.cache import TreeCache
from .rounds.outcome import Hidden
from .rounds.sampling import Draws

RANKS = 10  # best tokens of a draft whose accuracies are counted
UNKNOWN = -2
"""Token past the end of a text: it equals no token and no missing node."""


def replay(accepted: Sequence[int], start: int, end: int) -> list[int]:
    """Return the tokens emitted in each round of decoding that writes `start + 1 .. end - 1`.

    `accepted[n]` is how many drafts are right when position n is the root; `start` is the first
    position of the reply, which the prefill chose, and `end` the length of the text. A round at n
    emits its accepted drafts and the target's next token, cut at the end of the text, and the next
    root is n + accepted[n] + 1.

    Example: `replay([0, 2, 0, 0, 1, 0], 1, 6)` is `[3, 1]`. The round at 1 emits positions 2, 3, 4;
    the round at 4 has one right draft, but only position 5 is left.
    """
    emitted = []
    root = start
    while root < end - 1:
        emitted.append(min(accepted[root] + 1, end - 1 - root))
        root += accepted[root] + 1
    return emitted


def rank_of(tokens: Tensor, best: Tensor, missing: int = -1) -> Tensor:
    """Return the rank `[...]` of each token `[...]` among the best tokens `[..., K]` of a draft.

    The best tokens come best first. The rank is `missing` where a token is not among them.
    """
    # A token occurs at most once among the best ones, so the first hit is the only one.
    hit = best == tokens[..., None]
    return torch.where(hit.any(-1), hit.int().argmax(-1), missing)


@torch.inference_mode()
def rounds_on_text(proposer: Proposer, ids: Tensor, start: int, hidden: Hidden) -> list[int]:
    """Return the tokens emitted in each round when `proposer` drafts greedily along a known text.

    The text is `ids` `[S]` with features `hidden` `[S, H]`; its reply begins at `start`.
    """
    end, root = len(ids), start
    # A round near the end looks at the text as many tokens ahead as its tree has levels.
    text = [*ids.tolist(), *[UNKNOWN] * (proposer.max_drafted + 2)]

    def features(first: int, last: int) -> Hidden:
        taps = tuple(tap[None, first:last] for tap in hidden.taps)
        return Hidden(hidden.last[None, first:last], taps)

    length = torch.tensor([start], device=ids.device)
    # Greedy draws use no noise and read no text: key and text are there for the interface.
    draws = Draws(GREEDY, torch.zeros_like(length), ids[None], length)
    proposer.prefill(
        Prompts(
            tokens=[text[: start + 1]],
            ids=ids[None, :start],
            lengths=length,
            hidden=features(0, start),
            cache=TreeCache(0, 0),
        )
    )
    emitted = []
    while root < end - 1:
        tree = proposer.propose(ids[root : root + 1], draws)
        # The target's choice after a node of depth d is the text's token at root + d + 1, if the
        # node's path is the text itself; other nodes are wrong whatever is here.
        following = torch.tensor(text[root + 1 : root + 2 + tree.levels], device=ids.device)
        node = int(match(tree, following[tree.tables.depths]))
        path = [n for n in tree.tables.paths[0, node].tolist() if n >= 0]
        # The path counts the root, and the round also emits the bonus token.
        emitted.append(min(len(path), end - 1 - root))
        next_root = root + len(path)
        # After the last token no feature is left to commit, and no round follows.
        if next_root < end:
            count = torch.tensor([len(path)], device=ids.device)
            gained = ids[None, root:next_root]
            proposer.commit(
                Accepted(
                    tokens=[text[root + 1 : next_root + 1]],
                    path=torch.tensor([path], device=ids.device),
                    ids=gained,
                    counts=count,
                    hidden=features(root, next_root),
                )
            )
            draws.extend(gained, count)
        root = next_root
    proposer.finish()
    return emitted
