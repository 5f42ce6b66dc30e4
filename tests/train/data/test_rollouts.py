"""Texts written while training goes on: which rows they take, what of a decoded text is trained,
and that a resume has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from draftsmith.heads.errors import UserError
from draftsmith.inference.decode import Generation, Request, Round
from draftsmith.train.data.batches import ANY, Batches, RowShares, collate
from draftsmith.train.data.rollouts import (
    Document,
    Errors,
    Rollouts,
    Written,
    decoded_rounds,
    draft_model_texts,
    prompts_of,
    rounds_of,
)
from draftsmith.train.data.tables import TokenTable
from draftsmith.train.data.templates import Encoded
from draftsmith.train.methods.draft_model import DistillLoss, DistillObjective, runner_of
from draftsmith.train.methods.runs import EagleLoss
from draftsmith.train.methods.unrolled_loss import UnrolledObjective
from tests.conftest import tiny_target
from tests.eagles import random_eagle
from tests.train.methods.test_draft_model import draft_model_of

TARGET = tiny_target(seed=4, dtype=torch.float64, num_hidden_layers=3)


def table(count: int) -> TokenTable:
    """Documents i of eight tokens i, of which the last five are the reply."""
    return TokenTable.of(
        [Encoded([i] * 8, [False] * 3 + [True] * 5) for i in range(count)], [1] * count
    )


def write(prompts: Sequence[Request], seed: int) -> list[Document]:
    """Each prompt with a reply of four tokens 100 + the first one of its prompt."""
    found = []
    for request in prompts:
        ids = np.array([*request.prompt_ids, *[100 + request.prompt_ids[0]] * 4])
        found.append((ids, np.arange(7) >= 3, np.full(7, ANY)))
    return found


def stream(ranks: int = 1, share: float = 0.25, begin: float = 0.0) -> Batches:
    batches = Batches(table(30), 8, rows=2, accumulation=2 // ranks, ranks=ranks, seed=3)
    config = Rollouts(share=share, begin=begin, every=5, prompts=6)
    batches.written_parts = [
        Written("rollouts", config, write, batches, Accelerator(cpu=True), total=20)
    ]
    return batches


def rows_of(batches: Batches, step: int) -> list[int]:
    """First token of each row of a step, plus 100 if it was written."""
    found = []
    for accumulation in range(batches.accumulation):
        for rank in range(batches._ranks):
            batch = batches.micro_batch(step, accumulation, rank)
            found += [int(row.max()) for row in batch.ids]
    return found


def test_turns_are_shares_without_overlap_from_their_first_rows_on() -> None:
    turns = RowShares([(0.25, 5000), (0.5, 0)])
    turns.BLOCK = 64  # type: ignore[misc]
    found = [turns.of(number) for number in range(9000)]
    for part in range(3):
        assert [place for owner, place in found if owner == part] == list(
            range(sum(owner == part for owner, _ in found))
        )
    early, late = [owner for owner, _ in found[:5000]], [owner for owner, _ in found[5000:]]
    assert 0 not in early and abs(early.count(1) - 2500) < 5
    assert (
        abs(late.count(0) - 1000) < 5
        and abs(late.count(1) - 2000) < 5
        and abs(late.count(2) - 1000) < 5
    )
    assert (
        max(
            b - a
            for a, b in zip(
                *(lambda at: (at, at[1:]))([n for n, o in enumerate(late) if o == 0]), strict=False
            )
        )
        <= 8
    )
    again = RowShares([(0.25, 5000), (0.5, 0)])
    assert again.of(8999) == found[8999], "whoever asks first"


def test_a_quarter_of_the_rows_is_written_and_the_others_follow_without_gaps() -> None:
    plain = Batches(table(30), 8, rows=2, accumulation=2, ranks=1, seed=3)
    mixed = stream()
    expected = [token for step in range(6) for token in rows_of(plain, step)]
    mixed.before_step(0)
    found = [token for step in range(5) for token in rows_of(mixed, step)]
    written = [token for token in found if token >= 100]
    assert len(written) == 5 == len(set(written)), "each of them once before any comes again"
    assert [token for token in found if token < 100] == expected[:15]


def test_ranks_share_the_same_stream() -> None:
    one, two = stream(1), stream(2)
    for batches in (one, two):
        batches.before_step(0)
    assert [rows_of(one, step) for step in range(4)] == [rows_of(two, step) for step in range(4)]


def test_nothing_is_written_before_its_time_and_all_rows_can_be() -> None:
    late = stream(begin=0.5, share=1.0)
    for step in range(12):
        late.before_step(step)
        assert all((token >= 100) == (step >= 10) for token in rows_of(late, step))


def test_texts_are_written_anew_from_other_prompts_and_a_resume_has_them(tmp_path: Path) -> None:
    batches = stream(share=1.0)
    seen = []
    for step in range(10):
        batches.before_step(step)
        seen.append(rows_of(batches, step))
        if step == 6:
            batches.written_parts[0].save(tmp_path)
    assert {t for row in seen[:5] for t in row} != {t for row in seen[5:] for t in row}
    resumed = stream(share=1.0)
    resumed.written_parts[0].load(tmp_path)
    assert [rows_of(resumed, step) for step in range(7, 10)] == seen[7:]


def test_prompts_are_what_stands_before_a_reply_and_leaves_room_for_one() -> None:
    documents = [
        Encoded([1, 2, 3, 4], [False, False, True, True]),
        Encoded([5] * 4, [True] * 4),
        Encoded([6] * 8, [False] * 7 + [True]),
    ]
    assert prompts_of(TokenTable.of(documents, [1, 1, 1]), 8).tolist() == [[0, 2]]
    with pytest.raises(UserError, match="needs prompts"):
        batches = Batches(TokenTable.of(documents[1:], [1, 1]), 8, 1, 1, 1, 0)
        Written("rollouts", Rollouts(share=0.5), write, batches, Accelerator(cpu=True), 10)


def decoded() -> Generation:
    """Prompt of 3; the first token by the prefill; rounds: 2 of 3 right; 0 of 3; all 3 right, cut
    after the first."""
    rounds = [
        Round(tokens=[11, 12, 13], drafted=3, accepted=2),
        Round(tokens=[14], drafted=3),
        Round(tokens=[15], drafted=3, accepted=3),
    ]
    return Generation([1, 2, 3], [10, 11, 12, 13, 14, 15], rounds)


def test_rounds_of_a_decoded_text() -> None:
    """Roots at 3, 6 and 7: two right and a wrong one; a wrong one; a right one, for what was cut
    off nobody looked at."""
    assert rounds_of(decoded()).tolist() == [0, 0, 0, 3, 0, 0, 1, -1, 0]


def test_weights_of_drafts_of_a_decoded_text() -> None:
    text = decoded()
    ids = np.array([*text.prompt_ids, *text.token_ids])
    decoded_row = (ids, np.arange(9) >= 3, rounds_of(text))
    batch = collate([[decoded_row, (ids[:4], np.arange(4) >= 1)]])
    weights = batch.draft_weights(4, 0.5)[0]
    assert (
        weights[3].tolist() == [0.5, 0.5, 1, 0]
        and weights[6].tolist() == [1, 0, 0, 0]
        and weights[7].tolist() == [0.5, 0, 0, 0]
    )
    assert (
        weights[:3].sum() == weights[4:6].sum() == weights[8].sum() == 0
        and (weights[9:] == 1).all()
    )
    # A text that was cut within its last round says nothing of the document behind it.
    cut = collate(
        [
            [
                (ids[:5], np.arange(5) >= 3, rounds_of(text)[:5]),
                (ids[:3], np.arange(3) >= 1, np.zeros(3, int)),
            ]
        ]
    )
    assert cut.row_weights(0.5)[0].tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, 0]
    # A language model's row t drafts x[t+1]: rows 3 and 4 were right, 5 wrong, 6 wrong, 7 right;
    # ordinary text counts in full.
    assert batch.row_weights(0.5)[0].tolist() == [0, 0, 0, 0.5, 0.5, 1, 1, 0.5, 0, 1, 1, 1, 1]
    draft_model = draft_model_of()
    aim = DistillObjective(DistillLoss(), runner_of(draft_model), TARGET, accepted_weight=0.5)
    assert aim.row_weights(batch)[0].tolist() == [0, 0, 0, 0.5, 0.5, 1, 1, 0.5, 0, 1, 1, 1, 0]
    # EAGLE's row t drafts from the root at t + 1, at step k the token x[t+2+k].
    config = EagleLoss(steps=3).resolved(3)
    eagle = UnrolledObjective(config, random_eagle(TARGET), TARGET.head, accepted_weight=0.5)
    found = eagle.row_weights(batch)[0]
    assert (
        found[2].tolist() == [0.5, 0.5, 1]
        and found[5].tolist() == [1, 0, 0]
        and found[6].tolist() == [0.5, 0, 0]
    )
    assert (
        found[[0, 1, 3, 4, 7, 8]].sum() == 0
        and found[9].tolist() == [1, 1, 0]
        and found[10].tolist() == [1, 0, 0]
    )
    assert eagle.weights(batch) == {"step0": 4.0, "step1": 1.5, "step2": 1.0}


def test_what_the_draft_model_and_the_decoder_write() -> None:
    draft_model = draft_model_of()
    prompts = [Request([5, 6, 7], 0), Request([8, 9], 1)]
    config = Rollouts(share=1, max_new_tokens=12, batch_size=1)
    texts = draft_model_texts(config, runner_of(draft_model), TARGET.eos_ids, prompts, 3)
    together = draft_model_texts(
        Rollouts(share=1, max_new_tokens=12), runner_of(draft_model), TARGET.eos_ids, prompts, 3
    )
    for (ids, mask, rounds), (same, *_), request in zip(texts, together, prompts, strict=True):
        assert ids.tolist() == same.tolist(), "the noise belongs to the prompt, not to the batch"
        assert (
            ids[: len(request.prompt_ids)].tolist() == list(request.prompt_ids)
            and (rounds == ANY).all()
        )
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
    greedy = Errors(share=1, max_new_tokens=24, length=2, temperature=0.0)
    rejected = 0
    for ids, mask, rounds in decoded_rounds(greedy, TARGET, draft_model, prompts, 3):
        best = draft_model.model(torch.tensor(ids)[None]).logits[0].argmax(-1).tolist()
        assert not mask[0] and abs(rounds).max() <= 2
        for root in rounds.nonzero()[0].tolist():
            count = int(rounds[root])
            right = [best[row] == ids[row + 1] for row in range(root, root + abs(count))]
            assert right == [True] * (count - 1) + [False] if count > 0 else all(right)
            rejected += count > 0
    assert rejected > 4
    trimmed = draft_model_of(vocab_size=20)
    (text,) = draft_model_texts(
        config, runner_of(trimmed), TARGET.eos_ids, [Request([5, 200], 0)], 3
    )
    assert text[0][:2].tolist() == [5, 200]
