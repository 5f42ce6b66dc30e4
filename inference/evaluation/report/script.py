"""Script of a report's page. Without it the page shows the same numbers.

With it tables are sorted by their headings, rows are switched by temperature and batch size,
commands are copied, and the `title` of a reply's token is shown in a bubble: under the pointer, on
touch, and with the arrow keys. One bubble is open from the beginning, so that readers see that
there are any.
"""

from __future__ import annotations

SCRIPT = """
function make(tag, text, kind) {
  const made = document.createElement(tag); made.textContent = text; made.className = kind || '';
  if (tag === 'button') made.type = 'button';
  return made;
}

// Cells are compared as numbers where they begin with one; those without a value come last.
const units = { kB: 1e3, MB: 1e6, GB: 1e9 };
function value(row, column) {
  const text = row.cells[column].textContent.trim(), number = parseFloat(text);
  if (!column || !Number.isFinite(number)) return text === '\u2013' ? null : text;
  return number * (units[text.split(' ')[1]] || 1);
}
function compare(a, b) {
  return typeof a === 'number' && typeof b === 'number' ? a - b : String(a).localeCompare(b);
}
function sort(table, column) {
  const head = table.tHead.rows[0].cells[column], body = table.tBodies[0];
  const rows = [...body.rows], before = head.getAttribute('aria-sort');
  const numbers = rows.some(row => typeof value(row, column) === 'number');
  const up = before ? before === 'descending' : !numbers;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  rows.sort((a, b) => {
    const x = value(a, column), y = value(b, column);
    if (x === null || y === null) return (x === null) - (y === null);
    return up ? compare(x, y) : compare(y, x);
  });
  body.append(...rows);
}
function switches(table) {
  const rows = [...table.tBodies[0].rows], chosen = new Map(), box = make('div', '', 'switches');
  for (const column of (table.dataset.switches || '').split(' ').filter(Boolean)) {
    const name = table.tHead.rows[0].cells[column].textContent, group = make('div', name + ' ');
    const values = [...new Set(rows.map(row => row.cells[column].textContent))];
    if (values.length < 2) continue;
    group.setAttribute('role', 'group'); group.setAttribute('aria-label', name);
    for (const text of ['all', ...values]) {
      const button = make('button', text);
      button.setAttribute('aria-pressed', text === 'all');
      button.addEventListener('click', () => {
        for (const other of group.children) other.setAttribute('aria-pressed', other === button);
        chosen.set(column, text);
        for (const row of rows) row.hidden = [...chosen].some(([at, wanted]) =>
          wanted !== 'all' && row.cells[at].textContent !== wanted);
      });
      group.append(button);
    }
    box.append(group);
  }
  if (box.children.length) table.parentElement.before(box);
}
for (const table of document.querySelectorAll('table')) {
  switches(table);
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = make('button', '');
    button.append(...head.childNodes); head.append(button);
    button.addEventListener('click', () => sort(table, column));
  });
}

async function copy(text) {
  try { await navigator.clipboard.writeText(text); return; } catch (refused) { /* as below */ }
  const area = make('textarea', text);
  document.body.append(area); area.select(); document.execCommand('copy'); area.remove();
}
for (const command of document.querySelectorAll('code.command')) {
  const button = make('button', 'copy', 'copy');
  button.setAttribute('aria-live', 'polite');
  button.addEventListener('click', async () => {
    await copy(command.textContent);
    button.textContent = 'copied';
    setTimeout(() => { button.textContent = 'copy'; }, 2000);
  });
  command.after(button);
}

const tip = make('div', ''); tip.id = 'tip'; tip.hidden = true; tip.setAttribute('role', 'status');
document.body.append(tip);
let on = null, example = false;
function show(token) {
  if (on === token) return;
  if (on) { on.title = tip.textContent; on.classList.remove('on'); }
  on = token; example = false; tip.hidden = !token;
  if (!token) return;
  tip.textContent = token.title; token.removeAttribute('title'); token.classList.add('on');
  // In the reply's box, so that it moves and is folded with it.
  token.closest('.reply').append(tip);
  place();
}
function place() {
  const at = on.getClientRects()[0] || on.getBoundingClientRect();
  const box = tip.parentElement.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const above = at.bottom + 8 + size.height > innerHeight && at.top - 8 > size.height;
  tip.style.left = `max(0px, min(${at.left - box.left}px, 100% - ${size.width}px))`;
  tip.style.top = (above ? at.top - 8 - size.height : at.bottom + 8) - box.top + 'px';
}
document.addEventListener('pointerover', e => {
  const token = e.target.closest('.reply i');
  if (token || !example) show(token);
});
document.addEventListener('focusout', () => { if (!example) show(null); });
addEventListener('resize', () => { if (on) place(); });
document.addEventListener('keydown', e => {
  const reply = e.target.closest('.reply');
  if (e.key === 'Escape') show(null);
  if (!reply || (e.key !== 'ArrowRight' && e.key !== 'ArrowLeft')) return;
  e.preventDefault();
  const tokens = [...reply.querySelectorAll('i')], step = e.key === 'ArrowRight' ? 1 : -1;
  show(tokens[Math.max(0, Math.min(tokens.length - 1, tokens.indexOf(on) + step))]);
});
const first = document.querySelector('.reply');
if (first) show(first.querySelector('i.d1') || first.querySelector('i'));
example = !tip.hidden;
"""
