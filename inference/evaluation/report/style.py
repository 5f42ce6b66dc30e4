"""Style of a report's page: colours in light and dark mode, layout, phones and print."""

from __future__ import annotations

from .charts import COLOURS, LOOKS

STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c2024; --soft: #5c656f; --line: #dfe3e8;
  --panel: #f6f7f9;
  --warn-back: #b3261e; --warn-text: #fff; --draft: 0 114 178; --own: #b8500a; --focus: #0b63ce;
  --c0: #6f7782; --c1: #0072b2; --c2: #d55e00; --c3: #009e73; --c4: #b0548a; --c5: #c98a00;
  --c6: #3d9fd6; --c7: #7a6a00; }
@media screen and (prefers-color-scheme: dark) { :root { --back: #14171a; --text: #e8eaed;
  --soft: #a3acb6; --line: #343a41;
  --panel: #1d2125; --warn-back: #f2726a; --warn-text: #14171a; --draft: 86 180 233;
  --own: #f5a55a; --focus: #7db8ff;
  --c0: #98a1ab; --c1: #5ab0ea; --c2: #f08a4b; --c3: #2fc79b; --c4: #dc94bd; --c5: #e8b33c;
  --c6: #9bd3f5; --c7: #d8cf5a; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.55 system-ui,
  -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 36px 24px 80px; }
h1, h2, h3, h4 { line-height: 1.25; text-wrap: balance; overflow-wrap: anywhere; }
h1 { font-size: 27px; margin: 2px 0 14px; letter-spacing: -.01em; }
h2 { font-size: 21px; margin: 56px 0 12px; padding-top: 20px; border-top: 1px solid var(--line); }
h3 { font-size: 17px; margin: 40px 0 6px; }
h4 { font-size: 14px; margin: 22px 0 8px; }
p { margin: 6px 0; max-width: 92ch; }
.kicker { color: var(--soft); font-size: 13px; letter-spacing: .04em; }
ul.note { margin: 4px 0; padding-left: 20px; }
.note, figcaption small { color: var(--soft); font-size: 13px; }
.verdict { font-size: 17px; margin: 4px 0; max-width: none; }
a { color: inherit; text-underline-offset: 3px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 18px 0 0; font-size: 14px; }
code, pre, .reply, .prompt { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas,
  "DejaVu Sans Mono", monospace; }
code { font-size: 12.5px; overflow-wrap: anywhere; } code span { display: inline-block;
  max-width: 100%; }
.alert { font-weight: 600; }
.lossless { display: inline-block; margin: 10px 0 2px; padding: 2px 10px;
  border: 1px solid var(--c3); border-radius: 99px;
  font-size: 13px; }
.lossy { margin: 14px 0; padding: 10px 14px; border-radius: 6px; background: var(--warn-back);
  color: var(--warn-text);
  font-weight: 600; max-width: none; }
dl.facts { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 3px 18px;
  margin: 16px 0; font-size: 14px; }
dl.facts dt { color: var(--soft); }
dl.facts dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; margin: 14px 0;
  background: linear-gradient(to left, var(--back) 30%, transparent) right / 40px 100% local,
  linear-gradient(to left, var(--line), transparent) right / 14px 100% scroll;
  background-repeat: no-repeat; }
.phone { display: none; }
.switches { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 14px 0 0; font-size: 13px;
  color: var(--soft); } .switches > div { display: flex; flex-wrap: wrap; gap: 4px;
  align-items: baseline; } .switches + .wide { margin-top: 8px; }
.switches button, .copy { font: inherit; font-size: 13px; color: var(--text);
  background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 2px 9px;
  cursor: pointer; }
.switches button[aria-pressed=true] { background: var(--text); color: var(--back);
  border-color: var(--text); }
.copy { margin-left: 8px; font-size: 12px; vertical-align: baseline; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0;
  text-align: inherit; cursor: pointer; }
th button:hover { color: var(--text); text-decoration: underline; text-underline-offset: 3px; }
th[aria-sort] button { color: var(--text); font-weight: 700; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums;
  min-width: 100%; }
caption { text-align: left; font-weight: 600; font-size: 14px; padding: 4px 0 6px; }
th, td { padding: 4px 6px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { font-weight: 500; font-size: 12px; color: var(--soft); vertical-align: bottom;
  white-space: normal; min-width: 4em; line-height: 1.3; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--back);
  font-weight: 500; padding-left: 0; white-space: normal; overflow-wrap: anywhere;
  min-width: 10em; max-width: 17em; }
td:last-child, th:last-child { padding-right: 2px; }
@media screen and (max-width: 640px) { .more { display: none; } .phone { display: block; }
  th, td { padding: 4px 3px; } thead th { min-width: 0; font-size: 11px; } }
tr.best td, tr.best th { font-weight: 700; }
dl.facts { margin-bottom: 26px; }
.key { float: left; width: 10px; height: 10px; border-radius: 2px; margin: 6px 8px 0 0;
  background: var(--c); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 24px 40px; }
