"""The Python API: `load(target, drafter).generate(...)`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from transformers import PreTrainedModel

from ..heads.errors import UserError
from .conversations.formats import Conversation, RowError, conversation_of
from .conversations.rows import prompt_ids
from .decode import Generation, Request, decode, generate
from .detokenize import StreamedText
from .metrics import emitted_per_round, tau
from .proposer import Proposer, load_proposer
from .settings import Sampling, TargetConfig
from .target import Target, load_target, target_of

log = logging.getLogger(__name__)

MAX_BATCH = 64
T = TypeVar("T")


@runtime_checkable
class Array(Protocol):
    """A tensor, or an array of numpy."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | Sequence[dict[str, Any]] | Array
"""The user's words, token ids, or a conversation as a list of messages."""


@dataclass(repr=False)
class Reply(Generation):
    """A `Generation` with its text, which ends before an end token or a stop string.

    As in transformers, a stop string may begin in the prompt; the part of it that was written then
    stays in the text.
    """

    text: str = ""

    @property
    def tau(self) -> float:
        """Tokens kept per round, the target's own included; NaN if there was no round."""
        return tau([emitted_per_round(self)])

    def __repr__(self) -> str:
        return (
            f"Reply({self.text!r}, {len(self.token_ids)} tokens, {len(self.rounds)} rounds, "
            f"{self.finish_reason})"
        )


class Decoder:
    """A target and a drafter at work. One call at a time: the drafter's state belongs to the batch
    that runs."""

    def __init__(self, target: Target, proposer: Proposer) -> None:
        self.target, self.proposer = target, proposer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        samples: int = 1,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        batch_size: int = MAX_BATCH,
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> Any:
        """Decode one prompt to a `Reply`, or a list of prompts to a list of replies (`samples` for
        each, one after the other).

        Words are put into the target's chat template if it has one, unless `raw`. `sampling` is
        what `Sampling` takes: temperature, top_k, top_p, min_p, repetition_penalty, seed, rule. The
        noise of a prompt belongs to its place in the list and the number of the sample, so its text
        is the same in any batch. Raises `UserError`.
        """
        for name, value in (("samples", samples), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")
        chosen = _known(Sampling, sampling)
        if samples > 1 and chosen.greedy:
            raise UserError("samples are all the same at temperature 0; give a temperature too")
        stops = _stops(stop)
        given: Any = prompts.tolist() if isinstance(prompts, Array) else prompts
        one = _is_one(given)
        everything: Sequence[Any] = [given] if one else given
        requests = [
            Request(self.encode(prompt, raw), i, sample)
            for i, prompt in enumerate(everything)
            for sample in range(samples)
        ]
        if not requests:
            raise UserError("there is no prompt; give at least one")
        eos = frozenset() if ignore_eos else self.target.eos_ids
        replies: list[Reply] = []
        for start in range(0, len(requests), batch_size):
            part = requests[start : start + batch_size]
            for found in generate(
                self.target, self.proposer, part, max_new_tokens, chosen, eos, stops
            ):
                replies.append(Reply(**vars(found), text=self._text(found, stops)))
        return replies[0] if one and samples == 1 else replies

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 128,
        *,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        **sampling: Any,
    ) -> Iterator[str]:
        """Yield the text of one reply as it is decided, a piece a round at most."""
        stops = _stops(stop)
        text = StreamedText(self.target.tokenizer, stops)
        request = Request(self.encode(prompt, raw))
        for steps in decode(
            self.target,
            self.proposer,
            [request],
            max_new_tokens,
            _known(Sampling, sampling),
            None,
            stops,
        ):
            for _, step, reason in steps:
                tokens = [token for token in step.tokens if token not in self.target.eos_ids]
                if piece := text.add(tokens, last=reason is not None):
                    yield piece

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt."""
        given: Any = prompt.tolist() if isinstance(prompt, Array) else prompt
        if isinstance(given, bytes | Mapping) or not isinstance(given, Sequence):
            what = type(given).__name__
            raise UserError(
                "a prompt is words, token ids (of a tokenizer's output: the input_ids) or a list "
                f"of messages, not {what}"
            )
        if isinstance(given, str):
            if not given.strip():
                raise UserError("the prompt is empty; give it some words")
            chat = bool(self.target.tokenizer.chat_template) and not raw
            conversation = (
                Conversation(messages=[{"role": "user", "content": given}])
                if chat
                else Conversation(text=given)
            )
        elif given and isinstance(given[0], dict):
            try:
                conversation = conversation_of({"messages": list(given)})
            except RowError as error:
                raise UserError(f"the prompt is no conversation: {error}") from error
        elif all(isinstance(token, Integral) for token in given):
            return [int(token) for token in given]
        else:
            raise UserError(
                f"a prompt is words, token ids or a list of messages, not {type(given).__name__} "
                "of something else"
            )
        try:
            return prompt_ids(conversation, self.target.tokenizer, self.target.name)
        except RowError as error:
            raise UserError(f"a prompt cannot be encoded: {error}") from error

    def _text(self, generation: Generation, stops: Sequence[str]) -> str:
        text = StreamedText(self.target.tokenizer, stops)
        return text.add(
            [token for token in generation.token_ids if token not in self.target.eos_ids], last=True
        )


def _is_one(prompts: Any) -> bool:
    """Words, token ids and messages are one prompt; everything else is a list of prompts."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], Integral | dict)


