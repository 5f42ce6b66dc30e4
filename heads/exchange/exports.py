"""What each serving engine reads of a drafter: the layout, what it cannot express, and how it is
started.

Our own layout is what most engines read; here is what differs. Facts are of vLLM 0.32 and 0.33,
SGLang 0.5, TensorRT-LLM's PyTorch backend, llama.cpp b10434 and TGI of 2026; each engine's own
files say more than its documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from ..artifact import Artifact
from ..errors import UserError
from ..fingerprint import Fingerprint
from ..layout import stored_as
from .engine_names import ENGINES, EngineName

CHAINS_ONLY = ("vllm", "speculators", "trtllm", "llamacpp", "tgi", "hf")
SPECULATORS_FORMAT = "0.9.0"  # of the layout that is written
GGUF_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
DRAFTS = 3  # a round, where nothing else is asked for
# Families whose embeddings are scaled outside of the matrix that engines share.
SCALED_EMBEDDINGS = ("gemma", "granite", "minicpm")
SGLANG_SHIFTS = (  # families whose nested taps SGLang shifts only where the first is 1
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2",
    "kimi_k25", "mistral_large3",
)  # fmt: skip

# Families whose logits are scaled or capped, by which engines do with a transition bias something
# else than we.
CHANGED_LOGITS = ("gemma2", "gemma3n", "gemma4", "cohere", "granite", "minicpm")

MEDUSA_WITH_HEAD = "vllm-medusa"
"""Heads without output matrices, and the target's beside them, which vLLM does not take from the
target itself."""

Files = tuple[dict[str, Any], dict[str, Tensor]]
"""`config.json` and the tensors beside it."""


@dataclass(frozen=True)
class ExportRequest:
    """What is asked for."""

    engine: EngineName
    out: str
    """Where the export will stand, as the serve command will name it."""
    target: str
    """What the serve command calls the target."""
    drafts: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Recipe:
    """How one engine is given one kind of drafter."""

    layout: str
    """native, speculators, sglang-eagle1 or vllm-medusa."""
    serve: Callable[[ExportRequest, Any], str]
    notes: tuple[str, ...] = ()
    also: tuple[EngineName, ...] = ()
    """Other engines that read the very same directory."""


def kind_of(drafter: Any) -> str:
    """eagle1, eagle3, dflash, dspark, medusa or draft_model."""
    return f"eagle{drafter.shape.version}" if drafter.method == "eagle" else drafter.method


def recipe_for(engine: EngineName, artifact: Artifact) -> Recipe:
    """How `engine` is given this drafter. Raises `UserError` where it cannot be, with the
    reason."""
    drafter, kind = artifact.drafter, kind_of(artifact.drafter)
    found = RECIPES[engine].get(kind)
    if found is None:
        *most, last = (TITLES[k] for k in RECIPES[engine])
        takes = f"{', '.join(most)} or {last}" if most else last
        where = (
            ", ".join(other for other in ENGINES if obstacle(other, artifact) is None)
            or "none of the engines"
        )
        raise UserError(
            f"{engine} takes {takes}, not {TITLES[kind]}; this one can be exported to {where}"
        )
    if reason := obstacle(engine, artifact):
        raise UserError(f"{engine} cannot serve this drafter: {reason}")
    if kind in ("eagle1", "eagle3"):
        others = (e for e in found.also if obstacle(e, artifact) is None)
        if engine != "sglang" and kind == "eagle3":  # whose nested taps may have to be others
            same = sglang_taps(list(drafter.taps), artifact.fingerprint.model_type) == sglang_taps(
                list(drafter.taps), ""
            )
            others = (e for e in others if e != "sglang" or same)
        found = replace(found, also=tuple(others), notes=found.notes + _eagle_notes(drafter.shape))
    if kind in BLOCKS:
        others = (e for e in found.also if obstacle(e, artifact) is None)
        if drafter.shape.attention_bias:
            others = (e for e in others if (e in O_BIAS) == (engine in O_BIAS))
        found = replace(found, also=tuple(others))
    if kind == "medusa" and drafter.config.shared_head:
        found = replace(found, layout=MEDUSA_WITH_HEAD) if engine == "vllm" else found
        found = replace(
            found, also=(), notes=(*found.notes, "The heads share the target's output matrix.")
        )
    return found


def obstacle(engine: str, artifact: Artifact) -> str | None:
    """Why `engine` cannot be given this drafter; None if it can."""
    drafter, kind = artifact.drafter, kind_of(artifact.drafter)
    if kind not in RECIPES[engine]:  # type: ignore[index]
        return f"it takes no {TITLES[kind]}"
    if kind in ("eagle1", "eagle3"):
        return eagle_obstacle(engine, drafter.shape, artifact.fingerprint.model_type)
    if kind in BLOCKS:
        return block_obstacle(engine, drafter, artifact.fingerprint.model_type)
    if (
        kind == "medusa"
        and engine == "tgi"
        and drafter.config.shared_head
        and drafter.config.num_layers > 1
    ):
        return "it reads heads that share the target's output matrix with one layer each only"
    return None


def eagle_obstacle(engine: str, shape: Any, family: str) -> str | None:
    """Why `engine` cannot express an EAGLE drafter of this shape, or would silently compute
    something else; None if it can.

    `family`: the target's model type.
    """
    others_than_vllm = engine not in ("vllm", "speculators")
    if shape.activation != "silu":
        return (
            f"its layer has activation {shape.activation}, engines have silu; train with "
            "heads.activation silu"
        )
    if shape.hidden_size % shape.num_heads and engine != "llamacpp":
        return (
            f"its width {shape.hidden_size} is no multiple of its {shape.num_heads} heads, which a "
            "Llama's config has to be"
        )
    if shape.fc_bias and engine != "sglang":
        return "its fc has a bias, which engines drop without a word, or do not load"
    if "partial_rotary_factor" in shape.rope and engine in ("trtllm", "llamacpp"):
        return "rotary positions turn a part of each head only, which we have not seen it read"
    if shape.rope["rope_type"] == "dynamic" and others_than_vllm:
        return "dynamic rope depends on the text's length there"
    if shape.num_layers > 1 and others_than_vllm:
        return (
            f"it has {shape.num_layers} layers, and engines name the norms of a second one "
            "differently"
        )
    if shape.version == 1:
        if shape.qk_norm:
            return "EAGLE-1 with norms on queries and keys has no class there"
        if family.startswith(SCALED_EMBEDDINGS):
            return (
                f"a {family} target scales embeddings, and EAGLE-1 is handed unscaled ones there; "
                "use version 3"
            )
        return (
            "EAGLE-1 has no bias on queries and keys there"
            if shape.attention_bias and others_than_vllm
            else None
        )
    if shape.qk_norm and others_than_vllm:
        return "norms on queries and keys (heads.qk_norm) are known to vLLM only"
    if shape.attention_bias and others_than_vllm:
        return (
            "it has a bias on queries and keys, which the engine leaves out, wants elsewhere too, "
            "or does not load"
        )
    if engine == "sglang" and len(shape.taps) * shape.target_hidden_size == shape.hidden_size:
        return "its taps are as wide as its own state, so they are taken for one and fc is left out"
    if shape.norm_before_residual and engine in ("sglang", "trtllm"):
        return "norm_before_residual is not known there; vllm and llamacpp have it"
    if engine == "sglang" and family in SGLANG_SHIFTS and shape.taps[0] == 1:
        return f"for {family} targets it reads a first tap of 1 as 2"
    if engine == "llamacpp" and (shape.norm_taps or shape.norm_output):
        return (
            "norms of each tap or of the recycled state (EAGLE-3.1) are not known there; train "
            "without"
        )
    if engine == "llamacpp" and len(shape.taps) != 3:
        return f"it fuses {len(shape.taps)} taps, and the engine reads exactly three"
    return None


def block_obstacle(engine: str, drafter: Any, family: str) -> str | None:
    """`eagle_obstacle` for DFlash and DSpark."""
    shape = drafter.shape
    if shape.activation != "silu":
        return (
            f"its layers have activation {shape.activation}, engines have silu; train with "
            "heads.activation silu"
        )
    if shape.attention_bias and engine not in O_BIAS:
        return "it has a bias on queries and keys, which the engine leaves out or does not load"
    if "partial_rotary_factor" in shape.rope and engine not in ("vllm", "speculators"):
        return (
            "rotary positions turn a part of each head only, which the engine does not do for "
            "block drafters"
        )
    if shape.rope["rope_type"] == "dynamic" and engine not in ("vllm", "speculators"):
        return "dynamic rope depends on the text's length there"
    if shape.rope["rope_type"] in ("llama3", "longrope") and engine == "llamacpp":
        return (
            f"its rotary positions are of type {shape.rope['rope_type']}, which the engine drops "
            "for block drafters"
        )
    if drafter.method == "dspark" and family.startswith(CHANGED_LOGITS):
        return (
            f"a {family} target scales or caps its logits, and with them the transition bias "
            "there; train dflash"
        )
    return None


def _eagle_notes(shape: Any) -> tuple[str, ...]:
    notes = []
    if shape.draft_vocab_size < shape.vocab_size:
        share = shape.draft_vocab_size / shape.vocab_size
        notes.append(
            f"Drafts {shape.draft_vocab_size:,} of the target's {shape.vocab_size:,} tokens "
            f"({share:.0%})."
        )
    if shape.norm_taps or shape.norm_output:
        notes.append(
            "EAGLE-3.1 (`fc_norm`, `norm_output`): needs an engine of 2026-09 or later; older "
            "ones ignore these keys."
        )
    if shape.rope["rope_type"] == "longrope":
        notes.append(
            "Rotary positions are those of short texts: serve no longer ones than "
            "`original_max_position_embeddings`."
        )
    if shape.num_layers > 1:
        notes.append(f"{shape.num_layers} layers: other engines than vLLM do not load it.")
    return tuple(notes)


def files_for(
    layout: str, drafter: Any, order: ExportRequest, target: Fingerprint, head: Tensor | None = None
) -> Files:
    """What stands in `config.json` and the tensors' file. `head` `[V, H]`: the target's, where a
    layout holds it."""
    name = str(order.dtype).removeprefix("torch.")
    config = drafter.serving_config(order.target, name)
    tensors = {
        key: tensor.detach().to("cpu", stored_as(tensor, order.dtype)).contiguous().clone()
        for key, tensor in drafter.serving_state().items()
    }
    biased = O_BIAS if drafter.method in BLOCKS else ("vllm", "speculators")
    if (
        order.engine in biased
        and getattr(drafter, "shape", None) is not None
        and drafter.shape.attention_bias
    ):
        # They give the output projection a bias too where attention_bias is set, and fill one that
        # is missing with chance.
        for query in [name for name in tensors if name.endswith("q_proj.bias")]:
            missing = torch.zeros(drafter.shape.hidden_size, dtype=order.dtype)
            tensors[query.replace("q_proj", "o_proj")] = missing
    if layout == "speculators" and drafter.method in BLOCKS:
        return speculators_block(config, drafter, order.drafts), tensors
    if layout == "speculators":
        return speculators(config, tensors, drafter.shape, order.drafts)
    if layout == MEDUSA_WITH_HEAD:
        if head is None:
            raise UserError(
                "vllm wants the target's output matrix beside heads that share it; name the "
                "target with --target"
            )
        return config, tensors | {
            "lm_heads.0.weight": head.detach().to("cpu", order.dtype).contiguous().clone()
        }
    if layout == "sglang-eagle1":
        return sglang_eagle1(config, tensors)
    if order.engine == "sglang" and "eagle_config" in config:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = sglang_taps(
            list(drafter.taps), target.model_type
        )
    return config, tensors


def sglang_taps(taps: list[int], model_type: str) -> list[int]:
    """The nested ids as SGLang reads them: layers from 0; for some families only where the first is
    1, and taps else."""
    shifted = [tap - 1 for tap in taps]
    return taps if model_type in SGLANG_SHIFTS and shifted[0] != 1 else shifted


def speculators(
    config: dict[str, Any], tensors: dict[str, Tensor], shape: Any, drafts: int
) -> Files:
    """The layout of the speculators library: every flag written out, since its readers' defaults
    differ."""
    flags = (
        "draft_vocab_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "target_hidden_size",
    )
    made = {
        **_speculator("eagle3", "Eagle3DraftModel", config, drafts),
        **{key: config[key] for key in flags if key in config},
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "num_aux_hidden_states": config["num_aux_hidden_states"],
        "transformer_layer_config": {
            "model_type": "qwen3" if shape.qk_norm else "llama",
            **_layer_keys(config),
        },
    }
    # The class that vLLM makes of it takes what stands in the layer's config only.
    made["transformer_layer_config"]["num_aux_hidden_states"] = config["num_aux_hidden_states"]
    return made, {
        name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()
    }


def speculators_block(config: dict[str, Any], drafter: Any, drafts: int) -> dict[str, Any]:
    """The same of a block drafter."""
    shape, spark = drafter.shape, drafter.method == "dspark"
    spark_keys = (
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    )
    return {
        **_speculator(
            drafter.method, "DSparkDraftModel" if spark else "DFlashDraftModel", config, drafts
        ),
        **{key: config[key] for key in spark_keys if key in config},
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token,
        "aux_hidden_state_layer_ids": list(shape.taps),
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": shape.hidden_size,
        "sample_from_anchor": spark,
        # vLLM takes false, the library's default, for causal blocks though no layer slides
        "sliding_window_non_causal": True,
        "transformer_layer_config": {
            "model_type": "qwen3",
            "layer_types": config["layer_types"],
            **_layer_keys(config),
        },
    }


def _speculator(
    kind: str, architecture: str, config: dict[str, Any], drafts: int
) -> dict[str, Any]:
    """What every kind has at its top."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_FORMAT,
        "dtype": config["dtype"],
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
            "verifier": {"name_or_path": config["base_model_name_or_path"], "architectures": []},
        },
    }


