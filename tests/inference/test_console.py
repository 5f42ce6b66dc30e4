"""Progress without a terminal, lines in a log file, often at first and then seldom; and the bar of
a terminal or a notebook."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import time

import pytest

from draftsmith.inference.base import console
from draftsmith.inference.base.console import ProgressReporter, duration_text, plural


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (-1, "0 s")],
)
def test_durations_are_formatted_in_readable_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_a_line_says_what_is_done_and_what_is_left() -> None:
    with ProgressReporter(total=40, desc="decoding") as progress:
        progress.skip(10)
        progress.update(15)
        progress.now("with medusa")
        assert (
            progress.line(progress._began + 30)
            == "decoding: 25 of 40 prompts after 30 s, about 30 s left (with medusa)"
        )


@pytest.mark.parametrize(
    ("began", "waited", "due"),
    [
        # seconds since the start, and since the last line
        (100, 29, False),
        (100, 30, True),
        (600, 30, True),
        (601, 30, False),
        (900, 299, False),
        (900, 300, True),
    ],
)
def test_progress_lines_become_due_less_often_over_time(
    began: float, waited: float, due: bool
) -> None:
    with ProgressReporter(total=1000, desc="extracting") as progress:
        progress._began, progress._last = 1000.0 - began, 1000.0 - waited
        assert progress.due(1000.0) == due


def test_innermost_progress_is_printed_even_when_work_hangs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_S", 0.5)
    with ProgressReporter(total=9, desc="training", unit=" steps") as outer:
        outer.update()
        with ProgressReporter(range(3), desc="replaying", unit=" texts") as inner:
            time.sleep(2.5)  # no update in all that time
            assert inner._done == 0
        said = capsys.readouterr().err
        assert "replaying: 0 of 3 texts after" in said and "training" not in said
        assert list(ProgressReporter("ab", desc="x")) == ["a", "b"]
    assert not ProgressReporter._open


def test_skipped_work_does_not_affect_the_time_estimate() -> None:
    with ProgressReporter(total=40, desc="evaluating") as progress:
        progress.skip(10)
        progress.update(15)
        line = progress.line(progress._began + 30)
    assert line == "evaluating: 25 of 40 prompts after 30 s, about 30 s left"


NOTEBOOK = """
import builtins, sys
from types import ModuleType
from importlib.machinery import ModuleSpec

class ZMQInteractiveShell: pass

class Output:
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def clear_output(self, wait): pass
    def close(self): print("closed")

builtins.get_ipython = ZMQInteractiveShell
kernel = ModuleType("IPython")
kernel.display = ModuleType("IPython.display")
kernel.display.display = lambda *shown: print("displayed", type(shown[0]).__name__)
sys.modules |= {"IPython": kernel, "IPython.display": kernel.display}
widgets = ModuleType("ipywidgets")
widgets.__spec__, widgets.Output = ModuleSpec("ipywidgets", None), Output
if WITH_WIDGETS:
    sys.modules["ipywidgets"] = widgets
from draftsmith.inference.base import console
if not WITH_WIDGETS:
    console.find_spec = lambda name: None
console.LINE_S = 0.0
import time
with console.ProgressReporter(total=3, desc="decoding") as progress:
    progress.update()
    progress.now("with eagle3")
    time.sleep(0 if WITH_WIDGETS else 1.5)
"""


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_has_its_own_bar_and_lines_without_ipywidgets(widgets: bool) -> None:
    code = NOTEBOOK.replace("WITH_WIDGETS", str(widgets))
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    if widgets:
        assert "displayed Output" in done.stdout and "decoding: 1 of 3" not in done.stderr
    else:
        assert "displayed" not in done.stdout and "decoding: 1 of 3" in done.stderr
    assert "Warning" not in done.stderr, "rich's, of a missing ipywidgets"


TERMINAL = """
import sys
from draftsmith.inference.base.console import ProgressReporter
with ProgressReporter(total=3, desc="training", unit=" steps") as outer:
    outer.update()
    for _ in ProgressReporter(range(2), desc="replaying", unit=" texts"):
        outer.say("a line")
        print("a warning", file=sys.stderr)
"""


@pytest.mark.parametrize("piped", [True, False])
def test_a_terminal_has_a_bar_and_a_file_gets_what_is_printed(piped: bool) -> None:
    """Standard error is a terminal; bars within each other, and lines printed above them."""
    master, slave = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE if piped else slave,
        stderr=slave,
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(master, 4096):
            shown += piece
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert done.returncode == 0, text
    assert "training: 1 of 3 steps" in text and "replaying: 0 of 2 texts" in text
    assert text.count("a warning") == 2
    assert ((done.stdout or b"").count(b"a line"), text.count("a line")) == (
        (2, 0) if piped else (0, 2)
    )
    assert shown.count(b"\x1b[?25l") <= shown.count(b"\x1b[?25h"), "the cursor is shown again"


def test_a_number_of_one_is_singular_and_the_time_left_has_one_estimate() -> None:
    assert [plural(1, "row"), plural(2, "row"), plural(0, "pass")] == [
        "1 row", "2 rows", "0 passes",
    ]  # fmt: skip
    with ProgressReporter(desc="training", total=10) as progress:
        progress.skip(4)
        assert progress.left_s(progress._began + 5) is None, "nothing was done yet"
        progress.update(2)
        assert progress.left_s(progress._began + 5) == 10.0
        assert "about 10 s left" in progress.line(progress._began + 5)
