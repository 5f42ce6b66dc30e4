"""How the next token is chosen: processed distributions, keyed noise, and what a proposer may draw.

Shapes: B batch, M nodes, V vocabulary, K children, C text capacity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import noise
from .settings import Sampling


class Draws:
    """The choices of one running batch: the processed distributions at any node, and the noise that
    belongs to it.

    One object serves the loop and the proposer, so both see the same distributions and, in the
    coupled mode, the same noise. A node of depth d below a root at position r chooses the token of
    position r + d + 1.
    """

    def __init__(self, sampling: Sampling, keys: Tensor, text: Tensor, lengths: Tensor) -> None:
        self.sampling = sampling
        self._keys = keys  # [B]
        # [B, C]: prompt and accepted tokens; at and after `lengths`, a token that the row holds
        # anyway
        self._text = text
        self.lengths = lengths  # [B], the root's position
        # [B, levels, V], of the positions after this round's roots
        self._noise: Tensor | None = None

    def extend(self, ids: Tensor, counts: Tensor) -> None:
        """Append `counts` `[B]` of `ids` `[B, A]` to the texts; roots move on by as many."""
        if self.sampling.history_processor is not None:
            columns = torch.arange(ids.shape[1], device=ids.device)
            inside = columns < counts[:, None]
            filler = self._text[:, :1].expand_as(ids)
            self._text.scatter_(
                1, self.lengths[:, None] + columns, torch.where(inside, ids, filler)
            )
        self.lengths, self._noise = self.lengths + counts, None

    def reserve(self, capacity: int) -> None:
        """Make room for texts of so many tokens, by doubling; nothing is kept if no processor reads
        it."""
        missing = max(capacity, 2 * self._text.shape[1]) - self._text.shape[1]
        if capacity > self._text.shape[1] and self.sampling.history_processor is not None:
            self._text = torch.cat([self._text, self._text[:, :1].expand(-1, missing)], dim=1)

    def keep(self, rows: Tensor) -> None:
        self._keys, self._text, self.lengths = (
            self._keys[rows],
            self._text[rows],
            self.lengths[rows],
        )
        self._noise = None

    def scores(self, logits: Tensor, paths: Tensor | None) -> Tensor:
        """Processed log-scores `[B, M, V]` after nodes whose tokens, from the root on, are `paths`
        `[B, M, d]` (-1 = none).

        The distribution of the next token is their softmax. Penalties count the node's own path,
        which differs between siblings; `paths` may be None if nothing asks for it
        (`Sampling.history_processor`).
        """
        sampling = self.sampling
        if sampling.greedy and sampling.history_processor is None:
            return logits
        batch, nodes, vocab = logits.shape
        flat = (logits if logits.dtype == torch.float64 else logits.float()).reshape(
            batch * nodes, vocab
        )
        history: Any = None
        if sampling.history_processor is not None:
            assert paths is not None
            # a token that counts already
            paths = torch.where(paths < 0, self._text[:, :1, None], paths)
            text = self._text[:, None].expand(-1, nodes, -1)
            history = torch.cat([text, paths], dim=-1).reshape(batch * nodes, -1)
            flat = sampling.history_processor(history, flat)
        return sampling.warpers(history, flat).view(batch, nodes, vocab)

    def choices(self, scores: Tensor, depths: Tensor | int, levels: int | None = None) -> Tensor:
        """The target's token `[B, M]` after each node: argmax, at T > 0 with the noise of the
        position (Gumbel-max).

        `depths` of the nodes `[1 | B, M]`, at most `levels`, or one for all.
        """
        if self.sampling.greedy:
            return scores.argmax(-1)
        if isinstance(depths, int):
            return (scores + self._position_noise(depths, 1, scores)).argmax(-1)
        # Noise belongs to the position, so a few levels serve all nodes; a path cannot be longer
        # than there are nodes.
        by_depth = self._position_noise(
            0, levels + 1 if levels is not None else scores.shape[1], scores
        )
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        return (scores + by_depth[rows, depths]).argmax(-1)

    def _position_noise(self, depth: int, levels: int, like: Tensor) -> Tensor:
        """`[B, levels, V]`: noise of the positions that nodes of depth `depth`, `depth` + 1, ..
        choose.

        Drafting and verifying a round ask for the same noise, so it is made once.
        """
        there = 0 if self._noise is None else self._noise.shape[1]
        if depth + levels > there:
            places = self.lengths[:, None] + torch.arange(
                there + 1, depth + levels + 1, device=like.device
            )
            more = noise.gumbel(self._keys[:, None], noise.COUPLED, places, like.shape[-1])
            self._noise = more if self._noise is None else torch.cat([self._noise, more], dim=1)
        assert self._noise is not None
        return self._noise[:, depth : depth + levels].to(like.dtype)

    def guess(self, logits: Tensor, depth: int, paths: Tensor | None) -> Tensor:
        """The drafter's one choice `[B, M]` after nodes of one depth: with the target's noise,
        except under the rule match."""
        scores = self.scores(logits, paths)
        return scores.argmax(-1) if self.sampling.rule == "match" else self.choices(scores, depth)

    def rank(
        self,
        logits: Tensor,
        depth: int,
        count: int,
        paths: Tensor | None,
        score_temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The `count` likeliest choices of the target after nodes `[B, M]` of one depth, judged by
        the drafter's `logits`.

        Tokens and their log-scores `[B, M, count]`, best first. In the coupled mode the target's
        own noise is added first, so the best one is what the target will choose wherever the two
        agree; the score is in units of the logits, which at T -> 0 becomes the plain
        log-probability. Never for a rule that compares distributions: use `sample` there.

        `score_temperature` is the score temperature: log-scores of the logits over it. Below 1 the
        best token of each node counts for more, as it should at T = 0, where the target takes its
        best one always (verification-and-trees 8.8).
        """
        scores = self.scores(logits, paths)
        if self.sampling.coupled:
            scores = scores + self._position_noise(depth, 1, scores)
        if not self.sampling.greedy:
            scores = scores * self.sampling.temperature
        # sums along a path would be rounded to bf16
        scores = scores if scores.dtype == torch.float64 else scores.float()
        best = (
            (scores / score_temperature if score_temperature != 1 else scores)
            .log_softmax(-1)
            .topk(min(count, scores.shape[-1]))
        )
        return best.indices, best.values

    def sample(
        self, logits: Tensor, nodes: Tensor | int, count: int, paths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`count` tokens `[B, M, count]` drawn without replacement, in the order of the draws, and
        the distribution `[B, M, V]`.

        Fresh noise for every root and every node id in `nodes` (`[M]`, or one), independent of what
        the verifier uses: the first `count` of Gumbel-perturbed log-probabilities are such draws
        (Kool et al., arXiv 1903.06059). -1 where the distribution has run out of tokens.
        """
        scores = self.scores(logits, paths)
        probs = scores.softmax(-1)
        # Root and node together name the place; 1 << 20 nodes are more than any tree has.
        places = self.lengths[:, None] * (1 << 20) + nodes
        noisy = scores + noise.gumbel(
            self._keys[:, None], noise.DRAFT, places, scores.shape[-1]
        ).to(scores.dtype)
        best = noisy.topk(min(count, scores.shape[-1]))
        return torch.where(probs.gather(-1, best.indices) > 0, best.indices, -1), probs

    def coins(self, nodes: int) -> Tensor:
        """Uniforms `[B, nodes]` of this round, for the verifier."""
        return noise.uniform(self._keys, noise.COIN, self.lengths, nodes)

    def last(self, probs: Tensor) -> Tensor:
        """A draw `[B]` from `probs` `[B, V]` that ends this round."""
        return (
            probs.log()
            + noise.gumbel(self._keys, noise.FINAL, self.lengths, probs.shape[-1]).to(probs.dtype)
        ).argmax(-1)
