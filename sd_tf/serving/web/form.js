// The form: what it asks for as a request, what is wrong with it, and a picture's parameters put
// back into it.

import { byId, element } from "./dom.js";
import * as files from "./files.js";

const VALUES = [
  "prompt", "strength", "image_guidance_scale", "negative_prompt", "num_steps", "guidance_scale",
  "scheduler", "seed", "count",
];
const FIELDS = [...VALUES, ...files.NAMES];
const TICKS = ["random", "live"];
// What a picture is for → the fields that it brings, and what the prompt is called.
const USES = {
  start: { shown: ["image", "strength"], needed: [], prompt: "Prompt" },
  edit: { shown: ["image", "image_guidance_scale"], needed: ["image"], prompt: "Instruction" },
  paint: { shown: ["image", "mask", "strength"], needed: files.NAMES, prompt: "Prompt" },
};
const NO_USE = { shown: [], needed: [], prompt: "Prompt" };
const PLACEHOLDERS = { Prompt: "What the picture shows", Instruction: "What to change" };
const MOST_PREVIEWS = 10;
const SHOWN_EXAMPLES = 3;
const KEPT = `sd_tf ${location.pathname} form`;
const SMALLEST_SEED = -(2 ** 31);
const LARGEST_SEED = 2 ** 31 - 1;
const RANDOM_SEEDS = 2 ** 31;

let server = null;
let use = NO_USE;

export function setUp(about) {
  server = about;
  use = USES[about.image] ?? NO_USE;
  const shown = about.guidance ? ["guidance", ...use.shown] : use.shown;
  for (const part of document.querySelectorAll("[data-needs]")) {
    part.hidden = !shown.includes(part.dataset.needs);
  }
  document.querySelector("[data-optional=image]").hidden = use.needed.includes("image");
  byId("prompt-label").textContent = use.prompt;
  byId("prompt").placeholder = PLACEHOLDERS[use.prompt];
  files.setUp(clearErrors);
  byId("scheduler").replaceChildren(
    ...Object.keys(about.schedulers).map((name) => element("option", { value: name }, name)),
  );
  byId("count").max = about.max_count;
  byId("count-hint").textContent = `1 to ${about.max_count}`;
  showExamples(about.examples);
  fill({
    ...about.defaults,
    scheduler: about.default_scheduler,
    count: 1,
    ...kept(),
    ...entered(),
  });
  listen();
}

// Before the server had answered.
function entered() {
  const written = VALUES.filter((name) => byId(name).value !== "");
  const ticked = TICKS.filter((name) => byId(name).checked !== byId(name).defaultChecked);
  return {
    ...Object.fromEntries(written.map((name) => [name, byId(name).value])),
    ...Object.fromEntries(ticked.map((name) => [name, byId(name).checked])),
  };
}

function listen() {
  byId("form").addEventListener("input", (event) => {
    clearErrors(event.target.name);
    keep();
  });
  byId("scheduler").addEventListener("change", showMostSteps);
  byId("random").addEventListener("change", showSeed);
  for (const slider of document.querySelectorAll("[data-for]")) {
    const number = byId(slider.dataset.for);
    slider.addEventListener("input", () => {
      number.value = slider.value;
      clearErrors(number.name);
    });
    number.addEventListener("input", () => (slider.value = number.value));
  }
}

function showMostSteps() {
  const most = server.schedulers[byId("scheduler").value];
  byId("num_steps").max = most;
  const slider = document.querySelector("[data-for=num_steps]");
  slider.max = most;
  slider.value = byId("num_steps").value;
  byId("num_steps-hint").textContent = `1 to ${most}`;
}

// A seed that was random becomes editable as the number that it was.
function showSeed() {
  const seed = byId("seed");
  const isRandom = byId("random").checked;
  if (isRandom) seed.value = "";
  else if (seed.value === "") seed.value = seed.dataset.last ?? anySeed();
  seed.disabled = isRandom;
  const { last } = seed.dataset;
  seed.placeholder = last === undefined ? "a new one every time" : `last: ${last}`;
}

function anySeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] % RANDOM_SEEDS;
}

export function rememberSeed(seed) {
  byId("seed").dataset.last = seed;
  showSeed();
}

// Examples

function showExamples(examples, first = 0) {
  const shown = examples.slice(first, first + SHOWN_EXAMPLES);
  const chips = shown.map((text) => {
    const chip = element("button", { type: "button", title: text }, text);
    chip.addEventListener("click", () => useExample(text));
    return element("li", {}, chip);
  });
  if (examples.length > SHOWN_EXAMPLES) {
    const next = first + SHOWN_EXAMPLES < examples.length ? first + SHOWN_EXAMPLES : 0;
    const others = element("button", { type: "button", class: "others" }, "Others");
    others.addEventListener("click", () => {
      showExamples(examples, next);
      byId("examples").querySelector(".others").focus();
    });
    chips.push(element("li", {}, others));
  }
  byId("examples").replaceChildren(...chips);
}

