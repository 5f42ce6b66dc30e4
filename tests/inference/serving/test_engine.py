"""The engine of the local server: what it decodes together equals what is decoded alone, and what
nobody waits for leaves."""

from __future__ import annotations

import queue
import time
from typing import Any

import pytest

from draftsmith.inference.base.settings import Sampling
from draftsmith.inference.decode import Request, decode, generate
from draftsmith.inference.proposers.registry import load_proposer
from draftsmith.inference.serving.engine import BatchSettings, Engine, Job, RequestError
from draftsmith.inference.targets.target import Target
from tests.conftest import QUICKSTART, by_default
from tests.helpers.trained import chat_prompts

DRAFTERS = QUICKSTART.parent / "drafters"
KINDS = ["ngram", "none"]
TRAINED = [
    str(DRAFTERS / name)
    for name in ("eagle3", "medusa", "dflash", "dspark", "distill", "dspark:lookup=3")
]


def prompts_of(target: Target, count: int) -> list[list[int]]:
    return chat_prompts(target, "test", count)


@pytest.mark.parametrize(
    "spec",
    by_default([*KINDS, *TRAINED], KINDS[0], TRAINED[0]),
    ids=lambda spec: spec.rpartition("/")[2],
)
def test_two_batches_of_one_drafter_in_turns_write_what_each_writes_alone(
    quickstart: Target, spec: str
) -> None:
    """A copy of a proposer shares the weights and no state, for every kind of drafter."""
    first = load_proposer(spec, quickstart, print)
    second = first.clone()
    prompts = prompts_of(quickstart, 5)
    batches = [prompts[:2], prompts[2:]]
    alone = [[g.token_ids for g in generate(quickstart, first, batch, 24)] for batch in batches]
    written: list[dict[int, list[int]]] = [{}, {}]
    open_loops = []
    for place, (proposer, batch) in enumerate(zip((first, second), batches, strict=True)):
        requests = [Request(ids, number) for number, ids in enumerate(batch)]
        open_loops.append((place, decode(quickstart, proposer, requests, 24)))
    while open_loops:
        for place, loop in list(open_loops):
            try:
                for index, step, _ in next(loop):
                    written[place].setdefault(index, []).extend(step.tokens)
            except StopIteration:
                open_loops.remove((place, loop))
    for place in (0, 1):
        assert [written[place][i] for i in range(len(batches[place]))] == alone[place]


@pytest.mark.parametrize("spec", ["ngram", TRAINED[0]], ids=["ngram", "eagle3"])
def test_abandoned_row_leaves_without_affecting_other_rows(quickstart: Target, spec: str) -> None:
    proposer = load_proposer(spec, quickstart, print)
    prompts = prompts_of(quickstart, 3)
    alone = [g.token_ids for g in generate(quickstart, proposer, prompts, 32)]
    requests = [Request(ids, number) for number, ids in enumerate(prompts)]
    loop = decode(quickstart, proposer, requests, 32)
    written: dict[int, list[int]] = {0: [], 1: [], 2: []}
    steps = next(loop)
    given_up: set[int] | None = None
    rounds = 0
    while True:
        for index, step, _ in steps:
            assert rounds < 3 or index != 1, "a row that was given up has gained tokens"
            written[index] += step.tokens
        rounds += 1
        given_up = {1} if rounds == 3 else None
        try:
            steps = loop.send(given_up)
        except StopIteration:
            break
    assert written[0] == alone[0] and written[2] == alone[2]
    assert written[1] == alone[1][: len(written[1])] and len(written[1]) < len(alone[1])


def test_each_request_keeps_its_own_token_limit(quickstart: Target) -> None:
    proposer = load_proposer("ngram", quickstart, print)
    prompts = prompts_of(quickstart, 2)
    whole = generate(quickstart, proposer, prompts, 20)
    requests = [Request(prompts[0], 0, 0, 5), Request(prompts[1], 1)]
    cut = generate(quickstart, proposer, requests, 20)
    assert cut[0].token_ids == whole[0].token_ids[:5] and cut[0].finish_reason == "length"
    assert cut[1].token_ids == whole[1].token_ids


class Listener:
    """Collects what the engine delivers of one job."""

    def __init__(self, prompt: list[int], limit: int, settings: BatchSettings, name: int = 0):
        self.events: queue.Queue[Any] = queue.Queue()
        request = Request(prompt, name, 0, limit)
        self.job = Job(request, settings, lambda record, reason: self.events.put((record, reason)))

    def result(self) -> tuple[list[int], str]:
        tokens: list[int] = []
        while True:
            record, reason = self.events.get(timeout=60)
            if record is None:
                raise RuntimeError(reason)
            tokens += record.tokens
            if reason is not None:
                return tokens, reason


@pytest.fixture
def engine(quickstart: Target):
    proposers = {name: load_proposer(name, quickstart, print) for name in ("ngram", "none")}
    made = Engine(quickstart, proposers, rows=3, queue=8)
    yield made
    made.close()


