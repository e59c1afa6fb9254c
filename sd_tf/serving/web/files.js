// The pictures chosen in the form, as a request carries them.

import { byId } from "./dom.js";

const LARGEST = 12 * 2 ** 20; // bytes: a request has its limit

export const UNREADABLE = `It cannot be read, or is larger than ${LARGEST / 2 ** 20} MB.`;

let known = []; // names of the form's file inputs
let places = {}; // name → the element that shows its pictures

export function setUp(fileNames, onChange) {
  known = fileNames;
  const seen = known.map((name) => [name, byId(`${name}-seen`)]);
  places = Object.fromEntries(seen.filter(([, place]) => place !== null));
  const others = known.filter((name) => !(name in places));
  const changed = (name) => {
    if (name in places) show(places[name], chosen(name));
    onChange(name);
  };
  for (const name of known) {
    byId(name).addEventListener("change", () => changed(name));
  }
  if (others.length === 0) return;
  places[others[0]] = byId("given");
  byId("forget").addEventListener("click", () => {
    for (const name of others) {
      byId(name).value = "";
      changed(name);
    }
    byId(others[0]).focus();
  });
}

const chosen = (name) => [...byId(name).files];
const isChosen = (name) => chosen(name).length > 0;

// Shows the pictures, each in a copy of the place's first one.
function show(place, files) {
  const [first, ...others] = place.querySelectorAll("img");
  for (const img of [first, ...others]) if (img.src) URL.revokeObjectURL(img.src);
  for (const img of others) img.remove();
  first.removeAttribute("src");
  files.forEach((file, number) => {
    const img = number === 0 ? first : first.cloneNode();
    img.src = URL.createObjectURL(file);
    if (img !== first) place.append(img);
  });
  place.hidden = files.length === 0;
}

// Returns the chosen pictures in base64, by name: one, or a list of several; null where one cannot
// be read.
export async function contents() {
  const read = known.filter(isChosen).map(async (name) => [name, await content(chosen(name))]);
  return Object.fromEntries(await Promise.all(read));
}

// Returns the file names of the chosen pictures, by name.
export function names() {
  const of = (name) => chosen(name).map((file) => file.name);
  return Object.fromEntries(known.filter(isChosen).map((name) => [name, of(name)]));
}

async function content(files) {
  if (files.some((file) => file.size > LARGEST)) return null;
  const read = await Promise.all(files.map(base64));
  if (read.includes(null)) return null;
  return read.length === 1 ? read[0] : read;
}

function base64(file) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => resolve(null);
    reader.readAsDataURL(file);
  });
}