def _layer_keys(config: dict[str, Any]) -> dict[str, Any]:
    keys = (
        "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim",
        "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "rope_theta",
        "rope_parameters", "rope_scaling",
        "attention_bias", "mlp_bias", "tie_word_embeddings", "partial_rotary_factor",
    )  # fmt: skip
    return {key: config[key] for key in keys if key in config}


def sglang_eagle1(config: dict[str, Any], tensors: dict[str, Tensor]) -> Files:
    """SGLang's own class name, and a bias that its `fc` would fill with chance if there were
    none."""
    config = {**config, "architectures": ["LlamaForCausalLMEagle"], "bias": True}
    weight = tensors["fc.weight"]
    return config, {"fc.bias": torch.zeros(len(weight), dtype=weight.dtype), **tensors}


def _vllm(method: str) -> Callable[[ExportRequest, Any], str]:
    def serve(order: ExportRequest, drafter: Any) -> str:
        chosen = {"method": method, "model": order.out, "num_speculative_tokens": order.drafts}
        return f"vllm serve {quote(order.target)} --speculative-config {quote(json.dumps(chosen))}"

    return serve


def _sglang(algorithm: str) -> Callable[[ExportRequest, Any], str]:
    def serve(order: ExportRequest, drafter: Any) -> str:
        return (
            f"python -m sglang.launch_server --model-path {quote(order.target)} "
            f"--speculative-algorithm {algorithm} \\\n"
            f"    --speculative-draft-model-path {quote(order.out)} --speculative-num-steps "
            f"{order.drafts} \\\n"
            f"    --speculative-eagle-topk 1 --speculative-num-draft-tokens {order.drafts + 1}"
        )

    return serve


