"""The page of `draftsmith report` in a browser: it is shown without complaint, its script works.

The page is shown from file://, where nothing but itself is at hand.
"""

from __future__ import annotations

import json
import re
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from draftsmith.inference.evaluation.report.command import Options, run
from tests.conftest import ROOT
from tests.helpers.browser import chromium
from tests.helpers.reports import EVIL, made, sample, write_inputs


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return write_inputs(tmp_path)


PROBE = """<script>addEventListener('load', () => {
const tip = document.getElementById('tip');
const found = { sizes: [], outside: [], open: tip.textContent };
found.opened = !tip.hidden && tip.parentElement === document.querySelector('.reply');
document.querySelectorAll('details').forEach(d => { d.open = !d.closest('figure'); });
const html = document.documentElement, width = html.dataset.width;
if (width) html.style.width = width;
setTimeout(() => {
  for (const svg of document.querySelectorAll('figure svg')) {
    const box = svg.getBoundingClientRect(); found.sizes.push([box.width, box.height]);
    for (const text of svg.querySelectorAll('text')) {
      const b = text.getBoundingClientRect();
      const inside = b.left > box.left - 2 && b.right < box.right + 2
        && b.top > box.top - 2 && b.bottom < box.bottom + 2;
      if (!inside) found.outside.push(text.textContent);
    }
  }
  found.wider = main.scrollWidth - Math.ceil(main.getBoundingClientRect().width);
  const token = document.querySelector('.reply i:nth-child(2)');
  const scroller = document.querySelector('.wide'), cell = scroller.querySelector('tbody td');
  found.room = scroller.getBoundingClientRect().right - cell.getBoundingClientRect().right;
  document.body.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
  found.stays = !tip.hidden;
  token.dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
  found.tip = tip.textContent; found.text = token.textContent; found.kind = token.className;
  token.parentElement.dispatchEvent(
    new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }));
  found.next = tip.textContent;
  found.back = token.title;
  document.body.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
  found.closed = tip.hidden;
  document.body.dataset.found = JSON.stringify(found);
}, 1000); });</script>"""


