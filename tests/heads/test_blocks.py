"""Block drafters on disk, and what an untrained one begins with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from draftsmith.heads.artifact import Artifact
from draftsmith.heads.dflash import DFlashDrafter, default_taps
from draftsmith.heads.errors import UserError
from draftsmith.heads.files import read_json, write_json
from draftsmith.heads.layout import EmbeddingAndHead
from draftsmith.inference.decode import generate, generate_one
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.targets.target import Target
from draftsmith.train.methods.dflash.config import DFlashConfig
from draftsmith.train.methods.dflash.method import (
    METHOD,
    attend_nearby,
    linear_fit,
    rescale,
    shape_for,
)
from draftsmith.train.methods.dspark.config import DSparkConfig
from tests.conftest import tiny_target
from tests.helpers.architectures import architecture
from tests.helpers.random_blocks import KINDS, random_block
from tests.helpers.sealed import seal


def taps_of(target: Target, drafter: Any, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        return target.forward(ids[None], taps=drafter.taps).taps


def test_default_taps_are_those_of_the_releases_counted_from_the_embeddings() -> None:
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)  # Qwen3-8B: layers 1, 9, 17, 25, 33
    assert default_taps(40, 5) == (2, 11, 20, 29, 38)  # Qwen3-14B: 1, 10, 19, 28, 37
    assert default_taps(36, 1) == (19,)
    with pytest.raises(UserError, match=r"4 layers, too few for 5 taps; give heads\.taps"):
        default_taps(4, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=3)
    drafter = random_block(target, kind)
    rescale(drafter, (12.0, 0.3), keep=True)
    Artifact(drafter, target.fingerprint()).save(tmp_path / "d")
    loaded = Artifact.load(
        tmp_path / "d", target.fingerprint(), target.embedding_and_head, pytest.fail
    ).drafter
    assert loaded.facts() == drafter.facts() and bool((loaded.tap_scales == 1).all())
    ids = torch.arange(9)
    assert torch.equal(
        drafter.fuse(taps_of(target, drafter, ids)), loaded.fuse(taps_of(target, drafter, ids))
    )
    ours, theirs = dict(drafter.named_parameters()), dict(loaded.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "fc.weight")
    ways = [("width=1", drafter.drafts), ("nodes=6,width=3", 6), ("length=2,nodes=5", 5)]
    for settings, nodes in ways:
        proposer = load_proposer(f"{tmp_path / 'd'}:{settings}", target, pytest.fail)
        assert (
            proposer.max_drafted == nodes
            and generate(target, proposer, [[5, 6, 7, 8]], 12)[0].rounds
        )
    with pytest.raises(
        UserError, match=f"has {drafter.drafts} drafts, not 9; give a smaller length"
    ):
        load_proposer(f"{tmp_path / 'd'}:length=9,width=1", target, pytest.fail)


def test_a_block_drafter_owns_neither_embedding_nor_head(tmp_path: Path) -> None:
    target = tiny_target(num_hidden_layers=3)
    for kind, more in (("dflash", 0), ("dspark", 4)):
        Artifact(random_block(target, kind), target.fingerprint()).save(tmp_path / kind)
        stored = load_file(tmp_path / kind / "model.safetensors")
        assert not [name for name in stored if "embed" in name or "lm_head" in name]
        assert len(stored) == 3 + 2 * 11 + more


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop("hidden_norm.weight"), "hidden_norm.weight is missing"),
        (lambda t, c: t.update(surplus=torch.zeros(1)), "surplus is not part of this drafter"),
        (lambda t, c: t.update({"fc.weight": torch.zeros(3, 3)}), r"fc.weight has shape \[3, 3\]"),
        (
            lambda t, c: c.pop("dflash_config"),
            "Object missing required field dflash_config; save or copy",
        ),
        (lambda t, c: c.update(block_size=1), "block_size: Expected int >= 2"),
        (
            lambda t, c: c["dflash_config"].update(mask_token_id=10**6),
            "mask_token_id 1000000 is no",
        ),
        (lambda t, c: c["dflash_config"].update(target_layer_ids=[1, 3]), "not all below"),
    ],
)
def test_a_drafter_that_was_tampered_with_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    target = tiny_target(num_hidden_layers=3)
    Artifact(random_block(target), target.fingerprint()).save(tmp_path / "d")
    tensors, config = (
        load_file(tmp_path / "d" / "model.safetensors"),
        read_json(tmp_path / "d" / "config.json"),
    )
    change(tensors, config)
    save_file(tensors, tmp_path / "d" / "model.safetensors")
    write_json(tmp_path / "d" / "config.json", config)
    seal(tmp_path / "d")
    with pytest.raises(UserError, match=message):
        Artifact.load(tmp_path / "d", target.fingerprint(), target.embedding_and_head)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"taps": [0, 1]}, "between 1 and 2"),
        ({"taps": [2, 1]}, "must be ascending"),
        ({"taps": [1, 3]}, "between 1 and 2"),
    ],
)
def test_taps_that_engines_cannot_give_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        shape_for(DFlashConfig(num_layers=1, **config), tiny_target(num_hidden_layers=3).config, 3)


def test_settings_out_of_range_are_refused() -> None:
    for make in (
        lambda: DFlashConfig(block_size=1),
        lambda: DFlashConfig(num_layers=0),
        lambda: DSparkConfig(markov_rank=0),
        lambda: shape_for(DFlashConfig(taps=[1]), tiny_target().config, 9999),
    ):
        with pytest.raises(UserError, match="heads"):
            make()


def test_rescaling_changes_no_bit_of_what_is_computed() -> None:
    """Powers of two, so that it may be done at any time: when a drafter goes on learning, and when
    it is saved."""
    target = tiny_target(num_hidden_layers=3)
    drafter = random_block(target)
    taps = taps_of(target, drafter, torch.arange(20))
    before, weight = drafter.fuse(taps), drafter.fc.weight.clone()
    rescale(drafter, (23.0, 0.11), keep=True)
    assert drafter.tap_scales.tolist() == [2.0**-5, 2.0**3]
    assert torch.equal(drafter.fuse(taps), before) and not torch.equal(drafter.fc.weight, weight)
    assert torch.equal(drafter.serving_state()["fc.weight"], weight)
    rescale(drafter, (1.0, 1.0), keep=True)
    assert torch.equal(drafter.fc.weight, weight)


def test_a_linear_fit_of_a_few_rows_gives_what_is_wanted() -> None:
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor([1.0, -1.0, 0.0, 1.0, 0.5, -1.0])
    torch.testing.assert_close(rows @ linear_fit(rows, wanted), wanted, atol=0.15, rtol=0)


def noted(
    seen: list[torch.Tensor],
    keys: torch.Tensor,
    layer: int,
    queries: torch.Tensor,
    own: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """An `attend` that notes the distribution of slot 1 in each head, and adds nothing."""
    every = torch.cat([keys, own], dim=1).repeat_interleave(queries.shape[2] // own.shape[2], dim=2)
    scores = torch.einsum("bngd,bmgd->bgnm", queries, every) / queries.shape[-1] ** 0.5
    seen.append(scores.softmax(-1)[0, :, 1])
    return torch.zeros_like(queries).flatten(2)


def test_attention_begins_with_the_anchor_and_the_newest_context(quickstart: Target) -> None:
    """The share of attention that the first draft's slot gives to what its draft depends on, on a
    text that the fit has not seen: in one head of three 91% for the anchor, where chance gives 2%;
    in the others 28% for the newest eight of 53 positions, where chance gives 7%."""
    shape = shape_for(
        DFlashConfig(num_layers=1, block_size=4, taps=[2, 4, 7]), quickstart.config, 0
    )
    sample, text = (
        torch.tensor(quickstart.tokenizer(source)["input_ids"])
        for source in (
            "def read(path):\n    with open(path) as file:\n        return file.read().split()\n"
            * 4,
            "x = [i for i in y]\n" * 9,
        )
    )
    shares = []
    for nearby in (False, True):
        torch.manual_seed(0)
        drafter = DFlashDrafter(shape, quickstart.embedding_and_head)
        METHOD.first_weights(drafter, None)
        rescale(drafter, quickstart.tap_sizes(drafter.taps), keep=False)
        if nearby:
            attend_nearby(
                drafter, tuple(t[0] for t in taps_of(quickstart, drafter, sample)), sample
            )
        length = len(text) - 1
        fused = drafter.fuse(taps_of(quickstart, drafter, text[:length]))
        ((keys, _),) = drafter.context(fused, drafter.rotary(torch.arange(length)[None]))
        seen: list[torch.Tensor] = []
        with torch.no_grad():
            rotary = drafter.rotary(length + torch.arange(4)[None])
            drafter.layer(0, drafter.embed(text[None, length:]), rotary, partial(noted, seen, keys))
        (probs,) = seen  # [6 heads, context and block]
        shares.append(
            (float(probs[:2, length].mean()), float(probs[2:, length - 8 : length].sum(-1).mean()))
        )
    (anchor, newest), (anchor_then, newest_then) = shares
    assert anchor < 0.05 and newest < 0.1 and anchor_then > 0.6 and newest_then > 0.2, shares


def test_embeddings_come_unscaled_as_engines_hand_them_over() -> None:
    """Gemma multiplies its rows in the embedding itself."""
    target = architecture("gemma3")
    ids = torch.arange(5)
    rows = functional.embedding(ids, target.model.get_input_embeddings().weight)
    torch.testing.assert_close(target.embedding_and_head.rows(ids), rows)
    assert not torch.allclose(target.embedding_and_head.embed(ids), rows)
    plain = EmbeddingAndHead(lambda ids: rows[ids], lambda last: last)
    assert torch.equal(plain.rows(ids), rows)


@pytest.mark.parametrize("kind", ["dspark draft vocabulary", "dflash"])
def test_low_precision_block_drafter_keeps_target_text(kind: str, tmp_path: Path) -> None:
    """The text is the target's own; the drafter, and what it borrows of the head, is smaller."""
    target = tiny_target(num_hidden_layers=3)
    Artifact(random_block(target, kind), target.fingerprint()).save(tmp_path / "d")
    plain = generate_one(target, load_proposer("none", target, pytest.fail), [5, 6], 12)
    proposer: Any = load_proposer(f"{tmp_path / 'd'}:dtype=bfloat16", target, pytest.fail)
    assert proposer.drafter.fc.weight.dtype == torch.bfloat16
    logits = proposer.drafter.logits(
        proposer.drafter.state(torch.ones(1, target.hidden_size).bfloat16(), torch.tensor([3]))
    )
    small = "vocabulary" in kind
    assert logits.dtype == (torch.bfloat16 if small else torch.float32)
    assert generate_one(target, proposer, [5, 6], 12).token_ids == plain.token_ids
    with pytest.raises(UserError, match="unsupported drafter dtype int8"):
        load_proposer(f"{tmp_path / 'd'}:dtype=int8", target, pytest.fail)


@pytest.mark.parametrize("kind", ["dflash draft vocabulary", "dspark draft vocabulary"])
def test_a_drafter_that_has_decoded_can_learn(kind: str) -> None:
    """Its rows of the target's head are taken at the first use, which may be in inference mode."""
    target = tiny_target(num_hidden_layers=3)
    drafter = random_block(target, kind)
    states = torch.randn(2, target.hidden_size)
    with torch.inference_mode():
        drafter.base_logits(states)
    drafter.requires_grad_(True)
    drafter.base_logits(states).sum().backward()
    assert bool((drafter.norm.weight.grad != 0).any())