function useExample(text) {
  byId("prompt").value = text;
  clearErrors("prompt");
  keep();
  byId("prompt").focus();
}

// Reading

export async function read() {
  const number = (name) => byId(name).valueAsNumber;
  const num_steps = number("num_steps");
  const request = {
    prompt: byId("prompt").value,
    num_steps,
    seed: byId("random").checked ? null : number("seed"),
    scheduler: byId("scheduler").value,
    count: number("count"),
    previews: byId("live").checked ? Math.max(0, Math.min(MOST_PREVIEWS, num_steps - 1)) : 0,
    timeout: null,
  };
  if (server.guidance) {
    request.negative_prompt = byId("negative_prompt").value || null;
    request.guidance_scale = number("guidance_scale");
  }
  Object.assign(request, await files.contents());
  for (const name of ["strength", "image_guidance_scale"]) {
    if (use.shown.includes(name) && "image" in request) request[name] = number(name);
  }
  return request;
}

export function problems(request) {
  const unread = files.NAMES.filter((name) => request[name] === null);
  const found = Object.fromEntries(unread.map((name) => [name, files.UNREADABLE]));
  const most = server.schedulers[request.scheduler];
  const isWhole = (value, least, greatest) =>
    Number.isInteger(value) && value >= least && value <= greatest;
  if (request.prompt.trim() === "") {
    found.prompt = `Say what ${server.image === "edit" ? "to change" : "the picture is to show"}.`;
  }
  for (const name of use.needed.filter((name) => !(name in request))) {
    found[name] = "Choose a file.";
  }
  if ("strength" in request && !(request.strength > 0 && request.strength <= 1)) {
    found.strength = "A number above 0, up to 1.";
  }
  if ("image_guidance_scale" in request && !Number.isFinite(request.image_guidance_scale)) {
    found.image_guidance_scale = "A number, such as 1.5.";
  }
  if (!isWhole(request.num_steps, 1, most)) {
    found.num_steps = `A whole number from 1 to ${most}, with ${request.scheduler}.`;
  }
  if ("guidance_scale" in request && !Number.isFinite(request.guidance_scale)) {
    found.guidance_scale = "A number, such as 4 or 7.5.";
  }
  if (request.seed !== null && !isWhole(request.seed, SMALLEST_SEED, LARGEST_SEED)) {
    found.seed = `A whole number from ${SMALLEST_SEED} to ${LARGEST_SEED}.`;
  }
  if (!isWhole(request.count, 1, server.max_count)) {
    found.count = `A whole number from 1 to ${server.max_count}.`;
  }
  return found;
}

// Problems by field; the first of them gets the focus.
export function showProblems(found) {
  clearErrors();
  for (const [name, text] of Object.entries(found)) {
    byId(`${name}-error`).textContent = text;
    byId(name).setAttribute("aria-invalid", "true");
  }
  const first = FIELDS.find((name) => name in found);
  if (first !== undefined) byId(first).focus();
}

// A refusal of the server's, at the field that it names where it names one.
export function showRefusal(text) {
  const named = FIELDS.find((name) => new RegExp(`\\b${name}\\b`).test(text));
  showProblems(named === undefined ? {} : { [named]: text });
  if (named !== undefined) return;
  byId("form-notice").hidden = false;
  byId("form-notice").textContent = text;
}

export function clearErrors(name) {
  for (const each of name ? [name] : FIELDS) {
    if (!FIELDS.includes(each)) continue;
    byId(`${each}-error`).textContent = "";
    byId(each).removeAttribute("aria-invalid");
  }
  byId("form-notice").hidden = true;
}

// Filling

export function fill(values) {
  for (const name of VALUES) {
    if (name in values) byId(name).value = values[name] ?? "";
  }
  if (!(byId("scheduler").value in server.schedulers)) {
    byId("scheduler").value = server.default_scheduler;
  }
  if (typeof values.live === "boolean") byId("live").checked = values.live;
  byId("random").checked = values.random ?? (values.seed ?? "") === "";
  showSeed();
  showMostSteps();
  for (const slider of document.querySelectorAll("[data-for]")) {
    slider.value = byId(slider.dataset.for).value;
  }
  clearErrors();
  keep();
}

function keep() {
  const values = { random: byId("random").checked, live: byId("live").checked };
  for (const name of VALUES) values[name] = byId(name).value;
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(values));
  } catch {
    // The form is then empty after a reload, no more.
  }
}

function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}
