"""Losses between a drafter's distribution q and the target's distribution p, per position, and
their sums over many positions in bounded memory.

Distributions come as log-probabilities over the drafter's vocabulary, so that one softmax serves a
loss and its metrics. `log_p` may be a slice of the target's distribution that sums to less than one
(a draft vocabulary): overlaps take it as it is, since that is what decoding accepts; losses of the
KL family renormalise it, since a drafter cannot put mass elsewhere. Gradients with respect to the
logits z of q are those of reference/objectives.md section 2; p is a constant. Shapes: R rows
(positions), V vocabulary; p may have 1 in place of a row axis of q, one teacher for several drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Divergence = Literal[
    "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "lk-hybrid", "ce", "top-k-kl", "ce-l1"
]
NEEDS_LABELS = ("ce", "ce-l1")
SMALLEST_OVERLAP = 1e-5
HYBRID_ETA = 3.0
TOP_K = 10
CE_SHARE = 0.1


def log_probs(logits: Tensor) -> Tensor:
    """log softmax in fp32 at least: bf16 logits lose the tail."""
    return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def renormalised(log_p: Tensor) -> Tensor:
    """`log_p` with its mass made one."""
    return log_p - log_p.logsumexp(-1, keepdim=True)


def cross_entropy(log_q: Tensor, labels: Tensor) -> Tensor:
    """-log q(x*) `[R]`. d/dz = q - onehot."""
    return -log_q.gather(-1, labels[..., None])[..., 0]


def forward_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(p || q) `[R]`. d/dz = q - p. Soft cross-entropy with p's entropy taken off, so that its
    minimum is zero."""
    log_p = renormalised(log_p)
    p = log_p.exp()
    return (p * log_p).nan_to_num(0.0).sum(-1) - _dot(log_q, p)


def _dot(log_q: Tensor, p: Tensor) -> Tensor:
    """sum_v p log q `[R]`."""
    if p.dim() > 1 and p.shape[-2] == 1 and log_q.shape[-2] > 1:
        # it would round a difference of distributions to bf16
        with torch.autocast(log_q.device.type, enabled=False):
            # one teacher for several rows: no [R, V] product is made
            return (log_q @ p.transpose(-1, -2))[..., 0]
    return (p * log_q).sum(-1)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q || p) `[R]`: seeks modes. d/dz = q (log(q / p) - KL)."""
    return (log_q.exp() * (log_q - renormalised(log_p))).sum(-1)


def jensen_shannon(log_q: Tensor, log_p: Tensor, beta: float = 0.5) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, `[R]` (generalised
    JSD of GKD, arXiv 2306.13649).

    d/dz = (1 - beta) q (log(q / m) - KL(q || m)). At beta = 1/2 it is at most log 2.
    """
    log_p = renormalised(log_p)
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.logaddexp(log_p + _log(beta), log_q + _log(1 - beta))
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)


def _log(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).log())


def overlap(log_q: Tensor, log_p: Tensor) -> Tensor:
    """alpha = sum_v min(p, q) `[R]`: the largest chance that any lossless rule accepts one sampled
    draft."""
    return torch.minimum(log_q, log_p).exp_().sum(-1)


def total_variation(log_q: Tensor, log_p: Tensor) -> Tensor:
    """1 - alpha `[R]`. d/dz = -q (1[q < p] - s), s = sum of q where q < p. Exactly what is paid
    for; stalls from a cold start."""
    return 1 - overlap(log_q, log_p)


def lk_alpha(log_q: Tensor, log_p: Tensor) -> Tensor:
    """-log alpha `[R]` (arXiv 2602.23881): TV's gradient over alpha. For a point mass p it is the
    cross-entropy."""
    return -overlap(log_q, log_p).clamp(min=SMALLEST_OVERLAP).log()


def lk_hybrid(log_q: Tensor, log_p: Tensor, eta: float = HYBRID_ETA) -> Tensor:
    """l KL + (1 - l) TV with l = exp(-eta alpha), alpha held constant, for each row (arXiv
    2602.23881)."""
    alpha = overlap(log_q, log_p)
    share = torch.exp(-eta * alpha.detach())
    return share * forward_kl(log_q, log_p) + (1 - share) * (1 - alpha)


def top_k_kl(log_q: Tensor, log_p: Tensor, k: int = TOP_K) -> Tensor:
    """KL of both distributions restricted to the target's k best tokens and renormalised, `[R]`.
    What q leaks elsewhere is unpunished.

    d/dz = q' - p' on those tokens, q' and p' being the restricted distributions (objectives.md
    section 2).
    """
    best = log_p.topk(min(k, log_p.shape[-1]), dim=-1)
    there = best.indices.expand(*log_q.shape[:-1], -1)
    p, q = renormalised(best.values), renormalised(log_q.gather(-1, there))
    return (p.exp() * (p - q)).sum(-1)


