"""The arithmetic of gains: closed forms against tables of the literature, against play, and against
what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.costs import (
    CPU_BALANCE,
    GPUS,
    Roofline,
    best_length,
    break_even,
    chain_tokens,
    extend_acceptances,
    gpu_named,
    pass_cost,
    speedup,
    tree_tokens,
)
from draftsmith.inference.evaluation.simulate import (
    Chain,
    Options,
    assumed,
    by_load,
    longest_chain,
    run,
    simulation,
)
from tests.conftest import QUICKSTART
from tests.helpers.command_line import run_cli

CHANCE = st.floats(0, 1, allow_nan=False)


def closed_form(acceptance: float, length: int) -> float:
    """Return the expected tokens of a round with a chain of K = `length` drafts of one acceptance.

    This is (1 - a^(K+1)) / (1 - a) (arXiv 2211.17192, eq. 1).
    """
    # at an acceptance of 1 the formula is 0 / 0, and its limit K + 1
    return length + 1.0 if acceptance == 1 else (1 - acceptance ** (length + 1)) / (1 - acceptance)


@pytest.mark.parametrize(
    ("acceptance", "tokens"),
    [
        (0.6, (2.176, 2.383, 2.458)),
        (0.7, (2.533, 2.941, 3.141)),
        (0.8, (2.952, 3.689, 4.161)),
        (0.9, (3.439, 4.686, 5.695)),
    ],
)
def test_chain_tokens_match_published_values(acceptance: float, tokens: tuple[float, ...]) -> None:
    assert [round(chain_tokens([acceptance] * k), 3) for k in (3, 5, 7)] == list(tokens)
    assert chain_tokens([0.0] * 5) == 1 and chain_tokens([1.0] * 5) == 6


@given(CHANCE, st.integers(1, 12))
def test_constant_acceptance_matches_the_closed_form(acceptance: float, length: int) -> None:
    assert chain_tokens([acceptance] * length) == pytest.approx(closed_form(acceptance, length))


@given(st.lists(CHANCE, min_size=1, max_size=8))
def test_tokens_are_one_more_than_the_sum_of_survival(acceptances: list[float]) -> None:
    assert chain_tokens(acceptances) == pytest.approx(1 + sum(accumulate(acceptances, mul)))
    assert extend_acceptances(acceptances, len(acceptances) + 2) == [
        *acceptances,
        acceptances[-1],
        acceptances[-1],
    ]


@pytest.mark.parametrize(
    ("acceptance", "cost", "length", "gain"),
    [
        (0.6, 0.02, 6, 2.17),
        (0.7, 0.05, 6, 2.35),
        (0.8, 0.05, 8, 3.09),
        (0.8, 0.2, 4, 1.87),
        (0.9, 0.1, 10, 3.43),
    ],
)
def test_best_length_and_speedup_match_published_values(
    acceptance: float, cost: float, length: int, gain: float
) -> None:
    best = best_length([acceptance], cost, 32)
    assert best.length == length and best.speedup == pytest.approx(gain, abs=5e-3)


def test_no_drafting_is_best_where_a_draft_costs_more_than_it_is_worth() -> None:
    """Some length gains iff a > c (arXiv 2211.17192, corollary 3.9)."""
    assert best_length([0.3], 0.31, 32).length == 0 and best_length([0.3], 0.29, 32).length > 0
    cost = break_even([0.8], 5)
    assert speedup(closed_form(0.8, 5), 5 * cost) == pytest.approx(1)


def simulated_tokens(
    target: torch.Tensor, drafter: torch.Tensor, length: int, rounds: int, seed: int = 0
) -> float:
    """Return the mean tokens of `rounds` simulated rounds with a chain of `length` drafts.

    Drafts are drawn from `drafter` `[V]` and accepted with probability min(1, p / q) of `target`
    `[V]`, up to the first that is refused. Both distributions are the same at every position.
    """
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.multinomial(drafter, rounds * length, replacement=True, generator=generator)
    drafts = drafts.view(rounds, length)
    # tokens of probability 0 under the drafter make inf or nan here, and are never drawn
    chance = (target / drafter).clamp(max=1)[drafts]
    coins = torch.rand(rounds, length, generator=generator, dtype=chance.dtype)
    # the running product is 0 from the first refusal on, so its sum counts the accepted drafts
    accepted = (coins < chance).long().cumprod(-1).sum(-1)
    return float(accepted.double().mean()) + 1


@pytest.mark.parametrize("length", [1, 4])
def test_play_confirms_the_closed_form(length: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        target, drafter = torch.rand(2, 6, generator=generator, dtype=torch.float64).softmax(-1)
        acceptance = float(torch.minimum(target, drafter).sum())
        played = simulated_tokens(target, drafter, length, 200_000)
        assert played == pytest.approx(closed_form(acceptance, length), abs=0.02)


def test_roofline_matches_hand_computed_values() -> None:
    """8e9 parameters of 2 bytes at 3.35 TB/s: 4.78 ms; from 295 tokens on arithmetic takes
    longer."""
    model = Roofline(GPUS["H100"], 8e9, 0)
    plain = model.pass_seconds(1, 1, 0)
    assert plain == pytest.approx(16e9 / 3.35e12)
    assert model.free_tokens == pytest.approx(295, abs=1)
    at_knee = model.pass_seconds(1, 295, 0)
    assert at_knee == pytest.approx(plain, rel=0.01) and model.pass_seconds(1, 590, 0) > (
        1.9 * at_knee
    )
    cached = Roofline(GPUS["H100"], 8e9, 131072)
    assert cached.pass_seconds(32, 1, 3815) == pytest.approx(2 * plain, rel=0.01)
    slower = Roofline(GPUS["H100"], 8e9, 131072, 0.5, 0.8)
    assert slower.pass_seconds(32, 1, 3815) == pytest.approx(2 * plain / 0.8, rel=0.01)
    assert slower.free_tokens == pytest.approx(model.free_tokens * 0.5 / 0.8)


def test_pass_cost_and_tree_tokens_match_hand_computed_values() -> None:
    """On a CPU reading and multiplying add up; on a GPU the longer of both counts."""
    assert pass_cost(1) == 1 and pass_cost(1 + CPU_BALANCE) == 2
    gpu = gpu_named("NVIDIA H100 80GB HBM3")
    assert gpu == GPUS["H100"] and gpu_named("NVIDIA A100-SXM4-80GB") == GPUS["A100"]
    assert gpu_named("something else") is None
    assert pass_cost(200, gpu) == 1 and pass_cost(590, gpu) == pytest.approx(2, abs=0.01)
    # 1 + 0.8 + 0.1 + 0.8 * 0.5
    assert tree_tokens([[0.8, 0.1], [0.5, 0.2]], [(0,), (1,), (0, 0)]) == pytest.approx(2.3)


def simulated(acceptance: str, **options: Any) -> Any:
    return simulation(Options(acceptance, **options), Chain(None, assumed(acceptance), 0.05))


def test_loads_with_equal_lengths_are_merged_into_ranges() -> None:
    assert by_load([3, 3, 1, 0, 0]) == [[1, 2, 3], [3, 3, 1], [4, 5, 0]]


def test_costs_erase_the_gain() -> None:
    found = simulated("0.8", gpu="H100", params=8e9)
    assert found["tokens"] == pytest.approx(3.68928)
    gains = [simulated("0.8", draft_cost=cost)["speedup"] for cost in (0.0, 0.1, 0.4)]
    assert gains == sorted(gains, reverse=True) and gains[0] == pytest.approx(3.68928)
    by_batch = {row["batch"]: row for row in found["roofline"]}
    assert by_batch[256]["speedup"] < by_batch[64]["speedup"] <= by_batch[1]["speedup"]


@pytest.mark.parametrize("context", [300, 2000])
def test_the_best_length_falls_with_the_load(context: int) -> None:
    """Ranges as vLLM takes them, of equal length next to one another, up to the last batch."""
    found = simulated("0.8,0.75,0.7", gpu="H100", params=8e9, context=context)
    ranges, rows = found["by_load"], found["roofline"]
    assert found["context"] == context and ranges[0][0] == 1 and ranges[-1][1] == rows[-1]["batch"]
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
    lengths = [drafts for *_, drafts in ranges]
    assert lengths == sorted(lengths, reverse=True) and len({*lengths}) == len(lengths) > 2
    for row in rows:
        (drafts,) = (best for first, last, best in ranges if first <= row["batch"] <= last)
        assert row["best"]["length"] == drafts
    assert rows[0]["best"]["length"] == 6 and rows[0]["best"]["speedup"] > 2.6
    assert rows[-1]["best"]["length"] <= 2 and rows[-1]["best"]["speedup"] < 1.6


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"gpu": "H100"}, "go together"),
        ({"gpu": "Z1", "params": 1e9}, "unknown GPU 'Z1'"),
        ({"length": 0}, "at least 1"),
        ({"gpu": "H100", "params": 0.0}, "--params must be above 0"),
        ({"acceptance": "1.2"}, "between 0 and 1"),
        ({"acceptance": "high"}, "numbers with commas"),
        ({"acceptance": "no.json", "gpu": "H100", "params": 1e9}, "numbers with commas"),
    ],
)
def test_invalid_simulation_options_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        run(Options(**{"acceptance": "0.8", **options}))


@pytest.mark.full
def test_a_report_gives_acceptances_and_the_cost_of_drafts(tmp_path: Path) -> None:
    """Of two drafters on the quickstart target, the one of the longer chain."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"def add{i}(a, b):"}) + "\n" for i in range(3))
    )
    report = tmp_path / "report.json"
    shared = [
        "--target",
        str(QUICKSTART),
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "48",
        "--json",
        str(report),
    ]
    done = run_cli(
        "evaluate", *shared, "--drafter", "ngram", "--drafter", "ngram:length=3", "--no-baselines"
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(report.read_text())["settings"][0]["drafters"]
    chain = longest_chain(str(report))
    assert chain.name is not None and chain.draft_cost > 0
    seen = written[chain.name]["cond_accept"]
    assert (
        chain.acceptances == seen == max((row["cond_accept"] for row in written.values()), key=len)
    )
    load = ("--gpu", "H100", "--params", "8e9", "--context", "300", "--json", "-")
    done = run_cli("simulate", "--acceptance", str(report), *load)
    assert done.returncode == 0, done.stderr
    mine = json.loads(done.stdout)
    assert mine["draft_cost"] == pytest.approx(chain.draft_cost)
    options = Options(str(report), gpu="H100", params=8e9, context=300)
    assert mine["by_load"] == simulation(options, chain, len(seen))["by_load"]
    assert simulation(replace(options, draft_cost=0.3), chain)["draft_cost"] == 0.3
    done = run_cli("simulate", "--acceptance", str(report), *load[:-2])
    assert f"acceptances of {chain.name}, {seen[0]:.2f}, " in done.stdout
    report.write_text("{}")
    with pytest.raises(UserError, match="not a report"):
        run(Options(str(report)))
