"""Recipes of the serving engines: each one's layout, what it cannot express, and how it is started.

Most engines read the artifact's own layout, which is called native; this module holds what differs
(docs/checkpoint-formats.md#what-each-engine-reads). Facts are taken from the source code of vLLM
0.32 and 0.33, SGLang 0.5, TensorRT-LLM's PyTorch backend, llama.cpp b10434 and TGI of 2026, which
says more than their documentation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from ..artifact import Artifact
from ..dflash import DFlashDrafter
from ..eagle import EagleShape
from ..errors import UserError
from .engine_names import ENGINES, EngineName
from .layouts import (
    BLOCKS,
    MEDUSA_WITH_HEAD,
    O_BIAS,
    SGLANG_SHIFTS,
    ExportRequest,
    sglang_taps,
)

CHAINS_ONLY = ("vllm", "speculators", "trtllm", "llamacpp", "tgi")
GGUF_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
DRAFTS = 3  # drafts of a round, if no other number is given
# Families that scale their embeddings after the lookup, while engines share the matrix alone.
SCALED_EMBEDDINGS = ("gemma", "granite", "minicpm")

# Families that scale or cap their logits: engines do so to DSpark's transition bias too, while
# draftsmith adds it afterwards.
CHANGED_LOGITS = ("gemma2", "gemma3n", "gemma4", "cohere", "granite", "minicpm")


Serve = Callable[[ExportRequest, Any], str]
"""Function of a request and the drafter, of whichever kind, that returns the serve command."""


@dataclass(frozen=True)
class Recipe:
    """Layout, serve command and remarks for one kind of drafter in one engine."""

    layout: str
    """native, speculators, sglang-eagle1 or vllm-medusa."""
    serve: Serve
    notes: tuple[str, ...] = ()
    also: tuple[EngineName, ...] = ()
    """Other engines that read the very same directory."""


def kind_of(drafter: Any) -> str:
    """Return the drafter's kind: eagle1, eagle3, dflash, dspark, medusa or draft_model."""
    # Engines have different classes for the versions of EAGLE, which is one method here.
    return f"eagle{drafter.shape.version}" if drafter.method == "eagle" else drafter.method


def recipe_for(engine: EngineName, artifact: Artifact) -> Recipe:
    """Return the recipe of this drafter for `engine`.

    Raises `UserError` with the reason, and with the engines that take it, if `engine` cannot.
    """
    drafter, kind = artifact.drafter, kind_of(artifact.drafter)
    recipe = RECIPES[engine].get(kind)
    if recipe is None:
        *first_titles, last_title = (TITLES[known_kind] for known_kind in RECIPES[engine])
        takes = last_title
        if first_titles:
            takes = f"{', '.join(first_titles)} or {last_title}"
        # Asked of each engine, because a kind that it takes may still have a shape that it cannot
        # serve.
        takers = [name for name in ENGINES if obstacle(name, artifact) is None]
        where = ", ".join(takers) or "none of the engines"
        raise UserError(
            f"{engine} takes {takes}, not {TITLES[kind]}; this one can be exported to {where}"
        )
    if reason := obstacle(engine, artifact):
        raise UserError(f"{engine} cannot serve this drafter: {reason}")
    if kind in ("eagle1", "eagle3"):
        also = [name for name in recipe.also if obstacle(name, artifact) is None]
        # Exports for the other engines hold the nested taps as layers from 0. SGLang reads those
        # of some families in another unit, and then it cannot share the directory.
        if engine != "sglang" and kind == "eagle3":
            taps = list(drafter.taps)
            if sglang_taps(taps, artifact.fingerprint.model_type) != sglang_taps(taps, ""):
                also = [name for name in also if name != "sglang"]
        recipe = replace(
            recipe, also=tuple(also), notes=recipe.notes + _eagle_notes(drafter.shape, engine)
        )
    if kind in BLOCKS:
        also = [name for name in recipe.also if obstacle(name, artifact) is None]
        # With biases the export has a bias of the output projection for some engines only.
        if drafter.shape.attention_bias:
            also = [name for name in also if (name in O_BIAS) == (engine in O_BIAS)]
        recipe = replace(recipe, also=tuple(also))
    if kind == "medusa" and drafter.config.shared_head:
        if engine == "vllm":
            recipe = replace(recipe, layout=MEDUSA_WITH_HEAD)
        notes = (*recipe.notes, "The heads share the target's output matrix.")
        # vLLM wants the target's matrix in the folder and TGI has no use for it, so they share
        # none.
        recipe = replace(recipe, also=(), notes=notes)
    return recipe


def obstacle(engine: str, artifact: Artifact) -> str | None:
    """Return the reason why `engine` cannot serve this drafter; None if it can."""
    drafter, kind = artifact.drafter, kind_of(artifact.drafter)
    if kind not in RECIPES[engine]:  # type: ignore[index]
        return f"it takes no {TITLES[kind]}"
    if engine == "hf":  # draftsmith itself drafts there
        return None
    if kind in ("eagle1", "eagle3"):
        return eagle_obstacle(engine, drafter.shape, artifact.fingerprint.model_type)
    if kind in BLOCKS:
        return block_obstacle(engine, drafter, artifact.fingerprint.model_type)
    if kind == "medusa" and engine == "tgi":
        shared_head, layers = drafter.config.shared_head, drafter.config.num_layers
        if shared_head and layers > 1:
            return "it reads heads that share the target's output matrix with one layer each only"
    return None


