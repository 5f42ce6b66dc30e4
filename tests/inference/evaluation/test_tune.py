"""tune: the candidates, the halving, the choice, the profile and who may use it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest

from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.conversations.prompts import Prompt
from draftsmith.inference.decode import Generation, Round
from draftsmith.inference.evaluation.candidates import candidates
from draftsmith.inference.evaluation.evaluate import tuned_way
from draftsmith.inference.evaluation.figures import Gain, gain
from draftsmith.inference.evaluation.halving import (
    Choice,
    effort_for,
    enough,
    fewer,
    halves,
    level_of,
    rungs,
)
from draftsmith.inference.evaluation.measure import Turn
from draftsmith.inference.evaluation.tune import Options, check
from draftsmith.inference.profile import TuningProfile, key_of
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART
from tests.helpers.command_line import run_cli

EAGLE = str(QUICKSTART.parent / "drafters" / "eagle3")
MEDUSA = str(QUICKSTART.parent / "drafters" / "medusa")


def test_faster_half_is_measured_again_on_more_prompts() -> None:
    assert rungs(8) == [(8, 4), (4, 2), (3, 1)] and rungs(5) == [(5, 2), (3, 1)]
    assert rungs(2) == [(2, 1)] and rungs(1) == [(1, 1)]


def test_effort_for_a_budget_matches_hand_computed_values() -> None:
    """Of 40 prompts a half has 20: nine ways on 5 prompts, five on 10, five on 20, and two on the
    20 others are 235 replies, each of 0.04 + 96 / 100 seconds."""

    def effort(seconds: float, prompts: int = 40, batch: int = 1) -> tuple[int, int]:
        return effort_for(seconds, prompts, batch, 8, 0.04, 0.01)

    assert effort(math.inf) == effort(236) == (40, 96)
    assert effort(234) == (30, 96), "fewer prompts"
    assert effort(50) == (10, 48), "both halves have an interval"
    assert effort(0) == (10, 16) and effort(0, prompts=3) == (3, 16)
    assert effort(0, prompts=100, batch=4) == (40, 16), "batches of 4 have an interval"


@pytest.mark.parametrize(
    ("drafter", "kinds"),
    [(EAGLE, {"chain", "dynamic", "fixed"}), (MEDUSA, {"chain", "dynamic", "fixed"}),
     ("ngram:longest=2", {"chain"}),
     (str(QUICKSTART.parent / "draft_model"), {"chain", "dynamic"})],
)  # fmt: skip
def test_tuning_tries_six_to_ten_candidates_default_first(
    drafter: str, kinds: set[str], quickstart: Target
) -> None:
    found = candidates(drafter, quickstart, 1)
    assert 6 <= len(found) <= 10 and {way.kind for way in found} == kinds
    assert len({way.label for way in found}) == len(found)
    default: Any = load_proposer(drafter, quickstart, print, choose=True)
    first: Any = found[0].make()
    assert first.max_drafted == default.max_drafted
    for way in found:
        made: Any = way.make()
        assert made.max_drafted >= way.setting.get("length", 1)


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small but real run: T = 1, batches of two."""
    folder = tmp_path_factory.mktemp("tune")
    rows = [{"id": i, "prompt": f"def add{i}(a, b):\n    '''Add numbers.'''"} for i in range(3)]
    prompts = folder / "p.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = ["--budget", "0.01"]
    shared = ["--target", str(QUICKSTART), "--prompts", str(prompts)]
    sweep = [
        "--temperature",
        "1",
        "--batch-size",
        "2",
        "--drafter",
        MEDUSA,
    ]
    done = run_cli("tune", *shared, *sweep, *small, "--out", str(folder / "profile.json"))
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("batch 2: best of") == 1
        and "chosen" in done.stdout
        and "default" in done.stdout
    )
    said = " ".join(done.stdout.split())
    assert said.count(" is kept: ") == 1
    return folder / "profile.json"


