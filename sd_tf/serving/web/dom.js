// Elements are built from text and attributes only, so no text of a user or the server is markup.

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

const SMALL = 256; // pixels; in smaller pictures each pixel is shown as a square

export function picture(url, alt) {
  const image = element("img", { alt, src: url });
  image.addEventListener("load", () => sharpenIfSmall(image));
  return image;
}

export function sharpenIfSmall(image) {
  const isSmall = Math.max(image.naturalWidth, image.naturalHeight) < SMALL;
  image.classList.toggle("small", isSmall);
}

// Announces a text to screen readers, even if it equals the one before.
export function announce(text) {
  const announcer = byId("announcer");
  announcer.textContent = "";
  requestAnimationFrame(() => (announcer.textContent = text));
}

export const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
