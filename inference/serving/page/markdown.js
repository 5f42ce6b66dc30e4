// Replies as Markdown, with accepted drafts marked. Every node is created by its name and every text is
// set as text: HTML is never parsed, neither the model's nor the parser's.

import { Lexer } from "./marked.esm.js";
import { button, element } from "./elements.js";

const TAGS = { paragraph: "p", blockquote: "blockquote", strong: "strong", em: "em", del: "del" };

// Nodes of a reply as it was written: a span for each run of drafted or other tokens.
export const asWritten = (pieces) =>
  pieces.map((piece) => element("span", piece.drafted ? "drafted" : "", piece.text));

// Nodes of a reply as Markdown.
export function formatted(pieces) {
  const marks = new Marks(pieces);
  return nodes(Lexer.lex(marks.source, { gfm: true, breaks: true }), marks);
}

// Locates the texts of the parsed reply in the reply as it was written, to find out what was drafted.
class Marks {
  constructor(pieces) {
    this.pieces = pieces;
    this.source = pieces.map((piece) => piece.text).join("");
    this.place = 0; // characters of the source before the next text
    this.piece = 0; // piece that holds `place`
    this.start = 0; // characters before that piece
  }

  // The nodes of a text. The parser removes indents and quotation marks from the lines of a text, so
  // each line is searched for separately; one that it has changed is left unmarked.
  of(text) {
    return text.split(/(?<=\n)/).flatMap((line) => {
      const found = this.source.indexOf(line.replace(/\n$/, ""), this.place);
      if (found < 0) return [line];
      this.place = found;
      return this.runs(line);
    });
  }

  runs(line) {
    const made = [];
    while (line) {
      const piece = this.pieces[this.piece];
      const left = piece ? this.start + piece.text.length - this.place : Infinity;
      if (left <= 0) {
        this.start += piece.text.length;
        this.piece += 1;
        continue;
      }
      const run = line.slice(0, left);
      made.push(piece?.drafted ? element("span", "drafted", run) : run);
      this.place += run.length;
      line = line.slice(left);
    }
    return made;
  }
}

const nodes = (tokens, marks) => tokens.flatMap((token) => nodesOf(token, marks));

function filled(tag, children) {
  const made = element(tag);
  made.append(...children);
  return made;
}

function nodesOf(token, marks) {
  const inside = () => nodes(token.tokens, marks);
  if (token.type in TAGS) return [filled(TAGS[token.type], inside())];
  switch (token.type) {
    case "space":
      return [];
    case "text":
      return token.tokens ? inside() : marks.of(token.text);
    case "escape":
      return marks.of(token.text);
    case "heading": // below the page's own headings
      return [filled(`h${Math.min(token.depth + 2, 6)}`, inside())];
    case "br":
    case "hr":
      return [element(token.type)];
    case "codespan":
      return [filled("code", marks.of(token.text))];
    case "code":
      return [codeBlock(token, marks)];
    case "list":
      return [list(token, marks)];
    case "checkbox":
      return [token.checked ? "☑ " : "☐ "];
    case "table":
      return [table(token, marks)];
    case "link":
      return /^https?:\/\//i.test(token.href) ? [link(token.href, inside())] : marks.of(token.raw);
    default: // HTML, images, definitions of links: as they were written
      return marks.of(token.raw);
  }
}

function link(href, children) {
  const made = filled("a", children);
  Object.assign(made, { href, target: "_blank", rel: "noopener noreferrer" });
  return made;
}

function codeBlock(token, marks) {
  const block = element("div", "code");
  const copy = button("copy-code", "Copy", "Copy this code");
  const pre = filled("pre", [filled("code", marks.of(token.text))]);
  pre.tabIndex = 0; // so that keys can scroll it
  block.append(element("span", "language", token.lang || "code"), copy, pre);
  return block;
}

function list(token, marks) {
  const items = token.items.map((item) => filled("li", nodes(item.tokens, marks)));
  const made = filled(token.ordered ? "ol" : "ul", items);
  if (token.ordered) made.start = token.start;
  return made;
}

function table(token, marks) {
  const row = (tag) => (cells) =>
    filled("tr", cells.map((cell) => {
      const made = filled(tag, nodes(cell.tokens, marks));
      if (cell.align) made.className = cell.align;
      return made;
    }));
  const head = filled("thead", [row("th")(token.header)]);
  const made = filled("table", [head, filled("tbody", token.rows.map(row("td")))]);
  const frame = element("div", "table");
  frame.tabIndex = 0;
  frame.append(made);
  return frame;
}
