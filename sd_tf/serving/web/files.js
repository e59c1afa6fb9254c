// The pictures chosen in the form, as a request carries them.

import { byId } from "./dom.js";

const LARGEST = 12 * 2 ** 20; // bytes: a request has its limit

export const UNREADABLE = `It cannot be read, or is larger than ${LARGEST / 2 ** 20} MB.`;

let known = []; // names of the form's file inputs
let places = {}; // name → where its picture is shown: the element to hide, and the picture

export function setUp(fileNames, onChange) {
  known = fileNames;
  const seen = known.map((name) => [name, byId(`${name}-seen`)]).filter(([, img]) => img !== null);
  places = Object.fromEntries(seen.map(([name, img]) => [name, { place: img, img }]));
  const others = known.filter((name) => !(name in places));
  const changed = (name) => {
    if (name in places) show(places[name], chosen(name));
    onChange(name);
  };
  for (const name of known) {
    byId(name).addEventListener("change", () => changed(name));
  }
  if (others.length === 0) return;
  places[others[0]] = { place: byId("given"), img: byId("given-picture") };
  byId("forget").addEventListener("click", () => {
    for (const name of others) {
      byId(name).value = "";
      changed(name);
    }
    byId(others[0]).focus();
  });
}

function chosen(name) {
  return byId(name).files[0] ?? null;
}

function show({ place, img }, file) {
  if (img.src) URL.revokeObjectURL(img.src);
  if (file === null) img.removeAttribute("src");
  else img.src = URL.createObjectURL(file);
  place.hidden = file === null;
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
