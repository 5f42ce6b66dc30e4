"""A hybrid target with its own MTP layer, and with a draft model, in a real llama.cpp: the text of
plain decoding, and how many prompts have the counts of our loop. Not in the default run:
./scripts/check_llamacpp.sh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftsmith.commands import mtp
from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.conversations.prompts import read_prompts
from draftsmith.inference.decode import generate_one
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.targets.target import Target, load_target
from tests.conftest import QUICKSTART
from tests.helpers.exported import DRAFTS, REPLY, Counts, counts_like_each, unseen_functions
from tests.helpers.llamacpp import (
    ALIKE,
    DRAFT_MODEL,
    TIE,
    count,
    expected,
    gap,
    pytestmark,
    result_of,
    tool,
)

__all__ = ["pytestmark"]
HYBRID = QUICKSTART.parent / "hybrid"
OPTIONS: dict[str, Callable[[Path, Path], list[str]]] = {
    "mtp": lambda target, _: ["-m", str(target), "--spec-type", "draft-mtp"],
    "draft model": lambda target, draft: [
        "-m",
        str(target),
        "-md",
        str(draft),
        "--spec-type",
        "draft-simple",
    ],
}


@pytest.fixture(scope="module")
def hybrid() -> Target:
    return load_target(TargetConfig(str(HYBRID), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unseen_functions(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def prompts(hybrid: Target, prompts_file: Path) -> list[list[int]]:
    return [p.token_ids for p in read_prompts(prompts_file, hybrid.tokenizer, hybrid.name)]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    layer = tmp_path_factory.mktemp("drafters") / "mtp"
    mtp.run(mtp.ExtractOptions(str(HYBRID), str(layer)))
    return {"mtp": layer, "draft model": DRAFT_MODEL}


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The target with its layer, and the draft model."""
    folder = tmp_path_factory.mktemp("converted")
    files = folder / "target.gguf", folder / "draft.gguf"
    for source, file in zip((HYBRID, DRAFT_MODEL), files, strict=True):
        done = tool("convert.py", source, "--outtype", "f32", "--outfile", file, folder=folder)
        assert done.returncode == 0, done.stderr[-3000:]
    return files


@pytest.mark.parametrize("name", OPTIONS)
def test_llamacpp_accepts_what_we_count(
    name: str,
    hybrid: Target,
    prompts: list[list[int]],
    prompts_file: Path,
    drafters: dict[str, Path],
    converted: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    plain = result_of(tmp_path, count(tmp_path, prompts, ["-m", str(converted[0])], []))
    options = [*OPTIONS[name](*converted), "--spec-draft-n-max", str(DRAFTS)]
    options += ["--spec-draft-p-min", "0"]
    theirs = result_of(tmp_path, count(tmp_path, prompts, options, []))
    assert theirs["tokens"] == plain["tokens"], "speculation changed the text"
    replies = [generate_one(hybrid, PlainDecoding(), ids, REPLY).token_ids for ids in prompts]
    with torch.inference_mode():
        gaps = {
            i: gap(hybrid, ids, mine, tokens)
            for i, (ids, mine, tokens) in enumerate(
                zip(prompts, replies, plain["tokens"], strict=True)
            )
            if mine != tokens
        }
    assert all(difference < TIE for difference in gaps.values()), gaps
    alike = [i for i in range(len(prompts)) if i not in gaps]
    assert len(alike) >= ALIKE, gaps
    drafter = {name: (str(drafters[name]), DRAFTS)}
    found = counts_like_each("llamacpp", drafter, prompts_file, tmp_path, HYBRID)[name]
    ours: list[Counts] = [expected(request["rounds"], DRAFTS) for request in found["per_request"]]
    rounds, accepted = (sum(counts[key] for counts in ours) for key in ("drafts", "accepted"))
    print(f"{name}: tau {1 + accepted / rounds:.2f}, near ties of the target {gaps}")
    assert accepted > 0.2 * rounds, "next to nothing was accepted, so equality says nothing"
    # A round writes its accepted drafts and one token. By this measure llama.cpp counts every round
    # with an MTP layer, as we do: 19 of 24 prompts have equal counts, and all together 335 rounds
    # with 708 accepted drafts for our 336 with 707. With a draft model its counters leave out
    # rounds, for 21 of 24 prompts (docs/log/2026-11-experiments.md).
    equal = sum(theirs["counts"][i] == ours[i] for i in alike)
    left_out = sum(written(ours[i]) != written(theirs["counts"][i]) for i in alike)
    print(f"counts are equal for {equal} of {len(alike)} prompts; {left_out} leave out rounds")
    if name == "mtp":
        assert left_out == 0 and equal > len(alike) / 2


def written(counts: Counts) -> int:
    """Return the number of tokens that rounds with these counts wrote."""
    return int(counts["drafts"] + counts["accepted"])
