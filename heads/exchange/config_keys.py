"""Keys of public configurations: those that are used, those that change nothing, and the others.

A key that changes what a drafter computes, in a way that is not computed here, is refused by its
name: ignoring it would cost acceptance silently. An unknown key is named in a note.
Where a checkpoint's tensors decide, such as biases, experts and the number of taps, its keys are
not compared with them: every tensor has to be one of the drafter's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..errors import UserError
from ..files import JsonObject
from .foreign import Checkpoint

LAYER = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_theta", "rope_base", "rotary_emb_base", "rope_parameters", "rope_scaling",
    "partial_rotary_factor", "original_max_position_embeddings", "target_hidden_size",
    "draft_vocab_size",
}  # fmt: skip
TAPS = {"target_layer_ids", "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"}
USED = {
    "eagle1": LAYER | {"bias"},
    "eagle3": LAYER | TAPS | {
        "use_aux_hidden_state", "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm",
        "norm_output", "shared_head", "bias",
    },
    "block": LAYER | TAPS | {
        "block_size", "mask_token_id", "markov_rank", "markov_head_type", "num_target_layers",
        "sample_from_anchor", "shift_label", "dspark_bonus_anchor", "enable_confidence_head",
        "confidence_head_with_markov", "sliding_window_non_causal",
    },
}  # fmt: skip
"""Keys that the readers use, by what they read."""

HARMLESS = re.compile(
    # names, versions, types
    r"_?name_or_path|base_model\w*|target_model\w*|draft_model\w*|verifier\w*|architectures?"
    r"|\w*model_type|auto_map|\w*version\w*|torch_dtype|dtype|task|license|\w*commit\w*|git_\w+"
    r"|speculators_config|quantization_config|compression_config|_attn_\w+|attn_implementation"
    r"|tokenizer_class|tokenizer\w*path|chat_template|language|tags|library_name|has_no_defaults_\w+"
    r"|algorithm|method|spec_\w+"
    # ids of tokens, and settings of generation and of transformers' classes
    r"|(bos|eos|pad|sep|cls|unk|image|video|audio|decoder_start)_token(_id|_index|_ids)?|use_cache"
    r"|tie_\w+|torchscript|return_dict\w*|output_(attentions|hidden_states|scores|router_logits)"
    r"|is_decoder|is_encoder_decoder|add_cross_attention|cross_attention_hidden_size|pruned_heads"
    r"|chunk_size_feed_forward|finetuning_task|id2label|label2id|num_labels|problem_type|prefix"
    r"|task_specific_params|remove_invalid_values|tf_legacy_loss|use_bfloat16|max_length|min_length"
    r"|do_sample|temperature|top_[kp]|typical_p|num_beams|num_beam_groups|diversity_penalty"
    r"|length_penalty|repetition_penalty|no_repeat_ngram_size|encoder_no_repeat_ngram_size"
    r"|num_return_sequences|early_stopping|bad_words_ids|suppress_tokens|begin_suppress_tokens"
    r"|forced_\w+|exponential_decay_length_penalty|pretraining_tp|generation_config"
    # training
    r"|\w*(dropout|loss|learning_rate|initializer|gradient_checkpointing)\w*|\w*init_(std|range)"
    r"|(train|training|ttt|optim|optimizer|data|dataset|wandb)(_\w+)?|\w*_(lr|weight_decay|gamma)|lr"
    r"|seed|num_(anchors|epochs)|max_anchors|max_seq_?len(gth)?|model_max_length|scale_attn_weights"
    # hints for engines, and what the tensors or other keys decide
    r"|num_(speculative|lookahead|draft)_tokens|speculative_\w+|proposal_methods|draft_length"
    r"|default_proposal_method|num_aux_hidden_states|num_nextn_predict_layers|(max_paths|topk)"
    r"|(attention|mlp|qkv|fc|lm_head|o_proj)_bias|use_bias|bias|max_window_layers|num_target_layers"
    r"|parallel_draft_heads_num_layers|has_lm_head|has_own_(embed_tokens|lm_head)|embed_requires_grad|rope_local_base_freq|confidence_head_alpha"
    r"|\w*(quant|moe_|_moe|routed|router|topk|n_group|scoring_func|first_k_dense|_lora_)\w*"
    r"|qk_(nope|rope)_head_dim|v_head_dim|ep_size|decoder_sparse_step|mlp_only_layers|use_moe"
    # the target's vision and multi-token parts
    r"|(vision|audio|image|video|mtp)_\w+"
)

OFF = (None, False, 0, "", [], {})
"""Values that turn off what a key names."""


class Key(NamedTuple):
    """A key of a configuration, and where it stands."""

    place: str
    """Its name with those of the tables that it is in: dflash_config.causal."""
    name: str
    value: Any


class Facts(NamedTuple):
    """Facts that decide if a value changes anything."""

    kind: str
    """Name in `USED`."""
    head: bool
    """True if the logits are made by a head of the drafter's, or are added to."""
    config: JsonObject
    """All keys in one table."""
    normed: bool
    """True if there are norms of queries and keys among the tensors."""
    experts: bool
    """True if there are experts among them."""