def test_the_profile_holds_what_was_measured(profile: Path) -> None:
    found = json.loads(profile.read_text())
    assert found["drafters"].keys() == {key_of(MEDUSA)}
    for rows in found["drafters"].values():
        assert [(row["temperature"], row["batch"]) for row in rows] == [(1, 2)]
        for row in rows:
            assert row["finalists"][0] == row["default"]
            assert row["setting"] == row["default"]["setting"] and not row["taken"]
            assert row["gain_over_default"] == 1 and row["gain_ci95"] is None
            best = max(row["finalists"][1:], key=lambda final: final["gain"])
            assert row["best"]["label"] == best["label"] and math.isnan(best["gain_interval"][0])
            ratio = best["measured"]["tokens_s"] / row["default"]["measured"]["tokens_s"]
            assert best["gain"] == pytest.approx(ratio)
            needed = 10 * row["batch"]
            assert f"more prompts are needed for an interval, {needed} or more" in row["reason"]
            assert [len(rung["gains"]) for rung in row["tried"]] == [row["candidates"] - 1, 4]
            assert row["effort"] == {
                "prompts": 3, "prompts_again": 0, "max_new_tokens": 16,
            }  # fmt: skip
            for final in (row["plain"], *row["finalists"]):
                assert final["measured"]["tokens_s"] > 0 and final["measured"]["tau"] >= 1


