"""Lookahead decoding (Fu et al., arXiv 2402.02057): drafts of the target's own parallel guesses.

A window of W columns and `ngram - 1` levels holds guesses, and is verified in every round together
with the drafts (a Jacobi iteration). Column j (from 0) holds guesses for the tokens j + 1, j + 2,
.. after the root. The first guesses of all columns form a chain below the root, and the later ones
of a column form a chain below its first, so the whole window is a part of the draft tree.

The target's choices at the ends of the columns complete n-grams, which go into a pool, and become
the window's newest level. N-grams of the pool that begin with the root are drafted, besides the
window.

Shapes: B batch, N nodes of the tree with the root, W columns of the window.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain

import torch
from torch import Tensor

from ...heads.errors import UserError
from ..proposer import Accepted, Prompts, Proposer
from ..rounds.device import send
from ..rounds.sampling import Draws
from ..rounds.tree import NO_NODE, DraftTree, TreeShape
from ..tree_settings import MOST, positive


class _WindowRow:
    """Window and pool of one request.

    `rows[l][j]` is the guess of level l in column j; `root` is the text's last token.
    """

    def __init__(self, tokens: list[int], window: int, depth: int, kept: int) -> None:
        """Fill window and pool from a prompt.

        `tokens` are the prompt and the root. The window has `window` columns and `depth` levels; a
        token has at most `kept` continuations of `depth` tokens in the pool.
        """
        # The paper starts from random tokens. The prompt's own, repeated, are as arbitrary, and the
        # same in every run.
        fill = [tokens[i % len(tokens)] for i in range(window * depth)]
        self.rows = [fill[start : start + window] for start in range(0, len(fill), window)]
        # by an n-gram's first token: its continuations, in the order in which they came up last
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self._kept = kept
        self.root = tokens[-1]
        # An n-gram has depth + 1 tokens. Of 5 tokens and depth 2, n-grams begin at 0, 1 and 2.
        for start in range(len(tokens) - depth):
            self.remember(tokens[start : start + depth + 1])

    def remember(self, ngram: list[int]) -> None:
        """Add an n-gram to the pool, which keeps the latest few with the same first token."""
        continuations = self._pool.setdefault(ngram[0], OrderedDict())
        continuations[tuple(ngram[1:])] = None
        # Assigning to a key that is there leaves it in its old place.
        continuations.move_to_end(tuple(ngram[1:]))
        if len(continuations) > self._kept:
            # One was added, so at most one is too many: the one that has not come up for longest.
            continuations.popitem(last=False)

    def candidates(self) -> list[tuple[int, ...]]:
        """Return the continuations of the root in the pool, the latest first."""
        return list(reversed(self._pool.get(self.root, {})))


class Lookahead(Proposer):
    """Proposer of a window of guesses, and of n-grams that earlier guesses have made.

    The window has `window` columns; n-grams have `ngram` tokens, and at most `candidates` of them
    are drafted in a round. Raises `UserError` if that makes more than `MOST` nodes.
    """

    name = "lookahead"

    def __init__(self, window: int = 4, ngram: int = 3, candidates: int = 4) -> None:
        self._window = positive("window", window)
        self._depth = positive("ngram", ngram, least=2) - 1
        self._candidates = positive("candidates", candidates)
        drafted = self._depth * (self._window + self._candidates)
        if drafted > MOST:
            raise UserError(
                f"lookahead would have {drafted} tokens verified a round, {MOST} at most; lower "
                "window or ngram"
            )
        self.shape = self._make_shape()
        self.max_drafted = self.shape.drafted
        self._rows: list[_WindowRow] = []

    def _make_shape(self) -> TreeShape:
        """Return the shape: root, window level by level, and a chain for each candidate."""
        parents = [NO_NODE]
        # The first level is a chain below the root: column j is node j + 1, and its parent node j.
        # Of the other levels each node hangs below its own column in the level before. Example of
        # window 3: nodes 1, 2, 3 are a chain, and 4, 5, 6 have the parents 1, 2, 3.
        parents += range(self._window)
        for level in range(1, self._depth):
            first = 1 + (level - 1) * self._window
            parents += range(first, first + self._window)
        for _ in range(self._candidates):
            start = len(parents)
            # The first token hangs on the root, each other one on the node before it.
            parents += [0, *range(start, start + self._depth - 1)]
        return TreeShape(tuple(parents))

    def prefill(self, prompts: Prompts) -> None:
        self._rows = [
            _WindowRow(tokens, self._window, self._depth, self._candidates)
            for tokens in prompts.tokens
        ]

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        """Return the window and the candidates from the pool as a draft tree below `root` `[B]`."""
        drafts = []
        for row in self._rows:
            # The order of the nodes in the shape: the window by levels, then one chain after
            # another.
            draft = list(chain(*row.rows, *row.candidates()))
            # A pool with fewer candidates leaves whole chains out: all continuations are as long.
            missing = self.shape.drafted - len(draft)
            drafts.append(draft + [NO_NODE] * missing)
        tokens = torch.cat([root[:, None], send(drafts, root.device)], dim=1)
        # The window's guesses are earlier choices of the target, with the noise of these positions.
        return DraftTree(tokens, self.shape, informed=True)

    def commit(self, accepted: Accepted) -> None:
        """Add the n-grams of the target's choices and of the emitted text, and move the window."""
        assert accepted.choices is not None, (
            "lookahead needs the target's choices, which this rule does not have"
        )
        # The nodes of the window's last level, where the columns end: with window 3 and n-grams of
        # 3 tokens (two levels) they are 4, 5 and 6.
        ends = 1 + (self._depth - 1) * self._window
        for row, tokens, choices in zip(self._rows, accepted.tokens, accepted.choices, strict=True):
            answers = choices[ends : ends + self._window]
            for column, answer in enumerate(answers):
                # A column from top to bottom, and the target's token after its last guess.
                row.remember([level[column] for level in row.rows] + [answer])
            # the emitted text is as good a source of n-grams
            text = [row.root, *tokens]
            for start in range(len(text) - self._depth):
                row.remember(text[start : start + self._depth + 1])
            row.rows = self._advance([*row.rows[1:], answers], len(tokens), tokens[-1])
            row.root = tokens[-1]

    def _advance(self, rows: list[list[int]], steps: int, filler: int) -> list[list[int]]:
        """Return the levels `rows` moved to the positions after the new root.

        The root has moved by `steps` positions. Guesses of decided positions leave, and the last
        guess of each level is repeated at its far end; `filler` takes its place in an empty level.
        """
        moved = []
        for level in rows:
            # The oldest level has been dropped, so every level guesses one position later than its
            # number says: only `steps - 1` columns have to leave. Example: of [a b c], one step
            # leaves all three, two steps leave [b c c], and three [c c c].
            shifted = level[min(steps - 1, len(level)) :]
            padding = [level[-1] if level else filler] * self._window
            moved.append((shifted + padding)[: self._window])
        return moved

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def finish(self) -> None:
        self._rows = []
