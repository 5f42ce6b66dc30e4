"""Settings of a generation_config that change the text of transformers' `generate`, and that
decoding here does not apply."""

from __future__ import annotations

from typing import Any

from ..settings import Sampling

APPLIED = {"eos_token_id", "repetition_penalty"}
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Settings of sampling, which are given with every command, see `other_sampling`."""

WITHOUT_EFFECT = {
    # lengths: every command has one of its own
    *("max_length", "max_new_tokens"),
    # of beams and groups of them, which `num_beams` and `num_beam_groups` ask for
    *("early_stopping", "length_penalty", "diversity_penalty"),
    # how a token is computed
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory"),
    *("prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    # drafts, which do not change the text
    *("use_mtp", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind"),
    *("assistant_ensemble_weight", "target_lookbehind", "speculation_type"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    # what is returned next to the text, and how often
    *("num_return_sequences", "return_dict_in_generate", "output_attentions"),
    *("output_hidden_states", "output_scores", "output_logits"),
    # scores that are finite, of which only the order or the softmax is taken
    *("remove_invalid_values", "renormalize_logits"),
    # tokens outside of the text, and of models with an encoder
    *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
    "transformers_version",
}
"""Settings that change no reply. A setting that is in no list here changes it: what a later version
of transformers adds is named, not passed over."""

OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "guidance_scale"), (1,)),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("penalty_alpha", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("token_healing", "dola_layers"), (False,)),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids"), ([],)),
    **dict.fromkeys(("stop_strings", "force_words_ids", "constraints"), ([],)),
}
"""Values by which a setting changes nothing, besides the default of its class."""


def not_applied(config: Any) -> dict[str, Any]:
    """Return the settings of a `GenerationConfig` that change the text of `generate`, and not ours.

    Keys that the class does not have are left out: `generate` does not read them.
    """
    found = {}
    for name, default in vars(type(config)()).items():
        if name[0] == "_" or name in APPLIED or name in SAMPLING or name == "do_sample":
            continue
        value = getattr(config, name, default)
        if name not in WITHOUT_EFFECT and value not in (None, default, *OFF.get(name, ())):
            found[name] = value
    return found


def other_sampling(config: Any, sampling: Sampling) -> str:
    """Return a line on the sampling that a `GenerationConfig` asks for, "" if it is `sampling`.

    Model makers recommend it there, and servers take it where a request names none.
    """
    own = {name: getattr(config, name, None) for name in SAMPLING}
    different = [
        f"{name}={value}"
        for name, value in own.items()
        if value is not None and value != getattr(sampling, name)
    ]
    # Without `do_sample` transformers is greedy, and the others are left from its defaults.
    if not different or not getattr(config, "do_sample", False):
        return ""
    ours = ", ".join(f"{name}={getattr(sampling, name):g}" for name in SAMPLING)
    return (
        f"generation_config.json recommends sampling with {', '.join(different)}, which servers "
        f"take by default; here {ours} are taken unless others are given"
    )
