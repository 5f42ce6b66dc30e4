"""Losses between a drafter's distribution q and the target's p, and their sums in bounded memory.

Distributions are given as log-probabilities over the drafter's vocabulary, so that one softmax
serves a loss and its metrics. With a draft vocabulary `log_p` is a slice of the target's and sums
to less than one: overlaps take it as it is, since that is what decoding accepts; losses of the KL
family renormalise it, since a drafter cannot put mass elsewhere. Gradients are those of
docs/objectives.md#divergences, with respect to the logits z of q; p is a constant.

Shapes: R rows, which may be on several axes; V vocabulary of the drafter, x* the label. p may
have 1 in place of an axis of rows of q: one teacher for several drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..heads.errors import UserError
from .settings import NEEDS_LABELS, Divergence

RENORMALISED = ("kl", "reverse-kl", "jsd", "top-k-kl")
"""Losses that are the same for any multiple of p."""
SMALLEST_OVERLAP = 1e-5  # below it `lk-alpha` is constant, and its gradient zero
HYBRID_ETA = 3.0  # how fast `lk-hybrid` goes from KL to total variation
TOP_K = 10
CE_SHARE = 0.1  # of the cross-entropy in `ce-l1`; the rest is of the distance sum_v |p - q|
BLOCK_ROWS = 16  # rows whose minima stay in a processor's cache until they are summed


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 at least: in bfloat16 a sum would lose its small terms."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def log_probs(logits: Tensor) -> Tensor:
    """Return the log-softmax, in float32 at least."""
    return torch.log_softmax(logits, dim=-1, dtype=wide_dtype(logits.dtype))


def best_of(scores: Tensor) -> Tensor:
    """Return the index of the first of the largest numbers along the last axis."""
    # On a CPU torch looks at one number after another, NumPy at a vector of them: 49,152 float32
    # take 90 and 7 microseconds. A subclass, such as that of a tensor without memory, has no array.
    if (
        type(scores) is Tensor
        and scores.device.type == "cpu"
        and scores.is_floating_point()
        and not torch.compiler.is_compiling()
    ):
        # NumPy has no bfloat16; wider numbers have the same order.
        wide = scores.detach().to(torch.promote_types(scores.dtype, torch.float32))
        return torch.from_numpy(np.asarray(wide.numpy().argmax(-1)))
    return scores.argmax(-1)


def renormalised(log_p: Tensor) -> Tensor:
    """Return `log_p` less the log of its mass, so that p sums to one."""
    return torch.log_softmax(log_p, dim=-1)


def cross_entropy(log_q: Tensor, labels: Tensor) -> Tensor:
    """Return -log q(x*) `[R]` of the labels. d/dz = q - onehot(x*)."""
    return -_at(log_q, labels)


def forward_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return KL(p || q) `[R]`. d/dz = q - p.

    It is the cross-entropy of p and q minus the entropy of p, so its minimum is zero.
    """
    p, negative_entropy = teacher_of(log_p)
    return negative_entropy - _dot(log_q, p)


class Teacher(NamedTuple):
    """Distribution p of the target, with what KL(p || q) needs of it for any q."""

    p: Tensor
    """Probabilities `[R, V]` that sum to one."""
    negative_entropy: Tensor
    """sum_v p log p `[R]`."""

    def rows(self, index: Tensor) -> Teacher:
        return Teacher(self.p[index], self.negative_entropy[index])


def teacher_of(log_p: Tensor, whole: bool = False) -> Teacher:
    """Return the distribution of `log_p` `[R, V]`, renormalised unless it is `whole` already."""
    log_p = log_p if whole else renormalised(log_p)
    p = log_p.exp()
    # A token of probability 0 has p log p = 0 * -inf, which is NaN and should be 0.
    return Teacher(p, (p * log_p).nan_to_num(0.0).sum(-1))


def _dot(log_q: Tensor, p: Tensor) -> Tensor:
    """Return sum_v p log q `[R]`."""
    if p.dim() > 1 and p.shape[-2] == 1 and log_q.shape[-2] > 1:
        # One teacher has several drafts: a matrix product needs no table p * log q of all of them.
        # Under autocast it would round to bfloat16, which is too coarse for a difference of sums.
        with torch.autocast(log_q.device.type, enabled=False):
            return (log_q @ p.transpose(-1, -2))[..., 0]
    return (p * log_q).sum(-1)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return KL(q || p) `[R]`, which seeks the modes of p. d/dz = q (log(q / p) - KL(q || p))."""
    return (log_q.exp() * (log_q - renormalised(log_p))).sum(-1)


def jensen_shannon(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence `[R]`, at most log 2 (GKD, arXiv 2306.13649).

    It is (KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2. d/dz = q/2 (log(q / m) - KL(q || m)).
    """
    log_p = renormalised(log_p)
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.logaddexp(log_p + math.log(0.5), log_q + math.log(0.5))
    return 0.5 * (p * (log_p - log_m)).sum(-1) + 0.5 * (q * (log_q - log_m)).sum(-1)


