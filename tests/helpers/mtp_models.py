"""Tiny random targets with an MTP layer, in checkpoints as their families publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from tests.helpers.architectures import scatter

COMMON: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
    num_attention_heads=4, max_position_embeddings=256, initializer_range=0.2,
    pad_token_id=0, bos_token_id=None, eos_token_id=1,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
    n_group=1, topk_group=1, n_shared_experts=1, num_mtp_layers=1,
)  # fmt: skip
DELTA: dict[str, Any] = dict(
    num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=12, mtp_num_hidden_layers=1,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
)  # fmt: skip
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "deepseek": (
        DeepseekV3Config,
        dict(
            **EXPERTS, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
            qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12,
        ),
    ),
    "glm": (
        Glm4MoeConfig, dict(**EXPERTS, num_key_value_heads=2, head_dim=8, use_qk_norm=True),
    ),
    "qwen3.5": (Qwen3_5TextConfig, DELTA),
    "qwen3.5-moe": (
        Qwen3_5MoeTextConfig,
        dict(
            **DELTA, moe_intermediate_size=24, shared_expert_intermediate_size=24, num_experts=4,
            num_experts_per_tok=2,
        ),
    ),
}  # fmt: skip


def make_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A target of a family, in float32."""
    config, sizes = FAMILIES[kind]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config(**{**COMMON, **sizes, **changes}), dtype=torch.float32
    ).eval()
    if kind.startswith("qwen"):
        scatter(model)
    return model


def layer_tensors(kind: str, model: Any, seed: int = 1) -> dict[str, Tensor]:
    """Random tensors of an MTP layer for `model`, by their names in checkpoints of its family.

    The decoder layer is a copy of the last one with disturbed weights; experts are stored one by
    one, as these families publish them.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers

    def disturbed(tensor: Tensor) -> Tensor:
        return tensor + 0.1 * torch.randn(tensor.shape, generator=generator)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = {
        name: disturbed(tensor)
        for name, tensor in model.model.layers[-1].state_dict().items()
    }  # fmt: skip
    for name in [name for name in found if ".experts." in name]:
        joint = found.pop(name)
        for number, expert in enumerate(joint):
            prefix = name.rpartition(".")[0] + f".{number}"
            if name.endswith("gate_up_proj"):
                half = len(expert) // 2
                found[f"{prefix}.gate_proj.weight"] = expert[:half].clone()
                found[f"{prefix}.up_proj.weight"] = expert[half:].clone()
            else:
                found[f"{prefix}.down_proj.weight"] = expert.clone()
    joint, norms = random(hidden, 2 * hidden) * 0.2, [1 + 0.3 * random(hidden) for _ in range(3)]
    if kind.startswith("qwen"):
        own = {
            "fc": joint, "pre_fc_norm_embedding": norms[0] - 1, "pre_fc_norm_hidden": norms[1] - 1,
            "norm": norms[2] - 1,
        }  # fmt: skip
        named = {f"mtp.layers.0.{name}": tensor for name, tensor in found.items()}
        return named | {f"mtp.{name}.weight": tensor for name, tensor in own.items()}
    own = {"eh_proj": joint, "enorm": norms[0], "hnorm": norms[1], "shared_head.norm": norms[2]}
    prefix = f"model.layers.{layers}."
    copies = {
        f"{prefix}embed_tokens.weight": model.get_input_embeddings().weight.detach().clone(),
        f"{prefix}shared_head.head.weight": model.lm_head.weight.detach().clone(),
    }
    named = {prefix + name: tensor for name, tensor in found.items()}
    return named | copies | {f"{prefix}{name}.weight": t for name, t in own.items()}


def save(model: Any, tensors: dict[str, Tensor], folder: Path, tokenizer: Any = None) -> None:
    """Write a checkpoint: the model, and `tensors` next to its own."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file({**load_file(file), **stored}, file, {"format": "pt"})
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
