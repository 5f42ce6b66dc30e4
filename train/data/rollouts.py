"""Texts that are written while training goes on: by the student itself (on-policy), or by decoding
with the drafter as it is now.

A share of the packed rows comes from them. Which rows, and which prompts, is a function of seed and
place in the stream; the texts themselves are saved with every checkpoint, since the weights that
wrote them are gone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from ...inference.proposer import PlainDecoding, Proposer, method_module
from ...inference.settings import Sampling
from ...inference.target import Target
from .batches import ANY, Batches, pack
from .tables import TokenTable

Document = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids, mask, rounds: see `Batch`."""
Writer = Callable[[Sequence[Request], int], list[Document]]
"""Prompts and a seed -> one document each."""


@dataclass
class Rollouts:
    """Texts of the student's own, on which the target is asked what it would have said (on-policy
    distillation)."""

    share: float = 0.0
    """Share of the packed rows that hold such texts; 0 writes none, 1 nothing else. Epochs count
    all rows, these too."""
    begin: float = 0.0
    """Share of the run before the first of them."""
    every: int = 200
    """Steps between two writings."""
    prompts: int = 128
    """Training prompts that are answered each time."""
    max_new_tokens: int = 128
    """Longest text."""
    batch_size: int = 32
    """Texts written together."""
    temperature: float = 1.0
    """As deployed, like the next two."""
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        section = type(self).__name__.lower()
        if not 0 <= self.share <= 1 or not 0 <= self.begin < 1:
            raise UserError(f"{section}.share must lie in [0, 1], {section}.begin in [0, 1)")
        if min(self.every, self.prompts, self.max_new_tokens, self.batch_size) < 1:
            raise UserError(
                f"{section}.every, prompts, max_new_tokens and batch_size must be at least 1"
            )
        self.sampling(0)

    def sampling(self, seed: int) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, repetition_penalty=1.0, seed=seed)


