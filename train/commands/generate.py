"""`draftsmith generate`: decode one prompt, stream it, and colour what the drafter guessed
right."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from ...heads.errors import UserError
from ...inference.api import Decoder
from ...inference.decode import Generation, Request, Round, decode
from ...inference.detokenize import StreamedText
from ...inference.evaluation.tuning.profile import TuningProfile
from ...inference.metrics import emitted_per_round, tau
from ...inference.proposer import check_spec, load_proposer
from ...inference.settings import GREEDY, Sampling
from ...inference.target import load_target
from ..options import GenerateOptions as Options

GREEN, RESET = "\x1b[32m", "\x1b[0m"


def run(options: Options) -> None:
    check_spec(options.drafter)
    try:
        text = sys.stdin.buffer.read().decode() if options.prompt == "-" else options.prompt
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8 text") from error
    if not text.strip():
        raise UserError("the prompt is empty; give --prompt some words")
    target = load_target(options.target)
    tuned = None
    if options.profile is not None:
        tuned = TuningProfile(options.profile, target).setting(
            options.drafter, options.sampling.temperature, 1
        )
    proposer = load_proposer(
        options.drafter, target, lambda m: print(f"warning: {m}", file=sys.stderr), tuned
    )
    decoder = Decoder(target, proposer)
    color = (
        options.color
        if options.color is not None
        else sys.stdout.isatty() and "NO_COLOR" not in os.environ
    )
    ids = decoder.encode(text, options.raw)
    generation = stream(decoder, ids, options.max_new_tokens, color, options.sampling, options.stop)
    rounds = len(generation.rounds)
    lossy = (
        ""
        if options.sampling.lossless
        else " (LOSSY: typical acceptance does not keep the target's distribution)"
    )
    summary = f": tau {tau([emitted_per_round(generation)]):.2f}" if rounds else ""
    why = {
        "length": f" (cut at {options.max_new_tokens})",
        "context": " (the target's positions are full)",
    }
    ended = why.get(generation.finish_reason, "")
    print(
        f"{len(generation.token_ids)} tokens{ended} in {rounds} rounds{summary}{lossy}",
        file=sys.stderr,
    )


def stream(
    decoder: Decoder,
    ids: list[int],
    max_new_tokens: int,
    color: bool,
    sampling: Sampling = GREEDY,
    stop: Sequence[str] = (),
    stdout: TextIO | None = None,
) -> Generation:
    """Write the reply as it is decoded and return it."""
    generation = Generation(ids)
    text = StreamedText(decoder.target.tokenizer, stop)
    out = stdout or sys.stdout
    eos = decoder.target.eos_ids
    for steps in decode(
        decoder.target, decoder.proposer, [Request(ids)], max_new_tokens, sampling, None, stop
    ):
        _, step, reason = steps[0]
        if step.drafted is not None:
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
    for place, token in enumerate(step.tokens):
        piece = text.add(
            [] if token in eos else [token], last=last and place == len(step.tokens) - 1
        )
        if piece:
            out.write(f"{GREEN}{piece}{RESET}" if color and place < step.accepted else piece)
    out.flush()
