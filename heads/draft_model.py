"""Draft models: small causal language models that draft for a target with the same tokenizer.

On disk a draft model is an ordinary Hugging Face model directory, which every engine accepts.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from .errors import UserError
from .files import JsonObject
from .fingerprint import (
    ADDED_TOKENS_OPTION,
    added_ids,
    effect_of_unknown_tokens,
    output_settings,
    tokenizer_hash,
    unknown_tokens,
)
from .layout import DrafterModule, EmbeddingAndHead
from .pretrained import as_user_errors, make_causal_lm, read_causal_lm, read_tokenizer, save_model

log = logging.getLogger(__name__)

# Texts that tokenizers with the same vocabulary may still split differently.
PROBES = (
    "The quick brown fox jumps over the lazy dog, 1234567890 times.",
    "def f(x):\n    return {'a': [x ** 2, -1.5e-3]}  # \t tabs",
    " leading and trailing spaces  \n\n",
    "Zürich, Ελλάδα, 東京, עברית, 🙂👍🏽",
)


class DraftModel(DrafterModule, nn.Module):
    """Draft model with the target's tokenizer; it is trained and used without dropout."""

    method = kind = "draft_model"
    whole_model = drafts_by_level = True
    bound_to = ()
    """Empty: a target of any size fits if it has this tokenizer."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, vocab_size: int, added: Sequence[int] = ()
    ) -> None:
        """Make a drafter of a model and its tokenizer; `vocab_size` is the target's.

        `added` are the ids of the target's last tokens, which the tokenizer lacks.
        """
        super().__init__()
        self.model: Any = model.eval()
        self.tokenizer, self.vocab_size, self.added = tokenizer, vocab_size, added

    @property
    def placeholder(self) -> int:
        """Id of the known token that an added token is read as."""
        known = (self.tokenizer.unk_token_id, self.tokenizer.eos_token_id)
        return next((token for token in known if token is not None), 0)

    def save(self, directory: Path, target_name: str, dtype: torch.dtype) -> None:
        """Write the model, cast to `dtype`, and the tokenizer as Hugging Face files."""
        weights = {
            name: weight.detach().to("cpu", dtype)
            for name, weight in self.model.state_dict().items()
        }
        # `save_pretrained` needs a model of the type that is written. This one takes no memory
        # until it is given the cast weights, so that the device never holds two models.
        with torch.device("meta"):
            cast: Any = make_causal_lm(self.model.config, dtype=dtype)
        cast.load_state_dict(weights, assign=True)
        cast.tie_weights()
        cast.generation_config = self.model.generation_config
        save_model(cast, directory)
        self.tokenizer.save_pretrained(directory)

    def facts(self) -> JsonObject:
        """Return the values of its configuration that change what it computes."""
        return output_settings(self.model.config.get_text_config())

    @torch.no_grad()
    def for_export(self, vocab_size: int) -> Self:
        """Return a draft model whose embedding and head have as many rows as the target's.

        Engines compare these two numbers, not the tokenizers: of one family, some models have a
        padded embedding and some have not. Rows without a token are cut off; missing ones become
        the mean of the others, whose logit is never above the best one's. Raises `UserError` where
        the tokenizer has ids that are cut off.
        """
        known = self.model.config.get_text_config().vocab_size
        if known == vocab_size:
            return self
        last = max(self.tokenizer.get_vocab().values())
        if last >= vocab_size:
            raise UserError(
                f"the tokenizer of the draft model has ids up to {last}, and the target has rows "
                f"for {vocab_size} tokens; distil a draft model of the target's own tokenizer"
            )
        model = copy.deepcopy(self.model)
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        for tensor in (embedding.weight, head.weight, getattr(head, "bias", None)):
            if tensor is not None and vocab_size > known:
                tensor[known:] = tensor[:known].float().mean(0).to(tensor.dtype)
        same = type(self)(model, self.tokenizer, self.vocab_size)
        return same.eval().requires_grad_(False)

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype, embedding_and_head: EmbeddingAndHead | None
    ) -> Self:
        """Return the draft model in `directory`; of the target it needs tokenizer and vocabulary.

        Raises `UserError` if its weights do not fit its config, or if its tokenizer is not the
        target's.
        """
        if embedding_and_head is None:
            raise UserError(
                "a draft model needs the target's tokenizer to be checked against; load it "
                "together with its target"
            )
        with as_user_errors(directory, "draft model"):
            model, loading_info = read_causal_lm(directory, dtype=dtype, output_loading_info=True)
            tokenizer = read_tokenizer(directory)
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
        if wrong := [str(key) for kind in kinds for key in loading_info[kind]]:
            raise UserError(
                f"draft model {directory} does not fit its config: {min(wrong)} is missing or "
                "surplus"
            )
        theirs = embedding_and_head.tokenizer
        difference, added = tokenizer_difference(theirs, tokenizer), []
        if difference and tokenizer is not None:
            added = added_ids(theirs, tokenizer_hash(tokenizer)) or []
        sizes = model.config.get_text_config().vocab_size, embedding_and_head.vocab_size
        if added and not embedding_and_head.allow_added_tokens:
            raise UserError(
                f"draft model {directory} has another tokenizer than the target: "
                f"{unknown_tokens(added, *sizes)}; give {ADDED_TOKENS_OPTION} to draft without them"
            )
        if added:
            log.warning("%s", effect_of_unknown_tokens(added, *sizes))
        elif difference:
            raise UserError(
                f"draft model {directory} has another tokenizer than the target: {difference}; "
                "its token ids mean other text; use a model of the same family"
            )
        return cls(model, tokenizer, embedding_and_head.vocab_size, added)


def tokenizer_difference(target: Any, draft: Any) -> str | None:
    """Return a clause about a difference in the vocabularies or on `PROBES`, or None."""
    if target is None or draft is None:
        return "one of them has no tokenizer"
    target_ids, draft_ids = target.get_vocab(), draft.get_vocab()
    for token, number in sorted(target_ids.items(), key=lambda item: item[1]):
        if draft_ids.get(token) != number:
            draft_id = f"{draft_ids[token]}" if token in draft_ids else "missing"
            return f"token {token!r} is {number} in the target and {draft_id} in the draft model"
    if surplus := draft_ids.keys() - target_ids.keys():
        return f"the draft model has {len(surplus)} tokens more, such as {min(surplus)!r}"
    for text in PROBES:
        if target.encode(text) != draft.encode(text):
            return f"the same tokens, but {text[:24]!r} is tokenized differently"
    return None


Drafter = DraftModel
