"""Drafters of a base model on a target that was tuned from it with tokens added at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.errors import UserError
from draftsmith.heads.fingerprint import Fingerprint
from draftsmith.inference.base.settings import Sampling, TargetConfig
from draftsmith.inference.decode import generate
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.targets.target import Target, load_for_decoding
from tests.conftest import QUICKSTART, ROOT, by_default

DRAFTERS = ROOT / "scripts" / "quickstart" / "drafters"
KINDS = ("eagle3", "eagle3_plain", "eagle1", "medusa", "dflash", "dspark", "distill")
BASE = 2048
ADDED = [BASE, BASE + 1]
SAMPLINGS = [Sampling(), Sampling(1.0, seed=3), Sampling(0.8, rule="rejection", seed=3)]


def tuned(folder: Path, rows: int, tokens: tuple[str, ...] = ("<tool>", "</tool>")) -> Path:
    """The quickstart's target with tokens added at its end, in so many random rows."""
    tokenizer: Any = AutoTokenizer.from_pretrained(QUICKSTART)
    tokenizer.add_tokens(list(tokens))
    model: Any = AutoModelForCausalLM.from_pretrained(QUICKSTART, dtype=torch.float32)
    torch.manual_seed(0)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        # As large as its other rows, so that sampled texts hold these tokens too.
        weight[BASE:].normal_(std=float(weight[:BASE].std()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(tmp_path_factory.mktemp("tuned"), BASE + 2)


def target_in(path: Path, allow: bool = True) -> Target:
    return load_for_decoding(
        TargetConfig(str(path), dtype="float32", device="cpu", allow_added_tokens=allow)
    )


@pytest.fixture(scope="module")
def target(folder: Path) -> Iterator[Target]:
    yield target_in(folder)


def prompts_of(target: Target) -> list[list[int]]:
    """Prompts with and without the added tokens, in the middle and as the last token."""
    texts = ["def add(a, b):", "def <tool>mul</tool>(a, b):", "return <tool>"]
    prompts = [target.tokenizer(text).input_ids for text in texts]
    assert not set(prompts[0]) & set(ADDED) and set(ADDED) <= set(prompts[1])
    assert prompts[2][-1] == BASE
    return prompts


def drafts_of(proposer: Any, seen: list[torch.Tensor]) -> Any:
    """The proposer, noting what it drafts."""
    propose = proposer.propose

    def noted(root: torch.Tensor, draws: Any) -> Any:
        tree = propose(root, draws)
        seen.append(tree.tokens[:, 1:].clone())
        return tree

    proposer.propose = noted
    return proposer


def check_same_text(target: Target, spec: str, samplings: list[Sampling] = SAMPLINGS) -> float:
    """Compare with plain decoding; return tau of greedy decoding."""
    prompts, taus = prompts_of(target), []
    for sampling in samplings:
        plain = generate(target, load_proposer("none", target, print), prompts, 40, sampling)
        said: list[str] = []
        seen: list[torch.Tensor] = []
        proposer = drafts_of(load_proposer(spec, target, said.append), seen)
        drafted = generate(target, proposer, prompts, 40, sampling)
        tokens = torch.cat([each.flatten() for each in seen])
        assert len(tokens) and int(tokens.max()) < BASE, "an added token was drafted"
        if sampling.rule == "auto":  # else the texts agree in distribution
            assert [r.token_ids for r in drafted] == [r.token_ids for r in plain], spec
        written = sum(len(reply.token_ids) for reply in drafted)
        taus.append(written / len(seen))
    return taus[0]


@pytest.mark.parametrize("kind", by_default(KINDS, "eagle3", "distill"))
def test_output_equals_target_output_with_added_tokens(target: Target, kind: str) -> None:
    # Trees, and chains of several rows.
    assert check_same_text(target, str(DRAFTERS / kind)) > 1.5
    check_same_text(target, f"{DRAFTERS / kind}:width=1", SAMPLINGS[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_added_tokens_are_warned_about_or_refused(target: Target, folder: Path, kind: str) -> None:
    said: list[str] = []
    load_proposer(str(DRAFTERS / kind), target, said.append)
    if kind != "distill":  # it logs its line
        assert "2 tokens that the drafter does not know (ids 2048, 2049): they are never" in said[0]
    target.allow_added_tokens = False
    try:
        with pytest.raises(UserError, match="ids 2048, 2049.; give --allow-added-tokens") as error:
            load_proposer(str(DRAFTERS / kind), target, said.append)
        assert "\n" not in str(error.value)
    finally:
        target.allow_added_tokens = True


@pytest.mark.parametrize("kind", by_default(KINDS, "eagle3"))
def test_padded_embedding_rows_do_not_change_output(tmp_path: Path, kind: str) -> None:
    target = target_in(tuned(tmp_path, BASE + 64))
    check_same_text(target, str(DRAFTERS / kind), SAMPLINGS[:2])


@pytest.mark.parametrize(
    "kind", by_default(["eagle3", "eagle1", "medusa", "dflash", "dspark"], "dspark")
)
def test_drafters_of_a_padded_base_keep_target_output(
    target: Target, kind: str, tmp_path: Path
) -> None:
    """Its drafters have room for the added tokens, and for more than the target has."""
    target_before, warn = target.fingerprint(), lambda line: None
    artifact = Artifact.load(DRAFTERS / kind, target_before, target.embedding_and_head, warn)
    own = json.loads((DRAFTERS / kind / "draftsmith.json").read_text())["target"]
    padded = Fingerprint(**own | {"vocab_size": BASE + 64})
    drafter = artifact.drafter.resized(BASE + 64)
    Artifact(drafter, padded, artifact.calibration).save(tmp_path / "padded")
    check_same_text(target, str(tmp_path / "padded"), SAMPLINGS[:2])


def test_rows_of_tokens_that_a_target_lacks_are_cut_off() -> None:
    target = target_in(QUICKSTART)
    states = torch.randn(3, target.hidden_size)
    for kind in ("eagle3", "eagle3_plain", "eagle1", "medusa"):
        lender = target.embedding_and_head
        before = Artifact.load(DRAFTERS / kind, target.fingerprint(), lender).drafter
        after: Any = before.resized(1500, [1400, 1401])
        logits = [
            each.logits(states, 0) if kind == "medusa" else each.logits(states)
            for each in (before, after)
        ]
        ids = before.draft_vocab_ids
        ids = torch.arange(BASE) if ids is None else ids
        assert torch.equal(after.draft_vocab_ids, ids[ids < 1400])
        torch.testing.assert_close(logits[0][:, ids < 1400], logits[1])
        assert (after if kind == "medusa" else after.shape).vocab_size == 1500


def test_other_changes_of_the_vocabulary_stay_refused(tmp_path: Path, target: Target) -> None:
    """A token in another place, and a target with fewer tokens than the drafter's."""
    path = tuned(tmp_path / "t", BASE + 2)
    file = path / "tokenizer.json"
    data = json.loads(file.read_text())
    vocab = data["model"]["vocab"]
    one, two = list(vocab)[700], list(vocab)[900]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    file.write_text(json.dumps(data))
    other = target_in(path)
    for kind in KINDS:
        with pytest.raises(UserError, match="another target|another tokenizer") as error:
            load_proposer(str(DRAFTERS / kind), other, print)
        assert "allow-added" not in str(error.value)
