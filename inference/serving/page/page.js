// The page of `draftsmith serve`: a chat over the server's own API, with what was drafted.

import { ask, eventsOf } from "./api.js";
import { advance, newColumn, receive, textOf } from "./columns.js";
import { $, button, copy, element } from "./elements.js";
import { CODE, REQUESTS } from "./examples.js";
import { contentOf, drawn, sentence } from "./view.js";

const STORE = "draftsmith.2";
const DRAW_MS = 100; // between two drawings of a running reply: the target may need this processor
const FIELDS = ["temperature", "limit", "key"];
const SWITCHES = ["compare", "marks", "markdown"];
let models = [];
let turns = []; // {role, content}, and of replies {columns, running, stopped} too
let running = null; // AbortController of the reply that is being written
let editing = false; // the next message replaces the last one and its reply
let drawing = null; // timer of the next drawing

function save() {
  const kept = { turns, model: $("model").value };
  for (const name of FIELDS) kept[name] = $(name).value;
  for (const name of SWITCHES) kept[name] = $(name).checked;
  try {
    sessionStorage.setItem(STORE, JSON.stringify(kept));
  } catch {
    // The store is full or forbidden: only a reload loses the conversation.
  }
}

function restore() {
  let kept = null;
  try {
    kept = JSON.parse(sessionStorage.getItem(STORE));
  } catch {
    // The store is damaged or forbidden: start with no conversation.
  }
  if (!kept) return;
  turns = kept.turns || [];
  for (const turn of turns) if (turn.running) settle(turn, true);
  if (turns.length && !turns.at(-1).content) turns.splice(-2);
  for (const name of FIELDS) $(name).value = kept[name] ?? $(name).value;
  for (const name of SWITCHES) $(name).checked = kept[name] ?? $(name).checked;
  $("markdown").dataset.chosen = "yes";
  $("model").dataset.wanted = kept.model || "";
}

const chosen = () => models.find((model) => model.id === $("model").value);

async function loadModels() {
  models = (await (await ask("v1/models", $("key").value)).json()).data;
  $("key-row").hidden = true;
  const base = models.find((model) => model.parent === null);
  $("title").textContent = base.title;
  $("about").textContent = base.about;
  document.title = `${base.title} - draftsmith`;
  const drafters = models.filter((model) => model.parent !== null);
  const select = $("model");
  const wanted = select.value || select.dataset.wanted;
  select.replaceChildren();
  for (const model of drafters) {
    if (model.drafter === "plain") model.title = "none (plain decoding)";
    const option = element("option", "", model.title);
    option.value = model.id;
    select.append(option);
  }
  if (drafters.some((model) => model.id === wanted)) select.value = wanted;
  const code = base.code || !base.chat;
  document.body.classList.toggle("writes-code", code);
  if (!$("markdown").dataset.chosen) $("markdown").checked = !code;
  offer(code ? CODE : REQUESTS);
  show();
}

function offer(examples) {
  $("examples").replaceChildren(...examples.map(([kind, words]) => {
    const made = button("example", "");
    made.append(element("b", "", kind), element("span", "", words));
    made.addEventListener("click", () => {
      if (!running) send(words);
      $("words").focus();
    });
    return made;
  }));
}

const limit = () => Math.max(1, Math.floor(Number($("limit").value)) || 256);

function requestOf(model) {
  const body = { seed: Math.floor(Math.random() * 2 ** 31), max_tokens: limit(),
    temperature: Number($("temperature").value) || 0, stream: true, return_pieces: true };
  if (model.chat) {
    body.messages = turns.map(({ role, content }) => ({ role, content }));
    return ["v1/chat/completions", body];
  }
  // Without a chat template the last message is a text that the target continues.
  body.prompt = turns.at(-1).content;
  return ["v1/completions", body];
}

// Draw all turns again.
function show(below = true) {
  clearTimeout(drawing);
  drawing = null;
  $("log").replaceChildren(...turns.map(draw));
  $("intro").hidden = turns.length > 0 || !models.length;
  $("legend").hidden = turns.length === 0;
  scroll(below);
}

function draw(turn, index) {
  const last = index >= turns.length - 2;
  const made = drawn(turn, { markdown: $("markdown").checked, last, limit: limit() });
  made.classList.toggle("replaced", editing && last);
  return made;
}

// Draw the last turn again soon, with everything that arrives until then.
function showSoon() {
  drawing ??= setTimeout(() => {
    drawing = null;
    const below = atEnd();
    $("log").lastElementChild.replaceWith(draw(turns.at(-1), turns.length - 1));
    scroll(below);
  }, DRAW_MS);
}

const main = document.querySelector("main");
const atEnd = () => main.scrollHeight - main.scrollTop - main.clientHeight < 60;

// Do not scroll if the reader has scrolled up.
function scroll(wanted) {
  if (wanted) main.scrollTo(0, turns.length ? main.scrollHeight : 0);
}