def test_jobs_of_different_settings_get_what_they_would_get_alone(
    engine: Engine, quickstart: Target
) -> None:
    """Eight jobs, at most three in a batch: greedy, sampled, and with a stop string."""
    sampled = Sampling(temperature=0.8, seed=3)
    settings = [
        BatchSettings("ngram"),
        BatchSettings("ngram", sampled),
        BatchSettings("none", stop=("return",)),
        BatchSettings("ngram"),
    ] * 2
    prompts = prompts_of(quickstart, 8)
    listeners = [
        Listener(prompt, 12 + number, one)
        for number, (prompt, one) in enumerate(zip(prompts, settings, strict=True))
    ]
    engine.submit([listener.job for listener in listeners])
    for number, (listener, prompt, one) in enumerate(
        zip(listeners, prompts, settings, strict=True)
    ):
        proposer = load_proposer("ngram", quickstart, print)
        request = Request(prompt)
        (alone,) = generate(
            quickstart, proposer, [request], 12 + number, one.sampling, None, one.stop
        )
        assert listener.result() == (alone.token_ids, alone.finish_reason)
    assert engine.running == engine.waiting == 0


def test_what_is_given_up_leaves_the_queue_and_the_batch(
    engine: Engine, quickstart: Target
) -> None:
    prompts = prompts_of(quickstart, 8)
    endless = BatchSettings("none", ignore_eos=True)
    listeners = [Listener(prompt, 800, endless) for prompt in prompts]
    engine.submit([listener.job for listener in listeners])
    with pytest.raises(RequestError, match="8 requests wait already"):
        engine.submit([Listener(prompt, 8, endless).job for prompt in [*prompts, prompts[0]]])
    assert listeners[0].events.get(timeout=60)
    engine.give_up([listener.job for listener in listeners])
    until = time.monotonic() + 30
    while (engine.running or engine.waiting) and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.running == engine.waiting == 0
    ends = engine.counters.text().decode()
    assert 'draftsmith:requests_total{end="cancelled"} 8.0' in ends
    after = Listener(prompts[0], 4, BatchSettings("ngram"))
    engine.submit([after.job])
    assert len(after.result()[0]) == 4


