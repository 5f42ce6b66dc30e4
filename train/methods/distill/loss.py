"""Loss of a draft model: the target's distributions are distilled (DistillSpec, arXiv 2310.08461).

It learns at every position of a reply. Index table (docs/objectives.md#index-tables): row t reads
the text up to x[t], its label is x[t+1], its teacher p[t], its weight R(t+1).

Example: prompt 0 .. 3, reply 4 .. 8. Rows 3 .. 7 learn the labels x[4] .. x[8] from p[3] .. p[7]:
the first reply token too, which the other methods leave to the prefill.

Shapes: B packed rows, S positions, R rows with weight, H hidden size, Ht the target's, V
vocabulary, Vd the draft model's.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ....distill.divergences import best_of, log_probs, sum_in_chunks
from ....heads.draft_model import DraftModel
from ....heads.errors import UserError
from ....inference.rounds.device import send
from ....inference.rounds.tree import Pass
from ....inference.targets.causal_model import CausalModel
from ....inference.targets.masks import in_documents
from ....inference.targets.spread import decoder_layers
from ....inference.targets.target import TargetSource
from ...data.batches import Batch
from ...data.features import Features
from ...losses.memory import recomputed
from ...losses.vocabulary import compare_drafts, table
from ...objectives import Objective, Sums, depth_metrics
from .config import DistillLoss


class DistillObjective(Objective):
    """Objective of a draft model: a divergence at every row that predicts a reply token."""

    def __init__(self, config: DistillLoss, draft_model: CausalModel, target: TargetSource) -> None:
        self.config, self._target_head, self._draft_model = config, target.head, draft_model
        if config.recompute and draft_model.mixers:
            raise UserError(
                "objective.recompute does not run the recurrent layers of this draft model; leave "
                "it out, and take shorter rows if memory does not suffice"
            )

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return the number of a batch's rows with a label that counts, from masks alone."""
        return {"rows": float(batch.reply_run(1, 1).sum())}

    def forward(
        self,
        drafter: DraftModel,
        features: Features,
        denominators: dict[str, float],
        measured: bool = True,
    ) -> tuple[Tensor, Sums]:
        batch, device = features.batch, features.last.device
        draft_model = self._draft_model
        on_device = partial(send, device=device)
        ids = on_device(batch.ids)
        # Tokens that a draft model does not have are read as its last one, as in decoding.
        known_ids = ids.clamp(max=draft_model.vocab_size - 1)
        positions, decoder = on_device(batch.positions), draft_model.decoder
        packed = Pass(positions=positions, documents=batch.documents, written=batch.mask)
        recompute, in_masks = self.config.recompute, draft_model.attends_in_documents
        layers = decoder_layers(decoder, draft_model.num_layers)[1] if recompute else []
        with recomputed(layers, partial(in_documents, decoder) if in_masks else nullcontext):
            hidden = draft_model.forward(known_ids, packed).last.flatten(0, 1)
        # Found on the CPU, where their number is known without waiting.
        rows = batch.reply_run(1, 1).flatten().nonzero()[:, 0]
        device_rows = on_device(rows)
        # The denominator is 0 where no rank has a row with weight.
        factors = on_device(torch.ones(len(rows))) / max(denominators["rows"], 1e-9)
        last = features.last.flatten(0, 1)
        # A row with weight has its label in its own packed row, so the remainder never wraps.
        labels = ids.flatten()[(device_rows + 1) % ids.numel()]
        loss, *tables = sum_in_chunks(
            partial(self._chunk, draft_model, last, measured),
            hidden[device_rows],
            (device_rows, labels, factors),
            draft_model.head_parameters,
            self.config.rows_per_chunk,
        )
        if not measured:
            return loss, {}
        return loss, depth_metrics(*(x[:, None] for x in (*tables, torch.ones_like(factors))))

    def _chunk(
        self,
        draft_model: CausalModel,
        last: Tensor,
        measured: bool,
        hidden: Tensor,
        rows: Tensor,
        labels: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the `table` of R rows.

        `last` `[positions, Ht]` are the target's states, `hidden` `[R, H]` the draft model's, of
        `rows` `[R]`; `labels` and `factors` are `[R]`.
        """
        with torch.no_grad():
            teacher = self._target_head(last[rows])
            best = best_of(teacher)
        # A draft model may have padding rows past the target's vocabulary, which are never drafted,
        # or fewer tokens than the target: `size` is the number of tokens that both have.
        logits = draft_model.head(hidden)[:, : teacher.shape[-1]]
        size = logits.shape[-1]
        log_p = log_probs(teacher)[:, :size]
        # Columns are ids. Where the draft model lacks the best token, the row still has a loss.
        labels = torch.where(labels < size, labels, -1)
        drafts = compare_drafts(self.config.loss, logits, labels, best, log_p, overlaps=measured)
        return table(drafts, factors, measured)
