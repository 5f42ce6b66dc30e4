"""What a drafter would do in an engine: that engine's shape and rule, in our loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.errors import UserError
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.decode import Request, generate
from draftsmith.inference.evaluation.engines import ImitatedEngine, as_in_engine
from draftsmith.inference.evaluation.evaluate import Options, check
from draftsmith.inference.proposers.ngram import PlainDecoding
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART
from tests.helpers.random_blocks import proposer_of, random_block
from tests.helpers.trained import chat_prompts

HERE = QUICKSTART.parent
EAGLE3, EAGLE1, MEDUSA = (str(HERE / "drafters" / name) for name in ("eagle3", "eagle1", "medusa"))
DRAFT_MODEL = str(HERE / "draft_model")


@pytest.mark.parametrize(
    ("engine", "drafter", "setting"),
    [
        ("vllm", EAGLE3, {"length": 3, "width": 1}),
        ("vllm:drafts=5", EAGLE1, {"length": 5, "width": 1}),
        ("vllm:drafts=2", MEDUSA, {"length": 2, "width": 1}),
        ("vllm", "ngram", {"length": 3}),
        ("sglang", EAGLE3, {"length": 5, "width": 4, "nodes": 7}),
        ("sglang:steps=3,topk=2,tokens=6", EAGLE1, {"length": 3, "width": 2, "nodes": 5}),
        ("sglang:topk=1", EAGLE3, {"length": 5, "width": 1}),
        ("sglang", DRAFT_MODEL, {"length": 3, "width": 1}),
        ("llamacpp:drafts=16", DRAFT_MODEL, {"length": 16, "width": 1}),
    ],
)
def test_imitated_engines_draft_the_shapes_of_their_settings(
    quickstart: Target, engine: str, drafter: str, setting: dict[str, object]
) -> None:
    """SGLang's draft tokens count the root, ours do not; its topk 1 is a chain of as many drafts as
    steps."""
    assert as_in_engine(ImitatedEngine(engine), drafter, quickstart).setting == setting


@pytest.mark.parametrize(
    ("engine", "drafter", "why"),
    [
        ("llamacpp", EAGLE3, "EAGLE-3.1. are not known there"),
        ("llamacpp", EAGLE1, "takes no such drafter"),
        ("sglang", MEDUSA, "takes no such drafter"),
        ("vllm", f"{EAGLE3}:lookup=4", "takes no such drafter"),
        ("sglang", f"{EAGLE3}:lookup=4", "takes no such drafter"),
    ],
)
def test_drafters_unsupported_by_an_engine_are_refused(
    quickstart: Target, engine: str, drafter: str, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        as_in_engine(ImitatedEngine(engine), drafter, quickstart)


def test_a_drafter_decodes_with_the_engines_shape_and_rule(quickstart: Target) -> None:
    """Greedy drafts write the text of plain sampling; drawn ones keep its distribution only; no
    shape but the engine's is drafted."""
    requests = [Request(prompt, i) for i, prompt in enumerate(chat_prompts(quickstart, "valid", 6))]
    probs = Sampling(temperature=1.0, seed=5)
    plain = [g.token_ids for g in generate(quickstart, PlainDecoding(), requests, 24, probs)]
    rules, drafted, accepted = {}, {}, {}
    for spec in (
        "vllm",
        "vllm:draws=probabilistic",
        "vllm:draws=probabilistic,verify=block",
        "sglang",
    ):
        way = as_in_engine(ImitatedEngine(spec), EAGLE3, quickstart)
        found = way.generate(quickstart, requests, 24, probs)
        rounds = [r for g in found for r in g.rounds]
        (rules[spec],) = {r.rule for r in rounds}
        drafted[spec], accepted[spec] = (
            max(r.drafted or 0 for r in rounds),
            sum(r.accepted for r in rounds),
        )
        assert ([g.token_ids for g in found] == plain) == (rules[spec] == "match")
    assert list(rules.values()) == ["match", "rrs", "block", "match"]
    assert list(drafted.values()) == [3, 3, 3, 7] and min(accepted.values()) > 10


def test_matched_drafts_know_nothing_of_the_noise(quickstart: Target) -> None:
    """Under match a drafter guesses the same whatever the seed, and is right less often than one
    that shares the noise; what the target would accept in expectation is what is counted, within
    noise."""
    requests = [
        Request(prompt, i) for i, prompt in enumerate(chat_prompts(quickstart, "valid", 16))
    ]
    tau = {}
    for rule in ("coupled", "match"):
        proposer = load_proposer(f"{DRAFT_MODEL}:length=3", quickstart, print)
        rounds = [
            r
            for g in generate(
                quickstart, proposer, requests, 48, Sampling(temperature=1.0, rule=rule)
            )
            for r in g.rounds
        ]
        tau[rule] = 1 + sum(r.accepted for r in rounds) / len(rounds)
    assert tau["match"] < tau["coupled"]