def ce_and_l1(log_q: Tensor, log_p: Tensor, labels: Tensor, ce_share: float = CE_SHARE) -> Tensor:
    """0.1 CE + 0.9 sum |p - q| `[R]` (DSpark, arXiv 2607.05147). The second part is twice TV where
    p is whole."""
    return ce_share * cross_entropy(log_q, labels) + (1 - ce_share) * (
        log_p.exp() - log_q.exp()
    ).abs().sum(-1)


def divergence(name: Divergence, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
    """The loss of that name `[R]`; `labels` `[R]` (columns of q) are read by those of
    `NEEDS_LABELS` only."""
    if name == "ce":
        return cross_entropy(log_q, labels)
    if name == "ce-l1":
        return ce_and_l1(log_q, log_p, labels)
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


def sum_in_chunks(
    function: Callable[..., tuple[Tensor, ...]],
    hidden: Tensor,
    rows: tuple[Tensor, ...],
    parameters: Sequence[Tensor],
    rows_per_chunk: int,
) -> tuple[Tensor, ...]:
    """Sum a loss over all rows while the logits of one chunk exist at a time.

    `function(hidden, *rows)` takes slices of `hidden` and `rows` (equal first dimension) and gives
    the slice's loss (a sum), then any tables `[rows, ..]`, which are collected and carry no
    gradient. Gradients reach `hidden` and `parameters`, which must be all that `function` has to
    train: another tensor that needs a gradient raises `RuntimeError`. They are made chunk by chunk
    in the forward pass, right where the logits are, so nothing is kept and nothing is computed
    twice (objectives 10.1); the backward pass scales them. (Under ZeRO-3 the backward pass makes
    them, by computing each chunk again, and nothing is checked.) With no rows `function` runs once
    on empty slices, so that every parameter still takes part.
    """
    # ZeRO-3 has them whole only while their own module runs
    apart = any(hasattr(p, "ds_id") for p in parameters)
    if torch.is_grad_enabled() and not apart:
        return _InChunks.apply(function, rows, rows_per_chunk, hidden, *parameters)
    chunks = max(-(-hidden.shape[0] // rows_per_chunk), 1)
    # ZeRO-3's ranks gather weights together: each has to run as many chunks as the others, empty
    # ones at the end
    if apart:
        most = torch.tensor(chunks, device=hidden.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        chunks = int(most)
    starts = range(0, chunks * rows_per_chunk, rows_per_chunk)
    run = (
        partial(checkpoint, function, use_reentrant=False) if torch.is_grad_enabled() else function
    )
    parts = [run(*(x[start : start + rows_per_chunk] for x in (hidden, *rows))) for start in starts]
    losses, *tables = zip(*parts, strict=True)
    return (torch.stack(losses).sum(), *(torch.cat(table).detach() for table in tables))


def check_all_listed(loss: Tensor, wanted: Sequence[Tensor]) -> None:
    """Raise `RuntimeError` if `loss` depends on a leaf that learns and is not among `wanted`: it
    would get no gradient."""
    listed, seen = {id(tensor) for tensor in wanted}, set()
    waiting = [loss.grad_fn]
    while waiting:
        if (node := waiting.pop()) is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in listed:
            raise RuntimeError(
                f"a parameter of shape {list(leaf.shape)} learns from this loss but is not among "
                "the parameters that are listed; "
                "it would get no gradient"
            )
        waiting += [before for before, _ in node.next_functions]


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Any, rows: Any, rows_per_chunk: int, hidden: Tensor, *parameters: Tensor
    ) -> Any:
        learning = [i for i, p in enumerate(parameters) if p.requires_grad]
        sums = [torch.zeros_like(parameters[i]) for i in learning]
        to_hidden = torch.zeros_like(hidden)
        total, tables = None, []
        for start in range(0, max(hidden.shape[0], 1), rows_per_chunk):
            part = slice(start, start + rows_per_chunk)
            with torch.enable_grad():
                inputs = hidden[part].detach().requires_grad_()
                loss, *found = function(inputs, *(row[part] for row in rows))
                wanted = [inputs, *(parameters[i] for i in learning)]
                if start == 0:
                    check_all_listed(loss, wanted)
                grads = (
                    torch.autograd.grad(loss, wanted, allow_unused=True)
                    if loss.requires_grad
                    else [None] * len(wanted)
                )
            total = loss.detach() if total is None else total + loss.detach()
            tables.append([table.detach() for table in found])
            if grads[0] is not None:
                to_hidden[part] = grads[0]
            for into, grad in zip(sums, grads[1:], strict=True):
                if grad is not None:
                    into += grad
        ctx.learning, ctx.count = learning, len(parameters)
        ctx.save_for_backward(to_hidden, *sums)
        joined = [torch.cat(parts) for parts in zip(*tables, strict=True)]
        ctx.mark_non_differentiable(*joined)
        return (total, *joined)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Any:
        to_hidden, *sums = ctx.saved_tensors
        to_parameters: list[Tensor | None] = [None] * ctx.count
        for i, total in zip(ctx.learning, sums, strict=True):
            to_parameters[i] = total * grad
        return None, None, None, to_hidden * grad, *to_parameters
