"""Tiny random targets of many architectures, and proposers that are always right or always
wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    Zamba2Config,
)

from draftsmith.inference.base.tree_settings import TreeSettings
from draftsmith.inference.proposers.contract import Accepted, Prompts, Proposer
from draftsmith.inference.proposers.draft_model import DraftModelProposer
from draftsmith.inference.proposers.eagle import EagleProposer
from draftsmith.inference.proposers.medusa import MedusaProposer
from draftsmith.inference.proposers.ngram import NgramLookup, PlainDecoding
from draftsmith.inference.proposers.with_lookup import WithLookup
from draftsmith.inference.rounds.sampling import Draws
from draftsmith.inference.rounds.tree import DraftTree, TreeShape
from draftsmith.inference.targets.mixers import Mixer
from draftsmith.inference.targets.target import Target
from tests.conftest import random_heads
from tests.helpers.random_blocks import proposer_of, random_block
from tests.helpers.random_eagles import random_eagle

VOCAB = 100
WINDOW = 8  # shorter than every text
HEADS = {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 256}
GEMMA = {"sliding_window": WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, HEADS),
    "llama-mqa": (LlamaConfig, {**HEADS, "num_key_value_heads": 1}),
    "qwen2": (
        Qwen2Config,
        {**HEADS, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, {**HEADS, "head_dim": 8}),
    "mistral": (MistralConfig, {**HEADS, "sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, {**HEADS, **GEMMA}),
    "gemma3": (
        Gemma3TextConfig,
        {**HEADS, **GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": (Phi3Config, {**HEADS, "partial_rotary_factor": 0.5}),
    "gpt-neox": (
        GPTNeoXConfig,
        {"intermediate_size": 64, "max_position_embeddings": 256, "rotary_pct": 0.25},
    ),
    "gpt2": (GPT2Config, {"n_positions": 256}),
    "cohere": (CohereConfig, {**HEADS, "logit_scale": 0.5}),
    "deepseek-v3": (
        DeepseekV3Config,
        {
            **HEADS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "kv_lora_rank": 8,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt-oss": (GptOssConfig, {**HEADS, **MOE, "head_dim": 8, "sliding_window": WINDOW}),
    "mixtral": (MixtralConfig, {**HEADS, **MOE, "sliding_window": None}),
    "qwen2-moe": (
        Qwen2MoeConfig,
        {
            **HEADS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# Unequal sizes and numbers of heads, so that none can be taken for another.
DELTA = {
    **HEADS,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    **HEADS,
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 20,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
CONVOLUTION = {
    **HEADS,
    "num_hidden_layers": 3,
    "tie_word_embeddings": False,
    "conv_L_cache": 3,
    "layer_types": ["conv", "full_attention", "conv"],
}
HYBRIDS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3.5": (Qwen3_5TextConfig, DELTA),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, {**DELTA, **EXPERTS}),
    "qwen3-next": (Qwen3NextConfig, {**DELTA, **EXPERTS, "decoder_sparse_step": 1}),
    "olmo-hybrid": (OlmoHybridConfig, DELTA),
    "kimi-linear": (
        KimiLinearConfig,
        {
            **HEADS,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": DELTA["layer_types"],
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 4,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "bamba": (BambaConfig, {**MAMBA, "attn_layer_indices": [1]}),
    "granite-hybrid": (
        GraniteMoeHybridConfig,
        {
            **MAMBA,
            **MOE,
            "shared_intermediate_size": 80,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.5,
            "layer_types": DELTA["layer_types"],
        },
    ),
    "falcon-h1": (
        FalconH1Config,
        {
            **MAMBA,
            "mamba_d_ssm": 64,
            "embedding_multiplier": 1.3,
            "lm_head_multiplier": 0.5,
            "attention_in_multiplier": 0.8,
            "key_multiplier": 0.7,
            "attention_out_multiplier": 1.1,
            "ssm_in_multiplier": 0.5,
            "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
            "ssm_out_multiplier": 0.6,
        },
    ),
    "nemotron-h": (
        NemotronHConfig,
        {
            **HEADS,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 20,
            "conv_kernel": 4,
            "chunk_size": 16,
        },
    ),
    "zamba2": (
        Zamba2Config,
        {
            **HEADS,
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "mamba_d_state": 20,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "chunk_size": 16,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
        },
    ),
    "mamba2": (
        Mamba2Config,
        {
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 20,
            "n_groups": 2,
            "chunk_size": 16,
            "expand": 2,
        },
    ),
    "lfm2": (Lfm2Config, CONVOLUTION),
    "lfm2-moe": (Lfm2MoeConfig, {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1}),
}
"""Targets with recurrent layers: a form of every mixer that is known here."""
ARCHITECTURES |= HYBRIDS


def architecture(
    kind: str,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    layers: int = 2,
    scale: float = 0.3,
    **sizes_of_its_own: Any,
) -> Target:
    """A target of this kind, float64 so that near-ties vanish (experts and recurrent layers compute
    in float32)."""
    make, extra = ARCHITECTURES[kind]
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, vocab_size=VOCAB,
        initializer_range=scale,
        pad_token_id=0, eos_token_id=[1, 2], bos_token_id=None,
    )  # fmt: skip
    single = "num_experts_per_tok" in extra or kind in HYBRIDS
    model = AutoModelForCausalLM.from_config(
        make(**{**sizes, **extra, **sizes_of_its_own}),
        dtype=dtype or (torch.float32 if single else torch.float64),
    )
    if kind in HYBRIDS:
        scatter(model)
    return Target(model, None, kind)


@torch.no_grad()
def scatter(model: torch.nn.Module) -> None:
    """Give recurrent layers weights that differ between heads, and states that last."""
    for name, weight in model.named_parameters():
        kind = name.rpartition(".")[2]
        if "conv" in name:
            weight.copy_(torch.randn_like(weight) * 0.5)
        elif kind in ("A_log", "D"):
            weight.copy_(torch.randn_like(weight))
        elif kind == "dt_bias":
            weight.copy_(torch.randn_like(weight) - 2)


@contextmanager
def without_limits(mixers: list[Mixer]) -> Iterator[None]:
    """Do not limit the steps of texts meanwhile, as those of nodes are not: for a comparison."""
    limited = [mixer.module for mixer in mixers if hasattr(mixer.module, "time_step_limit")]
    before = [module.time_step_limit for module in limited]
    try:
        for module in limited:
            module.time_step_limit = (0.0, math.inf)
        yield
    finally:
        for module, limit in zip(limited, before, strict=True):
            module.time_step_limit = limit


def near_copy(target: Target, noise: float = 0.05) -> Target:
    """The target with disturbed weights: a draft model that is often right and often wrong."""
    import copy

    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * noise
            )
    return Target(model, target.tokenizer, "near copy")


def proposers(target: Target, drafter: Target) -> dict[str, Proposer]:
    """Every proposer that there is, with settings that make its trees branch."""
    heads = random_heads(target)
    ranks = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]
    found: dict[str, Proposer] = {
        "plain": PlainDecoding(),
        "ngram": NgramLookup(length=5),
        "draft-model chain": DraftModelProposer(drafter, target.vocab_size, TreeSettings(length=3)),
        "draft-model tree": DraftModelProposer(
            drafter, target.vocab_size, TreeSettings(length=3, width=3, nodes=9)
        ),
        "medusa": MedusaProposer(heads, TreeSettings(shape=ranks)),
        "medusa best-first": MedusaProposer(heads, TreeSettings(nodes=9)),
        "eagle3 chain": EagleProposer(
            random_eagle(target, "eagle3 shared head"), TreeSettings(length=3, width=1)
        ),
        "eagle3 tree": EagleProposer(
            random_eagle(target, "eagle3.1"), TreeSettings(length=3, width=3, nodes=9)
        ),
        "eagle1 tree": EagleProposer(
            random_eagle(target, "eagle1"), TreeSettings(length=3, width=2, nodes=6)
        ),
        "dflash chain": proposer_of(random_block(target)),
        "dflash tree": proposer_of(random_block(target), width=9, nodes=9),
        "dspark chain": proposer_of(random_block(target, "dspark"), width=1),
        "dspark tree": proposer_of(random_block(target, "dspark"), width=3, nodes=9),
    }
    branching = TreeSettings(length=3, width=2, nodes=6)
    with_lookup = {
        "eagle3": EagleProposer(random_eagle(target, "eagle3 draft vocabulary"), branching),
        "dspark": proposer_of(random_block(target, "dspark")),
        "medusa": MedusaProposer(heads, TreeSettings(shape=ranks)),
    }
    for name, proposer in with_lookup.items():
        found[f"{name} with lookup"] = WithLookup(proposer, 1, 5, prior=2.0)
    return found


TEN_NODES = TreeShape((-1, 0, 0, 1, 1, 3, 3, 5, 5, 2))


class FromTheFuture(Proposer):
    """Knows what the target will write. `right`: the path to the first of the deepest nodes is it,
    and all other nodes are wrong; that leaf is not the last row. Otherwise: a tree of the same
    shape in which no token is right."""

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        texts: dict[tuple[int, ...], list[int]],
        right: bool,
        vocab_size: int,
        shape: TreeShape = TEN_NODES,
    ) -> None:
        """`texts`: reply by prompt."""
        self.name = "oracle" if right else "adversary"
        self._texts, self._vocab = texts, vocab_size
        self._ahead: list[list[int]] = []
        self.shape, self.max_drafted = shape, shape.drafted
        path = shape.path_to(shape.depths.index(shape.levels))
        self._offsets = [
            0 if right and node in path else 1 + shape.children[parent].index(node)
            for node, parent in enumerate(shape.parents[1:], 1)
        ]
        """Differences of the nodes' tokens from the right token of their depth."""

    def prefill(self, prompts: Prompts) -> None:
        self._ahead = [list(self._texts[tuple(tokens[:-1])][1:]) for tokens in prompts.tokens]

    def propose(self, root: torch.Tensor, draws: Draws) -> DraftTree:
        rows = []
        for ahead, first in zip(self._ahead, root.tolist(), strict=True):
            coming = ahead + [3] * self.shape.levels
            drafts = zip(self.shape.depths[1:], self._offsets, strict=True)
            rows.append(
                [first, *((coming[depth - 1] + offset) % self._vocab for depth, offset in drafts)]
            )
        return DraftTree(torch.tensor(rows, device=root.device), self.shape)

    def commit(self, accepted: Accepted) -> None:
        self._ahead = [
            ahead[len(new) :] for ahead, new in zip(self._ahead, accepted.tokens, strict=True)
        ]

    def keep(self, rows: list[int]) -> None:
        self._ahead = [self._ahead[row] for row in rows]