@pytest.fixture(scope="module")
def blocks(quickstart: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Random drafters: DFlash with 5 slots, DSpark with 4, so 4 drafts of both."""
    folder = tmp_path_factory.mktemp("blocks")
    made = {kind: random_block(quickstart, kind, taps=[2, 4]) for kind in ("dflash", "dspark")}
    for name, drafter in made.items():
        Artifact(drafter, quickstart.fingerprint()).save(folder / name)
    return {name: str(folder / name) for name in made}


@pytest.mark.parametrize(
    ("engine", "kind", "setting"),
    [
        ("vllm", "dflash", {"length": 3, "width": 1, "slots": 4}),
        ("vllm:drafts=9", "dflash", {"length": 4, "width": 1, "slots": 5}),
        ("llamacpp", "dspark", {"length": 3, "width": 1, "slots": 3}),
        ("llamacpp:drafts=4", "dspark", {"length": 4, "width": 1, "slots": 4}),
        ("sglang", "dflash", {"length": 4, "width": 1, "slots": 5}),
        ("sglang:tokens=3", "dspark", {"length": 2, "width": 1, "slots": 2}),
    ],
)
def test_blocks_are_as_long_as_their_drafts(
    quickstart: Target, blocks: dict[str, str], engine: str, kind: str, setting: dict[str, object]
) -> None:
    """The anchor's slot drafts in DSpark only; SGLang's draft tokens count it for both."""
    assert as_in_engine(ImitatedEngine(engine), blocks[kind], quickstart).setting == setting


@pytest.mark.parametrize(
    ("engine", "kind", "why"),
    [
        (
            "sglang:topk=2",
            "dflash",
            "a block in one step, as a chain; leave out topk, tokens says how many",
        ),
        ("sglang:steps=2", "dspark", "leave out steps"),
    ],
)
def test_block_drafters_unsupported_by_an_engine_are_refused(
    quickstart: Target, blocks: dict[str, str], engine: str, kind: str, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        as_in_engine(ImitatedEngine(engine), blocks[kind], quickstart)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_shorter_block_is_that_of_a_drafter_that_has_no_more(
    quickstart: Target, blocks: dict[str, str], kind: str
) -> None:
    """And drafts otherwise than the beginning of a whole one: slots see those after them."""
    artifact = Artifact.load(blocks[kind], quickstart.fingerprint(), quickstart.embedding_and_head)
    first = artifact.drafter.first_slot
    request = [Request([5, 6, 7, 8], 0)]
    seen = {}
    for name, shape in (
        ("short", replace(artifact.drafter.shape, block_size=2 + first)),
        ("whole", artifact.drafter.shape),
    ):
        drafter = type(artifact.drafter)(shape, quickstart.embedding_and_head)
        drafter.load_state_dict(artifact.drafter.state_dict())
        seen[name] = drafts_of(proposer_of(drafter.eval(), length=2), quickstart, request)
    seen["cut"] = drafts_of(
        load_proposer(f"{blocks[kind]}:slots={2 + first},width=1", quickstart, print),
        quickstart,
        request,
    )
    assert seen["cut"] == seen["short"] != seen["whole"]
    for wrong, says in (
        (first, f"at least {first + 1}"),
        (9, "slots, not 9; give a smaller number"),
    ):
        with pytest.raises(UserError, match=says):
            load_proposer(f"{blocks[kind]}:slots={wrong}", quickstart, print)


def drafts_of(proposer: Any, target: Target, requests: list[Request]) -> list[list[int]]:
    """The tokens of every round's drafts."""
    found, propose = [], proposer.propose

    def watched(*given: Any) -> Any:
        tree = propose(*given)
        found.append(tree.tokens[0].tolist())
        return tree

    proposer.propose = watched
    generate(target, proposer, requests, 5, Sampling())
    return found


def test_block_drafts_are_drawn_in_vllm_too(quickstart: Target, blocks: dict[str, str]) -> None:
    """As standard rejection of one child a node, or of whole chains; greedy ones elsewhere."""
    for kind in ("dflash", "dspark"):
        proposer = load_proposer(blocks[kind], quickstart, print)
        rules = [
            ImitatedEngine(spec).rule(proposer)
            for spec in ("vllm", "vllm:draws=probabilistic", "sglang", "llamacpp")
        ]
        assert rules == ["match", "recursive", "match", "match"]
        assert ImitatedEngine("vllm:draws=probabilistic,verify=block").rule(proposer) == "rejection"
        way = as_in_engine(ImitatedEngine("vllm:draws=probabilistic"), blocks[kind], quickstart)
        (found,) = way.generate(quickstart, [Request([5, 6, 7], 0)], 6, Sampling(temperature=1.0))
        assert {r.rule for r in found.rounds} == {"rrs"} and max(
            r.drafted or 0 for r in found.rounds
        ) == 3


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"like": ["tgi"]}, "unknown engine 'tgi'; there are: vllm, sglang, llamacpp"),
        ({"like": ["vllm:steps=3"]}, "has no setting 'steps' here"),
        ({"like": ["vllm:drafts=0"]}, "drafts must be a whole number of at least 1"),
        ({"like": ["vllm:draws=some"]}, "greedy or probabilistic"),
        ({"like": ["vllm"], "drafter": []}, "name one with --drafter"),
    ],
)
def test_invalid_engine_settings_are_refused_before_loading(
    options: dict[str, object], why: str
) -> None:
    prompts = str(QUICKSTART / "config.json")
    with pytest.raises(UserError, match=why):
        check(
            Options(
                target=TargetConfig("t"), **{"prompts": prompts, "drafter": ["ngram"], **options}
            )
        )  # type: ignore[arg-type]


def test_sglang_tree_with_too_few_tokens_is_refused(quickstart: Target) -> None:
    with pytest.raises(UserError, match="5 steps need at least 6, not 4"):
        as_in_engine(ImitatedEngine("sglang:tokens=4"), EAGLE3, quickstart)