def eagle_obstacle(engine: str, shape: EagleShape, family: str) -> str | None:
    """Return the reason why `engine` cannot serve an EAGLE drafter of this shape; None if it can.

    A drafter that the engine would load, and silently compute otherwise, counts as one that it
    cannot serve. `shape` is an `EagleShape`, `family` the target's model type.
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
        return "rotary positions turn a part of each head only, which it was never seen to read"
    if shape.rope["rope_type"] == "dynamic" and others_than_vllm:
        return "dynamic rope depends on the text's length there"
    if shape.num_layers > 1 and others_than_vllm:
        return (
            f"it has {shape.num_layers} layers, and engines name the norms of a second one "
            "differently"
        )
    if shape.version == 1:
        return _eagle1_obstacle(shape, family, others_than_vllm)
    return _eagle3_obstacle(engine, shape, family, others_than_vllm)


def _eagle1_obstacle(shape: EagleShape, family: str, others_than_vllm: bool) -> str | None:
    """Return the reason among those that concern EAGLE-1 alone; None if there is none."""
    if shape.qk_norm:
        return "EAGLE-1 with norms on queries and keys has no class there"
    if family.startswith(SCALED_EMBEDDINGS):
        return (
            f"a {family} target scales embeddings, and EAGLE-1 is given unscaled ones there; use "
            "version 3"
        )
    if shape.attention_bias and others_than_vllm:
        return "EAGLE-1 has no bias on queries and keys there"
    return None


def _eagle3_obstacle(
    engine: str, shape: EagleShape, family: str, others_than_vllm: bool
) -> str | None:
    """Return the reason among those that concern EAGLE-3 alone; None if there is none."""
    if shape.qk_norm and others_than_vllm:
        return "norms on queries and keys (heads.qk_norm) are known to vLLM only"
    if shape.attention_bias and others_than_vllm:
        return (
            "it has a bias on queries and keys, which the engine leaves out, wants elsewhere too, "
            "or does not load"
        )
    # SGLang recognises a state that was fused already by its width, and does not apply fc to it.
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


def block_obstacle(engine: str, drafter: DFlashDrafter, family: str) -> str | None:
    """Return the reason why `engine` cannot serve this DFlash or DSpark drafter; None if it can.

    `family` is the target's model type.
    """
    shape = drafter.shape
    if shape.activation != "silu":
        return (
            f"its layers have activation {shape.activation}, engines have silu; train with "
            "heads.activation silu"
        )
    if shape.draft_vocab_size is not None:
        return (
            f"it drafts {shape.draft_vocab_size:,} of the target's {shape.vocab_size:,} tokens, "
            "and engines run the target's whole head for block drafters; train without "
            "heads.draft_vocab_size"
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


def _eagle_notes(shape: EagleShape, engine: str) -> tuple[str, ...]:
    """Return the remarks that follow from an `EagleShape`; most are about engines of others."""
    notes = []
    if shape.draft_vocab_size < shape.vocab_size:
        share = shape.draft_vocab_size / shape.vocab_size
        notes.append(
            f"Drafts {shape.draft_vocab_size:,} of the target's {shape.vocab_size:,} tokens "
            f"({share:.0%})."
        )
    if engine == "hf":
        return tuple(notes)
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


def _vllm(method: str) -> Serve:
    """Return the function that writes vLLM's serve command with this speculative method."""

    def serve(order: ExportRequest, drafter: Any) -> str:
        # The method is named, since vLLM would otherwise guess it from the path (`vllm_guess`).
        config = {"method": method, "model": order.out, "num_speculative_tokens": order.drafts}
        return f"vllm serve {quote(order.target)} --speculative-config {quote(json.dumps(config))}"

    return serve


def _sglang(algorithm: str) -> Serve:
    """Return the function that writes SGLang's serve command: a chain of `order.drafts` steps.

    SGLang counts the root among the draft tokens, so there is one more of these than drafts.
    """

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
    """Return SGLang's serve command for a block drafter.

    Its draft tokens count the root, so there is one more of them than drafts. A DFlash block has as
    many slots, because its first one is the anchor's own; all slots of a DSpark block draft.
    """
    kind = drafter.method
    return (
        f"python -m sglang.launch_server --model-path {quote(order.target)} "
        f"--speculative-algorithm {kind.upper()} \\\n"
        f"    --speculative-draft-model-path {quote(order.out)} \\\n"
        f"    --speculative-{kind}-block-size {order.drafts + drafter.first_slot} "
        f"--speculative-num-draft-tokens {order.drafts + 1}"
    )


