"""Texts that the draft model writes during training, and that the target judges.

A share of the packed rows holds such texts. The rows and the prompts are a function of the seed and
of the row's number in the stream. The texts are saved with every checkpoint, since the weights that
wrote them no longer exist at a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors.numpy import load_file, save_file

from ...heads.errors import UserError
from ...inference.base.console import ProgressReporter
from ...inference.decode import Generation, Request, generate
from ...inference.proposers.ngram import PlainDecoding
from ...inference.targets.causal_model import CausalModel
from .batches import Batches, Document, pack_rows
from .config import Rollouts
from .tables import TokenTable

TEXTS_AT_ONCE = 32  # texts that are written together: more are hardly faster
Writer = Callable[[Sequence[Request], int], list[Document]]
"""Function from prompts and a seed to a document for each prompt."""


class RolloutRows:
    """Rows of the stream that hold texts written during training."""

    FILE = "rollouts.safetensors"  # in a checkpoint

    def __init__(
        self,
        config: Rollouts,
        write: Writer,
        batches: Batches,
        accelerator: Accelerator,
        total: int,
        together: bool = False,
    ) -> None:
        """`write` makes the texts of `config`; `total` is the number of steps of the run.

        `together`: every rank writes all texts, since the ranks can only call the target together.
        Raises `UserError` if no prompt of the data leaves room for a reply.
        """
        self._together, self._config = together, config
        self._write, self._accelerator = write, accelerator
        self._prompts = prompts_of(batches.table, batches.max_length)
        if not len(self._prompts):
            raise UserError(
                "rollouts.share needs prompts of at most half of data.max_length, and the sources "
                "do not have any"
            )
        self._batches = batches
        self._first_step = round(config.begin * total)
        self._first_row = self._first_step * batches.rows_per_step
        self._documents: list[Document] = []
        self._packs: list[list[int]] = []

    def before_step(self, step: int) -> None:
        """Write new texts if they are due before `step`; all ranks call this.

        The ranks share the prompts, and afterwards each has all texts.
        """
        since = step - self._first_step
        if since < 0 or since % self._config.every:
            return
        number = since // self._config.every
        # The same seed on every rank; of three numbers, since an epoch's order has a seed of two
        # (`Batches.pack_of`).
        random = np.random.default_rng([self._batches.seed, number, 1])
        chosen = self._prompts[random.permutation(len(self._prompts))[: self._config.limit]]
        ranks, rank = self._accelerator.num_processes, self._accelerator.process_index
        requests = []
        for place, (document, start) in enumerate(chosen.tolist()):
            ids, _ = self._batches.table.document(document)
            requests.append(Request(ids[:start].tolist(), place))
        share = requests if self._together else requests[rank::ranks]
        # One seed for all ranks: noise is keyed by the seed and the request's id, so the text does
        # not depend on the rank that writes it.
        documents = self._write(share, int(random.integers(1 << 31)))
        places = [request.id for request in share]
        texts: list[Any] = list(zip(places, documents, strict=True))
        if not self._together:
            texts = gather_object(texts)
        # In the order of the prompts, so that the rows are the same on any number of ranks.
        texts.sort(key=lambda pair: pair[0])
        # A prompt takes at most half of a packed row, but the reply may be longer than the rest.
        longest = self._batches.max_length
        self._take([(ids[:longest], mask[:longest]) for _, (ids, mask) in texts])

    def _take(self, documents: list[Document]) -> None:
        self._documents = documents
        self._packs = pack_rows([len(ids) for ids, _ in documents], self._batches.max_length)

    def share_of(self, number: int) -> tuple[int, bool]:
        """Return the number of rollout rows before row `number`, and whether it is one itself.

        With a share of 0.4 these are the third and the fifth of five rows: 0.4 times 0 to 5 rows
        are 0, 0, 0, 1, 1, 2 whole ones.
        """
        rows = max(number - self._first_row, 0)
        before = int(rows * self._config.share)
        return before, number >= self._first_row and int((rows + 1) * self._config.share) > before

    def row(self, place: int) -> list[Document]:
        """Return the documents of rollout row `place`; they are repeated until new ones come."""
        return [self._documents[i] for i in self._packs[place % len(self._packs)]]

    def save(self, folder: Path) -> None:
        """Write the texts into a checkpoint's folder, end to end with their lengths."""
        if self._documents:
            ids, masks = zip(*self._documents, strict=True)
            tensors = {
                "lengths": np.array([*map(len, ids)]), "ids": np.concatenate(ids),
                "mask": np.concatenate(masks),
            }  # fmt: skip
            save_file(tensors, folder / self.FILE)

    def load(self, folder: Path) -> None:
        """Load the texts of a checkpoint, if it has any."""
        if (path := folder / self.FILE).is_file():
            stored = load_file(path)
            # `np.split` takes the inner borders only: the lengths 3 2 4 have the borders 3 and 5.
            borders = np.cumsum(stored["lengths"])[:-1]
            arrays = [np.split(stored[name], borders) for name in ("ids", "mask")]
            # The packs are not stored: `pack_rows` makes the same ones from the same lengths.
            self._take(list(zip(*arrays, strict=True)))


def prompts_of(table: TokenTable, longest: int) -> np.ndarray:
    """Return (document, start of its first reply) for each of n prompts `[n, 2]`.

    They have at most half of `longest` tokens, so that a reply of the same length fits.
    """
    starts = np.array([int(table.document(i)[1].argmax()) for i in range(len(table))])
    # A plain text, which has no prompt, has the start 0.
    fit = np.flatnonzero((starts > 0) & (starts <= longest // 2))
    return np.stack([fit, starts[fit]], axis=1)


def draft_model_texts(
    config: Rollouts,
    draft_model: CausalModel,
    eos_ids: frozenset[int],
    prompts: Sequence[Request],
    seed: int,
) -> list[Document]:
    """Return the draft model's own replies to prompts, without gradients.

    Prompt tokens that a draft model of a smaller vocabulary lacks become its last token, as in
    decoding; the documents keep them for the target.
    """
    readable = []
    for request in prompts:
        known_ids = [min(token, draft_model.vocab_size - 1) for token in request.prompt_ids]
        readable.append(Request(known_ids, request.id))
    texts: list[Generation] = []
    sampling = config.sampling(seed)
    with (
        torch.no_grad(),
        ProgressReporter(total=len(prompts), desc="writing texts", unit=" texts") as progress,
    ):
        for at in range(0, len(prompts), TEXTS_AT_ONCE):
            batch, longest = readable[at : at + TEXTS_AT_ONCE], config.max_new_tokens
            texts += generate(draft_model, PlainDecoding(), batch, longest, sampling, eos_ids)
            progress.update(len(batch))
    documents = []
    for request, text in zip(prompts, texts, strict=True):
        ids = np.array([*request.prompt_ids, *text.token_ids], np.int64)
        documents.append((ids, np.arange(len(ids)) >= len(request.prompt_ids)))
    return documents
