// Columns: a reply as one drafter writes it, with tau, speed and a clock.
//
// The engine decodes the columns of a comparison at the same time, a round of each in turn. A column's
// clock adds up the seconds of its own rounds, from its first token on. Text is shown up to the slowest
// clock of the columns that have not ended, so that all columns are at the same time on their clocks,
// however the server divides its time between them.

export function newColumn(model) {
  return { title: model.title, plain: model.drafter === "plain", pieces: [], arrived: [], clock: 0,
    total: 0, tokens: 0, rounds: 0, seconds: 0, acceptance: [], finish: null, ended: false };
}

export function receive(column, event) {
  const [{ pieces, round, finish_reason: finish }] = event.choices;
  column.clock += round.seconds;
  column.arrived.push({ pieces, finish, tokens: round.tokens, at: column.clock,
    acceptance: event.draftsmith?.acceptance });
  if (finish) column.ended = true;
}

// Show the text that has arrived, up to the slowest clock; all of it once every column has ended.
export function advance(columns) {
  const now = Math.min(...columns.filter((one) => !one.ended).map((one) => one.clock));
  for (const column of columns) {
    while (column.arrived.length && column.arrived[0].at <= now) take(column, column.arrived.shift());
  }
}

function take(column, step) {
  for (const piece of step.pieces) {
    const last = column.pieces.at(-1);
    if (last?.drafted === piece.drafted) last.text += piece.text;
    else column.pieces.push({ ...piece });
  }
  // The first token is the prefill's: it belongs to no round.
  if (column.total) {
    column.rounds += 1;
    column.tokens += step.tokens;
    column.seconds = step.at;
  }
  column.total += step.tokens;
  column.finish = step.finish;
  column.acceptance = step.acceptance || column.acceptance;
}

export const textOf = (column) => column.pieces.map((piece) => piece.text).join("");
export const tau = (column) => (column.rounds ? column.tokens / column.rounds : NaN);
export const speed = (column) => (column.seconds ? column.tokens / column.seconds : NaN);

// Comparison of two finished replies: are their texts equal, and where do they first differ?
export function compared([drafted, plain]) {
  const [one, other] = [drafted, plain].map((column) => [...textOf(column)]);
  let at = 0;
  while (at < one.length && one[at] === other[at]) at += 1;
  const same = at === one.length && at === other.length;
  const around = (text) => text.slice(at, at + 24).join("");
  return { same, at, drafted: around(one), plain: around(other), ratio: speed(drafted) / speed(plain) };
}
