"""Lookahead decoding (Fu et al., arXiv 2402.02057): n-grams from the target's own parallel guesses,
checked in the same forward.

A window of `window` columns runs beside the text as a Jacobi iteration. Column j holds guesses for
the tokens j + 1, j + 2, .. after the root; the first guesses of all columns form a chain, and each
column hangs its later ones below its own, so the whole window is a draft tree. The target's answers
at the ends of the columns complete n-grams for a pool, and become the window's newest row. N-grams
of the pool that start with the root are drafted along with it. Shapes: B batch, W columns, R =
ngram - 1 rows.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from ...heads.errors import UserError
from ..device import send
from ..proposer import MOST, Accepted, Prompts, positive
from ..sampling import Draws
from ..tree import NO_NODE, DraftTree, TreeShape


class _Row:
    """Window and pool of one request."""

    def __init__(self, tokens: list[int], window: int, depth: int, kept: int) -> None:
        # The paper starts from random tokens; the prompt's own, repeated, are as arbitrary and the
        # same in every run.
        fill = [tokens[i % len(tokens)] for i in range(window * depth)]
        self.rows = [fill[level * window : (level + 1) * window] for level in range(depth)]
        self._pool: dict[int, OrderedDict[tuple[int, ...], None]] = {}
        self._kept = kept
        self.root = tokens[-1]
        for start in range(len(tokens) - depth):
            self.remember(tokens[start : start + depth + 1])

    def remember(self, ngram: list[int]) -> None:
        """Keep the latest few continuations of the n-gram's first token."""
        known = self._pool.setdefault(ngram[0], OrderedDict())
        known[tuple(ngram[1:])] = None
        known.move_to_end(tuple(ngram[1:]))
        if len(known) > self._kept:
            known.popitem(last=False)

    def candidates(self) -> list[tuple[int, ...]]:
        return list(reversed(self._pool.get(self.root, {})))


class Lookahead:
    """`window` columns, n-grams of `ngram` tokens, at most `candidates` of them drafted a round."""

    name = "lookahead"
    taps: tuple[int, ...] = ()

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
        self._rows: list[_Row] = []

    def _make_shape(self) -> TreeShape:
        """Root; the window row by row; then one chain for each candidate."""
        parents = [NO_NODE]
        # the first row is a chain below the root: node j + 1 is column j
        parents += range(self._window)
        for level in range(1, self._depth):
            parents += [1 + (level - 1) * self._window + column for column in range(self._window)]
        for _ in range(self._candidates):
            start = len(parents)
            parents += [0, *range(start, start + self._depth - 1)]
        return TreeShape(tuple(parents))

    def prefill(self, prompts: Prompts) -> None:
        self._rows = [
            _Row(tokens, self._window, self._depth, self._candidates) for tokens in prompts.tokens
        ]

    def propose(self, root: Tensor, draws: Draws) -> DraftTree:
        filled = []
        for row in self._rows:
            tokens = [token for level in row.rows for token in level]
            found = [token for continuation in row.candidates() for token in continuation]
            filled.append(
                tokens + found + [NO_NODE] * (self._candidates * self._depth - len(found))
            )
        return DraftTree(
            torch.cat([root[:, None], send(filled, root.device)], dim=1), self.shape, informed=True
        )

    def commit(self, accepted: Accepted) -> None:
        assert accepted.choices is not None, (
            "lookahead needs the target's choices, which this rule does not have"
        )
        ends = 1 + (self._depth - 1) * self._window
        for row, tokens, choices in zip(self._rows, accepted.tokens, accepted.choices, strict=True):
            answers = choices[ends : ends + self._window]
            for column, answer in enumerate(answers):
                row.remember([level[column] for level in row.rows] + [answer])
            text = [row.root, *tokens]
            for start in range(len(text) - self._depth):
                row.remember(text[start : start + self._depth + 1])
            row.rows = self._advance([*row.rows[1:], answers], len(tokens), tokens[-1])
            row.root = tokens[-1]

    def _advance(self, rows: list[list[int]], steps: int, filler: int) -> list[list[int]]:
        """Columns of positions that are decided now leave; the last guess of each row fills the far
        end."""
        moved = []
        for level in rows:
            shifted = level[min(steps - 1, len(level)) :]
            moved.append(
                (shifted + [level[-1] if level else filler] * self._window)[: self._window]
            )
        return moved

    def keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def finish(self) -> None:
        self._rows = []