def visit(page: Path, width: int = 1280) -> tuple[str, list[str], list[str]]:
    """The page's DOM as a browser leaves it, what it said on the console, and what the page asked
    the network for."""
    log, profile = page.with_suffix(".netlog"), page.with_suffix(".profile")
    quiet = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--virtual-time-budget=5000",  # charts are drawn when the page has been laid out
    ]
    watch = [
        "--enable-logging=stderr",
        "--v=0",
        f"--log-net-log={log}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ]
    shape = [
        f"--window-size={width},2000",
        f"--user-data-dir={profile}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(
        [chromium(), *quiet, *watch, *shape], capture_output=True, text=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    record = json.loads(log.read_text())
    start = record["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    asked = [
        event["params"]
        for event in record["events"]
        if event["type"] == start and "url" in event.get("params", {})
    ]
    # The browser asks for updates of its own, which no page has initiated.
    return (
        done.stdout,
        said,
        [params["url"] for params in asked if params["initiator"] != "not an origin"],
    )


def probed(page: Path, width: int, layout: str = "", script: str = PROBE) -> dict[str, Any]:
    """Findings of the script in the page, whose policy is taken away since it would refuse it."""
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text()).replace(
        "</body>", script + "</body>"
    )
    copy = page.with_name(f"probed-{width}.html")
    copy.write_text(text.replace("<html ", f'<html data-width="{layout}" '))
    dom, said, _ = visit(copy, width)
    assert not said, said
    (found,) = re.findall(r'data-found="([^"]*)"', dom)
    return json.loads(unescape(found))


def test_a_browser_shows_the_page_without_complaint(inputs: Path) -> None:
    out = inputs / "r.html"
    run(Options([str(inputs)], str(out)))
    dom, said, asked = visit(out)
    assert not said and not asked
    charts = 2 + 4 * 2 + 4 + 2 + 4 + 2
    assert dom.count("<figure") == charts and dom.count("<table") == 2 + 2
    assert 'id="tip"' in dom and 'aria-pressed="true"' in dom, "the script ran, as allowed"
    template = ROOT / "inference/evaluation/report/page.html"
    assert not re.search(r'(src|href)="(?!#)|url\(|@import', template.read_text())
    for width, layout in ((1280, ""), (500, "390px")):
        found = probed(out, width, layout)
        shown = found["sizes"]
        assert len(shown) == charts and all(w > 250 and h > 60 for w, h in shown), width
        assert not found["outside"] and found["wider"] <= 0, (width, found)
        assert found["room"] >= 0, "the speed-up is in sight"
        assert found["tip"] == (
            "accepted draft, depth 1\n\u2018 add\u2019  p = 0.625\n1. \u2018 add\u2019  0.625\n"
            "2. \u2018 sub\u2019  0.250\n"
            "3. \u2018(x\u2019  0.125"
        )
        assert found["text"] == " add" and found["kind"].startswith("d1")
        assert found["next"].startswith("accepted draft, depth 2\n")
        assert found["back"] == found["tip"], "its title is there again"
        assert found["opened"] and found["open"] == found["tip"], (
            "one bubble is open from the first"
        )
        assert found["stays"] and found["closed"], "until the reader closes it"


def test_texts_in_any_script_and_of_any_length_fit_in(tmp_path: Path) -> None:
    """Names are Hebrew, Japanese and long; replies turn directions and hold what cannot be seen."""
    report = made((1,))
    drafters = report["settings"][0]["drafters"]
    head = drafters.pop("head")
    names = ("\u05e9\u05dc\u05d5\u05dd", "\u65e5\u672c\u8a9e\u306e\u8cea\u554f", "x" * 90)
    head["by_category"] = dict.fromkeys(names, head["by_category"]["code"])
    tokens = ["\u05e9\u05dc", "\u05d0\u202e\x1b", "\u0645\u0631\u062d" * 90, "\n"]
    head["samples"] = [sample(tokens, [-1, 1, 9, 0]) | {"prompt": "\u0645\u0631 " * 200}]
    drafters["\u65e5\u672c\u8a9e head"] = head
    (tmp_path / "a.json").write_text(json.dumps(report))
    out = tmp_path / "r.html"
    run(Options([str(tmp_path / "a.json")], str(out)))
    for width, layout in ((1280, ""), (500, "390px")):
        found = probed(out, width, layout)
        assert not found["outside"] and found["wider"] <= 0, found
        assert found["text"] == "\u05d0\ufffd\u241b", "nothing turns the direction of the page"
        isolated = "\u2018\u2068\u05d0\ufffd\u241b\u2069\u2019"
        assert found["tip"].splitlines()[1].startswith(isolated), "numbers behind it stay there"


def test_no_text_of_a_report_becomes_html(tmp_path: Path) -> None:
    evil = "".join(EVIL)
    report = made((1, 2))
    for setting in report["settings"]:
        head = setting["drafters"].pop("head")
        head["samples"] = [sample([*EVIL], [-1, 1, 2, 3, 0, 1, 0, 1, 0]) | {"id": evil}]
        head["samples"][0]["prompt"] = evil
        head["by_category"] = {evil: head["by_category"]["code"], "b": head["by_category"]["chat"]}
        setting["drafters"][evil] = head
    report |= {"command": evil, "target": {"name": evil}, "left_out": {evil: evil}}
    clean, out = tmp_path / "clean.html", tmp_path / "r.html"
    (tmp_path / "a.json").write_text(json.dumps(made((1, 2))))
    (tmp_path / "b.json").write_text(json.dumps(report))
    run(Options([str(tmp_path / "a.json")], str(clean)))
    run(Options([str(tmp_path / "b.json")], str(out)))
    (plain, _, _), (dom, said, asked) = visit(clean), visit(out)
    assert not said and not asked and "alert(2)" in dom
    tags = [{*re.findall(r"<([a-z][a-z0-9]*)", re.sub("<script.*?</script>", "", text, flags=re.S))}
            for text in (plain, dom)]  # fmt: skip
    assert tags[1] <= tags[0] and "img" not in tags[1]


USE = """<script>addEventListener('load', () => {
const found = { copied: [] };
navigator.clipboard.writeText = text => { found.copied.push(text); return Promise.resolve(); };
for (const button of document.querySelectorAll('button.copy')) button.click();
const table = document.querySelector('table'), heads = [...table.tHead.rows[0].cells];
const column = at => [...table.tBodies[0].rows].filter(row => row.getClientRects().length)
  .map(row => row.cells[at].textContent);
const press = (at) => { heads[at].querySelector('button').click();
  return [heads.map(head => head.getAttribute('aria-sort')).filter(Boolean), column(at)]; };
found.before = column(0);
const last = heads[heads.length - 1], hidden = () => !last.getClientRects().length;
found.hidden = hidden();
found.gains = [press(1), press(1)];
found.names = press(0);
found.intervals = press(7);
const groups = [...document.querySelectorAll('.switches')[0].children];
found.groups = groups.slice(0, 2).map(group => [group.getAttribute('aria-label'),
  [...group.querySelectorAll('button')].map(button => button.textContent)]);
groups[0].querySelectorAll('button')[2].click();
found.one = [column(2), column(3)];
groups[1].querySelectorAll('button')[1].click();
found.both = [column(2), column(3)];
found.pressed = [...document.querySelector('.switches').querySelectorAll('[aria-pressed=true]')]
  .map(button => button.textContent);
groups[0].querySelectorAll('button')[0].click();
found.again = column(3);
groups[2].querySelector('button').click();
found.all = hidden();
document.body.dataset.found = JSON.stringify(found);
});</script>"""


def test_tables_are_sorted_and_switched_and_commands_copied(inputs: Path) -> None:
    out = inputs / "r.html"
    run(Options([str(inputs / "a.json")], str(out)))
    found = probed(out, 1280, script=USE)
    assert found["copied"] == ["draftsmith evaluate --target some/target"]
    assert len(found["before"]) == 12
    (order, falling), (order_again, rising) = found["gains"]
    assert (order, order_again) == (["descending"], ["ascending"])
    numbers = [float(text.rstrip("x")) for text in falling]
    assert numbers == sorted(numbers, reverse=True) and rising == falling[::-1]
    order, names = found["names"]
    assert order == ["ascending"] and names == sorted(names), "only one heading at a time"
    order, intervals = found["intervals"]
    assert order == ["descending"] and intervals[-4:] == ["-"] * 4, "plain decoding has none"
    assert found["groups"] == [
        ["temperature", ["all", "0", "1"]],
        ["batch size", ["all", "1", "4"]],
    ]
    assert found["one"][0] == ["1"] * 6 and sorted(found["one"][1]) == ["1"] * 3 + ["4"] * 3
    assert found["both"] == [["1"] * 3, ["1"] * 3]
    assert found["pressed"] == ["1", "1"] and found["again"] == ["1"] * 6
    assert found["hidden"] and not found["all"], "a button shows the columns that are left out"


def test_the_browser_test_would_see_an_error_and_a_request(inputs: Path) -> None:
    out = inputs / "r.html"
    run(Options([str(inputs / "eagle")], str(out)))
    wrong = '<img src="http://report.invalid/x.png"><script>console.error("boom")</script></body>'
    open_page = re.sub(
        '<meta http-equiv="Content-Security-Policy"[^>]*>', "", out.read_text()
    ).replace("</body>", wrong)
    (inputs / "open.html").write_text(open_page)
    _, said, asked = visit(inputs / "open.html")
    assert asked == ["http://report.invalid/x.png"] and any("boom" in line for line in said)
    (inputs / "shut.html").write_text(out.read_text().replace("</body>", wrong))
    _, said, asked = visit(inputs / "shut.html")
    assert not asked and not any('"boom"' in line for line in said), "the policy refuses both"
    assert len(said) == 2 and all("Content Security Policy" in line for line in said)
