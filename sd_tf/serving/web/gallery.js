// The session's pictures, the newest first, and what one can do with each.

import { curl } from "./curl.js";
import { announce, byId, element, picture } from "./dom.js";
import * as store from "./store.js";
import * as viewer from "./viewer.js";

const WORDS = /[\p{L}\p{N}]+/gu;
const NAME_LENGTH = 48;
const COPY = "curl";
const SAID = 1500; // milliseconds that a button says what it did

let entries = []; // newest first: {id, png, url, parameters, card}
let cleared = [];
let useAgain = null;

export async function setUp(onUseAgain) {
  useAgain = onUseAgain;
  byId("clear").addEventListener("click", clear);
  byId("undo").addEventListener("click", undo);
  viewer.setUp({ list: () => entries, actions });
  for (const { id, png, parameters } of await store.load()) put(entry(png, parameters, id));
}

// A finished picture; returns a button for the stage that enlarges it.
export function add(png, parameters) {
  const made = entry(png, parameters, null);
  cleared = [];
  put(made);
  made.stored = store.add(png, parameters).then((id) => (made.id = id));
  return opener(made);
}

const describe = (parameters) => {
  const { num_steps, guidance_scale, image_guidance_scale, strength, scheduler, seed } = parameters;
  return [
    `${num_steps} steps`,
    Number.isFinite(guidance_scale) && `guidance ${guidance_scale}`,
    Number.isFinite(image_guidance_scale) && `picture guidance ${image_guidance_scale}`,
    Number.isFinite(strength) && `strength ${strength}`,
    scheduler,
    `seed\u00a0${seed}`,
  ]
    .filter(Boolean)
    .join(" · ");
};

function entry(png, parameters, id) {
  const made = { id, png, parameters, url: URL.createObjectURL(png), stored: Promise.resolve() };
  made.card = element(
    "li",
    { class: "card picture-card" },
    opener(made),
    element(
      "div",
      { class: "words" },
      element("p", { class: "prompt", title: parameters.prompt }, parameters.prompt),
      element("p", { class: "parameters" }, describe(parameters)),
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

// Without https a browser has no clipboard for us, but it still copies what is selected.
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

async function clear() {
  cleared = entries;
  entries = [];
  byId("cards").replaceChildren();
  showCount();
  announce("The gallery was cleared.");
  byId("undo").focus();
  await Promise.all(cleared.map((made) => made.stored));
  await store.remove(cleared.map((made) => made.id).filter((id) => id !== null));
}

function undo() {
  const back = cleared.toReversed();
  cleared = [];
  for (const made of back) {
    put(made);
    made.stored = made.stored
      .then(() => store.add(made.png, made.parameters))
      .then((id) => (made.id = id));
  }
  announce("The pictures are back.");
  byId("clear").focus();
}
