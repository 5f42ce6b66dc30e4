"""The Python API: `load(target, drafter).generate(...)`."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from numbers import Integral
from os import PathLike, fspath
from typing import Any, Generic, Literal, Protocol, TypeVar, overload, runtime_checkable

from transformers import PreTrainedModel

from ..heads.errors import UserError
from ..heads.exchange.hub import Drafter
from ..heads.files import JsonObject
from .base.detokenize import StreamedText, special_ids
from .base.settings import OTHER_NAMES, Sampling, TargetConfig
from .conversations.formats import Conversation, conversation_of
from .conversations.messages import RowError, check_text
from .conversations.rendering import prompt_ids
from .conversations.templates import check_template_kwargs
from .decode import Generation, Request, Round, decode, generate
from .metrics import conditional, emitted_per_round, survival, tau, time_per_token
from .profile import tuned_setting
from .proposers.contract import Proposer
from .proposers.custom_drafters import checked_proposer
from .proposers.registry import check_spec, load_proposer
from .targets.target import Target, load_for_decoding, prepare_to_compile, target_of

log = logging.getLogger(__name__)

MAX_BATCH = 64
T = TypeVar("T")
Piece = TypeVar("Piece")


@runtime_checkable
class ArrayLike(Protocol):
    """Tensor, or array of numpy."""

    def tolist(self) -> Any: ...


OnePrompt = str | Sequence[int] | Sequence[dict[str, Any]]
Prompt = OnePrompt | ArrayLike
"""Prompt: the user's words, token ids, or a conversation as a list of messages."""


@dataclass(repr=False)
class Reply(Generation):
    """Generation with its text, which ends before an end token or a stop string.

    Special tokens are left out. As in transformers, a stop string may begin in the prompt; its end,
    which belongs to the reply, then stays in the text.
    """

    text: str = ""

    @property
    def tau(self) -> float:
        """Tokens emitted per round, bonus token included; NaN if there was no round."""
        return tau([emitted_per_round(self)])

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the rounds over the seconds from first to last token; NaN without rounds."""
        seconds = time_per_token(self)
        return 1 / seconds if seconds else math.nan

    @property
    def acceptance(self) -> list[float]:
        """Acceptance of each draft position, given that those before it were accepted."""
        accepted = [round_.accepted for round_ in self.rounds]
        return conditional(survival(accepted, max(accepted, default=0)))

    def to_dict(self) -> dict[str, Any]:
        """Return the reply as JSON can hold it, each round with its drafts and tokens."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "tau": none_for_nan(self.tau),
            "acceptance": self.acceptance,
            "tokens_per_second": none_for_nan(self.tokens_per_second),
            "ttft_s": self.ttft_s,
            "decode_s": self.decode_s,
            "rounds": [
                {"drafted": one.drafted, "accepted": one.accepted, "tokens": list(one.tokens)}
                for one in self.rounds
            ],
        }

    def __repr__(self) -> str:
        return (
            f"Reply({self.text!r}, {len(self.token_ids)} tokens, {len(self.rounds)} rounds, "
            f"{self.finish_reason})"
        )


class Transcript:
    """Reply that is being decoded, with its final text so far."""

    def __init__(
        self, reply: Reply, tokenizer: Any, stops: Sequence[str], hidden: Collection[int]
    ) -> None:
        """Begin a reply, whose times count from now. Its text omits the tokens in `hidden`."""
        self.reply = reply
        self._text, self._hidden = StreamedText(tokenizer, stops), hidden
        self._started = time.perf_counter()

    def add(self, step: Round, reason: str | None) -> str:
        """Add a step of `decode`; return the text that has become final with it."""
        self.reply.take(step, reason, time.perf_counter() - self._started)
        return self._write(step.tokens, reason)

    def pieces(self, step: Round, reason: str | None) -> list[tuple[str, bool]]:
        """Add a step of `decode`; return its text token by token, each with True if drafted.

        Tokens that make no text final are left out.
        """
        self.reply.take(step, reason, time.perf_counter() - self._started)
        pieces, last = [], len(step.tokens) - 1
        for place, token in enumerate(step.tokens):
            if text := self._write([token], reason if place == last else None):
                pieces.append((text, place < step.accepted))
        return pieces

    def _write(self, tokens: Sequence[int], reason: str | None) -> str:
        """Return the text that has become final with `tokens`; `reason` is that of the reply's end.

        The token that ended a reply is never text, even if no token is hidden.
        """
        tokens = tokens[:-1] if reason == "eos" else tokens
        written = [token for token in tokens if token not in self._hidden]
        text = self._text.add(written, last=reason is not None, stopped=reason == "stop")
        self.reply.text += text
        return text


