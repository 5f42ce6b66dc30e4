// Drawing of turns.

import { compared, speed, tau, textOf } from "./columns.js";
import { button, element } from "./elements.js";
import { asWritten, formatted } from "./markdown.js";

const rate = (value) => `${value < 10 ? value.toFixed(1) : Math.round(value)} tokens/s`;

// The element of a turn. `look`: {markdown, last, limit}; only the last turn can be edited or retried.
export function drawn(turn, look) {
  return turn.role === "user" ? question(turn, look) : reply(turn, look);
}

function question(turn, look) {
  const row = element("div", "turn user");
  const text = element("div", "text", turn.content);
  text.dir = "auto";
  row.append(text);
  if (look.last) row.append(actions(button("edit", "Edit", "Edit this message")));
  return row;
}

function reply(turn, look) {
  const row = element("article", `turn reply${turn.columns.length > 1 ? " pair" : ""}`);
  row.setAttribute("aria-busy", String(turn.running));
  const columns = element("div", "columns");
  columns.append(...turn.columns.map((column) => drawnColumn(column, turn, look)));
  row.append(columns);
  if (turn.columns.length > 1 && !turn.running && !turn.stopped) row.append(verdict(turn));
  if (turn.running) return row;
  const copy = button("copy", "Copy", "Copy this reply");
  row.append(actions(copy, ...(look.last ? [button("retry", "Retry", "Ask again")] : [])));
  return row;
}

function actions(...buttons) {
  const made = element("p", "actions");
  made.append(...buttons);
  return made;
}

function drawnColumn(column, turn, look) {
  const made = element("section", "column");
  const head = element("div", "head");
  head.append(element("h2", "", column.plain ? "Plain decoding" : column.title), figures(column));
  if (turn.running) head.append(progress(column, turn.columns, look.limit));
  made.append(head, text(column, look.markdown));
  const notes = [];
  if (column.finish === "length") notes.push(`cut at ${column.total} tokens`);
  if (turn.stopped && !column.finish) notes.push("stopped");
  if (column.finish && column.acceptance.length) {
    const shares = column.acceptance.map((share) => `${Math.round(share * 100)}%`);
    notes.push(`drafts accepted, by position where reached: ${shares.join(" ")}`);
  }
  if (notes.length) made.append(element("p", "notes", notes.join(" · ")));
  return made;
}

function figures(column) {
  const line = element("p", "figures");
  if (!column.total) line.append("waiting for the first token");
  else if (!column.rounds) line.append("1 token");
  else {
    line.append(element("b", "", rate(speed(column))));
    line.append(" · ", element("b", "", `${tau(column).toFixed(2)} tokens a round`), " (tau)");
    line.append(` · ${column.total} tokens in ${column.seconds.toFixed(1)} s`);
  }
  return line;
}

// Progress of a column: towards the limit, or, once the other has ended, towards its equal text.
function progress(column, columns, limit) {
  const ended = columns.find((one) => one.finish);
  const bar = element("progress");
  Object.assign(bar, { max: ended ? ended.total : limit, value: column.total });
  bar.setAttribute("aria-label", `Tokens of ${column.title}`);
  return bar;
}

function text(column, markdown) {
  let nodes = null;
  if (markdown) {
    try {
      nodes = formatted(column.pieces);
    } catch {
      // The parser fails on deep nesting: show the reply as it was written.
    }
  }
  const made = element("div", nodes ? "text markdown" : "text written");
  made.dir = "auto";
  made.append(...(nodes || asWritten(column.pieces)));
  return made;
}

// Sentence on the difference of the two replies.
export function sentence(turn) {
  const { same, at, drafted, plain, ratio } = compared(turn.columns);
  const times = Number.isFinite(ratio) ? `${ratio.toFixed(2)}x the speed of plain decoding` : "";
  const differ = `The texts differ from character ${at + 1} on: "${drafted}" with drafts, "${plain}" without`;
  return [same ? "Same text" : differ, times].filter(Boolean).join(" · ");
}

function verdict(turn) {
  const line = element("div", "verdict");
  line.append(element("strong", "", sentence(turn)));
  const how = element("details");
  how.append(element("summary", "", "How they are timed"), element("p", "",
    "Both replies were decoded at the same time, a round of each in turn (one after the other where the " +
    "server decodes one batch at a time). Each has a clock that counts its own rounds alone, from its " +
    "first token on, and both texts were shown at the same time on these clocks. Either one alone would have " +
    "finished sooner."));
  line.append(how);
  return line;
}

export const contentOf = (turn) => textOf(turn.columns[0]);
