// Text and attributes only: nothing that a user or the server says is ever read as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function facts(entries) {
  return entries.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value)),
  );
}

const SMALL = 256; // pixels; below, each of them is shown as a square

export function picture(url, alt) {
  const image = element("img", { alt, src: url });
  image.addEventListener("load", () => sharpenIfSmall(image));
  return image;
}

export function sharpenIfSmall(image) {
  const isSmall = Math.max(image.naturalWidth, image.naturalHeight) < SMALL;
  image.classList.toggle("small", isSmall);
}

// Said to screen readers once; the same text again is said again.
export function announce(text) {
  const announcer = byId("announcer");
  announcer.textContent = "";
  requestAnimationFrame(() => (announcer.textContent = text));
}

export const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