def _sglang_block(order: ExportRequest, drafter: Any) -> str:
    """Draft tokens count the anchor's slot, which is a part of a DFlash block and comes before a
    DSpark one."""
    kind = drafter.method
    return (
        f"python -m sglang.launch_server --model-path {quote(order.target)} "
        f"--speculative-algorithm {kind.upper()} \\\n"
        f"    --speculative-draft-model-path {quote(order.out)} \\\n"
        f"    --speculative-{kind}-block-size {order.drafts + drafter.first_slot} "
        f"--speculative-num-draft-tokens {order.drafts + 1}"
    )


def _trtllm(kind: str) -> Callable[[ExportRequest, Any], str]:
    def serve(order: ExportRequest, drafter: Any) -> str:
        lines = [
            "speculative_config:",
            f"  decoding_type: {kind}",
            f"  max_draft_len: {order.drafts}",
        ]
        lines.append(f"  speculative_model: {json.dumps(order.out)}")
        if kind == "Eagle3":
            lines.append(f"  eagle3_layers_to_capture: {[tap - 1 for tap in drafter.taps]}")
        yaml = "\n".join(lines)
        return (
            f"cat > speculative.yaml <<'END'\n{yaml}\nEND\ntrtllm-serve {quote(order.target)} "
            "--config speculative.yaml"
        )

    return serve


