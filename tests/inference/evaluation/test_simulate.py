"""The arithmetic of gains: closed forms against tables of the literature, against play, and against
what was measured."""

from __future__ import annotations

import json
import subprocess
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.heads.errors import UserError
from draftsmith.inference.evaluation.gains import (
    GPUS,
    Model,
    best_length,
    break_even,
    experts_touched,
    free_tokens,
    pass_seconds,
    profile_tokens,
    speedup,
    stretched,
)
from draftsmith.inference.evaluation.simulate import Options, from_report, simulation
from tests.conftest import PYTHON, QUICKSTART
from tests.train.test_loop import environment


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from draftsmith.train.commands.cli import main; main()"
    return subprocess.run(
        [PYTHON, "-c", code, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )


CHANCE = st.floats(0, 1, allow_nan=False)


def chain_tokens(acceptance: float, length: int) -> float:
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
def test_tokens_of_a_chain(acceptance: float, tokens: tuple[float, ...]) -> None:
    assert [round(profile_tokens([acceptance] * k), 3) for k in (3, 5, 7)] == list(tokens)
    assert profile_tokens([0.0] * 5) == 1 and profile_tokens([1.0] * 5) == 6


@given(CHANCE, st.integers(1, 12))
def test_a_level_profile_is_the_closed_form(acceptance: float, length: int) -> None:
    assert profile_tokens([acceptance] * length) == pytest.approx(chain_tokens(acceptance, length))


@given(st.lists(CHANCE, min_size=1, max_size=8))
def test_tokens_are_one_more_than_the_sum_of_survival(acceptances: list[float]) -> None:
    assert profile_tokens(acceptances) == pytest.approx(1 + sum(accumulate(acceptances, mul)))
    assert stretched(acceptances, len(acceptances) + 2) == [
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
def test_the_best_length_and_what_it_gains(
    acceptance: float, cost: float, length: int, gain: float
) -> None:
    best = best_length([acceptance], cost)
    assert best.length == length and best.speedup == pytest.approx(gain, abs=5e-3)


def test_no_drafting_is_best_where_a_draft_costs_more_than_it_is_worth() -> None:
    """Some length gains iff a > c (arXiv 2211.17192, corollary 3.9)."""
    assert best_length([0.3], 0.31).length == 0 and best_length([0.3], 0.29).length > 0
    cost = break_even([0.8], 5)
    assert speedup(chain_tokens(0.8, 5), 5, cost) == pytest.approx(1)


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
        assert played == pytest.approx(chain_tokens(acceptance, length), abs=0.02)


@pytest.mark.parametrize(
    ("experts", "active", "touched"),
    [
        (64, 6, (6, 21, 35, 51, 61, 64)),
        (128, 8, (8, 29, 52, 82, 112, 126)),
        (256, 8, (8, 31, 57, 102, 163, 222)),
    ],
)
def test_experts_that_a_pass_reaches(experts: int, active: int, touched: tuple[int, ...]) -> None:
    assert [round(experts_touched(experts, active, n)) for n in (1, 4, 8, 16, 32, 64)] == list(
        touched
    )


def test_the_roofline_by_hand() -> None:
    """8e9 parameters of 2 bytes at 3.35 TB/s: 4.78 ms; from 295 tokens on arithmetic takes
    longer."""
    model, gpu = Model(8e9), GPUS["H100"]
    assert pass_seconds(model, gpu, 1, 1, 0) == pytest.approx(16e9 / 3.35e12)
    assert free_tokens(model, gpu) == pytest.approx(295, abs=1)
    at_knee = pass_seconds(model, gpu, 1, 295, 0)
    assert (
        at_knee == pytest.approx(pass_seconds(model, gpu, 1, 1, 0), rel=0.01)
        and pass_seconds(model, gpu, 1, 590, 0) > 1.9 * at_knee
    )
    cached = Model(8e9, kv_bytes=131072)
    assert pass_seconds(cached, gpu, 32, 1, 3815) == pytest.approx(
        2 * pass_seconds(model, gpu, 1, 1, 0), rel=0.01
    )
    sparse = Model(1e9, expert_params=64e9, experts=64, active=6)
    assert pass_seconds(sparse, gpu, 1, 1, 0) == pytest.approx(2 * 7e9 / 3.35e12)
    assert 5 < pass_seconds(sparse, gpu, 1, 8, 0) / pass_seconds(sparse, gpu, 1, 1, 0) < 6, (
        "verification is not free"
    )


def test_costs_erase_the_gain() -> None:
    found = simulation(Options(acceptance="0.8", gpu="H100", params=8e9))
    assert found["tokens"] == pytest.approx(3.68928)
    gains = [row["speedup"] for row in found["costs"]]
    assert gains == sorted(gains, reverse=True) and gains[0] == pytest.approx(3.68928)
    by_batch = {row["batch"]: row for row in found["roofline"] if row["context"] == 2000}
    assert by_batch[256]["speedup"] < by_batch[64]["speedup"] <= by_batch[1]["speedup"]


def test_the_best_length_falls_with_the_load() -> None:
    """At 40% of the FLOP/s and 80% of the bandwidth, with a long context too."""
    options = Options(
        acceptance="0.8,0.75,0.7", gpu="H100", params=8e9, longest=8,
        batch="1,32,128,512", context="300,2000", compute_share=0.4, bandwidth_share=0.8,
    )  # fmt: skip
    rows = simulation(options)["roofline"]
    for context in (300, 2000):
        lengths = [row["best"]["length"] for row in rows if row["context"] == context]
        gains = [row["best"]["speedup"] for row in rows if row["context"] == context]
        assert lengths[0] == 6 and lengths == sorted(lengths, reverse=True) and lengths[-1] <= 2
        assert gains[0] > 2.6 and gains[-1] < 1.6
    with pytest.raises(UserError, match="--compute-share and --bandwidth-share"):
        Options(acceptance="0.8", compute_share=0.0)


def test_the_schedule_by_load_is_the_best_length_of_every_batch() -> None:
    """Ranges as vLLM takes them, of equal length next to one another, up to the last batch."""
    options = Options(
        acceptance="0.8,0.75,0.7", gpu="H100", params=8e9, longest=8, context="300", batch="1,256"
    )
    (found,) = simulation(options)["by_load"]
    ranges = found["ranges"]
    assert found["context"] == 300 and ranges[0][0] == 1 and ranges[-1][1] == 256
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
    lengths = [drafts for *_, drafts in ranges]
    assert lengths == sorted(lengths, reverse=True) and len({*lengths}) == len(lengths) > 2
    for first, last, drafts in ranges:
        several = Options(
            acceptance="0.8,0.75,0.7", gpu="H100", params=8e9, longest=8, context="300",
            batch=f"{first},{last}",
        )  # fmt: skip
        assert {row["best"]["length"] for row in simulation(several)["roofline"]} == {drafts}


def test_verification_as_timed_takes_the_rooflines_place(tmp_path: Path) -> None:
    """Verifying 0, 2 and 4 drafts takes 1, 2 and 6 ms: with free drafts of acceptance 0.5, one
    draft (1.5 tokens in 1.5 steps) gains nothing, four (1.94 in 6) lose."""
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps({"verification_s": {"8": {"132.0": {"0": 1e-3, "2": 2e-3, "4": 6e-3}}}})
    )
    options = Options(
        acceptance="0.5", draft_length=4, draft_cost=0.0, longest=6, profile=str(profile)
    )
    (row,) = simulation(options)["measured_verification"]
    assert (row["batch"], row["context"], row["plain_s"]) == (8, 132, 1e-3)
    assert row["verify_cost"] == pytest.approx(6) and row["speedup"] == pytest.approx(1.9375 / 6)
    assert row["best"] == {"length": 0, "speedup": 1.0}
    profile.write_text("{}")
    with pytest.raises(UserError, match="is not a profile"):
        simulation(options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "give either"),
        ({"acceptance": "0.8", "report": "x"}, "give either"),
        ({"acceptance": "0.8", "gpu": "H100"}, "go together"),
        ({"acceptance": "0.8", "gpu": "Z1", "params": 1e9}, "unknown GPU 'Z1'"),
        ({"acceptance": "0.8", "draft_length": 0}, "at least 1"),
        ({"acceptance": "1.2"}, "between 0 and 1"),
        ({"acceptance": "high"}, "numbers with commas"),
        ({"acceptance": "0.8", "drafter": "mine"}, "names a drafter of --report"),
        ({"report": "no.json", "gpu": "H100", "params": 1e9}, "no.json"),
    ],
)
def test_wrong_options_are_said(options: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=why):
        simulation(Options(**options))  # type: ignore[arg-type]


