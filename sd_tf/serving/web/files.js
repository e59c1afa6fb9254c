// The pictures that are chosen in the form, as a request carries them.

import { byId } from "./dom.js";

export const NAMES = ["image", "mask"];
const LARGEST = 12 * 2 ** 20; // bytes: a request has its limit

export const UNREADABLE = `It cannot be read, or is larger than ${LARGEST / 2 ** 20} MB.`;

export function setUp(onChange) {
  for (const name of NAMES) {
    byId(name).addEventListener("change", () => changed(name));
  }
  byId("forget").addEventListener("click", () => {
    for (const name of NAMES) {
      byId(name).value = "";
      changed(name);
    }
    byId("image").focus();
  });
  show(chosen("image")); // it may have been chosen before this was listening

  function changed(name) {
    if (name === "image") show(chosen(name));
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

// name → base64, of those that are chosen; null where one cannot be read.
export async function contents() {
  const read = NAMES.filter(chosen).map(async (name) => [name, await content(chosen(name))]);
  return Object.fromEntries(await Promise.all(read));
}

// name → file name, of those that are chosen.
export function names() {
  return Object.fromEntries(NAMES.filter(chosen).map((name) => [name, chosen(name).name]));
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