Neutral = tuple[Any, ...] | Callable[[Any, Facts], bool]
"""Values that change nothing, or a function that is true for them."""


def _on(value: Any, _facts: Facts) -> bool:
    return value is None or bool(value)


def _full(value: Any, _facts: Facts) -> bool:
    return all(kind in ("full_attention", "dense", None) for kind in _listed(value))


def _equals(*others: str) -> Callable[[Any, Facts], bool]:
    """Return a function that is true for None, and for the value of one of the keys `others`."""

    def neutral(value: Any, facts: Facts) -> bool:
        return value is None or value in [facts.config.get(name) for name in others]

    return neutral


def _word(*words: str) -> Callable[[Any, Facts], bool]:
    """Return a function that is true for a value that turns the key off, and for any of `words`."""
    return lambda value, facts: value in OFF or re.sub(r"[-_ ]", "", str(value).lower()) in words


def _causal(value: Any, facts: Facts) -> bool:
    """Return true for what the attention is anyway: in a block all slots see each other."""
    return value is None or bool(value) == (facts.kind != "block")


def _not_causal(value: Any, facts: Facts) -> bool:
    return value is None or not _causal(value, facts)


def _rotated_share(value: Any, facts: Facts) -> bool:
    """Return true if a number is the whole of each head, or what `partial_rotary_factor` says."""
    share = facts.config.get("partial_rotary_factor") or 1
    heads = facts.config.get("num_attention_heads") or 1
    size = facts.config.get("head_dim") or (facts.config.get("hidden_size") or 0) // heads
    return value in (None, share, int(share * size))


