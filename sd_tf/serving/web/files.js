// The pictures chosen in the form, as a request carries them.

import { byId } from "./dom.js";

const LARGEST = 12 * 2 ** 20; // bytes: a request has its limit

export const UNREADABLE = `It cannot be read, or is larger than ${LARGEST / 2 ** 20} MB.`;

let known = []; // names of the form's file inputs; the first one's picture is shown

export function setUp(fileNames, onChange) {
  known = fileNames;
  if (known.length === 0) return;
  for (const name of known) {
    byId(name).addEventListener("change", () => changed(name));
  }
  byId("forget").addEventListener("click", () => {
    for (const name of known) {
      byId(name).value = "";
      changed(name);
    }
    byId(known[0]).focus();
  });

  function changed(name) {
    if (name === known[0]) show(chosen(name));
    onChange(name);
  }
}

function chosen(name) {
  return byId(name).files[0] ?? null;
}

function show(file) {
  const picture = byId("given-picture");
  if (picture.src) URL.revokeObjectURL(picture.src);
  if (file === null) picture.removeAttribute("src");
  else picture.src = URL.createObjectURL(file);
  byId("given").hidden = file === null;
}

// Returns the chosen pictures in base64, by name; null for one that cannot be read.
export async function contents() {
  const read = known.filter(chosen).map(async (name) => [name, await content(chosen(name))]);
  return Object.fromEntries(await Promise.all(read));
}

// Returns the file names of the chosen pictures, by name.
export function names() {
  return Object.fromEntries(known.filter(chosen).map((name) => [name, chosen(name).name]));
}

async function content(file) {
  return file.size > LARGEST ? null : base64(file);
}

function base64(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => resolve(null);
    reader.readAsDataURL(file);
  });
}
