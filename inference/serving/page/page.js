// The page of `draftsmith serve`: a chat over the server's own API. Texts of prompts and replies are
// only ever set as text, never as HTML.
"use strict";

const STORE = "draftsmith";
const $ = (name) => document.getElementById(name);
let models = [];
let turns = []; // {role, content, pieces, figures, plain, drafter}
let running = null; // AbortController of the reply that is being written

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function save() {
  const kept = { turns, model: $("model").value, temperature: $("temperature").value,
    limit: $("limit").value, compare: $("compare").checked, key: $("key").value };
  try {
    sessionStorage.setItem(STORE, JSON.stringify(kept));
  } catch {
    // A full or forbidden store: the conversation is gone after a reload, and nothing else.
  }
}

function restore() {
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(STORE));
  } catch {
    // Damaged or forbidden: begin again.
  }
  if (!kept) return;
  turns = kept.turns || [];
  for (const name of ["temperature", "limit", "key"]) $(name).value = kept[name] ?? $(name).value;
  for (const turn of turns) if (turn.plain === "running") delete turn.plain;
  $("compare").checked = kept.compare !== false;
  $("model").dataset.wanted = kept.model || "";
}

async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const options = body ? { method: "POST", headers, signal, body: JSON.stringify(body) } : { headers };
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  if (answer.status === 401) {
    $("key-row").hidden = false;
    $("key").focus();
  }
  let message = `the server answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not the server's own form: the status has to do.
  }
  const error = new Error(message);
  // Who has given no key has made no mistake: the field asks for it.
  error.expected = answer.status === 401 && !$("key").value;
  throw error;
}

async function loadModels() {
  models = (await (await ask("v1/models")).json()).data;
  $("key-row").hidden = true;
  const base = models.find((model) => model.parent === null);
  $("title").textContent = base.id;
  document.title = `${base.id} - draftsmith`;
  const select = $("model");
  const wanted = select.value || select.dataset.wanted;
  select.replaceChildren();
  for (const model of models) {
    if (model.parent === null) continue;
    const name = model.drafter === "plain" ? "none (plain decoding)" : model.drafter;
    const option = element("option", "", name);
    option.value = model.id;
    select.append(option);
  }
  if ([...select.options].some((option) => option.value === wanted)) select.value = wanted;
}

function requestOf(model, seed) {
  const chosen = models.find((entry) => entry.id === model);
  const body = { model, seed, temperature: Number($("temperature").value) || 0,
    max_tokens: Math.max(1, Math.floor(Number($("limit").value)) || 256) };
  if (chosen.chat) {
    body.messages = turns.map(({ role, content }) => ({ role, content }));
    return ["v1/chat/completions", body];
  }
  // Without a chat template the last message is a text that the target continues.
  body.prompt = turns.filter((turn) => turn.role === "user").at(-1).content;
  return ["v1/completions", body];
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).replace(/^data: /, "");
      text = text.slice(end + 2);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

const speed = (figures) => {
  const rate = figures.tokens_per_second;
  return rate ? `${rate < 10 ? rate.toFixed(1) : Math.round(rate)} tokens/s` : "";
};

function figuresOf(turn) {
  const line = element("p", "figures");
  const add = (text, strong) => line.append(strong ? element("b", "", text) : text);
  if (turn.stopped) add("stopped · ");
  if (turn.figures) {
    add(`${turn.drafter}: `);
    if (turn.figures.tau) {
      add(`${turn.figures.tau.toFixed(2)} tokens a round`, true);
      add(" (tau)");
    }
    const shares = turn.figures.acceptance.map((share) => `${Math.round(share * 100)}%`);
    if (shares.length) add(` · accepted where reached ${shares.join(" ")}`);
    if (turn.figures.tokens_per_second) {
      add(" · ");
      add(speed(turn.figures), true);
    }
  }
  if (turn.plain === "running") add(" · decoding plainly …");
  else if (turn.plain) {
    const ratio = turn.figures.tokens_per_second / turn.plain.figures.tokens_per_second;
    add(` · plain decoding ${speed(turn.plain.figures)}`);
    if (Number.isFinite(ratio)) {
      add(", ");
      add(`${ratio.toFixed(2)}x with drafts`, true);
    }
    add(turn.plain.same ? ", the same text" : ", another text");
  }
  return line;
}

function draw(turn) {
  const row = element("div", `turn ${turn.role === "user" ? "user" : "reply"}`);
  const text = element("div", "text");
  text.dir = "auto";
  if (turn.pieces) {
    for (const piece of turn.pieces) {
      text.append(element("span", piece.drafted ? "drafted" : "", piece.text));
    }
  } else {
    text.textContent = turn.content;
  }
  row.append(text);
  if (turn.role !== "user") row.append(figuresOf(turn));
  return row;
}

function show() {
  $("log").replaceChildren(...turns.map(draw));
  $("empty").hidden = turns.length > 0;
  document.querySelector("main").scrollTo(0, 1e9);
}

function showLast() {
  $("log").lastElementChild.replaceWith(draw(turns.at(-1)));
  document.querySelector("main").scrollTo(0, 1e9);
}

function busy(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  for (const name of ["fresh", "model"]) $(name).disabled = on;
}

function fail(error) {
  const shown = error && !error.expected;
  $("error").textContent = shown ? `Error: ${error.message}` : "";
  $("error").hidden = !shown;
}

async function send(words) {
  fail(null);
  const model = $("model").value;
  const seed = Math.floor(Math.random() * 2 ** 31);
  turns.push({ role: "user", content: words });
  const [path, body] = requestOf(model, seed);
  const drafter = models.find((entry) => entry.id === model).drafter;
  const turn = { role: "assistant", content: "", pieces: [], drafter };
  turns.push(turn);
  show();
  running = new AbortController();
  busy(true);
  try {
    const asked = { ...body, stream: true, return_pieces: true };
    const answer = await ask(path, asked, running.signal);
    for await (const event of eventsOf(answer)) {
      turn.pieces.push(...event.choices[0].pieces);
      turn.figures = event.draftsmith || turn.figures;
      showLast();
    }
    turn.content = turn.pieces.map((piece) => piece.text).join("");
    if ($("compare").checked && drafter !== "plain") await comparePlain(turn, path, body);
  } catch (error) {
    turn.content = turn.pieces.map((piece) => piece.text).join("");
    if (turn.plain === "running") delete turn.plain;
    turn.stopped = error.name === "AbortError";
    if (!turn.stopped) fail(error);
    if (!turn.content) {
      // Nothing came: the message goes back to where it can be sent again.
      turns.splice(-2);
      if (!$("words").value) $("words").value = words;
    }
  }
  running = null;
  busy(false);
  save();
  show();
}

async function comparePlain(turn, path, body) {
  turn.plain = "running";
  showLast();
  const plain = models.find((model) => model.drafter === "plain");
  const answer = await (await ask(path, { ...body, model: plain.id }, running.signal)).json();
  const [choice] = answer.choices;
  const text = choice.message ? choice.message.content : choice.text;
  turn.plain = { figures: answer.draftsmith[0], same: text === turn.content };
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = $("words").value;
  if (running || !words.trim()) return;
  if (!models.length) {
    try {
      await loadModels();
      fail(null);
    } catch (error) {
      fail(error);
      return;
    }
  }
  $("words").value = "";
  send(words);
});
$("words").addEventListener("keydown", (event) => {
  // An input method uses Enter to choose a character.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("stop").addEventListener("click", () => running && running.abort());
$("fresh").addEventListener("click", () => {
  turns = [];
  fail(null);
  save();
  show();
  $("words").focus();
});
$("colours").addEventListener("change", () => {
  document.body.classList.toggle("plain", !$("colours").checked);
});
$("key").addEventListener("change", () => loadModels().then(() => fail(null), fail));
for (const name of ["model", "temperature", "limit", "compare", "key"]) {
  $(name).addEventListener("change", save);
}
document.addEventListener("click", (event) => {
  if (!$("settings").contains(event.target)) $("settings").open = false;
});
window.addEventListener("beforeunload", save);

restore();
show();
loadModels().then(save, fail);
