"""Texts written during training: by the draft model itself, or decoded with the current drafter.

A share of the packed rows comes from them. Which rows and which prompts these are is a function of
the seed and of the row's number in the stream. The texts themselves are saved with every
checkpoint, since the weights that wrote them no longer exist at a resume.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.numpy import load_file, save_file

from ...heads.artifact import Artifact
from ...heads.errors import UserError
from ...inference.console import Progress
from ...inference.decode import Generation, Request, generate
from ...inference.drafters import proposer_of
from ...inference.proposer import Proposer
from ...inference.proposers.plain import PlainDecoding
from ...inference.targets.causal_model import CausalModel
from ...inference.targets.target import Target
from ..config import Errors, Rollouts
from .batches import ANY, Batches, pack_rows
from .tables import TokenTable

Document = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids, loss mask and rounds of a text, `[S]` each; see `Batch`."""
Writer = Callable[[Sequence[Request], int], list[Document]]
"""Function from prompts and a seed to one document for each prompt."""


class Written:
    """One kind of texts written during training, as a part of the stream of packed rows."""

    def __init__(
        self,
        name: str,
        config: Rollouts,
        write: Writer,
        batches: Batches,
        accelerator: Accelerator,
        total: int,
        together: bool = False,
    ) -> None:
        """`write` makes the texts of `config`; `total` are the steps of the run.

        `together`: every rank writes all the texts, since none can call the target alone. Raises
        `UserError` if no prompt of the data leaves room for a reply.
        """
        self._together = together
        self.name, self.config, self._write, self._accelerator = name, config, write, accelerator
        self._prompts = prompts_of(batches.table, batches.max_length)
        if not len(self._prompts):
            raise UserError(
                f"{name}.share needs prompts of at most half of data.max_length; the sources hold "
                "none"
            )
        # `hash` of a text differs from process to process, and ranks need the same number.
        self._batches, self._seed = batches, [batches.seed, zlib.crc32(name.encode())]
        self._first_step = round(config.begin * total)
        self.first_row = self._first_step * batches.rows_per_step
        self._documents: list[Document] = []
        self._packs: list[list[int]] = []

    def before_step(self, step: int) -> None:
        """Write new texts if they are due before `step`; all ranks call this.

        The ranks share the prompts, and afterwards each has all texts.
        """
        since = step - self._first_step
        if since < 0 or since % self.config.every:
            return
        number = since // self.config.every
        # Seeded by the run, the kind of text and the writing's number: the same on every rank.
        random = np.random.default_rng([*self._seed, number])
        chosen = self._prompts[random.permutation(len(self._prompts))[: self.config.prompts]]
        ranks, rank = self._accelerator.num_processes, self._accelerator.process_index
        requests = []
        for place, (document, start) in enumerate(chosen.tolist()):
            ids, _ = self._batches.table.document(document)
            requests.append(Request(ids[:start].tolist(), place))
        share = requests if self._together else requests[rank::ranks]
        # One seed for all ranks: the noise of a text follows from the seed and the request's id, so
        # it does not matter which rank writes the text.
        documents = self._write(share, int(random.integers(1 << 31)))
        places = [request.id for request in share]
        texts: list[Any] = list(zip(places, documents, strict=True))
        if not self._together:
            texts = gather_object(texts)
        # In the order of the prompts, so that the rows are the same on any number of ranks.
        texts.sort(key=lambda pair: pair[0])
        # A prompt takes at most half of a packed row, but the reply may be longer than the rest.
        longest = self._batches.max_length
        documents = []
        for _, (ids, mask, rounds) in texts:
            documents.append((ids[:longest], mask[:longest], rounds[:longest]))
        self._take(documents)

    def _take(self, documents: list[Document]) -> None:
        self._documents = documents
        self._packs = pack_rows([len(ids) for ids, *_ in documents], self._batches.max_length)

    def row(self, place: int) -> list[Document]:
        """Return the documents of row `place` of this kind, counted from its first row.

        After the last row the first one comes again, until texts are written again.
        """
        return [self._documents[i] for i in self._packs[place % len(self._packs)]]

    def save(self, folder: Path) -> None:
        """Write the texts into a checkpoint's folder, end to end with their lengths."""
        if self._documents:
            lengths = np.array([len(ids) for ids, *_ in self._documents])
            tensors = {"lengths": lengths}
            for name, arrays in zip(PARTS, zip(*self._documents, strict=True), strict=True):
                tensors[name] = np.concatenate(arrays)
            save_file(tensors, folder / f"{self.name}.safetensors")

    def load(self, folder: Path) -> None:
        """Take the texts of a checkpoint, if there were any yet."""
        if (path := folder / f"{self.name}.safetensors").is_file():
            stored = load_file(path)
            # `np.split` wants the inner borders only: the lengths 3 2 4 have the borders 3 and 5.
            borders = np.cumsum(stored["lengths"])[:-1]
            arrays = [np.split(stored[name], borders) for name in PARTS]
            # The packs are not stored: `pack_rows` makes the same ones of the same lengths.
            self._take(list(zip(*arrays, strict=True)))