def _trtllm(kind: str) -> Serve:
    """Return the function that writes TensorRT-LLM's serve command with this decoding type."""

    def serve(order: ExportRequest, drafter: Any) -> str:
        lines = [
            "speculative_config:",
            f"  decoding_type: {kind}",
            f"  max_draft_len: {order.drafts}",
        ]
        # Quoted as JSON, which YAML reads too: a path may hold a colon or a blank.
        lines.append(f"  speculative_model: {json.dumps(order.out)}")
        # The engine counts layers from 0.
        if kind == "Eagle3":
            lines.append(f"  eagle3_layers_to_capture: {[tap - 1 for tap in drafter.taps]}")
        yaml = "\n".join(lines)
        return (
            f"cat > speculative.yaml <<'END'\n{yaml}\nEND\ntrtllm-serve {quote(order.target)} "
            "--config speculative.yaml"
        )

    return serve


def _llamacpp(kind: str) -> Serve:
    """Return the function that writes llama.cpp's commands: two conversions, then the server."""

    def serve(order: ExportRequest, drafter: Any) -> str:
        needs_target = ""
        if kind != "draft-simple":
            needs_target = f" --target-model-dir {quote(order.target)}"
        # The type is named, because the converter by itself makes float16 of float32.
        outtype = GGUF_TYPES.get(order.dtype, "auto")
        return (
            f"python convert_hf_to_gguf.py {quote(order.target)} --outfile target.gguf\n"
            f"python convert_hf_to_gguf.py {quote(order.out)}{needs_target} --outtype {outtype} "
            "--outfile draft.gguf\n"
            f"llama-server -m target.gguf -md draft.gguf --spec-type {kind} --spec-draft-n-max "
            f"{order.drafts}"
        )

    return serve


def _tgi(order: ExportRequest, drafter: Any) -> str:
    return f"text-generation-launcher --model-id {quote(order.out)} --speculate {order.drafts}"


def _hf_script(order: ExportRequest, lines: str, how: str) -> str:
    """Return a shell command with a script that decodes a prompt by transformers' `generate`."""
    return (
        "python - <<'END'\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({order.target!r})\n"
        f"target = AutoModelForCausalLM.from_pretrained({order.target!r})\n"
        f"{lines}"
        'prompt = tokenizer("The capital of France is", return_tensors="pt")\n'
        f"print(tokenizer.decode(target.generate(**prompt, {how})[0]))\n"
        "END"
    )


def _hf(order: ExportRequest, drafter: Any) -> str:
    """Return the script with the drafter's own `custom_generate/generate.py`."""
    return _hf_script(order, "", f"custom_generate={order.out!r}, trust_remote_code=True")


def _hf_assisted(order: ExportRequest, drafter: Any) -> str:
    """Return the script with transformers' own assisted generation."""
    lines = (
        f"draft = AutoModelForCausalLM.from_pretrained({order.out!r})\n"
        f"draft.generation_config.num_assistant_tokens = {order.drafts}\n"
    )
    return _hf_script(order, lines, "assistant_model=draft")


TITLES = {
    "eagle1": "EAGLE-1", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark",
    "medusa": "Medusa heads",
    "draft_model": "a draft model",
}  # fmt: skip
_CHAIN = "Drafts are a chain here, so tau of a tree is not what this engine gives."
# Engines that read the very same directory, but for the obstacles that `recipe_for` looks at.
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
_READ_ONLY = "Written after the engine's source; it has not been run."
_CONVERTER = (
    "`convert_hf_to_gguf.py` is in llama.cpp's sources and reads folders: fetch a target of the "
    "hub with `hf download`."
)
_TRUST = (
    "`trust_remote_code=True` lets transformers run `custom_generate/generate.py` of this folder, "
    "which calls draftsmith and nothing else; draftsmith has to be installed."
)
_ASSISTED = (
    "`assistant_model` is transformers' own assisted generation; `custom_generate=FOLDER` decodes "
    "by draftsmith, batches too."
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
    "hf": {
        "eagle3": Recipe("native", _hf, (_TRUST,)),
        "eagle1": Recipe("native", _hf, (_TRUST,)),
        "dflash": Recipe("native", _hf, (_TRUST,)),
        "dspark": Recipe("native", _hf, (_TRUST,)),
        "medusa": Recipe("native", _hf, (_TRUST,)),
        "draft_model": Recipe("native", _hf_assisted, (_ASSISTED, _TRUST), _MODEL),
    },
}


def vllm_guess(path: str, kind: str) -> str | None:
    """Return the method that vLLM would take from the path, unless `kind` needs that one; or None.

    Where no method is given, vLLM looks for these parts of the path in lower case, in this order:
    `my-eagle-3-head` becomes EAGLE-1. vLLM looks at the whole path and this function at the last
    name only, because the folders above it are the user's; the printed commands name the method.
    """
    methods = {"eagle1": "eagle", "draft_model": "draft_model"}
    signs = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
    name = Path(path).name.lower()
    guess = None
    # The order matters: my-eagle-eagle3 holds both signs, and vLLM takes the first.
    for sign, method in signs:
        if sign in name:
            guess = method
            break
    return guess if guess not in (None, methods.get(kind, kind)) else None