class Stream(Generic[Piece]):
    """Iterator over the text of replies as it is decided; see `Decoder.stream`.

    `close` ends it early, after which the drafter can begin another batch.
    """

    def __init__(self, pieces: Generator[Piece, None, None], replies: list[Reply]) -> None:
        self._pieces, self.replies = pieces, replies
        """Replies so far, in the order of the prompts."""

    @property
    def reply(self) -> Reply:
        """The reply to the only prompt so far, or to the first one."""
        return self.replies[0]

    def __iter__(self) -> Stream[Piece]:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """Stop decoding."""
        self._pieces.close()


def none_for_nan(value: float) -> float | None:
    """Return a number, but None for NaN, which JSON lacks."""
    return None if math.isnan(value) else value


class Decoder:
    """Target and drafter. It decodes one call at a time: the drafter holds the batch's state."""

    def __init__(self, target: Target, proposer: Proposer) -> None:
        self.target, self.proposer = target, proposer

    def __repr__(self) -> str:
        return f"Decoder({self.target.name!r}, drafts with {self.proposer.name})"

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Tokens that are left out of texts: end tokens, and the tokenizer's special tokens."""
        return self.target.eos_ids | special_ids(self.target.tokenizer)

    @overload
    def generate(
        self,
        prompts: OnePrompt,
        max_new_tokens: int = 128,
        *,
        samples: Literal[1] = 1,
        **options: Any,
    ) -> Reply: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt] | ArrayLike,
        max_new_tokens: int = 128,
        *,
        samples: int = 1,
        **options: Any,
    ) -> list[Reply]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        max_new_tokens: int = 128,
        *,
        samples: int = 1,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        chat_template_kwargs: JsonObject | None = None,
        batch_size: int = MAX_BATCH,
        ignore_eos: bool = False,
        **sampling: Any,
    ) -> Reply | list[Reply]:
        """Decode one prompt to a `Reply`, or a list of prompts to a list of replies.

        With `samples` above 1 the result is a list: the samples of the first prompt, then those of
        the second. Words are put into the target's chat template if it has one, unless `raw`;
        `chat_template_kwargs` are its variables, such as enable_thinking. `stop` are stop strings;
        with `ignore_eos` a reply continues after an end token. `sampling` is what `Sampling` takes:
        temperature, top_k, top_p, min_p, repetition_penalty, seed, rule. The noise of a reply
        belongs to the seed, the prompt's index and the number of the sample, so the text does not
        depend on `batch_size`. The seed is 0 if none is given, so that a second call with the same
        prompts samples the same texts again: give `seed` for others, or `samples` for several.
        Raises `UserError`.
        """
        for name, value in (("samples", samples), ("batch_size", batch_size)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")
        settings, stops = _known(Sampling, sampling, self.generate), _stops(stop)
        if samples > 1 and settings.greedy:
            raise UserError("all samples are equal at temperature 0; give a temperature too")
        requests, single = self._requests(prompts, raw, chat_template_kwargs, samples)
        eos = frozenset() if ignore_eos else self.target.eos_ids
        generations: list[Generation] = []
        for start in range(0, len(requests), batch_size):
            batch = requests[start : start + batch_size]
            generations += generate(
                self.target, self.proposer, batch, max_new_tokens, settings, eos, stops
            )
        replies = [Reply(**vars(one), text=self._text(one, stops)) for one in generations]
        return replies[0] if single and samples == 1 else replies

    @overload
    def stream(
        self, prompts: OnePrompt, max_new_tokens: int = 128, **options: Any
    ) -> Stream[str]: ...

    @overload
    def stream(
        self, prompts: Sequence[Prompt] | ArrayLike, max_new_tokens: int = 128, **options: Any
    ) -> Stream[tuple[int, str]]: ...

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        chat_template_kwargs: JsonObject | None = None,
        **sampling: Any,
    ) -> Stream[Any]:
        """Return an iterator over the text of one reply, or of a batch, as it is decided.

        Of one prompt it yields pieces of text, at most one in each round; of a list of prompts,
        which are decoded together, pairs of a prompt's index and a piece. Its `reply`, or
        `replies`, is complete at the end. Arguments as in `generate`. Raises `UserError`.

        >>> decoder = load("scripts/quickstart/target", "ngram", device="cpu")
        >>> stream = decoder.stream("def add(a, b):", max_new_tokens=16)
        >>> "".join(stream) == stream.reply.text
        True
        """
        settings, stops = _known(Sampling, sampling, self.stream), _stops(stop)
        requests, single = self._requests(prompts, raw, chat_template_kwargs)
        transcripts = [self.transcript(request, stops) for request in requests]
        steps = decode(self.target, self.proposer, requests, max_new_tokens, settings, None, stops)

        def pieces() -> Generator[Any, None, None]:
            with closing(steps):
                for index, step, reason in chain.from_iterable(steps):
                    if piece := transcripts[index].add(step, reason):
                        yield piece if single else (index, piece)

        return Stream(pieces(), [transcript.reply for transcript in transcripts])

    def _requests(
        self, prompts: Any, raw: bool, template_kwargs: JsonObject | None, samples: int = 1
    ) -> tuple[list[Request], bool]:
        """Return the requests for prompts, and True for a single prompt. Raises `UserError`."""
        given: Any = prompts.tolist() if isinstance(prompts, ArrayLike) else prompts
        single = _is_one(given)
        requests = []
        for i, prompt in enumerate([given] if single else given):
            ids = self.encode(prompt, raw, template_kwargs)
            requests += [Request(ids, i, sample) for sample in range(samples)]
        if not requests:
            raise UserError("the list of prompts is empty; give at least one")
        return requests, single

    def encode(
        self, prompt: Prompt, raw: bool = False, template_kwargs: JsonObject | None = None
    ) -> list[int]:
        """Return a prompt's token ids; `raw` words get no chat template.

        `template_kwargs` are variables of the chat template. Raises `UserError`.
        """
        given: Any = prompt.tolist() if isinstance(prompt, ArrayLike) else prompt
        several = isinstance(given, Sequence) and not isinstance(given, bytes)
        if isinstance(given, str):
            if not given.strip():
                raise UserError("the prompt is empty; give it some words")
            conversation = Conversation(text=given)
            if self.target.tokenizer.chat_template and not raw:
                conversation = Conversation(messages=[{"role": "user", "content": given}])
        elif several and all(isinstance(token, Integral) for token in given):
            return [int(token) for token in given]
        elif several and isinstance(given[0], dict):
            try:
                conversation = conversation_of({"messages": list(given)})
            except RowError as error:
                raise UserError(f"the prompt is not a valid conversation: {error}") from error
        else:
            raise UserError(
                "a prompt is words, token ids (of a tokenizer's output: the input_ids, without "
                f"padding) or a list of messages, not {type(given).__name__}"
            )
        try:
            check_text(given)
            check_template_kwargs(template_kwargs or {})
            conversation = conversation.with_arguments(template_kwargs or {})
            return prompt_ids(conversation, self.target.tokenizer, self.target.name)
        except RowError as error:
            raise UserError(f"a prompt cannot be encoded: {error}") from error

    def transcript(self, request: Request, stops: Sequence[str]) -> Transcript:
        """Return the empty transcript of a request, which ends at the stop strings `stops`."""
        reply = Reply(list(request.prompt_ids))
        return Transcript(reply, self.target.tokenizer, stops, self.hidden)

    def _text(self, generation: Generation, stops: Sequence[str]) -> str:
        """Return the text of a reply, without special tokens and cut at a stop string."""
        text = StreamedText(self.target.tokenizer, stops)
        tokens = [token for token in generation.token_ids if token not in self.hidden]
        return text.add(tokens, last=True, stopped=generation.finish_reason == "stop")