def overlap(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return alpha = sum_v min(p, q) `[R]`.

    No lossless rule accepts one sampled draft with a higher probability.
    """
    # The minimum of the logarithms needs one exponential instead of two. It is taken in place,
    # which saves a table `[R, V]`: the gradient of a minimum does not need its result.
    return torch.minimum(log_q, log_p).exp_().sum(-1)


def overlap_of_probs(q: Tensor, p: Tensor) -> Tensor:
    """Return alpha as `overlap` does, of probabilities."""
    if q.device.type != "cpu" or q.dim() == 1:
        return torch.minimum(q, p).sum(-1)
    p = p.expand(len(q), *p.shape[1:])
    blocks = zip(q.split(BLOCK_ROWS), p.split(BLOCK_ROWS), strict=True)
    return torch.cat([torch.minimum(some, others).sum(-1) for some, others in blocks])


def total_variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return 1 - alpha `[R]`, the rate of rejection. d/dz = -q (1[q < p] - s), s = sum_{q < p} q.

    The gradient vanishes where p and q hardly overlap, so training does not get away from there.
    """
    return 1 - overlap(log_q, log_p)


def lk_alpha(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return -log alpha `[R]` (arXiv 2602.23881). d/dz is that of total variation over alpha.

    For a point mass p it is the cross-entropy.
    """
    return -overlap(log_q, log_p).clamp(min=SMALLEST_OVERLAP).log()


def lk_hybrid(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Return l KL(p || q) + (1 - l) TV `[R]`, with l = exp(-eta alpha) (arXiv 2602.23881).

    TV is the total variation, eta `HYBRID_ETA`. Each row has its own l, which carries no gradient.
    """
    alpha = overlap(log_q, log_p)
    share = torch.exp(-HYBRID_ETA * alpha.detach())
    return share * forward_kl(log_q, log_p) + (1 - share) * (1 - alpha)


def top_k_kl(log_q: Tensor, log_p: Tensor, k: int = TOP_K) -> Tensor:
    """Return KL(p' || q') `[R]`: p and q restricted to the k best tokens of p and renormalised.

    Mass of q on other tokens is not punished. d/dz = q' - p' on those tokens and 0 elsewhere.
    """
    best = log_p.topk(min(k, log_p.shape[-1]), dim=-1)
    # One teacher for several drafts: gather needs its indices for each of them.
    tokens = best.indices.expand(*log_q.shape[:-1], -1)
    best_log_p, best_log_q = renormalised(best.values), renormalised(log_q.gather(-1, tokens))
    return (best_log_p.exp() * (best_log_p - best_log_q)).sum(-1)


def divergence(name: Divergence, log_q: Tensor, log_p: Tensor | None, labels: Tensor) -> Tensor:
    """Return the loss of that name, `[R]`.

    `labels` `[R]` are columns of q; only the losses in `NEEDS_LABELS` read them. Those in
    `LABELS_ONLY` need no `log_p`.
    """
    if name == "ce":
        return cross_entropy(log_q, labels)
    assert log_p is not None, "only cross-entropy has no teacher"
    if name == "ce-l1":
        # The loss of DSpark (arXiv 2607.05147). Where p sums to one, the distance is twice the
        # total variation.
        distance = (log_p.exp() - log_q.exp()).abs().sum(-1)
        return CE_SHARE * cross_entropy(log_q, labels) + (1 - CE_SHARE) * distance
    if name not in _SOFT:
        known = ", ".join(get_args(Divergence))
        raise UserError(f"unknown divergence {name!r}; choose one of {known}")
    return _SOFT[name](log_q, log_p)


_SOFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "lk-alpha": lk_alpha,
    "lk-hybrid": lk_hybrid,
    "top-k-kl": top_k_kl,
}
assert set(_SOFT) | set(NEEDS_LABELS) == set(get_args(Divergence))


class LossOfLogits(NamedTuple):
    """Result of `loss_of_logits` for R rows; only the losses carry a gradient."""

    losses: Tensor
    """The divergences `[R]`."""
    log_sums: Tensor
    """The logits less these `[R]` are log-probabilities."""
    best: Tensor
    """The first column with the largest logit `[R]`."""
    overlaps: Tensor | None
    """The overlaps `[R]` with the other distribution, if there is one."""


def loss_of_logits(
    name: Divergence,
    logits: Tensor,
    log_p: Tensor | None,
    labels: Tensor,
    p: Tensor | None = None,
    teacher: Teacher | None = None,
) -> LossOfLogits:
    """Return the `divergence` of the softmax of `logits` `[R, V]`, and what comes with it.

    The overlaps with `p`, if it is given, cost less here than by `overlap`. `kl` takes a `teacher`
    that is made already in place of `log_p`.
    """
    best = best_of(logits)
    if name in ("ce", "kl"):
        if name == "kl" and teacher is None:
            assert log_p is not None, "only cross-entropy has no teacher"
            with torch.no_grad():
                teacher = teacher_of(log_p)
        given = teacher if teacher is not None and name == "kl" else (None, None)
        losses, log_sums, overlaps = _OfLogits.apply(logits, best, *given, labels, p)
        return LossOfLogits(losses, log_sums, best, overlaps)
    log_q = log_probs(logits)
    log_sums = (_at(logits, best) - _at(log_q, best)).detach()
    overlaps = None if p is None else overlap_of_probs(log_q.detach().exp(), p)
    return LossOfLogits(divergence(name, log_q, log_p, labels), log_sums, best, overlaps)


def _at(table: Tensor, columns: Tensor) -> Tensor:
    """Return the numbers `[R]` of a table `[R, V]` in one column of each row."""
    return table.gather(-1, columns[..., None])[..., 0]


class _OfLogits(torch.autograd.Function):
    """Cross-entropy with labels, or KL(p || q), of logits: d/dz is q - onehot(x*), or q - p.

    The gradient is made in the table of q; autograd would fill two more tables `[R, V]`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        best: Tensor,
        p: Tensor | None,
        negative_entropy: Tensor | None,
        labels: Tensor,
        other: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q = torch.softmax(logits, -1, dtype=wide_dtype(logits.dtype))
        # The largest q is exp(z - log-sum) of the largest logit z, and at least 1 / V.
        log_sums = _at(logits, best) - _at(q, best).log()
        if p is None:
            losses = log_sums - _at(logits, labels)
        else:
            assert negative_entropy is not None, "both are of one teacher"
            losses = negative_entropy + log_sums - _dot(logits.to(p.dtype), p)
        # Saved so, and not as attributes, since `checkpoint` has to be able to drop them.
        ctx.save_for_backward(q, p, labels)
        ctx.dtype = logits.dtype
        overlaps = None if other is None else overlap_of_probs(q, other)
        ctx.mark_non_differentiable(log_sums, *([] if overlaps is None else [overlaps]))
        return losses, log_sums, overlaps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Changed in place, so that a second pass over the same graph fails instead of being wrong.
        q, p, labels = ctx.saved_tensors
        if p is not None:
            q.sub_(p)
        else:
            index = labels[..., None]
            q.scatter_add_(-1, index, q.new_full((1,), -1.0).expand(index.shape))
        return q.mul_(gradient[..., None]).to(ctx.dtype), *[None] * 5


def sum_in_chunks(
    function: Callable[..., tuple[Tensor, ...]],
    hidden: Tensor,
    rows: tuple[Tensor, ...],
    parameters: Sequence[Tensor],
    rows_per_chunk: int,
) -> tuple[Tensor, ...]:
    """Sum a loss over all rows while the logits of one chunk of rows exist at a time.

    `function(hidden, *rows)` takes slices of `hidden` and of each of `rows`, all `[R, ..]`, and
    returns the slice's loss, a sum, then any number of tables with a row for each of its rows.
    Returned are the loss of all rows, and the tables `[R, ..]`, which carry no gradient.

    Gradients reach `hidden` and `parameters`, which must be all that `function` has to train:
    another tensor that needs a gradient raises `RuntimeError`. They are computed in the forward
    pass, chunk by chunk, and the backward pass scales them (docs/objectives.md#chunked-sums). Under
    ZeRO-3 each chunk is computed again in the backward pass, and another tensor that needs a
    gradient is not noticed. With no rows `function` runs once on empty slices, so that every
    parameter still takes part.
    """
    # DeepSpeed marks parameters that ZeRO-3 has split over the ranks. They are whole only while
    # their own module runs, so their gradients cannot be computed inside the forward pass.
    partitioned = any(hasattr(p, "ds_id") for p in parameters)
    if torch.is_grad_enabled() and not partitioned:
        return _InChunks.apply(function, rows, rows_per_chunk, hidden, *parameters)
    # Rounded up, and one empty chunk for no rows.
    chunks = max(-(-hidden.shape[0] // rows_per_chunk), 1)
    # Running a module gathers its weights from all ranks, and a rank that runs fewer chunks than
    # the others would leave them waiting: all run as many, empty ones at the end.
    if partitioned:
        most_chunks = torch.tensor(chunks, device=hidden.device)
        torch.distributed.all_reduce(most_chunks, torch.distributed.ReduceOp.MAX)
        chunks = int(most_chunks)
    run = function
    if torch.is_grad_enabled():
        run = partial(checkpoint, function, use_reentrant=False)
    results = []
    for start in range(0, chunks * rows_per_chunk, rows_per_chunk):
        chunk = slice(start, start + rows_per_chunk)
        results.append(run(hidden[chunk], *(values[chunk] for values in rows)))
    losses, *tables = zip(*results, strict=True)
    return (torch.stack(losses).sum(), *(torch.cat(table).detach() for table in tables))


def check_all_listed(loss: Tensor, wanted: Sequence[Tensor]) -> None:
    """Raise `RuntimeError` if `loss` depends on a leaf that learns and is not among `wanted`.

    Such a leaf would get no gradient, and nothing else would show it.
    """
    listed, seen = {id(tensor) for tensor in wanted}, set()
    # In the graph of autograd only leaves that learn have a `variable`.
    pending = [loss.grad_fn]
    while pending:
        if (node := pending.pop()) is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in listed:
            raise RuntimeError(
                f"a parameter of shape {list(leaf.shape)} learns from this loss but is not among "
                "the parameters that are listed; it would get no gradient"
            )
        pending += [next_node for next_node, _ in node.next_functions]


class _InChunks(torch.autograd.Function):
    """`sum_in_chunks` as one step of autograd: the gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, function: Any, rows: Any, rows_per_chunk: int, hidden: Tensor, *parameters: Tensor
    ) -> Any:
        learning = [i for i, p in enumerate(parameters) if p.requires_grad]
        found: list[Tensor | None] = [None] * len(learning)
        taken: set[int] = set()  # storages of gradients
        hidden_grad = torch.zeros_like(hidden)
        total, tables = None, []
        # An empty `hidden` still makes one chunk, so that the loss has a value and tables a shape.
        for start in range(0, max(hidden.shape[0], 1), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            # Autograd is off within `forward`. The detached leaf makes the graph end at this chunk.
            with torch.enable_grad():
                inputs = hidden[chunk].detach().requires_grad_()
                loss, *chunk_tables = function(inputs, *(values[chunk] for values in rows))
                wanted = [inputs, *(parameters[i] for i in learning)]
                # Every chunk has the same graph.
                if start == 0:
                    check_all_listed(loss, wanted)
                grads: Any = [None] * len(wanted)
                if loss.requires_grad:
                    # Not `backward`, which would add to `.grad` chunk by chunk, and whose hooks in
                    # DDP would send the first chunk's gradients to the other ranks as if they were
                    # all.
                    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
            total = loss.detach() if total is None else total + loss.detach()
            tables.append([table.detach() for table in chunk_tables])
            # None stands for a tensor that the loss does not depend on.
            if grads[0] is not None:
                hidden_grad[chunk] = grads[0]
            for i, grad in enumerate(grads[1:]):
                if grad is None:
                    continue
                if (summed := found[i]) is None:
                    # Those of output matrices are large: only what may share memory is copied.
                    storage = grad.untyped_storage()._cdata
                    own = grad.is_contiguous() and storage not in taken
                    taken.add(storage)
                    found[i] = grad if own else grad.clone()
                else:
                    summed += grad
        # Zero, and not none at all: engines wait for the gradient of every parameter.
        parameter_grads = []
        for i, summed in zip(learning, found, strict=True):
            parameter_grads.append(torch.zeros_like(parameters[i]) if summed is None else summed)
        ctx.learning, ctx.count = learning, len(parameters)
        ctx.save_for_backward(hidden_grad, *parameter_grads)
        joined = [torch.cat(parts) for parts in zip(*tables, strict=True)]
        ctx.mark_non_differentiable(*joined)
        return (total, *joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        hidden_grad, *parameter_grads = ctx.saved_tensors
        scaled_grads: list[Tensor | None] = [None] * ctx.count
        for i, summed in zip(ctx.learning, parameter_grads, strict=True):
            # `grad` is the factor that the loss got afterwards, such as the number of ranks and
            # micro-batches. In place, so that a second pass over the same graph fails.
            scaled_grads[i] = summed.mul_(grad)
        # A gradient for each argument of `forward`: the first three are not tensors.
        return None, None, None, hidden_grad * grad, *scaled_grads