def test_evaluate_and_generate_use_the_profile(profile: Path, tmp_path: Path) -> None:
    prompts = profile.parent / "p.jsonl"
    shared = ["--target", str(QUICKSTART), "--drafter", MEDUSA, "--profile", str(profile)]
    out = str(tmp_path / "o.json")
    more = [
        "--temperature",
        "1",
        "--batch-size",
        "2",
        "--no-baselines",
        "--repeats",
        "1",
        "--max-new-tokens",
        "12",
        "--limit",
        "2",
    ]
    done = run_cli("evaluate", *shared, "--prompts", str(prompts), *more, "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(profile.read_text())["drafters"][key_of(MEDUSA)]
    for setting in json.loads(Path(out).read_text())["settings"]:
        assert list(setting["drafters"]) == ["plain", "medusa", "medusa:tuned"]
        tuned = setting["drafters"]["medusa:tuned"]
        (row,) = (
            row for row in rows if (row["temperature"], row["batch"]) == (setting["temperature"], 2)
        )
        assert tuned["setting"] == row["setting"] and tuned["equal_to_ar"] == tuned["requests"]
    done = run_cli(
        "generate",
        *shared,
        "--prompt",
        "def add(a, b):",
        "--max-new-tokens",
        "8",
    )
    assert done.returncode == 0 and "8 tokens" in done.stderr


def test_generate_drafts_with_the_profiles_tree(profile: Path, tmp_path: Path) -> None:
    found = json.loads(profile.read_text())
    found["drafters"] = {
        "ngram:longest=2": [{"temperature": 0, "batch": 1, "setting": {"length": 1}}]
    }
    path = tmp_path / "p.json"
    path.write_text(json.dumps(found))
    shared = [
        "--target",
        str(QUICKSTART),
        "--prompt",
        "def add(a, b):\n    # Add.",
        "--max-new-tokens",
        "40",
    ]
    rounds = [  # without the speed, which stands behind the last comma
        run_cli("generate", *shared, "--drafter", spec, *more).stderr.rpartition(",")[0]
        for spec, more in (
            ("ngram:longest=2,length=8", ["--profile", str(path)]),
            ("ngram:longest=2,length=1", []),
            ("ngram:longest=2", []),
        )
    ]
    rounds = [said.splitlines()[-1] for said in rounds]
    assert rounds[0] == rounds[1] != rounds[2] and "rounds" in rounds[0]


@pytest.mark.full
def test_reported_gain_is_measured_on_prompts_not_used_for_selection(
    tmp_path: Path,
) -> None:
    """A lookup beside plain decoding of loops, where longer drafts pay; whatever is kept, the row
    says why."""
    prompts, out = tmp_path / "p.jsonl", tmp_path / "profile.json"
    rows = [{"prompt": f"x{i} = [{'0, ' * 20}"} for i in range(10)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--drafter", "ngram:length=1", "--budget", "0.2"]
    shared = ["--target", str(QUICKSTART), "--prompts", str(prompts), "--out", str(out)]
    done = run_cli("tune", *shared, *options)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["drafters"]["ngram"]
    assert row["effort"]["prompts"] == row["effort"]["prompts_again"] == 5
    assert row["default"]["setting"] == {"length": 1} and len(row["finalists"]) == 4
    best, level = row["best"], row["best"]["level"]
    assert level == level_of(3) and best["prompts_again"] == 5
    promising = best["gain_interval"][0] > 1
    assert promising == (best["gain_again"] is not None)
    assert row["taken"] == (promising and best["gain_again_ci95"][1] >= 1)
    if row["taken"]:
        assert row["setting"] != {"length": 1}
        assert row["gain_over_default"] == best["gain_again"]
        assert row["gain_ci95"] == best["gain_again_ci95"]
    else:
        assert row["setting"] == {"length": 1} and row["gain_over_default"] == 1
    assert row["reason"] in " ".join(done.stdout.split())


def test_a_part_of_the_prompts_and_its_halves_have_all_categories() -> None:
    """It holds for a file sorted by category, and where the categories take turns."""
    for name in (lambda n: "abc"[n // 8], lambda n: "abc"[n % 3]):
        prompts = [Prompt(str(n), [1], name(n), place=n, unit=n) for n in range(24)]
        part = fewer(prompts, 12)
        assert [p.place for p in part] == sorted(p.place for p in part)
        for half in halves(part):
            assert Counter(p.category for p in half) == {"a": 2, "b": 2, "c": 2}


def test_halves_have_prompts_of_all_kinds_and_whole_conversations() -> None:
    prompts = [Prompt(str(n), [1], unit=n // 2) for n in range(24)]
    first, second = halves(prompts)
    assert [p.unit for p in first] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    assert [p.unit for p in second] == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11]
    assert halves(prompts[:18]) == (prompts[:18], []), "nine conversations"
    assert enough(second, 1) and enough(second, 2) and not enough(second, 3)
    assert not enough(second[:8], 1), "four conversations"


def measured_gain(rng: numpy.random.Generator, truth: float, level: float) -> Gain:
    """The gain of a way that is `truth` times as fast, on twelve prompts that suit it or not."""
    turns, other = [], []
    for place in range(12):
        seconds = math.exp(rng.normal(0, 0.5))
        rounds = [Round(tokens=[1] * 40)]
        own = seconds / truth * math.exp(rng.normal(0, 0.1))
        prompt = Prompt("", [], place=place, unit=place)
        other.append(Turn(prompt, 0, Generation([], [], rounds, decode_s=seconds)))
        turns.append(Turn(prompt, 0, Generation([], [], rounds, decode_s=own)))
    return gain(turns, other, 1, level)


def choices(truth: float, count: int) -> list[Choice]:
    rng, level = numpy.random.default_rng(5), level_of(3)
    found = []
    for _ in range(count):
        gains = [measured_gain(rng, truth, level) for _ in range(3)]
        best = max(gains, key=lambda own: own.ratio)
        choice = Choice("default", "best", best, level, 1, 12)
        if choice.promising:
            choice.again = measured_gain(rng, truth, 0.95)
        found.append(choice)
    return found


def test_equal_finalists_do_not_replace_the_default() -> None:
    """In 2.5% of choices at most, in which one of three seems faster by chance."""
    found = choices(1.0, 1000)
    assert sum(choice.taken for choice in found) <= 35
    kept = next(choice for choice in found if not choice.promising)
    assert "The default (default) is kept: best has" in kept.reason
    assert "which does not exclude no gain" in kept.reason
    assert kept.to_json()["gain_over_default"] == 1


def test_the_gain_that_is_reported_is_not_that_of_the_luckiest() -> None:
    """Of three finalists that all gain 10% the best seems to gain more; measured again on prompts
    that had no part in the choice, it gains 10%."""
    taken = [choice for choice in choices(1.1, 400) if choice.taken]
    assert len(taken) > 200
    again = [math.log(choice.again.ratio) for choice in taken if choice.again is not None]
    lucky = [math.log(choice.gain.ratio) for choice in taken]
    error = float(numpy.std(again)) / math.sqrt(len(again))
    assert numpy.mean(again) == pytest.approx(math.log(1.1), abs=3 * error)
    assert numpy.mean(lucky) > math.log(1.1) + 6 * error
    said, row = taken[0].reason, taken[0].to_json()
    assert said.startswith("The default (default) is replaced: best has ")
    assert said.endswith("on 12 prompts that had no part in the choice.")
    assert row["gain_over_default"] == row["best"]["gain_again"] != row["best"]["gain"]


def test_a_finalist_that_is_slower_on_the_other_prompts_is_not_taken() -> None:
    lucky = Gain(1.2, (1.1, 1.3))
    choice = Choice("d", "b", lucky, 0.95, 4, 12, again=Gain(0.9, (0.85, 0.97)))
    assert choice.promising and not choice.taken
    assert choice.reason.startswith(
        "The default (d) is kept: b has 0.90x its tokens per second (95%: "
    )
    few = Choice("d", "b", lucky, 0.95, 4, 0)
    assert not few.promising and "40 or more" in few.reason


def test_the_nearest_temperature_and_batch_are_taken(profile: Path, quickstart: Target) -> None:
    rows: list[dict[str, Any]] = [
        {"temperature": t, "batch": b, "setting": {"length": 1 + i}}
        for i, (t, b) in enumerate([(0, 1), (0, 16), (1, 1), (1, 4)])
    ]
    written = json.loads(profile.read_text()) | {"drafters": {"ngram": rows}}
    path = profile.parent / "other.json"
    path.write_text(json.dumps(written))
    own = TuningProfile(str(path), quickstart)
    written["target"]["name"] = "the same elsewhere"
    path.write_text(json.dumps(written))
    assert TuningProfile(str(path), quickstart)
    asked = [(0.0, 1), (0.2, 3), (0.2, 5), (0.7, 1), (1.0, 64)]
    assert [own.setting("ngram", *at)["length"] for at in asked] == [1, 1, 2, 3, 4]
    assert "ngram:length=3" in own and MEDUSA not in own
    with pytest.raises(UserError, match="knows no drafter none; it has: ngram"):
        own.setting("none", 0, 1)
    probs = Sampling(temperature=1.0)
    assert tuned_way(own, "ngram", quickstart, probs, 4).setting == {"length": 4}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"target": {"name": "another", "weights_hash": "0"}}, "tuned for target another"),
        ({"target": {"numbers": {"rms_norm_eps": 0.5}}}, r"changed \(rms_norm_eps was 0.5, is"),
        ({"machine": {"device": "H100"}}, "tuned with device H100, this is cpu; tune again here"),
        ({"machine": {"threads": 99}}, "tuned with threads 99"),
        ({"drafters": None, "machine": None}, "is not a profile"),
    ],
)
def test_a_profile_of_another_target_or_machine_is_refused(
    profile: Path, quickstart: Target, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    found = json.loads(profile.read_text())
    found |= {key: ({**found[key], **value} if value else None) for key, value in change.items()}
    path = tmp_path / "p.json"
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    with pytest.raises(UserError, match=why):
        TuningProfile(str(path), quickstart)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"drafter": []}, "name a drafter"),
        ({"budget": -1}, "--budget is in minutes"),
        (
            {"temperature": [0.7, 0], "sampling": Sampling(temperature=1.0, top_k=5)},
            "top_k means nothing at temperature 0",
        ),
        ({"drafter": ["ngram", "ngram:length=3"]}, "a drafter is named twice"),
        ({"out": "."}, "it is a folder"),
        ({"batch_size": [0]}, "at least 1"),
        ({"sampling": Sampling(temperature=1.0, rule="rejection")}, "not with rule rejection"),
    ],
)
def test_invalid_tuning_options_are_refused_before_loading(
    options: dict[str, Any], why: str
) -> None:
    prompts = str(QUICKSTART / "config.json")
    with pytest.raises(UserError, match=why):
        check(
            Options(
                **{
                    "target": TargetConfig("t"),
                    "prompts": prompts,
                    "out": "o",
                    "drafter": ["ngram"],
                    **options,
                }
            )
        )


def test_a_given_temperature_is_tuned_for() -> None:
    prompts = str(QUICKSTART / "config.json")
    options = Options(
        TargetConfig("t"), prompts, "o", ["ngram"], sampling=Sampling(temperature=0.7, seed=3)
    )
    assert check(options)[0] == [Sampling(temperature=0.7, seed=3)]
