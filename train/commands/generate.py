"""`draftsmith generate`: decodes one prompt, streams the reply, and colours the accepted drafts."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from ...heads.errors import UserError
from ...inference.api import Decoder
from ...inference.console import warn
from ...inference.decode import Generation, Request, Round, decode
from ...inference.detokenize import StreamedText
from ...inference.drafters import check_spec, load_proposer
from ...inference.evaluation.tuning.profile import TuningProfile
from ...inference.metrics import emitted_per_round, tau, time_per_token
from ...inference.proposers.plain import PlainDecoding
from ...inference.settings import GREEDY, Sampling
from ...inference.targets.target import load_for_decoding
from ..options import GenerateOptions as Options

GREEN, RESET = "\x1b[32m", "\x1b[0m"


def run(options: Options) -> None:
    """Decode the prompt, stream the reply, and print a line about tau on stderr.

    Raises `UserError` for an empty prompt, and for one that is not UTF-8 text.
    """
    check_spec(options.drafter)
    try:
        text = sys.stdin.buffer.read().decode() if options.prompt == "-" else options.prompt
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8 text") from error
    if not text.strip():
        raise UserError("the prompt is empty; give --prompt some words")
    target = load_for_decoding(options.target)
    tuned = None
    if options.profile is not None:
        tuned = TuningProfile(options.profile, target).setting(
            options.drafter, options.sampling.temperature, batch=1
        )
    proposer = load_proposer(options.drafter, target, warn, tuned, choose=True)
    decoder = Decoder(target, proposer)
    color = options.color
    if color is None:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    ids = decoder.encode(text, options.raw)
    generation = stream(decoder, ids, options.max_new_tokens, color, options.sampling, options.stop)
    rounds = len(generation.rounds)
    lossy = ""
    if not options.sampling.lossless:
        lossy = " (LOSSY: typical acceptance does not keep the target's distribution)"
    summary = f": tau {tau([emitted_per_round(generation)]):.2f}" if rounds else ""
    seconds = time_per_token(generation)
    speed = f", {1 / seconds:,.0f} tokens/s" if seconds else ""
    endings = {
        "length": f" (cut at {options.max_new_tokens})",
        "context": " (the target's positions are full)",
    }
    ended = endings.get(generation.finish_reason, "")
    print(
        f"{len(generation.token_ids)} tokens{ended} in {rounds} rounds{summary}{speed}{lossy}",
        file=sys.stderr,
    )
    if color and any(step.accepted for step in generation.rounds):
        print(f"{GREEN}green{RESET}: accepted drafts; the rest the target wrote", file=sys.stderr)
    if options.compare:
        compare(decoder, ids, options, generation)


def compare(decoder: Decoder, ids: list[int], options: Options, drafted: Generation) -> None:
    """Decode the same prompt plainly, and print its speed and whether the text is the same."""
    plainly = Decoder(decoder.target, PlainDecoding())
    plain = stream(
        plainly, ids, options.max_new_tokens, False, options.sampling, options.stop, io.StringIO()
    )
    seconds, drafted_seconds = time_per_token(plain), time_per_token(drafted)
    gain = f", {seconds / drafted_seconds:.2f}x with drafts" if seconds and drafted_seconds else ""
    speed = f"{1 / seconds:,.0f} tokens/s" if seconds else "no round"
    same = "the same text" if plain.token_ids == drafted.token_ids else "another text"
    print(f"plain decoding: {speed}{gain}; {same}", file=sys.stderr)


def stream(
    decoder: Decoder,
    ids: list[int],
    max_new_tokens: int,
    color: bool,
    sampling: Sampling = GREEDY,
    stop: Sequence[str] = (),
    stdout: TextIO | None = None,
) -> Generation:
    """Write the reply to `stdout` (the standard output if None) as it is decoded, and return it.

    With `color`, accepted drafts are green.
    """
    generation = Generation(ids)
    text = StreamedText(decoder.target.tokenizer, stop)
    out = stdout or sys.stdout
    eos = decoder.target.eos_ids
    started = time.perf_counter()
    for steps in decode(
        decoder.target, decoder.proposer, [Request(ids)], max_new_tokens, sampling, None, stop
    ):
        _, step, reason = steps[0]
        now = time.perf_counter() - started
        if step.drafted is None:
            generation.ttft_s = now
        generation.decode_s = now - generation.ttft_s
        if step.drafted is not None:  # None: the step after the prefill, which is no round
            generation.rounds.append(step)
        generation.token_ids.extend(step.tokens)
        generation.finish_reason = reason or ""
        _write(text, step, eos, reason is not None, color, out)
    out.write("\n")
    out.flush()
    return generation


def _write(
    text: StreamedText, step: Round, eos: frozenset[int], last: bool, color: bool, out: TextIO
) -> None:
    """Write the tokens of a step, as far as they are whole characters; `last`: nothing follows."""
    for index, token in enumerate(step.tokens):
        # End tokens are not text. The last token lets go of characters that `text` held back.
        ends = last and index == len(step.tokens) - 1
        piece = text.add([] if token in eos else [token], last=ends)
        if piece:
            # The accepted drafts come first; the token after them is the target's own.
            out.write(f"{GREEN}{piece}{RESET}" if color and index < step.accepted else piece)
    out.flush()
