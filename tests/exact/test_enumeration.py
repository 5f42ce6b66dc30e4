"""The rules that compare distributions are exact: every outcome over a toy vocabulary is
enumerated, on the functions that the loop calls.

The joint distribution of three tokens (those that the round emits, completed by the target itself)
must equal the target's. Every mistake of docs/verification.md#planted-mistakes is planted the same
way, and must be seen.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.rounds import accept as verifiers
from draftsmith.inference.rounds.accept import (
    AcceptancePlan,
    Verifier,
    match,
    recursive,
    traversal,
)
from draftsmith.inference.rounds.tree import NO_NODE, DraftTree, TreeShape
from tests.helpers.enumeration import token_level
from tests.helpers.trees import wide_tree

LENGTH = 3
CHAIN = TreeShape.chain(2)
TREE = wide_tree((2, 2))
# three levels below the first child, one below the second
UNEVEN = TreeShape((-1, 0, 0, 1, 1, 2, 3))
# wider than a truncated distribution has tokens: nodes are missing, and nodes below them
WIDE = TreeShape((-1, 0, 0, 0, 1, 1, 3))
SHAPES = {"chain": CHAIN, "tree": TREE, "uneven": UNEVEN, "wide": WIDE}


class ToyModels:
    """Random distributions of target and drafter after every prefix of up to three tokens."""

    def __init__(
        self, seed: int, vocab: int, far: bool, temperature: float = 1.0, top_k: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.p: dict[tuple[int, ...], Tensor] = {}
        self.q: dict[tuple[int, ...], Tensor] = {}
        self.raw_p: dict[tuple[int, ...], Tensor] = {}
        self.raw_q: dict[tuple[int, ...], Tensor] = {}
        for length in range(LENGTH + 1):
            for prefix in itertools.product(range(vocab), repeat=length):
                p = torch.randn(vocab, generator=generator, dtype=torch.float64) * (
                    1.5 if far else 1.0
                )
                other = torch.randn(vocab, generator=generator, dtype=torch.float64)
                q = (0.2 if far else 0.5) * p + (0.8 if far else 0.5) * other
                for name, logits in (("p", p), ("q", q)):
                    getattr(self, f"raw_{name}")[prefix] = logits.softmax(-1)
                    warped = logits / temperature
                    if top_k:
                        warped = warped.masked_fill(
                            warped < warped.topk(top_k).values[-1], -torch.inf
                        )
                    getattr(self, name)[prefix] = warped.softmax(-1)

    def joint(self, probs: dict[tuple[int, ...], Tensor]) -> Tensor:
        """Probability of every string of three tokens `[V, V, V]`."""
        found = torch.zeros((self.vocab,) * LENGTH, dtype=torch.float64)
        for text in itertools.product(range(self.vocab), repeat=LENGTH):
            found[text] = torch.stack([probs[text[:i]][text[i]] for i in range(LENGTH)]).prod()
        return found


Draft = tuple[float, list[int]]
"""Probability of a drafted tree, and its tokens (the root's is not used)."""


def sampled_trees(
    shape: TreeShape, probs: dict[tuple[int, ...], Tensor], replace: bool = False
) -> Iterable[Draft]:
    """Every tree whose children are draws from their parent's distribution, without replacement by
    default, with its probability."""

    def fill(node: int, chance: float, tokens: list[int]) -> Iterable[Draft]:
        if node == shape.nodes:
            yield chance, tokens
            return
        parent = shape.parents[node]
        prefix = tuple(tokens[n] for n in shape.path_to(parent)[1:])
        if parent and NO_NODE in prefix:
            yield from fill(node + 1, chance, [*tokens, NO_NODE])
            return
        older = [tokens[n] for n in shape.children[parent] if n < node]
        left = probs[prefix].clone()
        if not replace:
            left[[t for t in older if t >= 0]] = 0
        total = float(left.sum())
        if total == 0:  # the distribution has run out of tokens
            yield from fill(node + 1, chance, [*tokens, NO_NODE])
            return
        for token in range(len(left)):
            if left[token] > 0:
                yield from fill(node + 1, chance * float(left[token]) / total, [*tokens, token])

    yield from fill(1, 1.0, [0])


def best_tree(shape: TreeShape, probs: dict[tuple[int, ...], Tensor]) -> Draft:
    """The tree of the likeliest children."""
    tokens = [0]
    for node in range(1, shape.nodes):
        parent = shape.parents[node]
        prefix = tuple(tokens[n] for n in shape.path_to(parent)[1:])
        tokens.append(
            int(probs[prefix].argsort(descending=True)[shape.children[parent].index(node)])
        )
    return 1.0, tokens


def tensors(
    shape: TreeShape, drafts: list[Draft], models: ToyModels, q: dict[tuple[int, ...], Tensor]
) -> tuple[Tensor, ...]:
    """Chances `[B]`, tokens `[B, N]`, p and q `[B, N, V]`."""
    chances = torch.tensor([chance for chance, _ in drafts], dtype=torch.float64)
    tokens = torch.tensor([row for _, row in drafts])
    uniform = torch.full((models.vocab,), 1 / models.vocab, dtype=torch.float64)

    def rows(probs: dict[tuple[int, ...], Tensor]) -> Tensor:
        paths = [
            [tuple(row[n] for n in shape.path_to(node)[1:]) for node in range(shape.nodes)]
            for _, row in drafts
        ]
        return torch.stack(
            [torch.stack([probs.get(prefix, uniform) for prefix in row]) for row in paths]
        )

    return chances, tokens, rows(models.p), rows(q)


def emitted_distribution(
    shape: TreeShape,
    models: ToyModels,
    chances: Tensor,
    tokens: Tensor,
    last_tokens: Tensor,
    last: Tensor,
) -> tuple[Tensor, float]:
    """Joint distribution of three tokens, and tokens a round, from outcomes: weights `[B]`, nodes
    `[B]` and distributions of the last token `[B, V]`."""
    found = torch.zeros((models.vocab,) * LENGTH, dtype=torch.float64)
    count = 0.0
    for chance, row, node, probs in zip(
        chances.tolist(), tokens.tolist(), last_tokens.tolist(), last, strict=True
    ):
        path = tuple(row[n] for n in shape.path_to(node)[1:])
        count += chance * (len(path) + 1)
        for final in range(models.vocab):
            weight = chance * float(probs[final])
            if weight:
                text = (*path, final)
                for rest in itertools.product(
                    range(models.vocab), repeat=max(LENGTH - len(text), 0)
                ):
                    whole = (*text, *rest)
                    after = [float(models.p[whole[:i]][whole[i]]) for i in range(len(text), LENGTH)]
                    found[whole[:LENGTH]] += weight * float(
                        torch.tensor(after, dtype=torch.float64).prod()
                    )
    return found, count


def enumerate_plan(
    shape: TreeShape, drafts: list[Draft], models: ToyModels, verify: Verifier, q=None
) -> tuple[Tensor, float]:
    """Every drafted tree, every pattern of coins, every last token."""
    chances, tokens, p, draft = tensors(shape, drafts, models, models.q if q is None else q)
    plan = verify(shape, tokens, p, draft)
    assert ((plan.chances >= 0) & (plan.chances <= 1 + 1e-12)).all()
    pooled: dict[tuple[tuple[int, ...], int], Tensor] = {}
    weights: dict[tuple[tuple[int, ...], int], float] = {}
    for pattern in itertools.product((False, True), repeat=shape.nodes - 1):
        coins = torch.tensor([[True, *pattern]]).expand(len(tokens), -1)
        odds = torch.where(coins, plan.chances, 1 - plan.chances)[:, 1:].prod(-1) * chances
        nodes = plan.select(coins.clone())
        for row in (odds > 0).nonzero()[:, 0].tolist():
            node = int(nodes[row])
            path = tuple(int(tokens[row, n]) for n in shape.path_to(node)[1:])
            key = (path, node)
            weight = float(odds[row])
            pooled[key] = (
                pooled.get(key, torch.zeros(models.vocab, dtype=torch.float64))
                + weight * plan.probs[row, node]
            )
            weights[key] = weights.get(key, 0.0) + weight
    keys = list(pooled)
    rows = []
    for path, node in keys:
        row = [0] * shape.nodes
        for place, token in zip(shape.path_to(node)[1:], path, strict=True):
            row[place] = token
        rows.append(row)
    last_tokens = torch.tensor([node for _, node in keys])
    last = torch.stack([pooled[key] / weights[key] for key in keys])
    return emitted_distribution(
        shape,
        models,
        torch.tensor([weights[key] for key in keys], dtype=torch.float64),
        torch.tensor(rows),
        last_tokens,
        last,
    )


def enumerate_match(
    shape: TreeShape, drafts: list[Draft], models: ToyModels, pick=match
) -> tuple[Tensor, float]:
    """Every drafted tree and every independent target choice after each node."""
    chances, tokens, p, _ = tensors(shape, drafts, models, models.q)
    found, count = torch.zeros((models.vocab,) * LENGTH, dtype=torch.float64), 0.0
    for pattern in itertools.product(range(models.vocab), repeat=shape.nodes):
        choices = torch.tensor([pattern]).expand(len(tokens), -1)
        odds = p.gather(2, choices[..., None])[..., 0].prod(-1) * chances
        nodes = pick(DraftTree(tokens, shape), choices)
        last = torch.nn.functional.one_hot(
            choices.gather(1, nodes[:, None])[:, 0], models.vocab
        ).double()
        part, tokens_part = emitted_distribution(shape, models, odds, tokens, nodes, last)
        found, count = found + part, count + tokens_part
    return found, count


def error_of(outcome: tuple[Tensor, float], models: ToyModels) -> float:
    found = outcome[0]
    assert float(found.sum()) == pytest.approx(1, abs=1e-9)
    return float((found - models.joint(models.p)).abs().max())


def block(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
    """Block verification by its formula for chains, which the loop's traversal has to equal."""
    last, weights = shape.nodes - 1, [torch.ones_like(p[:, 0, 0])]
    for i in range(1, shape.nodes):
        x = tokens[:, i]
        ratio = verifiers.ratio(
            verifiers.gather_probs(p[:, i - 1], x), verifiers.gather_probs(q[:, i - 1], x)
        )
        weights.append((weights[-1] * ratio).clamp(max=1))
    weight = torch.stack(weights, dim=1)
    chances, probs = weight.clone(), p.clone()
    rest, mass = verifiers.residual_weighted(weight[:, :last], p[:, :last], q[:, :last])
    chances[:, :last], probs[:, :last] = verifiers.share_of(mass, weight[:, :last]), rest
    order = tuple(range(last, -1, -1))
    return AcceptancePlan(chances, probs, partial(verifiers.select_first, order))


LOSSLESS: list[tuple[str, Verifier]] = [
    ("chain", token_level),
    ("chain", block),
    ("chain", traversal),
    ("chain", recursive),
    ("tree", recursive),
    ("tree", traversal),
    ("uneven", recursive),
    ("uneven", traversal),
    ("wide", recursive),
    ("wide", traversal),
]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("shape", "verify"), LOSSLESS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize(("seed", "vocab", "top_k"), [(0, 3, 0), (1, 3, 2), (3, 3, 1), (2, 4, 0)])
def test_joint_distribution_equals_that_of_the_target(
    shape: str, verify: Verifier, seed: int, vocab: int, top_k: int, far: bool
) -> None:
    models = ToyModels(seed, vocab, far, temperature=0.7 if top_k else 1.0, top_k=top_k)
    drafts = list(sampled_trees(SHAPES[shape], models.q))
    assert sum(chance for chance, _ in drafts) == pytest.approx(1)
    if shape == "wide" and top_k:
        assert any(NO_NODE in tokens for _, tokens in drafts)
    assert error_of(enumerate_plan(SHAPES[shape], drafts, models, verify), models) < 1e-9


@pytest.mark.parametrize(("shape", "verify"), LOSSLESS, ids=lambda v: getattr(v, "__name__", v))
def test_rules_are_exact_for_independent_drafts(shape: str, verify: Verifier) -> None:
    """As those of Medusa's heads and of a block: one distribution for all nodes of a depth."""
    models = ToyModels(4, 3, far=True)
    models.q = {prefix: models.q[(0,) * len(prefix)] for prefix in models.q}
    drafts = list(sampled_trees(SHAPES[shape], models.q))
    assert error_of(enumerate_plan(SHAPES[shape], drafts, models, verify), models) < 1e-9


SMALL = (0.0, 1e-45, 1e-39, 1.2e-38, 1e-37, 1e-30, 1e-20, 1e-13, 1e-12, 1e-10, 1e-8, 1e-7)


def corner_distributions(seed: int) -> ToyModels:
    """Distributions in float32 of which all but one or two entries lie between nothing and its
    smallest step beside 1."""
    draw, models = random.Random(seed), ToyModels(seed, 3, far=True)
    for probs in (models.p, models.q):
        for prefix in probs:
            entries = [draw.choice(SMALL) for _ in range(models.vocab)]
            for place in draw.sample(range(models.vocab), draw.choice([1, 1, 2])):
                entries[place] = draw.random()
            single = torch.tensor(entries, dtype=torch.float32)
            probs[prefix] = (single / single.sum()).double()
    return models


@pytest.mark.parametrize(("shape", "verify"), LOSSLESS, ids=lambda v: getattr(v, "__name__", v))
def test_rules_stay_exact_in_float32_near_underflow(shape: str, verify: Verifier) -> None:
    """A weight of 1 beside a mass that float32 loses beside 1 once gave chances of 1e4."""

    def single(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
        plan = verify(shape, tokens, p.float(), q.float())
        assert torch.isfinite(plan.probs).all() and (plan.probs >= 0).all()
        assert ((plan.chances >= 0) & (plan.chances <= 1)).all()
        return AcceptancePlan(plan.chances.double(), plan.probs.double(), plan.select)

    for seed in range(2 if shape in ("uneven", "wide") else 6):
        models = corner_distributions(seed)
        found, _ = enumerate_plan(
            SHAPES[shape], list(sampled_trees(SHAPES[shape], models.q)), models, single
        )
        assert float((found - models.joint(models.p)).abs().max()) < 1e-6, seed


def sure_distributions(seed: int, rest: float, temperature: float, dtype: torch.dtype) -> ToyModels:
    """A drafter that leaves `rest` beside its first choice, and a target that often disagrees, by
    the loop's own processors at a temperature."""
    draw, models = torch.Generator().manual_seed(seed), ToyModels(seed, 3, far=True)
    warpers = Sampling(temperature=temperature).warpers
    for prefix in models.q:
        first = int(torch.randint(3, (), generator=draw))
        # logits at T = 1 that leave `rest` at `temperature`
        logits = torch.rand(3, generator=draw, dtype=torch.float64) - math.log(1 / rest)
        logits[first] = 0
        scores = warpers(None, (logits * temperature).to(dtype)[None])[0]
        models.q[prefix] = scores.softmax(-1).double()
        # every other target is as sure of a token of its own
        if torch.rand((), generator=draw) < 0.5:
            models.p[prefix] = models.q[prefix].roll(int(torch.randint(3, (), generator=draw)))
        models.p[prefix] = models.p[prefix].to(dtype).double()
    return models


@pytest.mark.parametrize(
    "temperature",
    [0.05, *(pytest.param(warmer, marks=pytest.mark.full) for warmer in (0.2, 1.0))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize(("shape", "verify"), LOSSLESS, ids=lambda v: getattr(v, "__name__", v))
def test_a_sure_drafter_leaves_the_targets_distribution(
    shape: str, verify: Verifier, dtype: torch.dtype, temperature: float
) -> None:
    """What is left of q after its first child was once divided by 1e-12 and not by its sum, so that
    the second child was accepted nearly always."""

    def typed(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
        plan = verify(shape, tokens, p.to(dtype), q.to(dtype))
        return AcceptancePlan(plan.chances.double(), plan.probs.double(), plan.select)

    bound = 1e-6 if dtype == torch.float32 else 1e-9
    large = shape in ("uneven", "wide")
    rests = (1e-13, 1e-40) if large else (1e-6, 1e-11, 1e-13, 1e-20, 1e-30, 1e-37, 1e-40)
    for seed, rest in enumerate(rests):
        models = sure_distributions(seed, rest, temperature, dtype)
        drafts = list(sampled_trees(SHAPES[shape], models.q))
        found, _ = enumerate_plan(SHAPES[shape], drafts, models, typed)
        assert float((found - models.joint(models.p)).abs().max()) < bound, rest


@pytest.mark.parametrize("seed", range(2))
def test_matching_a_deterministic_tree_is_exact(seed: int) -> None:
    models = ToyModels(seed, 3, far=False)
    shape = TreeShape((-1, 0, 0, 1, 1, 2))
    drafts = [best_tree(shape, models.q)]
    outcome = enumerate_match(shape, drafts, models)
    assert error_of(outcome, models) < 1e-9


def test_block_is_traversal_on_a_chain_and_accepts_more_than_the_token_level_rule() -> None:
    models = ToyModels(5, 3, far=True)
    drafts = list(sampled_trees(CHAIN, models.q))
    counts = {
        rule.__name__: enumerate_plan(CHAIN, drafts, models, rule)[1]
        for rule in (token_level, block, traversal, recursive)
    }
    assert counts["block"] == pytest.approx(counts["traversal"], abs=1e-12)
    assert counts["recursive"] == pytest.approx(counts["token_level"], abs=1e-12)
    assert counts["block"] > counts["token_level"] + 1e-3


def test_traversal_accepts_more_than_recursive_rejection() -> None:
    for seed in range(3):
        models = ToyModels(seed, 3, far=False)
        drafts = list(sampled_trees(TREE, models.q))
        assert (
            enumerate_plan(TREE, drafts, models, traversal)[1]
            > enumerate_plan(TREE, drafts, models, recursive)[1]
        )


# The mistakes of docs/verification.md#planted-mistakes. Each gives the joint distribution that a
# wrong program would have.


def deterministic_children_by_ratio(models: ToyModels) -> tuple[Tensor, float]:
    return enumerate_plan(TREE, [best_tree(TREE, models.q)], models, recursive)


def greedy_chain_by_ratio(models: ToyModels) -> tuple[Tensor, float]:
    return enumerate_plan(CHAIN, [best_tree(CHAIN, models.q)], models, token_level)


def pruned_by_value(models: ToyModels) -> tuple[Tensor, float]:
    """Two children are drawn, the likelier is kept and tested alone."""
    kept: list[Draft] = []
    pair = wide_tree((2,))
    for chance, (_, a, b) in sampled_trees(pair, models.q):
        best = a if models.q[()][a] >= models.q[()][b] else b
        kept.append((chance, [0, best]))
    return enumerate_plan(TreeShape.chain(1), kept, models, token_level)


def first_token_greedy(models: ToyModels) -> tuple[Tensor, float]:
    changed = ToyModels.__new__(ToyModels)
    changed.__dict__.update(vars(models))
    changed.p = {
        **models.p,
        (): torch.nn.functional.one_hot(models.p[()].argmax(), models.vocab).double(),
    }
    return enumerate_match(CHAIN, [best_tree(CHAIN, models.q)], changed)


def block_that_breaks(models: ToyModels) -> tuple[Tensor, float]:
    def verify(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
        plan = block(shape, tokens, p, q)
        return AcceptancePlan(plan.chances, plan.probs, partial(verifiers.select_down, shape))

    return enumerate_plan(CHAIN, list(sampled_trees(CHAIN, models.q)), models, verify)


def a_draw_for_each_row(models: ToyModels) -> tuple[Tensor, float]:
    """Two candidate rows share their first token; each draws the target again, and the longest
    accepted row wins."""
    shape = TreeShape((-1, 0, 1, 1))
    _, tokens = best_tree(shape, models.q)
    found, count = torch.zeros((models.vocab,) * LENGTH, dtype=torch.float64), 0.0
    # draws after root, node 1, and the row's leaf
    outcomes = list(itertools.product(range(models.vocab), repeat=3))
    for first, second in itertools.product(outcomes, repeat=2):
        rows = []
        for draws, leaf in ((first, 2), (second, 3)):
            path = [0, 1, leaf]
            length = 0
            while length < 2 and draws[length] == tokens[path[length + 1]]:
                length += 1
            rows.append((length, path[length], draws[length]))
        weight = 1.0
        for draws, leaf in ((first, 2), (second, 3)):
            prefixes = [(), (tokens[1],), (tokens[1], tokens[leaf])]
            weight *= float(
                torch.stack(
                    [models.p[prefix][d] for prefix, d in zip(prefixes, draws, strict=True)]
                ).prod()
            )
        _, node, last = max(rows, key=lambda row: row[0])
        one_hot = torch.nn.functional.one_hot(torch.tensor([last]), models.vocab).double()
        part, c = emitted_distribution(
            shape,
            models,
            torch.tensor([weight], dtype=torch.float64),
            torch.tensor([tokens]),
            torch.tensor([node]),
            one_hot,
        )
        found, count = found + part, count + c
    return found, count


def draft_at_another_temperature(models: ToyModels) -> tuple[Tensor, float]:
    sharper = {prefix: (probs**2) / (probs**2).sum() for prefix, probs in models.q.items()}
    return enumerate_plan(CHAIN, list(sampled_trees(CHAIN, sharper)), models, token_level)


def traversal_without_weights(models: ToyModels) -> tuple[Tensor, float]:
    """The parent's weight stays what it was when a child was rejected."""

    def verify(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
        real = verifiers.residual_weighted

        def keep(weight: Tensor, left: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
            return real(weight, left, drawn)[0], weight  # w / (w + 1 - w) = w

        verifiers.residual_weighted = keep
        try:
            plan = traversal(shape, tokens, p, q)
        finally:
            verifiers.residual_weighted = real
        return plan

    return enumerate_plan(TREE, list(sampled_trees(TREE, models.q)), models, verify)


def bonus_without_temperature(models: ToyModels) -> tuple[Tensor, float]:
    def verify(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
        plan = token_level(shape, tokens, p, q)
        leaf = shape.nodes - 1
        raw = [models.raw_p[tuple(int(row[n]) for n in shape.path_to(leaf)[1:])] for row in tokens]
        plan.probs[:, leaf] = torch.stack(raw)
        return plan

    return enumerate_plan(CHAIN, list(sampled_trees(CHAIN, models.q)), models, verify)


def rejection_draws_from_p(
    shape: TreeShape, rule: Verifier, models: ToyModels
) -> tuple[Tensor, float]:
    def verify(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
        plan = rule(shape, tokens, p, q)
        return AcceptancePlan(plan.chances, p, plan.select)

    return enumerate_plan(shape, list(sampled_trees(shape, models.q)), models, verify)


def draft_law_not_reduced(models: ToyModels) -> tuple[Tensor, float]:
    real = verifiers.zero_and_renormalize
    verifiers.zero_and_renormalize = lambda q, tokens: q
    try:
        return enumerate_plan(TREE, list(sampled_trees(TREE, models.q)), models, recursive)
    finally:
        verifiers.zero_and_renormalize = real


def with_replacement(models: ToyModels, drop_duplicates: bool) -> tuple[Tensor, float]:
    real = verifiers.zero_and_renormalize
    verifiers.zero_and_renormalize = lambda q, tokens: q
    pair = wide_tree((2,))
    drafts = [
        (chance, [0, a, NO_NODE if drop_duplicates and a == b else b])
        for chance, (_, a, b) in sampled_trees(pair, models.q, True)
    ]
    try:
        return enumerate_plan(pair, drafts, models, recursive)
    finally:
        verifiers.zero_and_renormalize = real


def block_with_the_token_level_residual(models: ToyModels) -> tuple[Tensor, float]:
    def verify(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
        plan = block(shape, tokens, p, q)
        plain = p.clone()
        plain[:, :-1] = verifiers.residual(p[:, :-1], q[:, :-1])
        return AcceptancePlan(plan.chances, plain, plan.select)

    return enumerate_plan(CHAIN, list(sampled_trees(CHAIN, models.q)), models, verify)


def typical(models: ToyModels) -> tuple[Tensor, float]:
    """Medusa's: a drafted token passes if it is likely enough."""

    def verify(shape: TreeShape, tokens: Tensor, p: Tensor, q: Tensor) -> AcceptancePlan:
        entropy = -(p * p.log()).sum(-1)
        bar = (0.3 * (-entropy).exp()).clamp(max=0.09)
        chances = torch.ones_like(p[..., 0])
        for node in range(1, shape.nodes):
            parent = shape.parents[node]
            chances[:, node] = (
                p[:, parent].gather(1, tokens[:, node, None])[:, 0] > bar[:, parent]
            ).double()
        return AcceptancePlan(chances, p, partial(verifiers.select_down, shape))

    return enumerate_plan(CHAIN, [best_tree(CHAIN, models.q)], models, verify)


MISTAKES: dict[str, Callable[[ToyModels], tuple[Tensor, float]]] = {
    "deterministic children tested with p/q": deterministic_children_by_ratio,
    "greedy chain tested with softmax q": greedy_chain_by_ratio,
    "sampled children pruned by value": pruned_by_value,
    "first token greedy": first_token_greedy,
    "block verification that breaks at the first failure": block_that_breaks,
    "a target draw for each row": a_draw_for_each_row,
    "draft at T=0.5, ratio with q at T=1": draft_at_another_temperature,
    "traversal without updating weights": traversal_without_weights,
    "bonus without temperature": bonus_without_temperature,
    "rejection draws from p": partial(rejection_draws_from_p, CHAIN, token_level),
    "RRS: last draw from the unreduced p": partial(rejection_draws_from_p, TREE, recursive),
    "without replacement, q not zeroed": draft_law_not_reduced,
    "duplicates removed from draws with replacement": partial(
        with_replacement, drop_duplicates=True
    ),
    "block verification with the token-level residual": block_with_the_token_level_residual,
    "typical acceptance": typical,
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_every_known_mistake_is_seen(mistake: str) -> None:
    errors = [
        error_of(MISTAKES[mistake](models), models)
        for models in (ToyModels(s, 3, far=s % 2 == 0, temperature=0.5) for s in range(16))
    ]
    assert max(errors) > 1e-6, errors


def test_draws_with_replacement_are_exact_as_long_as_duplicates_stay() -> None:
    """The harness itself, on a rule that the loop does not use (SpecInfer): the mistake above is in
    the dropping."""
    models = ToyModels(0, 3, far=True)
    assert error_of(with_replacement(models, drop_duplicates=False), models) < 1e-9


@pytest.mark.parametrize("rule", [token_level, block, recursive])
@pytest.mark.parametrize("seed", range(3))
def test_a_chain_that_ends_by_its_own_drafts_is_still_exact(rule: Verifier, seed: int) -> None:
    """Adaptive chains: one draft if its own probability is below a threshold, two otherwise."""
    models = ToyModels(seed, 4, far=False)
    q = models.q[()]
    last_tokens = [token for token in range(4) if float(q[token]) < float(q.median()) + 1e-9]
    assert 0 < len(last_tokens) < 4
    one, two = TreeShape.chain(1), CHAIN
    short = [draft for draft in sampled_trees(one, models.q) if draft[1][1] in last_tokens]
    long = [draft for draft in sampled_trees(two, models.q) if draft[1][1] not in last_tokens]
    found = enumerate_plan(one, short, models, rule)[0] + enumerate_plan(two, long, models, rule)[0]
    assert error_of((found, 0.0), models) < 1e-9
    # A chain that ends by what it would have drafted next is not: the test can fail.
    second = [draft for draft in sampled_trees(two, models.q) if draft[1][2] in last_tokens]
    peeked = [(chance, row[:2]) for chance, row in second]
    rest = [draft for draft in sampled_trees(two, models.q) if draft[1][2] not in last_tokens]
    wrong = (
        enumerate_plan(one, peeked, models, rule)[0] + enumerate_plan(two, rest, models, rule)[0]
    )
    assert error_of((wrong, 0.0), models) > 1e-4