function busy(controller) {
  running = controller;
  document.body.classList.toggle("busy", Boolean(controller));
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  for (const name of ["fresh", "model"]) $(name).disabled = Boolean(controller);
}

function fail(error) {
  if (error?.status === 401) {
    $("key-row").hidden = false;
    $("key").focus();
  }
  // A key that was not given yet is not an error: the field asks for it.
  const shown = error && !(error.status === 401 && !$("key").value);
  $("error").textContent = shown ? `Error: ${error.message}` : "";
  $("error").hidden = !shown;
}

// End a turn: show all that has arrived, even if a column waits for another one.
function settle(turn, stopped) {
  const ended = turn.columns.map((column) => column.ended);
  for (const column of turn.columns) column.ended = true;
  advance(turn.columns);
  Object.assign(turn, { running: false, stopped: stopped && ended.includes(false) });
  turn.content = contentOf(turn);
}

async function send(words) {
  fail(null);
  if (editing) turns.splice(-2);
  edit(false);
  turns.push({ role: "user", content: words });
  const model = chosen();
  const [path, body] = requestOf(model);
  const plain = models.find((other) => other.drafter === "plain");
  const asked = $("compare").checked && model !== plain ? [model, plain] : [model];
  const turn = { role: "assistant", content: "", columns: asked.map(newColumn), running: true };
  turns.push(turn);
  show();
  const controller = new AbortController();
  busy(controller);
  $("status").textContent = "The reply is being written.";
  let stopped = false;
  try {
    await Promise.all(asked.map(async ({ id }, place) => {
      const answer = await ask(path, $("key").value, { ...body, model: id }, controller.signal);
      for await (const event of eventsOf(answer)) {
        receive(turn.columns[place], event);
        advance(turn.columns);
        showSoon();
      }
    }));
  } catch (error) {
    controller.abort(); // the other column too
    stopped = true;
    if (error.name !== "AbortError") fail(error);
  }
  settle(turn, stopped);
  if (stopped && !turn.content) {
    // Nothing arrived: put the message back so that it can be sent again.
    turns.splice(-2);
    if (!$("words").value) $("words").value = words;
  }
  busy(null);
  save();
  show(atEnd());
  const both = turn.columns.length > 1 && !stopped;
  $("status").textContent = stopped ? "The reply was stopped."
    : `The reply has ended. ${both ? sentence(turn) : ""}`;
}

// Put the last message back into the field for editing, or cancel that.
function edit(on) {
  if (on === editing) return;
  editing = on;
  $("editing").hidden = !on;
  $("words").value = on ? turns.at(-2).content : "";
  for (const row of [...$("log").children].slice(-2)) row.classList.toggle("replaced", on);
  if (on) $("words").focus();
}

function retry() {
  const { content } = turns.at(-2);
  turns.splice(-2);
  send(content);
}

function mark() {
  document.body.classList.toggle("unmarked", !$("marks").checked);
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const words = $("words").value;
  if (running || !words.trim()) return;
  for (const field of [$("temperature"), $("limit")]) {
    if (field.checkValidity()) continue;
    $("settings").open = true;
    field.reportValidity();
    return;
  }
  try {
    if (!models.length) await loadModels();
  } catch (error) {
    fail(error);
    return;
  }
  $("words").value = "";
  send(words);
});
$("words").addEventListener("keydown", (event) => {
  // An input method uses Enter to choose a character.
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    $("form").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("words").value && turns.length && !running) {
    event.preventDefault();
    edit(true);
  }
});
$("log").addEventListener("click", ({ target }) => {
  if (target.matches(".copy-code")) copy(target.nextElementSibling.textContent, target);
  if (target.matches(".copy")) {
    const place = [...$("log").children].indexOf(target.closest(".turn"));
    copy(textOf(turns[place].columns[0]), target);
  }
  if (target.matches(".edit") && !running) edit(true);
  if (target.matches(".retry") && !running) retry();
});
$("stop").addEventListener("click", () => running?.abort());
$("cancel").addEventListener("click", () => edit(false));
$("fresh").addEventListener("click", () => {
  edit(false);
  turns = [];
  fail(null);
  save();
  show();
  $("words").focus();
});
$("markdown").addEventListener("change", () => {
  $("markdown").dataset.chosen = "yes";
  show(false);
});
$("marks").addEventListener("change", mark);
$("key").addEventListener("change", () => loadModels().then(() => fail(null), fail));
for (const name of ["model", ...FIELDS, ...SWITCHES]) $(name).addEventListener("change", save);
document.addEventListener("click", (event) => {
  if (!$("settings").contains(event.target)) $("settings").open = false;
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if ($("settings").open) $("settings").open = false;
  else if (running) running.abort();
  else edit(false);
});
window.addEventListener("beforeunload", save);

restore();
mark();
show();
loadModels().then(save, fail);
