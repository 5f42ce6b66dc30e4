"""Texts written during training: their rows, and their restoration by a resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from draftsmith.heads.errors import UserError
from draftsmith.inference.decode import Request
from draftsmith.train.data import rollouts
from draftsmith.train.data.batches import Batches
from draftsmith.train.data.rollouts import (
    Document,
    RolloutRows,
    Rollouts,
    draft_model_texts,
    prompts_of,
)
from draftsmith.train.data.tables import TokenTable
from draftsmith.train.data.templates import Encoded
from draftsmith.train.methods.distill.method import runner_of
from tests.conftest import tiny_target
from tests.helpers.draft_models import draft_model_of

TARGET = tiny_target(seed=4, dtype=torch.float64, num_hidden_layers=3)


def table(count: int) -> TokenTable:
    """Document i has eight tokens i, of which the last five are the reply."""
    return TokenTable.of(
        [Encoded([i] * 8, [False] * 3 + [True] * 5) for i in range(count)], [1] * count
    )


def write(prompts: Sequence[Request], seed: int) -> list[Document]:
    """Each prompt with a reply of four tokens 100 + the first one of its prompt."""
    found = []
    for request in prompts:
        ids = np.array([*request.prompt_ids, *[100 + request.prompt_ids[0]] * 4])
        found.append((ids, np.arange(7) >= 3))
    return found


def stream(ranks: int = 1, share: float = 0.25, begin: float = 0.0) -> Batches:
    batches = Batches(table(30), 8, rows=2, accumulation=2 // ranks, ranks=ranks, seed=3)
    config = Rollouts(share=share, begin=begin, every=5, limit=6)
    batches.rollouts = RolloutRows(config, write, batches, Accelerator(cpu=True), total=20)
    return batches


def written_of(batches: Batches) -> RolloutRows:
    assert batches.rollouts is not None
    return batches.rollouts


def rows_of(batches: Batches, step: int) -> list[int]:
    """First token of each row of a step, plus 100 if it was written."""
    found = []
    for accumulation in range(batches.accumulation):
        for rank in range(batches._ranks):
            batch = batches.micro_batch(step, accumulation, rank)
            found += [int(row.max()) for row in batch.ids]
    return found


def test_a_quarter_of_the_rows_is_written_and_the_others_follow_without_gaps() -> None:
    plain = Batches(table(30), 8, rows=2, accumulation=2, ranks=1, seed=3)
    mixed = stream()
    expected = [token for step in range(6) for token in rows_of(plain, step)]
    written_of(mixed).before_step(0)
    found = [token for step in range(5) for token in rows_of(mixed, step)]
    written = [token for token in found if token >= 100]
    assert len(written) == 5 == len(set(written)), "each of them once before any comes again"
    assert [token for token in found if token < 100] == expected[:15]


def test_ranks_share_the_same_stream() -> None:
    one, two = stream(1), stream(2)
    for batches in (one, two):
        written_of(batches).before_step(0)
    assert [rows_of(one, step) for step in range(4)] == [rows_of(two, step) for step in range(4)]


def test_nothing_is_written_before_its_time_and_all_rows_can_be() -> None:
    late = stream(begin=0.5, share=1.0)
    for step in range(12):
        written_of(late).before_step(step)
        assert all((token >= 100) == (step >= 10) for token in rows_of(late, step))


def test_rollouts_are_refreshed_and_restored_on_resume(tmp_path: Path) -> None:
    batches = stream(share=1.0)
    seen = []
    for step in range(10):
        written_of(batches).before_step(step)
        seen.append(rows_of(batches, step))
        if step == 6:
            written_of(batches).save(tmp_path)
    assert {t for row in seen[:5] for t in row} != {t for row in seen[5:] for t in row}
    resumed = stream(share=1.0)
    written_of(resumed).load(tmp_path)
    assert [rows_of(resumed, step) for step in range(7, 10)] == seen[7:]


def test_rollout_prompts_end_before_a_reply_that_fits() -> None:
    documents = [
        Encoded([1, 2, 3, 4], [False, False, True, True]),
        Encoded([5] * 4, [True] * 4),
        Encoded([6] * 8, [False] * 7 + [True]),
    ]
    assert prompts_of(TokenTable.of(documents, [1, 1, 1]), 8).tolist() == [[0, 2]]
    with pytest.raises(UserError, match="needs prompts"):
        batches = Batches(TokenTable.of(documents[1:], [1, 1]), 8, 1, 1, 1, 0)
        RolloutRows(Rollouts(share=0.5), write, batches, Accelerator(cpu=True), 10)


def test_draft_model_texts_keep_prompts_and_are_batch_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft_model = draft_model_of()
    prompts = [Request([5, 6, 7], 0), Request([8, 9], 1)]
    config = Rollouts(share=1, max_new_tokens=12)
    together = draft_model_texts(config, runner_of(draft_model), TARGET.eos_ids, prompts, 3)
    monkeypatch.setattr(rollouts, "TEXTS_AT_ONCE", 1)
    texts = draft_model_texts(config, runner_of(draft_model), TARGET.eos_ids, prompts, 3)
    for (ids, mask), (same, _), request in zip(texts, together, prompts, strict=True):
        assert ids.tolist() == same.tolist(), "the noise belongs to the prompt, not to the batch"
        assert ids[: len(request.prompt_ids)].tolist() == list(request.prompt_ids)
        assert mask.tolist() == [False] * len(request.prompt_ids) + [True] * (
            len(ids) - len(request.prompt_ids)
        )
    assert (
        draft_model_texts(config, runner_of(draft_model), TARGET.eos_ids, prompts, 4)[0][0].tolist()
        != texts[0][0].tolist()
    )
    assert all(p.requires_grad for p in draft_model.parameters()), (
        "writing leaves the draft model as it was"
    )
    trimmed = draft_model_of(vocab_size=20)
    (text,) = draft_model_texts(
        config, runner_of(trimmed), TARGET.eos_ids, [Request([5, 200], 0)], 3
    )
    assert text[0][:2].tolist() == [5, 200]