def _llamacpp(kind: str) -> Callable[[ExportRequest, Any], str]:
    def serve(order: ExportRequest, drafter: Any) -> str:
        needs_target = (
            f" --target-model-dir {quote(order.target)}" if kind != "draft-simple" else ""
        )
        # left to itself the converter makes fp16 of fp32
        kept = GGUF_TYPES.get(order.dtype, "auto")
        return (
            f"python convert_hf_to_gguf.py {quote(order.target)} --outfile target.gguf\n"
            f"python convert_hf_to_gguf.py {quote(order.out)}{needs_target} --outtype {kept} "
            "--outfile draft.gguf\n"
            f"llama-server -m target.gguf -md draft.gguf --spec-type {kind} --spec-draft-n-max "
            f"{order.drafts}"
        )

    return serve


def _tgi(order: ExportRequest, drafter: Any) -> str:
    return f"text-generation-launcher --model-id {quote(order.out)} --speculate {order.drafts}"


def _hf(order: ExportRequest, drafter: Any) -> str:
    return (
        "python - <<'END'\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({order.target!r})\n"
        f"names = ({order.target!r}, {order.out!r})\n"
        "target, draft = (AutoModelForCausalLM.from_pretrained(name) for name in names)\n"
        f"draft.generation_config.num_assistant_tokens = {order.drafts}\n"
        'prompt = tokenizer("The capital of France is", return_tensors="pt")\n'
        "print(tokenizer.decode(target.generate(**prompt, assistant_model=draft)[0]))\n"
        "END"
    )


