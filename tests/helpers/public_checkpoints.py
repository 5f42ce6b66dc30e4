"""EAGLE checkpoints as other projects store them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftsmith.heads.eagle import EagleDrafter
from draftsmith.heads.exchange.foreign import Answers, ImportedDrafter
from draftsmith.heads.exchange.public import read_public
from tests.helpers.random_artifacts import TAPS, TARGET, eagle, side

Tensors = dict[str, Tensor]

NONE = Answers()

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": 0, "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": TARGET.vocab_size,
}  # fmt: skip

EMBEDDING = TARGET.model.get_input_embeddings().weight.detach().clone()


def store(
    folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.detach().contiguous().clone() for name, t in tensors.items()}, folder / file)
    return folder


def eagle1(**shape: Any) -> tuple[EagleDrafter, Tensors]:
    """SafeAILab's: an embedding of its own in fp32, and a bias of fc where the config does not deny
    it."""
    drafter = eagle("eagle1", **shape).drafter
    return drafter, dict(drafter.serving_state()) | {"embed_tokens.weight": EMBEDDING}


def eagle3(kind: str = "eagle3", **shape: Any) -> tuple[EagleDrafter, Tensors]:
    drafter = eagle(kind, **shape).drafter
    return drafter, dict(drafter.serving_state())


def same(found: ImportedDrafter, drafter: Any) -> None:
    ours = drafter.serving_state()
    theirs = found.drafter.serving_state()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(tensor.dtype)), name
    assert found.drafter.facts() == drafter.facts()


def read(folder: Path, answers: Answers = NONE) -> ImportedDrafter:
    return read_public(folder, side(TARGET), answers)


def specforge(**more: Any) -> dict[str, Any]:
    inner = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    return (
        LLAMA
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": TARGET.vocab_size,
            "eagle_config": inner,
        }
        | more
    )


def speculators_config(drafter: EagleDrafter, **more: Any) -> dict[str, Any]:
    """As version 0.9 of the library writes it: a null, the rope in one spelling, its own code by
    name."""
    layer = {
        key: value for key, value in LLAMA.items() if key not in ("rope_theta", "architectures")
    }
    layer |= {
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "head_dim": 8,
        "pad_token_id": None,
    }
    methods = [
        {
            "accept_tolerance": 0.0,
            "proposal_type": "greedy",
            "speculative_tokens": 3,
            "verifier_accept_k": 1,
        }
    ]
    return {
        "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": drafter.shape.draft_vocab_size, "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": TAPS,
        "embed_requires_grad": False, "fc_norm": False,
        "norm_before_fc": drafter.shape.norm_fused_taps,
        "norm_before_residual": drafter.shape.norm_before_residual,
        "norm_output": drafter.shape.norm_output,
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": methods,
                               "verifier": {"architectures": ["LlamaForCausalLM"],
                               "name_or_path": "x"}},
        "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False, "transformer_layer_config": layer, **more,
    }  # fmt: skip