def _is_one(prompts: Any) -> bool:
    """Return True for words, token ids and messages, False for a list of prompts."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
        return True
    return len(prompts) > 0 and isinstance(prompts[0], Integral | dict)


def _known(make: Callable[..., T], settings: dict[str, Any], called: Callable[..., Any]) -> T:
    """Return `make(**settings)`. Raises `UserError` for a setting that the dataclass lacks.

    `called` is the function that took the settings, whose parameters are suggested too.
    """
    names = [f.name for f in fields(make)]  # type: ignore[arg-type]
    parameters = [
        one.name
        for one in inspect.signature(called).parameters.values()
        if one.kind is not one.VAR_KEYWORD
    ]
    for name in settings:
        if name not in names:
            near = [one for one in OTHER_NAMES.get(name, "").split() if one in names + parameters]
            near += difflib.get_close_matches(name, [*names, *parameters], 1)
            meant = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise UserError(f"unknown option {name!r}; {meant}")
    return make(**settings)


def _stops(stop: Any) -> list[str]:
    """Return the stop strings as a list. Raises `UserError`; `decode` checks the strings."""
    if isinstance(stop, str):
        return [stop]
    if not isinstance(stop, Sequence | set | frozenset):
        raise UserError(f"stop must be a text or a list of texts, not {stop!r}")
    return list(stop)


def load(
    target: str | PathLike[str] | TargetConfig | Target | PreTrainedModel,
    drafter: str | PathLike[str] | Drafter | Proposer = "none",
    *,
    profile: str | PathLike[str] | None = None,
    temperature: float = 0.0,
    batch_size: int = 1,
    compile: bool = False,
    tokenizer: Any = None,
    **options: Any,
) -> Decoder:
    """Return a decoder of `target` that drafts with `drafter`.

    `target` is a model's folder or its name on the hub, a `TargetConfig`, a loaded `Target`, or a
    model that transformers has loaded, with its `tokenizer` (else it is read from where the model
    came from). `drafter` is a drafter's folder, a draft model's folder, a `draftsmith.Drafter`, a
    `draftsmith.Proposer`, or none (plain decoding) or ngram; settings follow a colon, such as
    `"ngram:length=8"`.

    With the `profile` (a file that draftsmith tune wrote) the drafter has the settings that were
    best for this `temperature` (0 is greedy) and `batch_size` (prompts decoded together). They
    choose the profile's row only: `Decoder.generate` takes a temperature itself. `compile` compiles
    the rounds, which takes a minute or two at first.

    `options` are for a target by its path or name, and are the fields of `TargetConfig`:

    - `dtype: str`: type of the target's weights: auto (as stored, but float32 on a CPU), float32,
      bfloat16 or float16.
    - `device: str`: auto (cuda if there is one), cpu, cuda or cuda:N.
    - `adapter: str`: folder of a LoRA adapter, which is merged into the weights.
    - `attention: str`: attention implementation of transformers.
    - `trust_remote_code: bool`: run code that comes with the model.

    Raises `UserError`.

    >>> decoder = load("scripts/quickstart/target", "ngram:length=6", device="cpu")
    >>> reply = decoder.generate("def add(a, b):", max_new_tokens=24)
    >>> len(reply.token_ids) <= 24 and reply.tau >= 1
    True

    The text is the target's own for any drafter, also at a temperature above 0, since the noise
    belongs to the position and not to the drafter:

    >>> plain = load("scripts/quickstart/target", device="cpu")
    >>> reply.token_ids == plain.generate("def add(a, b):", max_new_tokens=24).token_ids
    True
    >>> prompts = ["def add(a, b):"] * 2
    >>> sampled = [d.generate(prompts, 24, temperature=0.7, seed=5) for d in (decoder, plain)]
    >>> [a.text for a in sampled[0]] == [b.text for b in sampled[1]]
    True
    """
    named = str(drafter.folder) if isinstance(drafter, Drafter) else drafter
    if isinstance(named, PathLike):
        named = fspath(named)
    if isinstance(named, str):
        check_spec(named)
    elif named is None or isinstance(named, list | tuple | dict):
        raise UserError("one drafter must be named; 'none' decodes plainly")
    elif not isinstance(named, Proposer):
        raise UserError(
            f"drafter is a folder, a name or a draftsmith.Proposer, not {type(named).__name__}"
        )
    elif profile is not None:
        raise UserError("a profile goes with a drafter by its name or folder, not with a proposer")
    loaded = _loaded(target, tokenizer, options)
    if compile:
        prepare_to_compile(loaded.device)
        loaded.static = True
    if isinstance(named, str):
        path = None if profile is None else fspath(profile)
        tuned = tuned_setting(path, named, loaded, temperature, batch_size)
        named = load_proposer(named, loaded, log.warning, tuned, choose=True)
    return Decoder(loaded, checked_proposer(named, loaded))


def _loaded(target: Any, tokenizer: Any, options: dict[str, Any]) -> Target:
    """Return the target that was given to `load`. Raises `UserError`."""
    if isinstance(target, str | PathLike):
        target = _known(TargetConfig, {"path": fspath(target), **options}, load)
    elif options:
        raise UserError(
            f"{', '.join(options)}: a loaded target, or one with a config, takes no options"
        )
    if isinstance(target, PreTrainedModel):
        return target_of(target, tokenizer)
    if tokenizer is not None:
        raise UserError(
            "tokenizer goes with a model that is loaded already; a target in a folder has its own"
        )
    if isinstance(target, TargetConfig):
        return load_for_decoding(target)
    if not isinstance(target, Target):
        raise UserError(
            f"target must be a folder, a name on the hub, or a model, not a {type(target).__name__}"
        )
    return target