def _known(make: Callable[..., T], settings: dict[str, Any]) -> T:
    """`make(**settings)`; `UserError` for a setting that it does not have."""
    names = [f.name for f in fields(make)]  # type: ignore[arg-type]
    for name in settings:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise UserError(f"unknown option {name!r}; {meant}")
    return make(**settings)


def _stops(stop: Any) -> list[str]:
    if isinstance(stop, str):
        return [stop]
    if not isinstance(stop, Sequence | set | frozenset):
        raise UserError(f"stop must be a text or a list of texts, not {stop!r}")
    return list(stop)


def load(
    target: str | Path | TargetConfig | Target | PreTrainedModel,
    drafter: str | Path | Proposer = "none",
    *,
    compile: bool = False,
    tokenizer: Any = None,
    **options: Any,
) -> Decoder:
    """A decoder of `target` that drafts with `drafter`.

    `target`: a folder, a name on the hub, a loaded `Target`, or a model that transformers has
    loaded, with its `tokenizer` (read from where the model came from if not given); `options` are
    those of `TargetConfig` (dtype, device, adapter, attention). `drafter`: an artifact's folder, a
    small model's folder, or none, ngram, suffix, lookahead, early-exit, with settings after a
    colon. `compile` compiles the target's forward (shapes are static then). Raises `UserError`.

    >>> decoder = load("scripts/quickstart/target", "ngram:length=6", device="cpu")
    >>> reply = decoder.generate("def add(a, b):", max_new_tokens=24)
    >>> len(reply.token_ids) <= 24 and reply.tau >= 1
    True

    The text is the target's own, whatever drafts; with a temperature too, for the noise belongs to
    the position, not to the drafter:

    >>> plain = load("scripts/quickstart/target", device="cpu")
    >>> reply.token_ids == plain.generate("def add(a, b):", max_new_tokens=24).token_ids
    True
    >>> prompts = ["def add(a, b):"] * 2
    >>> sampled = [d.generate(prompts, 24, temperature=0.7, seed=5) for d in (decoder, plain)]
    >>> [a.text for a in sampled[0]] == [b.text for b in sampled[1]]
    True
    """
    if not isinstance(target, str | Path) and options:
        raise UserError(
            f"{', '.join(options)}: a loaded target, or one with a config, takes no options"
        )
    if isinstance(target, PreTrainedModel):
        target = target_of(target, tokenizer)
    elif tokenizer is not None:
        raise UserError(
            "tokenizer goes with a model that is loaded already; a target in a folder has its own"
        )
    if not isinstance(target, str | Path | Target | TargetConfig):
        raise UserError(
            f"target must be a folder, a name on the hub, or a model, not a {type(target).__name__}"
        )
    if not isinstance(target, Target):
        config = (
            target
            if isinstance(target, TargetConfig)
            else _known(TargetConfig, {"path": str(target), **options})
        )
        target = load_target(config)
    if compile:
        target.compile()
    if drafter is None:
        raise UserError("a drafter must be named; 'none' decodes plainly")
    proposer = (
        load_proposer(drafter, target, log.warning) if isinstance(drafter, str | Path) else drafter
    )
    return Decoder(target, proposer)