figure { margin: 12px 0; min-width: 0; max-width: 560px; break-inside: avoid; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 8px; }
figcaption small { display: block; font-weight: 400; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg.full { display: none; }
@media screen and (min-width: 970px) { figure.alone { grid-column: 1 / -1; max-width: none; }
  svg.full { display: block; } svg.half { display: none; } }
svg text { font-size: 12px; fill: var(--text); font-variant-numeric: tabular-nums; }
svg .tick, svg .axis { fill: var(--soft); }
svg .value, svg .group { paint-order: stroke; stroke: var(--back); stroke-width: 4px; }
svg .group { font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 1; fill: none; }
svg .rule { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 2 3; fill: none; }
svg .line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
svg .line.dashed { stroke-dasharray: 6 4; stroke-width: 1.6; }
svg .mark { fill: var(--c); stroke: var(--back); stroke-width: 1; }
svg .mark.dashed { fill: var(--back); stroke: var(--c); stroke-width: 1.4; }
svg .whisker { stroke: var(--c); stroke-width: 1.2; fill: none; }
svg .whisker.over { stroke: var(--text); }
svg .leader { stroke: var(--c); stroke-width: .8; opacity: .6; fill: none; }
svg text.name[class*=" c"] { fill: var(--c); font-weight: 600; }
svg .bar { fill: var(--c); }
svg .part { stroke: var(--back); stroke-width: 1; }
svg rect.p0 { fill: #e69f00; } svg rect.p1 { fill: #0072b2; } svg rect.p2 { fill: #36b890; }
  svg rect.p3 { fill: #cc79a7; }
svg rect.p4 { fill: #a9b0b8; }
svg text.inside { fill: #14171a; font-weight: 600; } svg text.inside.p1 { fill: #fff; }
details { margin: 5px 0; } details details { margin: 2px 0 2px 18px; }
summary { cursor: pointer; font-size: 14px; font-weight: 500; padding: 4px 0; }
.prompt, .reply { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px;
  line-height: 1.75; margin: 6px 0 14px;
  padding: 10px 14px; border-radius: 6px; }
.prompt { border: 1px solid var(--line); color: var(--soft); max-height: 15em; overflow: auto;
  line-height: 1.5; }
.prompt, .reply { unicode-bidi: plaintext; text-align: start; }
.reply { background: var(--panel); position: relative; }
.legend i { unicode-bidi: isolate; }
.reply i, .legend i { font-style: normal; border-radius: 3px; padding: 1px 0;
  border-bottom: 2px solid transparent; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 16px; font-size: 13px; margin: 10px 0;
  padding: 0; list-style: none; }
.legend i { padding: 1px 7px; }
i.own { border-bottom-color: var(--own); }
i.first { border-bottom: 2px dotted var(--soft); }
i.d1 { background: rgb(var(--draft) / .13); } i.d2 { background: rgb(var(--draft) / .22); }
i.d3 { background: rgb(var(--draft) / .31); } i.d4 { background: rgb(var(--draft) / .40); }
i.d5 { background: rgb(var(--draft) / .49); } i.d6 { background: rgb(var(--draft) / .58); }
.reply i.on { outline: 2px solid var(--focus); }
.nl { color: var(--soft); opacity: .7; }
#tip { position: absolute; z-index: 9; width: max-content; max-width: min(340px, 100%);
  text-align: left; direction: ltr; user-select: none; padding: 8px 11px;
  border-radius: 6px; pointer-events: none;
  background: var(--text); color: var(--back); font: 12.5px/1.5 ui-monospace, Menlo, Consolas,
  monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
#tip[hidden] { display: none; }
:focus-visible { outline: 2px solid var(--focus); outline-offset: 2px; }
dl.words { font-size: 14px; } dl.words dt { font-weight: 600; margin-top: 8px; } dl.words dd {
  margin: 0; color: var(--soft); }
@media (max-width: 600px) { main { padding: 22px 16px 60px; } h1 { font-size: 22px; } svg text {
  font-size: 13px; }
  th:first-child { min-width: 7em; max-width: 11em; }
  dl.facts { grid-template-columns: minmax(0, 1fr); gap: 0; } dl.facts dd { margin-bottom: 6px; } }
@media print { body { font-size: 11px; } main { max-width: none; padding: 0; } nav {
  display: none; }
  .wide { overflow: visible; } table, thead th { font-size: 9px; } th, td { padding: 3px 4px; }
  .key { width: 7px; height: 7px; margin-right: 4px; } .prompt { max-height: none; }
  #tip, .copy, .switches { display: none; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  tr, figure { break-inside: avoid; } h2, h3, h4 { break-after: avoid; } }
"""

# The classes c0, c1, .. only set the variable --c, so that a drafter's line, markers and key in a
# table get one colour. 0 is neutral; from c8 on the colours begin again.
for _look in range(LOOKS + 1):
    _colour = 1 + (_look - 1) % COLOURS if _look else 0
    STYLE += f".c{_look} {{ --c: var(--c{_colour}); }}\n"
