"""The decode loop: prefill -> [propose -> verify -> accept -> commit]* -> tokens, and one record a round.

It knows no method: a new drafter is a new proposer. First form: one request at a time, greedy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..heads.errors import UserError
from .accept import accept_greedy
from .cache import TreeCache
from .proposer import Proposer
from .target import Hidden, Target
from .tree import NO_NODE, DraftTree


@dataclass
class Round:
    """What one step of the loop did. The step that follows the prefill is not a round: it has `drafted` None."""

    tokens: list[int]
    """Tokens kept, at most `accepted + 1`: nothing past an end token or the limit."""
    drafted: int | None = None
    """Nodes verified, without the root."""
    accepted: int = 0
    """Drafts on the accepted path, before anything was cut."""
    t_draft_s: float = 0.0
    t_verify_s: float = 0.0
    t_accept_s: float = 0.0
    t_kv_s: float = 0.0
    t_round_s: float = 0.0


@dataclass
class Generation:
    """A finished request: its tokens, its rounds and why it ended."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str = "length"
    ttft_s: float = 0.0
    decode_s: float = 0.0


def generate(
    target: Target,
    proposer: Proposer,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: frozenset[int] | None = None,
) -> Generation:
    """Decode one prompt greedily to its end; see `decode`."""
    eos = target.eos_ids if eos_ids is None else eos_ids
    result = Generation(list(prompt_ids))
    started = time.perf_counter()
    for step in decode(target, proposer, prompt_ids, max_new_tokens, eos):
        if step.drafted is None:
            result.ttft_s = time.perf_counter() - started
        else:
            result.rounds.append(step)
        result.token_ids.extend(step.tokens)
    result.decode_s = time.perf_counter() - started - result.ttft_s
    if result.token_ids[-1] in eos:
        result.finish_reason = "eos"
    elif len(result.token_ids) < max_new_tokens:
        result.finish_reason = "context"
    return result


@torch.inference_mode()
def decode(
    target: Target, proposer: Proposer, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: frozenset[int]
) -> Iterator[Round]:
    """Yield the target's own greedy continuation of the prompt, round by round, as it is verified.

    Ends at an end token (which is yielded), after `max_new_tokens`, or where the target's positions end. Raises `UserError` for
    an empty prompt and for one that leaves no room.
    """
    room = target.max_positions - len(prompt_ids)
    if not prompt_ids:
        raise UserError("the prompt is empty; give at least one token")
    if room < 1:
        raise UserError(f"a prompt of {len(prompt_ids)} tokens leaves no room in {target.max_positions} positions; shorten it")
    if max_new_tokens < 1:
        raise UserError("max_new_tokens must be at least 1")
    limit = min(max_new_tokens, room)
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    cache = TreeCache(len(prompt_ids) + limit + proposer.max_drafted + 1)

    hidden = target.forward(ids, cache=cache, taps=proposer.taps)
    cache.commit(list(range(len(prompt_ids))))
    proposer.prefill(ids, hidden)
    root = target.head(hidden.last[:, -1]).argmax(-1)
    first = int(root)
    yield Round([first])
    emitted, done = 1, first in eos_ids

    while emitted < limit and not done:
        start = time.perf_counter()
        tree = proposer.propose(root)
        drafted = time.perf_counter()
        hidden, choices = verify(target, tree, cache, proposer.taps)
        verified = time.perf_counter()
        path, tokens, root = accept(tree, choices)
        decided = time.perf_counter()
        kept = cut(tokens, limit - emitted, eos_ids)
        cache.commit(path)
        on_path = torch.tensor(path, device=ids.device)
        proposer.commit(tree.tokens[:, on_path], Hidden(hidden.last[:, on_path], tuple(tap[:, on_path] for tap in hidden.taps)))
        end = time.perf_counter()
        emitted, done = emitted + len(kept), kept[-1] in eos_ids
        yield Round(
            kept, tree.shape.drafted, len(path) - 1,
            drafted - start, verified - drafted, decided - verified, end - decided, end - start,
        )  # fmt: skip


def verify(target: Target, tree: DraftTree, cache: TreeCache, taps: tuple[int, ...]) -> tuple[Hidden, Tensor]:
    """One target forward over the whole tree: features of every node, and the target's choice `[B, N]` after each."""
    depths = tree.shape.tables(tree.tokens.device).depths
    # A node past the last position can never be kept (the limit cuts it off); clamping keeps learned positions in range.
    positions = (cache.length + depths).clamp(max=target.max_positions - 1)[None]
    visible = tree.shape.tables(tree.tokens.device).ancestors
    # A lone root sees everything, which is what the model does without being told.
    mask = None if tree.shape.nodes == 1 else target.tree_mask(visible, positions[0], cache.length)
    hidden = target.forward(tree.tokens, positions, mask, cache, taps)
    return hidden, target.head(hidden.last).argmax(-1)


def accept(tree: DraftTree, choices: Tensor) -> tuple[list[int], list[int], Tensor]:
    """The accepted path (node ids, root first), the tokens that the round yields, and the next root `[B]`.

    The single device-to-host synchronisation of a round is here.
    """
    paths = tree.shape.tables(tree.tokens.device).paths
    path = paths[accept_greedy(tree, choices)]  # [B, D + 1]
    chosen = torch.where(path == NO_NODE, NO_NODE, choices.gather(1, path.clamp(min=0)))
    nodes, tokens = torch.stack([path[0], chosen[0]]).tolist()
    count = sum(node != NO_NODE for node in nodes)
    return nodes[:count], tokens[:count], chosen[:, count - 1]


def cut(tokens: list[int], limit: int, eos_ids: frozenset[int]) -> list[int]:
    """`tokens` up to the first end token (kept) and no more than `limit`."""
    kept = []
    for token in tokens[:limit]:
        kept.append(token)
        if token in eos_ids:
            break
    return kept