TITLES = {
    "eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark",
    "medusa": "Medusa heads",
    "draft_model": "a draft model",
}  # fmt: skip
BLOCKS = ("dflash", "dspark")
O_BIAS = ("vllm", "speculators", "sglang")
"""Engines whose block drafters have biases on queries, keys, values and the output projection, or
on none."""
_CHAIN = "Drafts are a chain here, so tau of a tree is not what this engine gives."
_SHARED: tuple[EngineName, ...] = ("vllm", "sglang", "trtllm", "llamacpp")
_FEWER = (
    "With fewer drafts engines run a shorter block, so each draft may be another one than in the "
    "whole block."
)
_CUT = "`--spec-draft-p-min` ends a block at the first draft of less confidence than that."
_DSPARK_VLLM = "Needs vLLM's V2 runner, so a GPU."


def _SPECULATORS(order, drafter):
    return f"vllm serve {quote(order.out)}"


_MODEL: tuple[EngineName, ...] = ("vllm", "sglang", "trtllm", "llamacpp", "hf")
_READ_ONLY = "Written after the engine's source; we have not run it."
_CONVERTER = (
    "`convert_hf_to_gguf.py` is in llama.cpp's sources and reads folders: fetch a target of the "
    "hub with `hf download`."
)
_MEDUSA_VLLM = "vLLM 0.33 has dropped Medusa: 0.32 or older, V1 runner."
RECIPES: dict[EngineName, dict[str, Recipe]] = {
    "vllm": {
        "eagle3": Recipe("native", _vllm("eagle3"), (_CHAIN,), _SHARED),
        "eagle1": Recipe("native", _vllm("eagle"), (_CHAIN,)),
        "dflash": Recipe("native", _vllm("dflash"), (_CHAIN, _FEWER), _SHARED),
        "dspark": Recipe(
            "native", _vllm("dspark"), (_CHAIN, _FEWER, _DSPARK_VLLM, _READ_ONLY), _SHARED
        ),
        "draft_model": Recipe("native", _vllm("draft_model"), (), _MODEL),
        "medusa": Recipe("native", _vllm("medusa"), (_CHAIN, _MEDUSA_VLLM), ("vllm", "tgi")),
    },
    "speculators": {
        "eagle3": Recipe("speculators", _SPECULATORS, (_CHAIN,)),
        "dflash": Recipe("speculators", _SPECULATORS, (_CHAIN, _FEWER)),
        "dspark": Recipe("speculators", _SPECULATORS, (_CHAIN, _FEWER, _DSPARK_VLLM, _READ_ONLY)),
    },
    "sglang": {
        "eagle3": Recipe("native", _sglang("EAGLE3"), (_READ_ONLY,), _SHARED),
        "eagle1": Recipe("sglang-eagle1", _sglang("EAGLE"), (_READ_ONLY,)),
        "dflash": Recipe("native", _sglang_block, (_CHAIN, _FEWER, _READ_ONLY), _SHARED),
        "dspark": Recipe("native", _sglang_block, (_CHAIN, _FEWER, _READ_ONLY), _SHARED),
        "draft_model": Recipe("native", _sglang("STANDALONE"), (_READ_ONLY,), _MODEL),
    },
    "trtllm": {
        "eagle3": Recipe("native", _trtllm("Eagle3"), (_CHAIN, _READ_ONLY), _SHARED),
        "dflash": Recipe("native", _trtllm("DFlash"), (_CHAIN, _FEWER, _READ_ONLY), _SHARED),
        "dspark": Recipe("native", _trtllm("DSpark"), (_CHAIN, _FEWER, _READ_ONLY), _SHARED),
        "draft_model": Recipe("native", _trtllm("Draft_Target"), (_READ_ONLY,), _MODEL),
    },
    "llamacpp": {
        "eagle3": Recipe("native", _llamacpp("draft-eagle3"), (_CHAIN, _CONVERTER), _SHARED),
        "dflash": Recipe(
            "native", _llamacpp("draft-dflash"), (_CHAIN, _FEWER, _CONVERTER), _SHARED
        ),
        "dspark": Recipe(
            "native", _llamacpp("draft-dspark"), (_CHAIN, _FEWER, _CUT, _CONVERTER), _SHARED
        ),
        "draft_model": Recipe("native", _llamacpp("draft-simple"), (_CONVERTER,), _MODEL),
    },
    "tgi": {"medusa": Recipe("native", _tgi, (_CHAIN, _READ_ONLY), ("vllm", "tgi"))},
    "hf": {"draft_model": Recipe("native", _hf, (), _MODEL)},
}


def vllm_guess(path: str, kind: str) -> str | None:
    """The method that vLLM takes from a path where none is given, if it is another one than `kind`
    needs; None if not.

    It looks for parts of the whole path in lower case, in this order: `my-eagle-3-head` becomes
    EAGLE-1. Only the folder's own name is ours to judge; the commands that we print name the
    method.
    """
    methods = {"eagle1": "eagle", "draft_model": "draft_model"}
    signs = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
    name = Path(path).name.lower()
    guess = next((method for sign, method in signs if sign in name), None)
    return guess if guess not in (None, methods.get(kind, kind)) else None