@dataclass
class Errors(Rollouts):
    """Acceptance errors: texts that the target writes with the drafter as it is now. Only rows that
    a round drafted from are trained, up to the first rejected draft: what stands behind that one is
    never looked at."""

    length: int = 4
    """Drafts a round."""
    accepted_weight: float = 0.5
    """Weight of accepted drafts beside 1 for the rejected ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1 or not 0 <= self.accepted_weight <= 1:
            raise UserError(
                "errors.length must be at least 1, errors.accepted_weight lie in [0, 1]"
            )


class Written:
    """One kind of such texts as a part of the stream of packed rows."""

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
        """`total`: steps of the run. `together`: every rank writes all the texts, since none can
        call the target alone."""
        self._together = together
        self.name, self.config, self._write, self._accelerator = name, config, write, accelerator
        self._prompts = prompts_of(batches.table, batches.max_length)
        if not len(self._prompts):
            raise UserError(
                f"{name}.share needs prompts of at most half of data.max_length; the sources hold "
                "none"
            )
        self._batches, self._seed = batches, [batches.seed, zlib.crc32(name.encode())]
        self._first_step = round(config.begin * total)
        self.first_row = self._first_step * batches.rows_per_step
        self._documents: list[Document] = []
        self._packs: list[list[int]] = []

    def before_step(self, step: int) -> None:
        """Write anew if it is time to: every rank its share of the prompts, and all of them all
        texts."""
        since = step - self._first_step
        if since < 0 or since % self.config.every:
            return
        number = since // self.config.every
        random = np.random.default_rng([*self._seed, number])
        chosen = self._prompts[random.permutation(len(self._prompts))[: self.config.prompts]]
        ranks, rank = self._accelerator.num_processes, self._accelerator.process_index
        requests = [
            Request(self._batches.table.document(document)[0][:start].tolist(), i)
            for i, (document, start) in enumerate(chosen.tolist())
        ]
        mine = requests if self._together else requests[rank::ranks]
        documents = self._write(mine, int(random.integers(1 << 31)))
        found: list[Any] = [
            (request.id, document) for request, document in zip(mine, documents, strict=True)
        ]
        found = found if self._together else gather_object(found)
        longest = self._batches.max_length
        self._take(
            [
                tuple(part[:longest] for part in document)
                for _, document in sorted(found, key=lambda pair: pair[0])
            ]
        )

    def _take(self, documents: list[Document]) -> None:
        self._documents = documents
        self._packs = pack([len(ids) for ids, *_ in documents], self._batches.max_length)

    def row(self, place: int) -> list[Document]:
        """The documents of a row, `place` rows of this kind after the first one."""
        return [self._documents[i] for i in self._packs[place % len(self._packs)]]

    def save(self, folder: Path) -> None:
        """What a resume needs."""
        if self._documents:
            lengths = np.array([len(ids) for ids, *_ in self._documents])
            parts = {
                name: np.concatenate(column)
                for name, column in zip(PARTS, zip(*self._documents, strict=True), strict=True)
            }
            save_file({"lengths": lengths, **parts}, folder / f"{self.name}.safetensors")

    def load(self, folder: Path) -> None:
        if (path := folder / f"{self.name}.safetensors").is_file():
            stored = load_file(path)
            borders = np.cumsum(stored["lengths"])[:-1]
            self._take(list(zip(*(np.split(stored[name], borders) for name in PARTS), strict=True)))


PARTS = ("ids", "mask", "rounds")


def prompts_of(table: TokenTable, longest: int) -> np.ndarray:
    """`[P, 2]`: documents, and where their first reply begins, where that leaves room for a reply
    as long as the prompt."""
    starts = np.array([int(table.document(i)[1].argmax()) for i in range(len(table))])
    fit = np.flatnonzero((starts > 0) & (starts <= longest // 2))
    return np.stack([fit, starts[fit]], axis=1)


def student_texts(
    config: Rollouts,
    student: Target,
    eos_ids: frozenset[int],
    prompts: Sequence[Request],
    seed: int,
) -> list[Document]:
    """The student's own replies, all of whose tokens are marked; nothing of the sampling carries a
    gradient.

    Prompt tokens that a trimmed student does not have are read as its last one, as everywhere.
    """
    known = [
        Request([min(token, student.vocab_size - 1) for token in r.prompt_ids], r.id)
        for r in prompts
    ]
    texts = _in_batches(config, student, PlainDecoding(), known, seed, eos_ids)
    documents = []
    for text, request in zip(texts, prompts, strict=True):
        text.prompt_ids = list(request.prompt_ids)
        documents.append(
            _document(text, np.full(len(text.prompt_ids) + len(text.token_ids), ANY, np.int64))
        )
    return documents


def decoded_rounds(
    config: Errors, target: Target, drafter: Any, prompts: Sequence[Request], seed: int
) -> list[Document]:
    """The target's replies, decoded with chains of the drafter as it is now; `rounds` says from
    where and how far they were right."""
    artifact = Artifact(drafter, target.fingerprint())
    proposer = method_module(drafter.method).make_proposer(artifact, length=config.length, width=1)
    return [
        _document(text, rounds_of(text))
        for text in _in_batches(config, target, proposer, prompts, seed, None)
    ]


def rounds_of(text: Generation) -> np.ndarray:
    """`[S]`: at each root of a round, how many of its drafts were looked at: m > 0 if the last of
    them was rejected, -m if all were accepted; 0 elsewhere."""
    start = len(text.prompt_ids)
    rounds = np.zeros(start + len(text.token_ids), np.int64)
    root = start  # chosen by the prefill
    for step in text.rounds:
        kept = len(step.tokens)
        if kept > step.accepted and step.accepted < (step.drafted or 0):
            rounds[root] = step.accepted + 1
        else:
            rounds[root] = -min(step.accepted, kept)
        root += kept
    return rounds


def _in_batches(
    config: Rollouts,
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Request],
    seed: int,
    eos_ids: frozenset[int] | None,
) -> list[Generation]:
    done: list[Generation] = []
    with (
        torch.no_grad(),
        Progress(total=len(prompts), desc="writing texts", unit=" texts") as progress,
    ):
        for at in range(0, len(prompts), config.batch_size):
            part = prompts[at : at + config.batch_size]
            done += generate(
                target,
                proposer,
                part,
                config.max_new_tokens,
                config.sampling(seed),
                eos_ids,
            )
            progress.update(len(part))
    return done


def _document(text: Generation, rounds: np.ndarray) -> Document:
    ids = np.array([*text.prompt_ids, *text.token_ids], np.int64)
    return ids, np.arange(len(ids)) >= len(text.prompt_ids), rounds
