"""The fused forward pass beside transformers' own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GraniteConfig

from draftsmith.inference.base.settings import TargetConfig
from draftsmith.inference.proposers.draft_model import DraftModelProposer
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.rounds.cache import TreeCache
from draftsmith.inference.targets.packed import linears_of
from draftsmith.inference.targets.target import Target, load_for_decoding
from tests.conftest import QUICKSTART, tiny_target
from tests.helpers.architectures import ARCHITECTURES, HEADS, architecture
from tests.helpers.fused_targets import FUSED, states_of


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_models_of_llamas_form_are_fused_and_no_others(kind: str) -> None:
    target = architecture(kind)
    target.fuse(move=True)
    assert (target.fused is not None) == (kind in FUSED)


@pytest.mark.parametrize("move", [True, False])
@pytest.mark.parametrize("kind", sorted(FUSED))
def test_fused_pass_gives_the_states_of_transformers(kind: str, move: bool) -> None:
    target = architecture(kind)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))
    lengths = [12, 9]
    expected = states_of(target, ids, lengths)
    target.fuse(move)
    found = states_of(target, ids, lengths)
    for own, other in zip(found, expected, strict=True):
        for a, b in zip((own.last, *own.taps), (other.last, *other.taps), strict=True):
            # a row's padding holds nothing of meaning
            for row, length in enumerate(lengths if a.shape[1] == 12 else [3, 3]):
                # transformers' norms are computed in float32 whatever the model's dtype is
                torch.testing.assert_close(a[row, :length], b[row, :length], atol=1e-5, rtol=1e-4)


def test_a_model_of_the_form_that_computes_something_else_stays_transformers() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=100,
        initializer_range=0.3,
    )  # fmt: skip
    config = GraniteConfig(**HEADS, **sizes, residual_multiplier=0.5, attention_multiplier=8**-0.5)
    target = Target(AutoModelForCausalLM.from_config(config), None, "granite")
    target.fuse(move=True)
    assert target.fused is None


def tiny_copy(target: Target) -> Target:
    """The same model, decoded by transformers' forward pass."""
    return Target(copy.deepcopy(target.model), target.tokenizer, "copy")


def bytes_of(model: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def test_matrices_are_moved_and_not_copied() -> None:
    target = tiny_target()
    size, fingerprint = bytes_of(target.model), target.fingerprint()
    target.fuse(move=True)
    assert target.fused is not None
    assert bytes_of(target.model) == size and target.fingerprint() == fingerprint


def test_the_matrices_of_a_users_model_stay_and_may_change() -> None:
    target = tiny_target()
    matrix = target.decoder.layers[0].self_attn.q_proj.weight
    place = matrix.data_ptr()
    target.fuse(move=False)
    assert matrix.data_ptr() == place
    with torch.no_grad():
        matrix.mul_(-1)
    ids = torch.arange(3, 15)[None]
    found, expected = states_of(target, ids, [12]), states_of(tiny_copy(target), ids, [12])
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.last, other.last)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_prompt_in_pieces_has_the_states_of_the_whole(kind: str) -> None:
    target = architecture(kind)
    target.fuse(move=True)
    ids = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(1))
    whole = target.prefill(ids, [12, 7], TreeCache(2, 16), (1,))
    pieces = target.prefill(ids, [12, 7], TreeCache(2, 16), (1,), chunk=5)
    for row, length in enumerate([12, 7]):
        for a, b in ((whole.last, pieces.last), (whole.taps[0], pieces.taps[0])):
            torch.testing.assert_close(a[row, :length], b[row, :length], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_a_draft_model_is_run_as_its_target_is(fused: bool) -> None:
    """A given attention is the reference, which must hold for all that decodes."""
    folder = str(QUICKSTART.parent / "draft_model")
    target = load_for_decoding(
        TargetConfig(str(QUICKSTART), device="cpu", attention=None if fused else "sdpa")
    )
    proposer = load_proposer(folder, target, pytest.fail)
    assert isinstance(proposer, DraftModelProposer)
    assert (target.fused is not None) == (proposer.model.fused is not None) == fused
    assert fused or not proposer.model.packed_bytes


def test_a_matrix_of_a_quantising_subclass_is_left_alone() -> None:
    """torchao's weights are tensors of a subclass, for which no operator here is made."""

    class Quantised(Tensor):
        def __tensor_flatten__(self) -> Any:
            raise NotImplementedError

    target = tiny_target()
    projection = target.decoder.layers[0].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight.data.as_subclass(Quantised), False)
    target.fuse(move=True)
    assert target.fused is None
    assert projection not in [linear for *_, linear in linears_of(target.decoder)]