ROTARY = "its rotary positions rotate neighbours (as is_neox_style false does)"
FACTOR = "draftsmith's drafters have no such factor but 1"
CAUSAL = ""
"""Stands for a reason that depends on the kind, see `check_keys`."""
RULES: tuple[tuple[str, Neutral, str], ...] = (
    (r"\w*(non_causal|bidirectional)\w*", _not_causal, CAUSAL),
    (r"\w*causal\w*", _causal, CAUSAL),
    (r"(\w+_)?(attention|attn|mask)_(mode|type|kind)|\w*draft_attention",
     _word("full", "bidirectional", "noncausal", "dense", "gqa", "mha", "default", "sdpa", "eager",
           "flashattention2", "flexattention", "fullattention"),
     "its attention is of another kind, such as causal or sliding"),
    (r"\w*sinks?(_\w+)?", OFF, "its attention has sinks"),
    (r"\w*(attn|attention)\w*(soft_?cap|logits?_cap)\w*", OFF, "its attention is capped"),
    (r"\w*(soft_?cap|logits?_cap)\w*", lambda v, f: v in OFF or not f.head,
     "its logits are capped"),
    (r"scale_emb(ed(ding)?s?)?|normalize_emb\w*", lambda v, f: v in (*OFF[:2], 1) and v is not True,
     "its embeddings are scaled"),
    (r"query_pre_attn_scalar", _equals("head_dim"), FACTOR),
    (r"dim_model_base", _equals("hidden_size"), FACTOR),
    (r"(?!rope_|rotary_|rms_norm)(\w+_)?(scale|scaling|scalar|scaler|multiplier)s?(_\w+)?",
     (None, False, 1), FACTOR),
    (r"(rope_|rotary_)?is_neox(_style)?", _on, ROTARY),
    (r"(rope|rotary)_(emb_)?interleaved?|(use_)?interleaved_rope|mrope_interleave", OFF, ROTARY),
    (r"rotary_(pct|percent|percentage|dim|ndims)|rope_(dim|pct)", _rotated_share,
     "it rotates another part of each head than partial_rotary_factor says"),
    (r"position(al)?_emb\w*_type|pos_emb_type", _word("rope", "rotary", "default"),
     "its positions are not rotary"),
    (r"use_(rope|rotary\w*)|rope", _on, "its positions are not rotary"),
    (r"no_?p?e?_?rope_layers?\w*|nope_\w+|no_rope_\w+",
     lambda v, f: v in OFF or (isinstance(v, list) and all(each == 1 for each in v)),
     "it has layers without positions"),
    (r"(use_)?alibi|clip_qkv|(use_)?parallel_(attn|residual|block)|\w*(attn|attention)\w*_gate"
     r"|(use_)?gated_(attention|attn)\w*|residual_post_layernorm|post_norm|use_post_norm", OFF,
     "its layers compute something else"),
    (r"parallel_draft_step", lambda v, f: v in (*OFF, 1) and v is not True, "it has further heads"),
    (r"use_mtp_layernorm", OFF, "its layers compute something else"),
    (r"use_(input_layernorm_in_first_layer|last_layernorm)|next_layer_regular", _on,
     "it has no norm where a drafter of this kind has one"),
    (r"(eagle_)?decoder_type", _word("llama", "qwen3"), "its layers are of another kind"),
    (r"\w*parallel_draft(ing)?(_(?!heads)\w+)?|pard\w*|ptd_\w+|p_?eagle\w*", OFF,
     "it drafts all tokens at once"),
    (r"\w*mask_emb\w*|mask_hidden", OFF, "it has an embedding of its own for slots to be drafted"),
    (r"projector_type|(selector|conv|gru)_\w+|pure_draft_prefix_len",
     _word("none", "dflash", "dspark"), "it is another method than DFlash and DSpark"),
    (r"(use_)?qk_(layer_?)?norm", lambda v, f: v is None or bool(v) == f.normed,
     "its tensors say otherwise (q_norm, k_norm)"),
    (r"norm(alization)?_(type|class)|layer_?norm_type", _word("rms", "rmsnorm"),
     "its norms are not RMS norms"),
    (r"(layer_)?norm_eps(ilon)?", _equals("rms_norm_eps"), "rms_norm_eps says otherwise"),
    (r"hidden_activation|activation(_function|_type)?|act(_fn)?|mlp_act\w*",
     lambda v, f: _word("silu", "swish", "swiglu")(v, f) or v == f.config.get("hidden_act"),
     "hidden_act, or silu where it is not given, is computed"),
    (r"(mlp|ffn)_(type|kind|class)|mlp_layer_types",
     lambda v, f: _full(v, f) or _word("mlp", "swiglu", "gated", "default", "llama", "silu")(v, f),
     "its layers compute something else"),
    (r"(num|n)_(\w+_)?experts?(_\w+)?", lambda v, f: v in OFF or not f.experts,
     "its layers have experts"),
    (r"truncated_vocab_size", _equals("vocab_size", "draft_vocab_size"),
     "it drafts a part of the vocabulary"),
)  # fmt: skip
"""Forms of keys, which of their values change nothing, and what the others mean."""
PATTERNS = [(re.compile(form), neutral, reason) for form, neutral, reason in RULES]

WINDOW = re.compile(
    r"layer_types|(?!rope_|max_window|sliding_window_non_causal)(\w+_)?(windows?|swa|sliding"
    r"|local_attention)(_\w+)?|attention_chunk_size|chunked_attention\w*"
)
"""Keys about layers that see a part of the text only."""


