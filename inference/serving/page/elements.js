// Elements, and copying.

export const $ = (name) => document.getElementById(name);

export function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function button(className, text, label) {
  const made = element("button", className, text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  return made;
}

// Copy a text, and say on the button for a moment that it was.
export async function copy(text, pressed) {
  const before = pressed.textContent;
  pressed.textContent = (await copied(text)) ? "Copied" : "Not copied";
  setTimeout(() => (pressed.textContent = before), 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers have no clipboard for pages of other machines without TLS: the old way is left.
    const field = element("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
