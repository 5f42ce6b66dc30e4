"""Beginning of a run: first weights of an untrained drafter, or the shape of one to train further.

Shapes: n sampled positions, F taps, H hidden size, E size of an attention head, V vocabulary, Vd
draft vocabulary.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...heads.artifact import Artifact
from ...heads.dflash import DFlashDrafter
from ...heads.dspark import DSparkDrafter
from ...heads.errors import UserError
from ...heads.exchange.exporter import load_alone
from ...heads.files import JsonObject
from ...heads.layers import config_of
from ...heads.medusa import MedusaHeads
from ...inference.targets.target import TargetSource

log = logging.getLogger(__name__)

# Length of the direction that queries and keys share at first (`attend_nearby`); random weights
# alone give them a length of about 3 in another direction each, for heads of size 32.
NEARBY = 5.0
RIDGE = 0.03  # of `linear_fit`, relative to the mean squared length of a row
INIT_STD = 0.02  # of the matrices that DSpark has and DFlash has not


def check_gradients_pass(target: TargetSource) -> None:
    """Raise `UserError` for a target through whose head a drafter cannot learn."""
    if target.dtype == torch.float16:
        raise UserError(
            "the drafter learns through the target's head, and float16 loses its gradients; give "
            "--target.dtype bfloat16 or float32"
        )


@torch.no_grad()
def set_scale(norm: nn.Module, scale: Tensor) -> None:
    """Make a norm multiply by `scale` `[H]`, whether it does so by its weight or by 1 + weight."""
    weight = norm.get_parameter("weight")
    weight.copy_(scale - 1 if is_centred(norm) else scale)


def is_centred(norm: nn.Module) -> bool:
    """Return whether an RMS norm multiplies by 1 + weight instead of by its weight."""
    weight = norm.get_parameter("weight")
    return not torch.allclose(norm(torch.ones_like(weight)), weight, atol=1e-3)


@torch.no_grad()
def start_uncertain(norm: nn.Module, logits: Tensor, spread: float = 1.0) -> None:
    """Scale an untrained drafter's final norm down until its logits are small.

    `logits` `[..., V]` are a sample of what the drafter computes so far; afterwards their standard
    deviation over the vocabulary is at most `spread`. With the target's norm as it is the first
    states of a drafter make logits as large as the target's, and wrong: with SmolLM2 the loss began
    at 36, far above log V, and the first hundred steps had to unlearn that.
    """
    deviation = logits.float().std(-1).square().mean().sqrt()
    # Only down: small logits are no harm to an untrained drafter.
    weight, offset = norm.get_parameter("weight"), float(is_centred(norm))
    factor = (spread / deviation).clamp(max=1.0).to(weight)
    weight.copy_((weight + offset) * factor - offset)


@torch.no_grad()
def block_weights(
    drafter: DFlashDrafter, norm_weight: Tensor | None, ids: Tensor | None = None
) -> None:
    """Set the final norm to the target's `[H]`, and `fc` to weigh all rescaled taps the same.

    `ids` `[Vd]` are the target ids of the draft vocabulary, None for all tokens.
    """
    if ids is not None:
        drafter.set_maps(ids)
    if norm_weight is not None:
        drafter.norm.weight.copy_(norm_weight)
    nn.init.normal_(drafter.fc.weight, std=drafter.fc.weight.shape[1] ** -0.5)
    if isinstance(drafter, DSparkDrafter):
        for module in (drafter.transition_in, drafter.transition_out, drafter.confidence_head):
            nn.init.normal_(module.weight, std=INIT_STD)
        # A logit near 0: every draft begins with a confidence of about one half.
        nn.init.zeros_(drafter.confidence_head.bias)


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

    def fit(context_value: float, token_value: float, mask_value: float) -> Tensor:
        values = torch.tensor([context_value, token_value, mask_value], device=rows.device)
        return linear_fit(rows, values.repeat_interleave(len(ids)))

    return fit(0.0, 1.0, 1.0), fit(-1.0, 1.0, -1.0), fit(1.0, -1.0, -1.0)


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


def check_same(options: Any, init_from: str, stored: JsonObject) -> None:
    """Raise `UserError` if the run's `heads`, `options`, ask for others than those in `stored`."""
    defaults = asdict(type(options)())
    for name, value in asdict(options).items():
        # An option given as its default cannot be distinguished from one that was left out.
        if value not in (defaults[name], stored[name]):
            # A recipe's key cannot be left out, so what it has to be is said.
            right = "null" if stored[name] is None else str(stored[name])
            if defaults[name] is None:
                right = "null, which takes the drafter's"
            raise UserError(
                f"init_from {init_from} has {name} {stored[name]}, heads.{name} says {value}; set "
                f"heads.{name} to {right}"
            )


def take_heads_before(run: Any) -> None:
    """Set `run.heads` to those of the drafter that the run begins with, if it names one.

    Which features are read follows from them. Raises `UserError` for a folder without a drafter,
    and if the run asks for other heads than the drafter has.
    """
    if run.init_from is None or not hasattr(run, "heads"):
        return
    drafter, options_class = load_alone(run.init_from).drafter, type(run.heads)
    if isinstance(drafter, MedusaHeads):
        stored = asdict(drafter.config)
    else:
        stored = config_of(drafter.shape, options_class)
    check_same(run.heads, run.init_from, stored)
    run.heads = options_class(**stored)


def shape_before(run: Any, target: TargetSource, before: Artifact, configs: Any) -> Any:
    """Return the shape of the drafter that the run begins with, that of `run.heads`.

    Differences to what its target would have now are logged as warnings. `configs` is the module of
    `heads/` with `shape_for`.
    """
    shape = before.drafter.shape
    listed = ", ".join(f"{name} {value}" for name, value in asdict(run.heads).items())
    log.info("going on from %s: %s", run.init_from, listed)
    # Block drafters have a token for the slots that are to be drafted, which no option names.
    own = [shape.mask_token] if hasattr(shape, "mask_token") else []
    expected = asdict(configs.shape_for(run.heads, target.config, *own))
    for name, value in asdict(shape).items():
        if expected[name] != value:
            log.warning(
                "the drafter keeps %s %s, though the target has %s", name, value, expected[name]
            )
    return shape
