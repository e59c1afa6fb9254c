// The session's pictures, the newest first, and what one can do with each.

import { curl } from "./curl.js";
import { announce, byId, element, picture } from "./dom.js";
import * as store from "./store.js";
import * as viewer from "./viewer.js";

const WORDS = /[\p{L}\p{N}]+/gu;
const NAME_LENGTH = 48;
const COPY = "curl";
const SAID = 1500; // milliseconds for which a button says what it did

let entries = []; // newest first: {id, png, url, parameters, words, card}
let cleared = [];
let useAgain = null;

export async function setUp(onUseAgain) {
  useAgain = onUseAgain;
  byId("clear").addEventListener("click", clear);
  byId("undo").addEventListener("click", undo);
  viewer.setUp({ list: () => entries, actions });
  for (const { id, ...made } of await store.load()) put(entry(made, id));
}

// Adds a finished picture {png, parameters, words}; words are the parameters as facts and as one
// line. Returns a button for the stage, which enlarges the picture.
export function add(picture) {
  const made = entry(picture, null);
  cleared.forEach(({ url }) => URL.revokeObjectURL(url));
  cleared = [];
  put(made);
  made.stored = store.add(made).then((id) => (made.id = id));
  return opener(made);
}

function entry({ png, parameters, words }, id) {
  const url = URL.createObjectURL(png);
  // `stored` ends when all is done that was to be done with the record, one thing after the other.
  const made = { id, png, parameters, words, url, stored: Promise.resolve() };
  made.card = element(
    "li",
    { class: "card picture-card" },
    opener(made),
    element(
      "div",
      { class: "words" },
      element("p", { class: "prompt", title: parameters.prompt }, parameters.prompt),
      element("p", { class: "parameters" }, words.line),
      element("div", { class: "actions" }, ...actions(made)),
    ),
  );
  return made;
}

function opener(made) {
  const button = element(
    "button",
    { type: "button", class: "open", "aria-label": `Enlarge: ${made.parameters.prompt}` },
    picture(made.url, ""),
  );
  button.addEventListener("click", () => viewer.open(made));
  return button;
}

function put(made) {
  entries.unshift(made);
  byId("cards").prepend(made.card);
  showCount();
}

function showCount() {
  byId("gallery").hidden = entries.length === 0 && cleared.length === 0;
  byId("gallery-title").textContent = entries.length
    ? `This session (${entries.length})`
    : "This session";
  byId("clear").hidden = entries.length === 0;
  byId("cleared").hidden = cleared.length === 0;
}

// Actions

function actions(made) {
  const again = element(
    "button",
    { type: "button", class: "quiet", title: "Use these parameters again" },
    "Use again",
  );
  again.addEventListener("click", () => {
    viewer.close();
    useAgain(made.parameters);
  });
  const download = element(
    "a",
    { class: "quiet", href: made.url, download: fileName(made.parameters), title: "Download PNG" },
    "Download",
  );
  const copy = element(
    "button",
    { type: "button", class: "quiet", title: "Copy as a curl command" },
    COPY,
  );
  copy.addEventListener("click", () => copyCommand(copy, curl(made.parameters)));
  return [again, download, copy];
}

function fileName({ prompt, seed }) {
  const words = (prompt.match(WORDS) ?? ["picture"]).join("-").slice(0, NAME_LENGTH);
  return `${words}-${seed}.png`;
}

async function copyCommand(button, text) {
  const said = (await copied(text)) ? "Copied" : "Not allowed";
  button.textContent = said;
  announce(said);
  setTimeout(() => (button.textContent = COPY), SAID);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

// Without https browsers have no clipboard API, but they still copy the selection.
function copiedBySelection(text) {
  const focused = document.activeElement;
  const area = element("textarea", { class: "unseen", readonly: "" });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const succeeded = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return succeeded;
}

// Clearing

function clear() {
  cleared.forEach(({ url }) => URL.revokeObjectURL(url));
  cleared = entries;
  entries = [];
  byId("cards").replaceChildren();
  showCount();
  announce("The gallery was cleared.");
  byId("undo").focus();
  for (const made of cleared) made.stored = made.stored.then(() => forget(made));
}

async function forget(made) {
  const { id } = made;
  made.id = null;
  if (id !== null) await store.remove([id]);
}

function undo() {
  const back = cleared.toReversed();
  cleared = [];
  for (const made of back) {
    put(made);
    made.stored = made.stored
      .then(() => store.add(made))
      .then((id) => (made.id = id));
  }
  announce("The pictures are back.");
  byId("clear").focus();
}