@pytest.mark.full
def test_the_model_meets_what_was_measured(tmp_path: Path) -> None:
    """A report of drafters on the quickstart target: tokens by products are tau_untruncated,
    speed-ups are the report's own.

    That tau over a round's cost is the measured speed-up is tested in test_evaluate.py, over more
    drafters than these two.
    """
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
    found = from_report(str(report), 16)
    assert len(found) == 2
    written = json.loads(report.read_text())["settings"][0]["drafters"]
    for name, row in found.items():
        assert row["tokens"] == pytest.approx(row["tau_untruncated"])
        assert row["speedup_predicted"] == written[name]["predicted_speedup"] > 0
        assert row["speedup_measured"] == written[name]["speedup"] > 0
    load = ("--gpu", "H100", "--params", "8e9", "--batch", "1,64", "--context", "300")
    done = run_cli("simulate", "--report", str(report), *load, "--drafter", "ngram")
    assert done.returncode == 0 and "measured" in done.stdout, done.stderr
    seen = written["ngram"]["cond_accept"]
    assert f"acceptances of ngram, {seen[0]:.2f}, " in done.stdout
    # The same as with these acceptances given, up to the length of the drafter's chain.
    options = {"gpu": "H100", "params": 8e9, "batch": "1,64", "context": "300"}
    given = {"acceptance": ",".join(map(str, seen)), "longest": len(seen), "draft_length": 5}
    mine = simulation(Options(report=str(report), drafter="ngram", **options))  # type: ignore[arg-type]
    theirs = simulation(Options(**given, **options))  # type: ignore[arg-type]
    assert mine.pop("drafter") == "ngram" and theirs.pop("drafter") is None and mine == theirs
    with pytest.raises(UserError, match="no acceptances of a 'mine' that drafts chains"):
        simulation(Options(report=str(report), drafter="mine", **options))  # type: ignore[arg-type]
    report.write_text("{}")
    with pytest.raises(UserError, match="not a report"):
        from_report(str(report), 16)