def test_an_unforeseen_error_leaves_nobody_waiting_and_the_thread_alive(
    engine: Engine, quickstart: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = prompts_of(quickstart, 1)
    endless = BatchSettings("none", ignore_eos=True)
    first = Listener(prompt, 900, endless)
    engine.submit([first.job])
    assert first.events.get(timeout=60)

    def broken(batch: object) -> None:
        raise SystemError("unforeseen")

    monkeypatch.setattr(engine, "_advance", broken)
    with pytest.raises(RuntimeError, match="an internal error"):
        first.result()
    monkeypatch.undo()
    assert engine.alive and engine.running == engine.waiting == 0
    after = Listener(prompt, 4, endless)
    engine.submit([after.job])
    assert len(after.result()[0]) == 4


def test_an_error_before_the_first_round_reaches_its_clients(
    engine: Engine, quickstart: Target
) -> None:
    """A drafter that there is not fails between the queue and the batch."""
    (prompt,) = prompts_of(quickstart, 1)
    broken = [Listener(prompt, 4, BatchSettings("no such drafter")) for _ in range(2)]
    engine.submit([listener.job for listener in broken])
    for listener in broken:
        with pytest.raises(RuntimeError, match="an internal error"):
            listener.result()
    sound = Listener(prompt, 4, BatchSettings("ngram"))
    engine.submit([sound.job])
    assert engine.alive and len(sound.result()[0]) == 4


def stragglers(prompts: list[list[int]]) -> list[Listener]:
    """Two long replies of different settings, so that they are two batches."""
    settings = [BatchSettings("none", ignore_eos=True)]
    settings.append(BatchSettings("none", Sampling(temperature=0.9), ignore_eos=True))
    return [Listener(prompt, 900, one) for prompt, one in zip(prompts, settings, strict=True)]


@pytest.mark.parametrize("like", ["a straggler", "none of them"])
def test_a_short_request_does_not_wait_for_long_ones(
    engine: Engine, quickstart: Target, like: str
) -> None:
    """One token beside two long replies of different settings comes within a second."""
    prompts = prompts_of(quickstart, 3)
    long = stragglers(prompts[:2])
    engine.submit([listener.job for listener in long])
    for listener in long:
        assert listener.events.get(timeout=60)
    own = long[0].job.settings if like == "a straggler" else BatchSettings("ngram", stop=("x",))
    short = Listener(prompts[2], 1, own)
    asked = time.monotonic()
    engine.submit([short.job])
    assert len(short.result()[0]) == 1
    waited = time.monotonic() - asked
    assert engine.running == 2, "the long replies have ended, so nothing was tried"
    engine.give_up([listener.job for listener in long])
    assert waited < 1, waited


def test_a_request_of_other_settings_waits_a_bounded_time_for_many(quickstart: Target) -> None:
    """Each long reply is a batch of its own, and rows are free."""
    engine = Engine(quickstart, {"none": load_proposer("none", quickstart, print)}, rows=12)
    prompts = prompts_of(quickstart, 9)
    long = []
    for number, prompt in enumerate(prompts[:8]):
        sampling = Sampling(temperature=0.5 + number / 10)
        long.append(Listener(prompt, 900, BatchSettings("none", sampling, ignore_eos=True)))
    short = Listener(prompts[8], 1, BatchSettings("none"))
    try:
        for listener in long:
            engine.submit([listener.job])
            assert listener.events.get(timeout=60)
        asked = time.monotonic()
        engine.submit([short.job])
        assert len(short.result()[0]) == 1
        waited = time.monotonic() - asked
        assert engine.running >= 7, "the long replies have ended, so nothing was tried"
        assert waited < 2, waited
    finally:
        engine.close()


def test_rows_of_all_batches_together_are_limited(engine: Engine, quickstart: Target) -> None:
    """The engine has three rows; a fourth reply of other settings waits for one of them."""
    prompts = prompts_of(quickstart, 4)
    other = BatchSettings("ngram", ignore_eos=True)
    long = [*stragglers(prompts[:2]), Listener(prompts[2], 900, other)]
    engine.submit([listener.job for listener in long])
    for listener in long:
        assert listener.events.get(timeout=60)
    fourth = Listener(prompts[3], 1, BatchSettings("none"))
    engine.submit([fourth.job])
    time.sleep(1)
    assert (engine.running, engine.waiting) == (3, 1)
    engine.give_up([long[0].job])
    assert len(fourth.result()[0]) == 1
    engine.give_up([listener.job for listener in long])


def test_replies_of_many_seeds_are_one_batch(quickstart: Target) -> None:
    """Each has the text that its seed gives alone."""
    engine = Engine(quickstart, {"ngram": load_proposer("ngram", quickstart, print)}, rows=6)
    (prompt,) = prompts_of(quickstart, 1)
    settings = BatchSettings("ngram", Sampling(temperature=0.8))
    listeners = [Listener(prompt, 12, settings) for _ in range(6)]
    for seed, listener in enumerate(listeners):
        listener.job.request = Request(prompt, 0, 0, 12, seed)
    engine.submit([listener.job for listener in listeners])
    proposer = load_proposer("ngram", quickstart, print)
    texts = set()
    for seed, listener in enumerate(listeners):
        sampling = Sampling(temperature=0.8, seed=seed)
        (alone,) = generate(quickstart, proposer, [Request(prompt)], 12, sampling)
        listener.events.get(timeout=60)  # the prefill
        record, reason = listener.events.get(timeout=60)
        assert record.rows == 6 or reason
        written = [alone.token_ids[0], *record.tokens]
        while reason is None:
            record, reason = listener.events.get(timeout=60)
            written += record.tokens
        assert written == alone.token_ids and reason == alone.finish_reason
        texts.add(tuple(written))
    engine.close()
    assert len(texts) > 3


def test_a_long_prompt_does_not_pad_many_short_ones(quickstart: Target) -> None:
    """Sixteen prompts would fit into a batch, but not padded to 900 tokens."""
    engine = Engine(quickstart, {"none": load_proposer("none", quickstart, print)}, rows=16)
    settings = BatchSettings("none", ignore_eos=True)
    prompts = [[5] * 10 for _ in range(15)]
    prompts.insert(3, [5] * 900)
    listeners = [Listener(prompt, 3, settings) for prompt in prompts]
    engine.submit([listener.job for listener in listeners])
    padded = 0
    for listener in listeners:
        listener.events.get(timeout=60)  # the prefill
        record, _ = listener.events.get(timeout=60)
        if listener is listeners[3]:
            padded = record.rows * 900
        assert listener.result()[1] == "length"
    assert 900 < padded <= 8192
    engine.close()


def test_closed_engine_ends_jobs_and_refuses_new_ones(engine: Engine, quickstart: Target) -> None:
    (prompt,) = prompts_of(quickstart, 1)
    first = Listener(prompt, 900, BatchSettings("none", ignore_eos=True))
    engine.submit([first.job])
    assert first.events.get(timeout=60)
    engine.close()
    with pytest.raises(RuntimeError, match="the server is stopping"):
        first.result()
    assert not engine.alive and engine.running == engine.waiting == 0
    with pytest.raises(RequestError, match="the server is stopping"):
        engine.submit([Listener(prompt, 4, BatchSettings("none")).job])


def test_a_batch_that_fails_ends_its_own_requests_only(engine: Engine, quickstart: Target) -> None:
    prompts = prompts_of(quickstart, 2)
    broken = Listener([10**9], 4, BatchSettings("none"))
    sound = Listener(prompts[0], 4, BatchSettings("ngram"))
    engine.submit([broken.job])
    engine.submit([sound.job])
    with pytest.raises(RuntimeError, match="an internal error"):
        broken.result()
    assert len(sound.result()[0]) == 4
