"""Training of DFlash drafters: initial weights, mask token, calibration.

The mask token is in the slots of a block that are to be drafted. It is one that texts do not hold,
so that a drafter reads it as a slot and as nothing else. A text that holds it all the same is
decoded as correctly as any other, only drafted worse.

Shapes: S positions, D drafts of a block, n roots that are run together or sampled positions, F
taps, H hidden size, E size of an attention head, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....heads.artifact import Artifact
from ....heads.dflash import BlockShape, DFlashDrafter, default_taps
from ....heads.errors import UserError
from ....heads.files import JsonObject
from ....heads.layers import check_taps, chosen_sizes
from ....heads.vocabulary import spread_ids
from ....inference.rounds.outcome import Hidden
from ....inference.targets.target import TargetSource
from ...data.batches import Batches
from ...losses.blocks import contexts, run_blocks
from ...losses.calibration import RankedMethod, batch_of_text, ranks_in
from ...losses.initialization import (
    apply_init_from,
    check_gradients_pass,
    draft_vocabulary,
    kept_shape,
    shrink_logits,
)
from ...losses.vocabulary import VocabularyMap
from ...method import FeaturesRead
from ...outline import FROZEN, TRAINED, MetaTarget, Outline, work_of
from .config import DFlashConfig, DFlashRun
from .loss import BlockObjective

log = logging.getLogger(__name__)

SPREAD = 0.25
"""Standard deviation of an untrained drafter's logits. It is small because states that are made
from a mask token's embedding give the tokens of texts low probabilities."""
PLACES = 32  # roots whose blocks `forced_blocks` runs at one time
# Length of the direction that queries and keys share at first (`attend_nearby`); random weights
# alone give them a length of about 3 in another direction each, for heads of size 32.
NEARBY = 5.0
RIDGE = 0.03  # of `linear_fit`, relative to the mean squared length of a row
SMALLEST_ROW = 0.1  # smallest fit embedding row of a mask token, as a share of the usual size