def check_keys(found: Checkpoint, kind: str, head: bool, *tables: str) -> None:
    """Refuse keys that change the drafter, and note those that are not read, each once.

    `kind` is the name in `USED`. `head` is true if the drafter's logits are not those of the
    target's head alone. `tables` are the names of tables within the configuration whose keys count
    too. Raises `UserError`, which names the key.
    """
    keys = list(keys_of(found, tables))
    config = {key.name: key.value for key in reversed(keys)}
    names = " ".join(found.tensors)
    facts = Facts(kind, head, config, "q_norm" in names, "experts." in names)
    check_windows(found, keys)
    unread = []
    for key in keys:
        name = key.name.lower()
        if name in USED[kind] or HARMLESS.fullmatch(name) or WINDOW.fullmatch(name):
            continue
        rules = (rule[1:] for rule in PATTERNS if rule[0].fullmatch(name))
        neutral, reason = next(rules, (None, ""))
        if neutral is None:
            unread += [] if key.value is None else [key.place]
        elif not (neutral(key.value, facts) if callable(neutral) else key.value in neutral):
            slots = "its blocks are causal: a slot does not see those after it"
            refuse(
                found, [key], reason or (slots if kind == "block" else "its layers are not causal")
            )
    if unread and not found.answers.ours:
        found.notes.append(
            "keys of config.json that are not known here change nothing (not read: "
            f"{', '.join(unread)})"
        )


def keys_of(found: Checkpoint, tables: tuple[str, ...]) -> Iterator[Key]:
    """Yield the keys of a configuration as stored, then those of its tables `tables`."""
    config = found.original
    for name, value in config.items():
        if name not in tables:
            yield Key(as_text(name), name, value)
    for table in tables:
        inner = config.get(table) or {}
        if not isinstance(inner, dict):
            raise UserError(
                f"{found.path} has an invalid field: {table} is {as_text(inner)}, not a table"
            )
        for name, value in inner.items():
            yield Key(f"{table}.{as_text(name)}", name, value)


def check_windows(found: Checkpoint, keys: list[Key]) -> None:
    """Raise `UserError` where layers attend to a window, or may do so for some engine.

    A size alone is a window, as in Mistral's configurations, unless a switch turns it off, as
    Qwen's do, or `layer_types` says that all layers attend to everything.
    """
    about = [key for key in keys if WINDOW.fullmatch(key.name.lower())]
    types = [key for key in about if key.name == "layer_types" and key.value not in OFF]
    switches = [key for key in about if key.name.startswith("use_")]
    others = [key for key in about if key not in (*types, *switches)]
    kinds = [key for key in types if set(_listed(key.value)) != {"full_attention"}]
    on = [key for key in switches if key.value not in OFF]
    sizes = [key for key in others if key.value not in (*OFF, -1)]
    off = bool(types) or any(key.value is False for key in switches)
    if kinds or on or (sizes and not off):
        reason = "it has layers with sliding attention, which see a window of the text"
        refuse(found, [*kinds, *on, *sizes], reason)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def refuse(found: Checkpoint, keys: list[Key], reason: str) -> None:
    """Raise `UserError` for keys that change what the drafter computes."""
    said = ", ".join(f"{key.place} {as_text(key.value)}" for key in keys)
    key = "the key" if len(keys) == 1 else "these keys"
    raise UserError(
        f"{found.path} says {said}, which is not supported: {reason}; remove {key} if the "
        "drafter was trained without"
    )


def as_text(value: Any) -> str:
    """Return a value as JSON, but a plain text without quotes, in at most 60 characters."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."


def merge_tables(
    found: Checkpoint, tables: tuple[str, ...], apart: tuple[str, ...] = ()
) -> JsonObject:
    """Return the keys of a configuration and of its tables `tables` as one table.

    Keys without a value are left out. Raises `UserError` for a key with different values in two
    places, of which engines read one or the other. Those of `apart`, and those that change nothing,
    may differ: the outer one is taken.
    """
    whole: dict[str, Key] = {}
    for key in keys_of(found, tables):
        if key.value is None:
            continue
        first = whole.setdefault(key.name, key)
        used = any(key.name in names for names in USED.values())
        passed_over = key.name in apart or (HARMLESS.fullmatch(key.name) and not used)
        if first.value != key.value and not passed_over:
            raise UserError(
                f"{found.path} says {first.place} {first.value} and {key.place} {key.value}; "
                "engines read either, so remove the wrong one"
            )
    return {name: key.value for name, key in whole.items()}