# Tensors of a document in a checkpoint, in the order of `Document`, by which `load` takes them.
PARTS = ("ids", "mask", "rounds")


def prompts_of(table: TokenTable, longest: int) -> np.ndarray:
    """Return (document, start of its first reply) for each usable prompt, `[n, 2]` for n of them.

    Usable are prompts of at most half of `longest`, which leave space for as long a reply.
    """
    starts = np.array([int(table.document(i)[1].argmax()) for i in range(len(table))])
    # A start of 0 is a plain text, which has no prompt.
    fit = np.flatnonzero((starts > 0) & (starts <= longest // 2))
    return np.stack([fit, starts[fit]], axis=1)


def draft_model_texts(
    config: Rollouts,
    draft_model: CausalModel,
    eos_ids: frozenset[int],
    prompts: Sequence[Request],
    seed: int,
) -> list[Document]:
    """Return the draft model's own replies to prompts; no gradient passes through the sampling.

    Prompt tokens that a draft model of a smaller vocabulary lacks are given to it as its last
    token, as in decoding; the documents have the prompts as they were.
    """
    readable = []
    for request in prompts:
        known_ids = [min(token, draft_model.vocab_size - 1) for token in request.prompt_ids]
        readable.append(Request(known_ids, request.id))
    texts = _in_batches(config, draft_model, PlainDecoding(), readable, seed, eos_ids)
    # Prompts as they were before ids were replaced: the target, which judges the texts, has them.
    return [
        _document(request.prompt_ids, text.token_ids)
        for request, text in zip(prompts, texts, strict=True)
    ]


def decoded_rounds(
    config: Errors, target: Target, drafter: Any, prompts: Sequence[Request], seed: int
) -> list[Document]:
    """Return the target's replies to prompts, decoded with chains of the current drafter.

    Their `rounds` hold where each round began and how far its drafts were right.
    """
    artifact = Artifact(drafter, target.fingerprint())
    proposer = proposer_of(artifact, length=config.length, width=1)
    return [
        _document(text.prompt_ids, text.token_ids, rounds_of(text))
        for text in _in_batches(config, target, proposer, prompts, seed, None)
    ]


def rounds_of(text: Generation) -> np.ndarray:
    """Return how many drafts were looked at, at the root of each round of a text `[S]`.

    See `Batch.rounds`.
    """
    start = len(text.prompt_ids)
    rounds = np.zeros(start + len(text.token_ids), np.int64)
    root = start  # chosen by the prefill
    for step in text.rounds:
        # Two of four drafts accepted, three tokens emitted: the third draft was rejected, so 3. All
        # four accepted, five tokens emitted: -4. The reply ended with the first of two accepted
        # drafts, one token emitted: -1.
        emitted = len(step.tokens)
        # The draft after the accepted ones was rejected if there was one and the target's own token
        # took its place. Without that token the reply has ended within the accepted drafts.
        if emitted > step.accepted and step.accepted < (step.drafted or 0):
            rounds[root] = step.accepted + 1
        else:
            rounds[root] = -min(step.accepted, emitted)
        root += emitted
    return rounds


def _in_batches(
    config: Rollouts,
    target: CausalModel,
    proposer: Proposer,
    prompts: Sequence[Request],
    seed: int,
    eos_ids: frozenset[int] | None,
) -> list[Generation]:
    """Decode all prompts, `config.batch_size` at a time; see `generate`."""
    texts: list[Generation] = []
    with (
        torch.no_grad(),
        Progress(total=len(prompts), desc="writing texts", unit=" texts") as progress,
    ):
        for at in range(0, len(prompts), config.batch_size):
            batch = prompts[at : at + config.batch_size]
            sampling = config.sampling(seed)
            texts += generate(target, proposer, batch, config.max_new_tokens, sampling, eos_ids)
            progress.update(len(batch))
    return texts


def _document(
    prompt_ids: Sequence[int], reply_ids: Sequence[int], rounds: np.ndarray | None = None
) -> Document:
    """Return a prompt and its reply as a document, an ordinary text if it has no `rounds`."""
    ids = np.array([*prompt_ids, *reply_ids], np.int64)
    written = np.arange(len(ids)) >= len(prompt_ids)
    return ids, written, np.full(len(ids), ANY, np.int64) if rounds is None else rounds
