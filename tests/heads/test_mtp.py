"""MTP layers: the logits of transformers' own, or of a plain reference; greedy text and rounds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from draftsmith.commands.mtp import find_layer, read_for
from draftsmith.heads.mtp import MtpDrafter
from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.decode import generate, generate_one
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.targets.target import Target
from tests.conftest import tiny_target
from tests.helpers import mtp_models

CHAIN, TREE = TreeSettings(length=3, width=1), TreeSettings(length=4, width=4, nodes=12)


@pytest.fixture(scope="module", params=mtp_models.FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Target, MtpDrafter]:
    """A target that was loaded from its checkpoint, and its MTP layer."""
    kind, folder = request.param, tmp_path_factory.mktemp("target")
    made = mtp_models.make_model(kind)
    mtp_models.save(made, mtp_models.layer_tensors(kind, made), folder, tiny_target().tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # transformers looks for the layer under the number that it has in the published model.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]
    target = Target(model, None, str(folder))
    return (
        kind,
        target,
        read_for(find_layer(str(folder)), target)[0].drafter.eval().requires_grad_(False),
    )


def causal(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    # Autocast hides what other kernels refuse.
    assert queries.dtype == keys.dtype == values.dtype
    q, k, v = (states.transpose(1, 2) for states in (queries, keys, values))
    read = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return read.transpose(1, 2).flatten(2)


def logits_of(drafter: MtpDrafter, ids: Tensor, last: Tensor) -> Tensor:
    """The logits of every row of a text, `ids` `[1, S]` with last states `[1, S, H]`."""
    token_part, state = drafter.token_part(ids[:, 1:]), drafter.fuse((), last[:, :-1])
    positions = torch.arange(ids.shape[1] - 1)[None]
    return drafter.logits(drafter.advance(token_part, state, drafter.rotary(positions), causal))


def plain_reference(model: Any, folder: Path, ids: Tensor, last: Tensor) -> Tensor:
    """The same of a Qwen3.5 layer, by its class alone: no cache, and transformers' attention."""
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    last_layer = model.model.layers[-1]
    layer = type(last_layer)(model.config, model.config.num_hidden_layers - 1)
    part = {
        name.removeprefix("mtp.layers.0."): tensor
        for name, tensor in stored.items()
        if name.startswith("mtp.layers.0.")
    }
    for name in [name for name in layer.state_dict() if ".experts." in name]:
        prefix, _, kind = name.rpartition(".")
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        experts = [
            torch.cat([part.pop(f"{prefix}.{number}.{each}.weight") for each in kinds])
            for number in range(model.config.num_experts)
        ]
        part[name] = torch.stack(experts)
    layer.load_state_dict(part)

    def normed(name: str, x: Tensor) -> Tensor:
        norm = type(last_layer.input_layernorm)(x.shape[-1], eps=model.config.rms_norm_eps)
        norm.weight = nn.Parameter(stored[f"mtp.{name}.weight"])
        return norm(x)

    embedded = normed("pre_fc_norm_embedding", model.get_input_embeddings()(ids[:, 1:]))
    both = torch.cat([embedded, normed("pre_fc_norm_hidden", last[:, :-1])], -1)
    positions = torch.arange(ids.shape[1] - 1).expand(3, 1, -1)  # as transformers 5.17 wants them
    joined = both @ stored["mtp.fc.weight"].T
    output = layer(joined, position_embeddings=model.model.rotary_emb(joined, positions))
    return model.lm_head(normed("norm", output))


@torch.no_grad()
def test_logits_are_those_of_transformers_or_of_a_plain_reference(
    pair: tuple[str, Target, MtpDrafter],
) -> None:
    kind, target, drafter = pair
    ids = torch.randint(2, 96, (1, 12), generator=torch.Generator().manual_seed(3))
    last = target.model.model(ids).last_hidden_state
    if kind.startswith("qwen"):
        expected = plain_reference(target.model, Path(target.name), ids, last)
    else:
        theirs = MtpModel.from_pretrained(target.model)
        places = torch.arange(1, 12)[None]  # of the tokens: rotary positions are relative
        states = theirs.forward_layer(0, last[:, :-1], places, None, input_ids=ids[:, 1:])
        expected = theirs._project_to_logits(states)
    found = logits_of(drafter, ids, last)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert float(found.std()) > 0.1


@torch.no_grad()
def test_low_precision_logits_stay_close_to_float32(pair: tuple[str, Target, MtpDrafter]) -> None:
    _, target, drafter = pair
    ids = torch.randint(2, 96, (1, 12), generator=torch.Generator().manual_seed(3))
    last = target.model.model(ids).last_hidden_state
    exact = logits_of(drafter, ids, last)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = logits_of(drafter, ids, last)
    low = copy.deepcopy(drafter).to(torch.bfloat16)
    for found in (mixed, logits_of(low, ids, last)):
        assert float((found.float() - exact).norm() / exact.norm()) < 0.05


@torch.no_grad()
def test_greedy_text_matches_target_and_rounds_match_transformers(
    pair: tuple[str, Target, MtpDrafter],
) -> None:
    kind, target, drafter = pair
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(2, 96, (n,), generator=generator).tolist() for n in (5, 9, 2, 14)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = target.model.generate(ids, do_sample=False, max_new_tokens=24, pad_token_id=0)
        expected.append(text[0, len(prompt) :].tolist())
    for settings in (CHAIN, TREE):
        results = generate(target, EagleProposer(drafter, settings), prompts, 24)
        assert [result.token_ids for result in results] == expected
    if kind.startswith("qwen"):
        return  # transformers has no MTP for this family
    for prompt in prompts:
        one = EagleProposer(drafter, TreeSettings(length=1, width=1))
        ours = generate_one(target, one, prompt, 24)
        passes: list[int] = []
        handle = target.model.model.register_forward_pre_hook(
            lambda module, args, kwargs, passes=passes: passes.append(kwargs["input_ids"].shape[1]),
            with_kwargs=True,
        )
        text = target.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24, use_mtp=True, pad_token_id=0
        )
        handle.remove()
        assert text[0, len(prompt) :].tolist() == ours.token_ids
        assert len(passes) == 1 + len(ours.rounds), "a prefill and a pass for each round"
