"""Progress without a terminal: lines in a log file, often at first, then only where there is
something to say."""

import subprocess
import sys
import time

import pytest

from draftsmith.inference import console
from draftsmith.inference.console import Progress, clock, several


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


def test_work_of_an_earlier_process_took_no_time() -> None:
    with Progress(total=40, desc="evaluating") as progress:
        progress.skip(10)
        progress.update(15)
        line = progress.line(progress._began + 30)
    assert line == "evaluating: 25 of 40 prompts after 30 s, about 30 s left"


NOTEBOOK = """
import sys
from types import ModuleType, SimpleNamespace as Anything

class Widget:
    bar_style = value = ""
    def __init__(self, *children, **more):
        self.children, self.layout, self.style = children, Anything(), Anything()
        self.__dict__.update(more)
        if "children" in more:
            self.children = more["children"]
    def add_class(self, name): pass
    def close(self): print("closed")

sys.modules["ipykernel.zmqshell"] = ModuleType("ipykernel.zmqshell")
kernel = ModuleType("IPython")
kernel.get_ipython = lambda: Anything(config={"IPKernelApp": {}}, kernel=None)
kernel.version_info = (9, 0, 0, "")
kernel.display = ModuleType("IPython.display")
kernel.display.display = lambda *shown: print("displayed", type(shown[0]).__name__)
sys.modules |= {"IPython": kernel, "IPython.display": kernel.display}
widgets = ModuleType("ipywidgets")
widgets.__version__ = "8.0.0"
widgets.FloatProgress = widgets.HBox = widgets.HTML = Widget
widgets.IntProgress = Widget
sys.modules["ipywidgets"] = widgets if WITH_WIDGETS else None
from draftsmith.inference import console
console.LINE_S = 0.0
import time
with console.Progress(total=3, desc="decoding") as progress:
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
        assert "displayed" in done.stdout and "decoding: 1 of 3" not in done.stderr
    else:
        assert "displayed" not in done.stdout and "decoding: 1 of 3" in done.stderr
    assert "Warning" not in done.stderr, "tqdm's, of a missing ipywidgets"


def test_a_bar_that_was_interrupted_as_it_began_closes() -> None:
    """Python calls `__del__` of the unfinished object, and would print what goes wrong there."""
    Progress.__new__(Progress).close()


def test_a_number_of_one_is_singular_and_the_time_left_has_one_estimate() -> None:
    assert [several(1, "row"), several(2, "row"), several(0, "pass")] == [
        "1 row", "2 rows", "0 passes",
    ]  # fmt: skip
    with Progress(desc="training", total=10, initial=4) as progress:
        assert progress.left_s(progress._began + 5) is None, "nothing was done yet"
        progress.update(2)
        assert progress.left_s(progress._began + 5) == 10.0
        assert "about 10 s left" in progress.line(progress._began + 5)
