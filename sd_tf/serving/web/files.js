// The pictures chosen in the form, as a request carries them.

import { byId } from "./dom.js";
import { listOf } from "./lists.js";

const LARGEST = 12 * 2 ** 20; // bytes: a request has its limit

export const UNREADABLE = `It cannot be read, or is larger than ${LARGEST / 2 ** 20} MB.`;

let known = []; // names of the form's file inputs
let places = {}; // name → the element that shows its pictures

// Takes up the form's file inputs; `before` has the pictures of those that the form had before, as
// `held` returns them.
export function setUp(fileNames, onChange, before = {}) {
  known = fileNames;
  const seen = known.map((name) => [name, byId(`${name}-seen`)]);
  places = Object.fromEntries(seen.filter(([, place]) => place !== null));
  const others = known.filter((name) => !(name in places));
  for (const name of known) {
    byId(name).addEventListener("change", () => {
      showChosen(name);
      onChange(name);
    });
  }
  if (others.length > 0) {
    places[others[0]] = byId("given");
    byId("forget").addEventListener("click", () => {
      others.forEach(forget);
      others.forEach(onChange);
      byId(others[0]).focus();
    });
  }
  for (const name of known.filter((name) => name in before)) {
    byId(name).files = before[name];
    showChosen(name);
  }
}

// Returns the files of all inputs by name, for `setUp`.
export const held = () => Object.fromEntries(known.map((name) => [name, byId(name).files]));

// Forgets the pictures of each input whose file names are others than these; returns the names, by
// input, of the files that have to be chosen again.
export function keepOnly(fileNames) {
  const wanted = known.map((name) => [name, [fileNames[name] ?? []].flat()]);
  const missing = wanted.filter(([name, files]) => !isEqual(namesOf(name), files));
  for (const [name] of missing) forget(name);
  return Object.fromEntries(missing.filter(([, files]) => files.length > 0));
}

const isEqual = (one, other) => one.length === other.length && one.every((x, i) => x === other[i]);

function forget(name) {
  byId(name).value = "";
  showChosen(name);
}

function showChosen(name) {
  if (name in places) show(places[name], chosen(name));
}

const chosen = (name) => [...byId(name).files];
export const isChosen = (name) => known.includes(name) && chosen(name).length > 0;
const namesOf = (name) => chosen(name).map((file) => file.name);

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

// Returns the file names of the chosen pictures, by name; none for the other fields of their lists.
export function names() {
  const lists = known.filter(isChosen).map(listOf);
  const sent = known.filter((name) => lists.includes(listOf(name)));
  return Object.fromEntries(sent.map((name) => [name, namesOf(name)]));
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
