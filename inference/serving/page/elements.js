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

// Copy a text, and briefly confirm it on the button.
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
    // Browsers give pages of other machines no clipboard without TLS, so use the old API.
    const field = element("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
