"""Choice of the next token: processed distributions, keyed noise, and the drafts of a proposer.

Shapes: B batch, M nodes, D depths, K children of a node, V vocabulary, C capacity of the texts, A
accepted nodes with the root.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.settings import Sampling
from . import noise
from .tree import NO_NODE


class Draws:
    """Choices of one running batch: the processed distributions at any node, and their noise.

    The loop and the proposer share one object, so both see the same distributions and, under the
    coupled rule, the same noise. A node of depth d below a root at position r chooses the token of
    position r + d + 1.
    """

    def __init__(self, sampling: Sampling, keys: Tensor, text: Tensor, lengths: Tensor) -> None:
        self.sampling = sampling
        self._keys = keys  # [B]
        # [B, C]: the prompt and the accepted tokens before the root. From `lengths` on it holds a
        # token that the row has anyway, so that a penalty, which asks only if a token is in the
        # text, is not changed by it.
        self._text = text
        self.lengths = lengths.clone()  # [B]: position of the root, which moves on in place
        # [B, D, V]: noise of the positions after this round's roots, or None
        self._noise: Tensor | None = None

    def extend(self, ids: Tensor, counts: Tensor) -> None:
        """Append the first `counts` `[B]` of `ids` `[B, A]`, and move the roots on.

        The texts need space for A tokens more (`reserve`).
        """
        if self.sampling.history_processor is not None:
            # One scatter writes all rows: past its own count a row gets its first token.
            columns = torch.arange(ids.shape[1], device=ids.device)
            inside = columns < counts[:, None]
            filler = self._text[:, :1].expand_as(ids)
            self._text.scatter_(
                1, self.lengths[:, None] + columns, torch.where(inside, ids, filler)
            )
        # In place: a recorded round finds them where they were.
        self.lengths.add_(counts)
        self.forget_noise()

    def reserve(self, capacity: int) -> None:
        """Make space for texts of `capacity` tokens, by doubling, if `extend` writes them."""
        missing = max(capacity, 2 * self._text.shape[1]) - self._text.shape[1]
        if capacity > self._text.shape[1] and self.sampling.history_processor is not None:
            self._text = torch.cat([self._text, self._text[:, :1].expand(-1, missing)], dim=1)

    def forget_noise(self) -> None:
        """Make this round's noise again when it is asked for."""
        self._noise = None

    def placed(self, capacity: int) -> Draws:
        """Return choices with tensors of their own for `take`, and space for `capacity` tokens."""
        text = self._text
        if self.sampling.history_processor is not None:
            text = text[:, :1].repeat(1, capacity)
        return Draws(self.sampling, self._keys.clone(), text, self.lengths)

    def take(self, other: Draws) -> None:
        """Take over the requests of `other`, a batch of as many rows."""
        self._keys.copy_(other._keys)
        self.lengths.copy_(other.lengths)
        if self.sampling.history_processor is not None:
            self._text.copy_(other._text[:, :1].expand_as(self._text))
            self._text[:, : other._text.shape[1]] = other._text
        self.forget_noise()

    def keep(self, rows: Tensor) -> None:
        """Drop every batch row but `rows`."""
        self._keys = self._keys[rows]
        self._text = self._text[rows]
        self.lengths = self.lengths[rows]
        self._noise = None

    def scores(self, logits: Tensor, paths: Tensor | None) -> Tensor:
        """Return processed log-scores `[B, M, V]` after nodes with `logits` `[B, M, V]`.

        The distribution of the next token is their softmax. `paths` `[B, M, n]` are the tokens of
        each node's path from the root on (-1: none). Penalties count them, so they differ between
        siblings. `paths` may be None if `Sampling.history_processor` is None.
        """
        sampling = self.sampling
        # The best token of the raw logits is the choice, so nothing is copied or cast.
        if sampling.plain_greedy:
            return logits
        batch, nodes, vocab = logits.shape
        # Softmax, noise and penalties in bfloat16 would change which token is chosen.
        precise = logits if logits.dtype == torch.float64 else logits.float()
        # transformers' processors take one row of scores for each text
        flat = precise.reshape(batch * nodes, vocab)
        history: Any = None
        if sampling.history_processor is not None:
            assert paths is not None
            # -1 is not a token id: put one in its place that counts already
            paths = torch.where(paths < 0, self._text[:, :1, None], paths)
            text = self._text[:, None].expand(-1, nodes, -1)
            history = torch.cat([text, paths], dim=-1).reshape(batch * nodes, -1)
            flat = sampling.history_processor(history, flat)
        return sampling.warpers(history, flat).view(batch, nodes, vocab)

    def choices(self, scores: Tensor, depths: Tensor | int, levels: int | None = None) -> Tensor:
        """Return the target's token `[B, M]` after each node, from `scores` `[B, M, V]`.

        At T = 0 it is the best one, at T > 0 the best one after the noise of the position was added
        (Gumbel-max). `depths` are the nodes' `[1 | B, M]`, at most `levels`, or one for all.
        """
        if self.sampling.greedy:
            return scores.argmax(-1)
        if isinstance(depths, int):
            # One depth for all nodes: the noise `[B, 1, V]` broadcasts over them.
            return (scores + self._position_noise(depths, 1, scores)).argmax(-1)
        assert levels is not None, "the depths are known to the device only"
        # Noise belongs to the position, so nodes of one depth share it.
        by_depth = self._position_noise(0, levels + 1, scores)
        # [B, 1] and [1 | B, M] broadcast to the noise of each node's depth, [B, M, V].
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        return (scores + by_depth[rows, depths]).argmax(-1)

    def margins(self, logits: Tensor, paths: Tensor | None) -> Tensor:
        """Return how far the target's choice after each root is ahead of the next token, `[B]`.

        It is in units of the logits `[B, 1, V]`, the noise of the coupled rule included: rounding
        that moves them by less than half of it changes no choice. `paths` as in `scores`.
        """
        scores = self.scores(logits, paths)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        if self.sampling.coupled:
            scores = (scores + self._position_noise(0, 1, scores)) * self.sampling.temperature
        best = scores[:, 0].topk(2).values
        return best[:, 0] - best[:, 1]

    def prepare(self, levels: int, logits: Tensor) -> None:
        """Make the noise of the depths 0 .. `levels` at once, for logits such as `logits`."""
        if self.sampling.coupled:
            self._position_noise(0, levels + 1, logits)

    def _position_noise(self, depth: int, levels: int, like: Tensor) -> Tensor:
        """Return noise `[B, levels, V]` of the positions that nodes of depth `depth`, .. choose.

        It is kept until the roots move on. dtype, device and V are those of `like`.
        """
        made = 0 if self._noise is None else self._noise.shape[1]
        if depth + levels > made:
            # Column d of `_noise` belongs to depth d, hence to position root + d + 1. Example:
            # below a root at position 7 the columns 0 and 1 are of the positions 8 and 9.
            places = self.lengths[:, None] + torch.arange(
                made + 1, depth + levels + 1, device=like.device
            )
            more = noise.gumbel(self._keys[:, None], noise.COUPLED, places, like.shape[-1])
            self._noise = more if self._noise is None else torch.cat([self._noise, more], dim=1)
        assert self._noise is not None
        return self._noise[:, depth : depth + levels].to(like.dtype)

    def guess(self, logits: Tensor, depth: int, paths: Tensor | None) -> Tensor:
        """Return the drafter's one choice `[B, M]` after nodes; arguments as in `rank`.

        It is made with the target's noise, except under the rule match.
        """
        scores = self.scores(logits, paths)
        # The rule match draws the target's choice with noise of its own, which the draft must not
        # know: the likeliest token is the best guess then.
        return scores.argmax(-1) if self.sampling.rule == "match" else self.choices(scores, depth)

    def rank(
        self, logits: Tensor, depth: int, count: int, paths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the target's likeliest choices after nodes of one depth, as the drafter judges.

        `logits` `[B, M, V]` are the drafter's, `paths` as in `scores`. Returns tokens and their
        log-scores, both `[B, M, K]`, best first; K is `count`, or V if that is less.

        Under the coupled rule the target's own noise is added first, so the best token is what the
        target will choose wherever the two agree. A score is a log-softmax in units of the logits:
        as T goes to 0 it becomes the plain log-probability. Never use this for a rule that compares
        distributions, which needs draws (`sample`).
        """
        scores = self.scores(logits, paths)
        if self.sampling.coupled:
            scores = scores + self._position_noise(depth, 1, scores)
        # the processed scores are divided by T
        if not self.sampling.greedy:
            scores = scores * self.sampling.temperature
        # scores are summed along a path, and bfloat16 would round the sums
        scores = scores if scores.dtype == torch.float64 else scores.float()
        best = scores.log_softmax(-1).topk(min(count, scores.shape[-1]))
        return best.indices, best.values

    def sample(
        self, logits: Tensor, nodes: Tensor | int, count: int, paths: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Draw `count` tokens after each node without replacement.

        Returns the tokens `[B, M, K]` in the order of the draws, -1 where the distribution has run
        out of tokens, and the distribution `[B, M, V]` that they were drawn from. K is `count`, or
        V if that is less. `nodes` are node ids `[M]`, or one; `paths` as in `scores`.

        Under greedy decoding the draws are those of the logits as they are. Give a tree the
        distribution only where `sampling.compares_distributions`.
        The noise is fresh for every root and node id, and independent of the verifier's. The first
        `count` of Gumbel-perturbed log-probabilities are draws without replacement (Kool et al.,
        arXiv 1903.06059).
        """
        scores = self.scores(logits, paths)
        probs = scores.softmax(-1)
        # Truncation gives tokens no probability. Tokens with a subnormal probability are not drawn
        # either: it has few bits, some devices take it for 0, and the verifier has to know the
        # distribution of the draws. Any distribution is lossless to draw from.
        drawn = probs >= torch.finfo(probs.dtype).tiny
        probs = torch.where(drawn, probs, 0.0)
        # Root and node together name the place of the noise: no tree has as many as 2^20 nodes, so
        # no two places are the same number.
        places = self.lengths[:, None] * (1 << 20) + nodes
        # From the largest score on, as the softmax computes them: at a low temperature scores are
        # so large that float32 would round the noise away.
        noisy = (scores - scores.amax(-1, keepdim=True)) + noise.gumbel(
            self._keys[:, None], noise.DRAFT, places, scores.shape[-1]
        ).to(scores.dtype)
        best = noisy.masked_fill(~drawn, -torch.inf).topk(min(count, scores.shape[-1]))
        # top-k takes tokens that are not drawn when no other is left
        return torch.where(best.values > -torch.inf, best.indices, NO_NODE), probs

    def coins(self, nodes: int) -> Tensor:
        """Return the verifier's uniform numbers of this round, one for each node: `[B, nodes]`."""
        # The root's position names the round: no two rounds of a request have the same root.
        return noise.uniform(self._keys, noise.COIN, self.lengths, nodes)

    def last(self, probs: Tensor) -> Tensor:
        """Draw the last token `[B]` of this round from `probs` `[B, V]`."""
        return (
            # A token of probability 0 has -inf here, and noise is finite: it is never drawn.
            probs.log()
            + noise.gumbel(self._keys, noise.FINAL, self.lengths, probs.shape[-1]).to(probs.dtype)
        ).argmax(-1)