def forced_blocks(
    drafter: DFlashDrafter, hidden: Hidden, ids: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Run a block at every position of a text, in order, and yield n roots at a time.

    Yields the blocks' outputs `[n, D, H]`, the text's token before each draft `[n, D]` and the
    text's token in its place `[n, D]`, -1 past the end.

    Example: in a text of 5 tokens, root 3 with three drafts has x3 x4 0 before them (past the end
    any token does, which nothing reads) and x4 -1 -1 in their places.
    """
    length, batch = len(ids), batch_of_text(ids)
    context = contexts(drafter, batch, tuple(tap[None] for tap in hidden.taps))
    ahead = functional.pad(ids, (0, drafter.drafts), value=-1).unfold(0, drafter.drafts + 1, 1)
    for start in range(0, length, PLACES):
        # Always as many blocks: kernels of other sizes would be compiled for each.
        roots = torch.arange(start, start + PLACES).clamp(max=length - 1)
        text = ahead[start : start + PLACES]
        outputs = run_blocks(drafter, batch, roots[None], context)[0, : len(text)]
        yield outputs, text[:, :-1].clamp(min=0), text[:, 1:]


@torch.no_grad()
def rescale(drafter: DFlashDrafter, tap_sizes: tuple[float, ...], keep: bool) -> None:
    """Divide the taps by powers of two near their sizes `tap_sizes`, root mean squares.

    With it `fc` learns at the pace of the other matrices: raw taps have sizes of 10 to 100, the
    weights of `fc` would be as much smaller, and a step of AdamW would change them by as much as
    they are. With `keep` the drafter computes the same as before, bit for bit (a factor that is a
    power of two rounds nothing).
    """
    # Example: a tap of size 27, near 2^5, is multiplied by 1/32.
    powers = [2.0 ** -round(math.log2(size)) for size in tap_sizes]
    scales = torch.tensor(powers, device=drafter.tap_scales.device)
    if keep:
        # `fc` reads taps times scale: what the scale gains, the weight has to lose.
        drafter.fc.weight.div_(drafter.columns(scales / drafter.tap_scales))
    drafter.tap_scales.copy_(scales)


@torch.no_grad()
def attend_nearby(drafter: DFlashDrafter, taps: tuple[Tensor, ...], ids: Tensor) -> None:
    """Let queries and keys begin so that attention finds the rows that a draft depends on.

    `taps` `[n, H]` each and `ids` `[n]` are a sample of the target's features and tokens. A third
    of the key-value heads (at least one, if there are several) begins with the anchor's token, the
    others with the newest positions of the context. With random weights attention starts out even
    over hundreds of rows.

    All queries of a head begin with one direction, and each key with the same direction times how
    much its row is wanted, a linear function of the row that is fitted to the sample. Rotary
    positions tell which of the wanted rows is nearest: the direction for the context lies in the
    half of the head that rotates fast, so that its product fades with distance, the one for the
    anchor in the slow half. For the quickstart target the first draft is then right 20% of the time
    after 200 steps, with random weights 9% (docs/log/2026-11-experiments.md).
    """
    query_fit, anchor_fit, context_fit = _fit_rows(drafter, taps, ids)
    size, numbers = drafter.shape.head_dim, torch.arange(drafter.shape.head_dim)
    # Number i of a head is paired with i + rotary.size / 2, and frequencies fall with i: the
    # first quarter of the rotated part turns fast, the second quarter slowly.
    fast = numbers < drafter.rotary.size // 4
    slow = ~fast & (numbers < drafter.rotary.size // 2)
    for layer in drafter.decoder_layers:
        # One matrix `[E, H]` for each attention head and key-value head, as views: adding to them
        # changes the layer. Values begin at random.
        queries, keys, _ = layer.qkv.weight.unflatten(0, (-1, size)).split(
            [layer.heads, layer.kv_heads, layer.kv_heads]
        )
        for head, key in enumerate(keys):
            to_anchor = head < max(layer.kv_heads // 3, 1) and layer.kv_heads > 1
            half = slow if to_anchor else fast
            direction = functional.normalize(half.to(query_fit), dim=0) * NEARBY
            key += torch.outer(direction, anchor_fit if to_anchor else context_fit)
            # All attention heads that share this key-value head get the same queries.
            shared = queries.unflatten(0, (layer.kv_heads, -1))[head]
            shared += torch.outer(direction, query_fit)


def _fit_rows(
    drafter: DFlashDrafter, taps: tuple[Tensor, ...], ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three linear functions `[H]` of a normed row, fitted to the sample of `attend_nearby`.

    The first is near 1 for the rows of a block, which have queries, and near 0 for the context. The
    second is near 1 for anchors' tokens, the third for the context, and each near -1 for all other
    rows.
    """
    width = drafter.norm.weight.shape
    fused = drafter.fuse(tuple(tap[None] for tap in taps))[0]
    context = functional.rms_norm(fused.float(), width)
    slots = drafter.embed(ids[None])[0].unflatten(0, (len(ids), -1))
    embedded = functional.rms_norm(slots.float(), width)
    # Every slot but the first holds the mask token: one is repeated, so that it weighs as much as
    # the other two kinds of rows.
    tokens, masks = embedded[:, 0], embedded[:1, 1].expand(len(ids), -1)
    rows = torch.cat([context, tokens, masks])
    values = torch.tensor([[0.0, 1.0, 1.0], [-1.0, 1.0, -1.0], [1.0, -1.0, -1.0]])
    wanted = values.to(rows.device).repeat_interleave(len(ids), dim=1)
    return linear_fit(rows, wanted[0]), linear_fit(rows, wanted[1]), linear_fit(rows, wanted[2])


def linear_fit(rows: Tensor, wanted: Tensor) -> Tensor:
    """Return `w` `[H]` such that `rows @ w` is near `wanted` `[n]`, for `rows` `[n, H]`.

    This is ridge regression in its dual form, w = X^T (X X^T + c I)^-1 y, where c is `RIDGE` times
    the mean squared length of a row.
    """
    # The dual form solves a system of n rows instead of H columns.
    products = rows @ rows.T
    return rows.T @ torch.linalg.solve(
        products + RIDGE * products.diagonal().mean() * torch.eye(len(rows)).to(rows), wanted
    )


def restore_tap_scales(drafter: DFlashDrafter, target: TargetSource) -> None:
    """Take the scales of the taps out of the `fc` of a drafter that was loaded.

    On disk they are multiplied into it, which computes the same. But such an `fc` has small weights
    for large inputs, and a step of the optimiser changes it too much.
    """
    if bool((drafter.tap_scales == 1).all()):
        rescale(drafter, target.tap_sizes(drafter.taps), keep=True)


def choose_mask_token(asked: int | None, target: TargetSource, batches: Batches) -> int:
    """Return a token that no reply holds and that has an embedding.

    It is `asked` if given, else the first of `unused_tokens` that is fit. Raises `UserError` for an
    `asked` token that is not fit, and where no token is known.
    """
    reply_counts = batches.token_counts(target.vocab_size)
    for token in unused_tokens(target) if asked is None else [asked]:
        if (reason := unfit_reason(token, target, reply_counts)) is None:
            return token
        if asked is not None:
            raise UserError(
                f"heads.mask_token {asked} {reason}; name a token that texts never hold"
            )
    raise UserError(
        "no unused token is known to mask drafts with; name one that texts never hold with "
        "heads.mask_token"
    )


def warn_of_mask_token(token: int, target: TargetSource, batches: Batches) -> None:
    """Log a warning if the mask token that a drafter has learned with is not fit for these texts.

    It cannot have another one: texts that hold it are drafted worse, and decoded as correctly.
    """
    reason = unfit_reason(token, target, batches.token_counts(target.vocab_size))
    if reason is not None:
        log.warning("the drafter's mask token, %d, %s", token, reason)


def unfit_reason(token: int, target: TargetSource, counts: Tensor) -> str | None:
    """Return the reason why a token cannot be the mask, as a part of a message; None if it can.

    `counts` `[V]` says how often the texts hold each token.
    """
    if not 0 <= token < target.vocab_size:
        return f"is not a token: the target has {target.vocab_size}, from 0"
    ids = torch.cat([torch.tensor([token]), spread_ids(target.vocab_size, 256)]).to(target.device)
    sizes = target.embedding_and_head.rows(ids).float().norm(dim=-1)
    # Norms make a small row large, but only down to their epsilon: from a row near zero all queries
    # would be near zero too. The median is hardly moved by the rows of other unused tokens.
    if sizes[0] < SMALLEST_ROW * sizes[1:].median():
        return "has next to no embedding, from which nothing is drafted"
    if token in target.eos_ids:
        return "ends replies"
    return f"occurs {int(counts[token])} times in the training replies" if counts[token] else None


def unused_tokens(target: TargetSource) -> list[int]:
    """Return tokens that texts can be trusted not to hold, best first.

    These are the first row of the embedding past the tokenizer's own tokens, the mask token, tokens
    whose names call them mask, reserved or unused, and the padding.
    """
    tokenizer = target.tokenizer
    if tokenizer is None:
        return []
    named = []
    for token, added in tokenizer.added_tokens_decoder.items():
        if any(word in str(added).lower() for word in ("mask", "reserved", "unused")):
            named.append(token)
    # Embeddings are often padded to a round size: the first row after the tokens is in no text. The
    # padding comes last: some tokenizers use a token for it that has another meaning too.
    tokens = [len(tokenizer), tokenizer.mask_token_id, *sorted(named), tokenizer.pad_token_id]
    # A tokenizer may have more tokens than the target's embedding has rows.
    return [token for token in tokens if token is not None and token < target.vocab_size]


class DFlashMethod(RankedMethod[DFlashRun, DFlashDrafter]):
    """Training of DFlash drafters, and what DSpark's shares with it."""

    run_class = DFlashRun
    drafter_class = DFlashDrafter
    objective_class = BlockObjective

    def shape(self, run: DFlashRun, target: TargetSource | MetaTarget) -> Any:
        """Return the drafter's shape, with any mask token where none is chosen yet."""
        return self.shape_for(run.heads, target, run.heads.mask_token or 0)

    def shape_for(
        self, config: DFlashConfig, target: TargetSource | MetaTarget, mask_token: int
    ) -> BlockShape:
        """Return the drafter's shape with a mask token. Raises `UserError`."""
        return shape_for(config, target.config, mask_token)

    def features_of(self, run: DFlashRun, target: TargetSource | MetaTarget) -> FeaturesRead:
        return self.shape(run, target).taps, False

    def resolve(self, run: DFlashRun, target: MetaTarget) -> None:
        apply_init_from(run)
        shape = self.shape(run, target)
        run.heads = replace(
            run.heads, taps=list(shape.taps), intermediate_size=shape.intermediate_size
        )
        run.objective = run.objective.resolved(shape.block_size)

    def outline(self, run: DFlashRun, target: MetaTarget) -> Outline:
        """Return the run's `Outline`.

        Every position is context once: `fc`, then keys and values of each layer. The layers
        themselves run over the slots of all blocks, however few roots a packed row has, the head
        over the drafts of those at roots.
        """
        shape = self.shape(run, target)
        drafter = self.drafter_class(shape, target.embedding_and_head)
        passes = run.objective.anchors * shape.block_size / run.data.max_length
        head = shape.hidden_size * (shape.draft_vocab_size or shape.vocab_size)
        work = work_of(
            drafter.layers, drafter.fc, shape.hidden_size, run.objective.recompute, passes
        )
        keys_values = 2 * shape.num_kv_heads * shape.head_dim
        work["operations"] += TRAINED * keys_values * shape.hidden_size * shape.num_layers
        work["kept"] += (shape.hidden_size + keys_values) * shape.num_layers
        return Outline(
            drafter,
            logit_rows=run.objective.rows_per_chunk * drafter.drafts,
            head_operations=FROZEN * head * drafter.drafts,
            most_roots=run.objective.anchors / run.data.max_length,
            **work,
        )

    def make_drafter(
        self, run: DFlashRun, target: TargetSource, batches: Batches, before: Artifact | None
    ) -> DFlashDrafter:
        if before is not None:
            mask_token = before.drafter.shape.mask_token
            warn_of_mask_token(mask_token, target, batches)
            expected = self.shape_for(run.heads, target, mask_token)
            return self.drafter_class(kept_shape(run, before, expected), target.embedding_and_head)
        mask_token = choose_mask_token(run.heads.mask_token, target, batches)
        shape = self.shape_for(run.heads, target, mask_token)
        drafter = self.drafter_class(shape, target.embedding_and_head)
        self.initialize(drafter, target, batches)
        return drafter

    def initialize(self, drafter: DFlashDrafter, target: TargetSource, batches: Batches) -> None:
        """Give an untrained drafter what it can have of its target and of the texts.

        The order matters: `attend_nearby` is fitted to fused taps, so their scales come before it,
        and the size of the first logits follows from all of it.
        """
        shape = drafter.shape
        ids = draft_vocabulary(shape.draft_vocab_size or shape.vocab_size, target, batches)
        if ids is not None:
            drafter.set_maps(ids)
        self.first_weights(drafter, target.final_norm_weight())
        # `keep=False`: nothing is trained yet, so what the drafter computes may change.
        rescale(drafter, target.tap_sizes(drafter.taps), keep=False)
        # One position is left over, because a server writes a token with every request.
        ids = batches.sample_ids(target.max_positions - 1)
        taps = tuple(tap.cpu() for tap in target.tap_sample(ids, drafter.taps))
        attend_nearby(drafter, taps, torch.tensor(ids))
        # Blocks read taps alone, so any tensor does in place of the last state. The first roots are
        # enough to judge the size of logits by.
        outputs, _, _ = next(forced_blocks(drafter, Hidden(taps[0], taps), torch.tensor(ids)))
        # The drafter is still on the CPU and in float32, the target's head may be elsewhere.
        states = drafter.norm(outputs).to(target.device, target.dtype)
        shrink_logits(drafter.norm, target.embedding_and_head.head(states).cpu(), SPREAD)

    @torch.no_grad()
    def first_weights(self, drafter: DFlashDrafter, norm_weight: Tensor | None) -> None:
        """Set the final norm to the target's `[H]`, and `fc` to weigh rescaled taps the same."""
        if norm_weight is not None:
            drafter.norm.weight.copy_(norm_weight)
        nn.init.normal_(drafter.fc.weight, std=drafter.fc.weight.shape[1] ** -0.5)

    def make_objective(
        self, run: DFlashRun, target: TargetSource, drafter: DFlashDrafter
    ) -> BlockObjective:
        check_gradients_pass(target)
        restore_tap_scales(drafter, target)
        return self.objective_class(run.objective, drafter, target.head, run.seed)

    @torch.no_grad()
    def teacher_forced(self, drafter: DFlashDrafter, hidden: Hidden, ids: Tensor) -> Tensor:
        """Return ranks `[S, D]` by the training pass.

        Row n, column d - 1 is the place of the text's own token x[n+d] among the best of draft d
        from root n. It is -1 where the token is not among the best, or lies outside the text.
        """
        vocabulary = VocabularyMap(drafter)
        ranks = []
        for outputs, before, labels in forced_blocks(drafter, hidden, ids):
            logits = drafter.logits(drafter.state(outputs, before))
            ranks.append(ranks_in(logits, vocabulary.columns(labels)))
        return torch.cat(ranks)

    def tree_of_evaluation(self, depths: int, tree_nodes: int) -> JsonObject:
        return {"length": min(depths, tree_nodes)}


def shape_for(
    config: DFlashConfig, target: Any, mask_token: int, markov_rank: int | None = None
) -> BlockShape:
    """Return the sizes of the drafter that `config` describes, for a target's transformers config.

    `markov_rank` is DSpark's. Raises `UserError` for taps or a mask token that the target does not
    have.
    """
    layers = target.num_hidden_layers
    taps = tuple(config.taps) if config.taps else default_taps(layers, config.num_layers)
    # Not 0: layers are written from 0 without the embeddings, so that tap 0 would be layer -1. Not
    # L: transformers gives that one after the final norm.
    check_taps(taps, 1, layers)
    if not 0 <= mask_token < target.vocab_size:
        raise UserError(
            f"heads.mask_token {mask_token} is not a token: the target has {target.vocab_size}, "
            "from 0"
        )
    size = config.draft_vocab_size
    return BlockShape(
        taps=taps,
        block_size=config.block_size,
        mask_token=mask_token,
        hidden_size=target.hidden_size,
        target_layers=layers,
        # Drafting all tokens takes no maps.
        draft_vocab_size=size if size and size < target.vocab_size else None,
        markov_rank=markov_rank,
        **chosen_sizes(config, target),
    )


METHOD = DFlashMethod()
