"""Progress without a terminal: lines in a log file, often at first, then only where there is
something to say."""

import time

import pytest
from draftsmith.inference import console
from draftsmith.inference.console import Progress, clock


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (-1, "0 s")],
)
def test_a_duration_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_line_says_what_is_done_and_what_is_left() -> None:
    with Progress(total=40, desc="decoding", initial=10) as progress:
        progress.update(15)
        progress.now("with medusa")
        assert (
            progress.line(progress._began + 30)
            == "decoding: 25 of 40 prompts after 30 s, about 30 s left (with medusa)"
        )


@pytest.mark.parametrize(
    ("began", "waited", "more", "due"),
    [
        # seconds since the start, since the last line, work done since then (of 1,000)
        (100, 29, 1000, False),
        (100, 30, 0, True),
        (600, 30, 0, True),
        (601, 30, 49, False),
        (601, 30, 50, True),
        (900, 299, 0, False),
        (900, 300, 0, True),
    ],
)
def test_when_a_line_is_due(began: float, waited: float, more: int, due: bool) -> None:
    with Progress(total=1000, desc="extracting") as progress:
        progress._began, progress._last = 1000.0 - began, 1000.0 - waited
        progress.update(more)
        assert progress.due(1000.0) == due


def test_the_innermost_speaks_and_work_that_hangs_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_S", 0.5)
    with Progress(total=9, desc="training", unit=" steps") as outer:
        outer.update()
        with Progress(range(3), desc="replaying", unit=" texts") as inner:
            time.sleep(2.5)  # no update in all that time
            assert inner._done == 0
        said = capsys.readouterr().err
        assert "replaying: 0 of 3 texts after" in said and "training" not in said
        assert list(Progress("ab", desc="x", show=False)) == ["a", "b"]
    assert not Progress._open
