// The form: what it asks for as a request, what is wrong with it, and a picture's parameters put
// back into it. Its fields are those that the server describes.

import { byId, element } from "./dom.js";
import { build, isFile, isNumber, isSelect, isTick, sentence } from "./fields.js";
import { gathered, has, listOf, spread } from "./lists.js";
import * as files from "./files.js";
import * as mixture from "./mixture.js";

const TICKS = ["random", "live"];
// The prompt's label, by the use of a picture.
const PROMPTS = { edit: { label: "Instruction", help: "what to change" } };
const MOST_PREVIEWS = 10;
const SHOWN_EXAMPLES = 3;
const KEPT = `sd_tf ${location.pathname} form`;
const RANDOM_SEEDS = 2 ** 31;

let server = null;
let fields = []; // the server's; the prompt's is on the page from the start
let lastSeed = null; // of the last run

// Builds the form; what an earlier one has stays, where the server still has a field for it.
export function setUp(about) {
  const isFirst = server === null;
  const before = isFirst ? kept() : written();
  const pictures = files.held();
  const { id: focused } = document.activeElement;
  server = about;
  fields = about.fields.map((field) =>
    field.name === "prompt" ? { ...field, ...PROMPTS[about.use_of_picture] } : field,
  );
  const [prompt, ...others] = fields;
  byId("prompt-label").textContent = prompt.label;
  byId("prompt").placeholder = sentence(prompt.help);
  byId("fields").replaceChildren(...build(others));
  files.setUp(fields.filter(isFile).map((field) => field.name), clearErrors, pictures);
  showExamples(about.examples);
  const defaults = values().map((field) => [field.name, field.default]);
  const entered = byId("prompt").value === "" ? {} : { prompt: byId("prompt").value };
  fill({ ...Object.fromEntries(defaults), live: byId("live").checked, ...before, ...entered });
  listenToFields();
  if (isFirst) listenToForm();
  byId(focused)?.focus({ preventScroll: true });
}

const values = () => fields.filter((field) => !isFile(field));

// The fields' own listeners come before the form's, which keeps what they write.
function listenToForm() {
  byId("form").addEventListener("input", (event) => {
    clearErrors(event.target.name);
    keep();
  });
}

function listenToFields() {
  mixture.listen();
  byId("scheduler").addEventListener("change", showMostSteps);
  byId("random").addEventListener("change", showSeed);
  byId("size")?.addEventListener("change", showShape);
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

// Shows what ControlNets see in the size that is chosen.
function showShape() {
  const [height, width] = byId("size").value.split("x");
  byId("form").style.setProperty("--shape", `${width} / ${height}`);
}

// Shows the seed's field; a seed that was random becomes editable as its last number.
function showSeed() {
  const seed = byId("seed");
  const isRandom = byId("random").checked;
  if (isRandom) seed.value = "";
  else if (seed.value === "") seed.value = lastSeed ?? anySeed();
  seed.disabled = isRandom;
  seed.placeholder = lastSeed === null ? "a new one every time" : `last: ${lastSeed}`;
}

function anySeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] % RANDOM_SEEDS;
}

export function rememberSeed(seed) {
  lastSeed = seed;
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

// Returns the values that are given, by name; null for a file that cannot be read.
export async function read() {
  const given = values().map((field) => [field.name, value(field)]);
  const request = {
    ...Object.fromEntries(given.filter(([, value]) => value !== null)),
    ...(await files.contents()),
  };
  for (const { name, goes_with: other } of fields) {
    if (other !== null && !has(request, other)) delete request[name];
  }
  if ("size" in request) {
    [request.height, request.width] = request.size.split("x").map(Number);
    delete request.size;
  }
  const previews = Math.max(0, Math.min(MOST_PREVIEWS, request.num_steps - 1));
  return { ...request, previews: byId("live").checked ? previews : 0 };
}

// Returns the values as the server takes them.
export const composed = (request) => gathered(request, fields);

function value(field) {
  const control = byId(field.name);
  if (control.disabled) return null; // a random seed
  if (isTick(field)) return control.checked;
  if (isNumber(field)) return Number.parseFloat(control.value);
  if (field.kind === "mixture") return mixture.numbers(control.value);
  return control.value === "" && !field.required ? null : control.value;
}

// Returns the problems of a request, by name.
export function problems(request) {
  const found = fields.map((field) => [field.name, problem(field, request)]);
  return Object.fromEntries(found.filter(([, text]) => text !== null));
}

function problem(field, request) {
  const value = request[field.name];
  if (isFile(field)) {
    if (value === null) return files.UNREADABLE;
    const isMany = Array.isArray(value) && value.length > field.most_files;
    if (isMany) return `At most ${field.most_files} pictures.`;
    return field.required && value === undefined ? "Choose a file." : null;
  }
  if (value === undefined) return null;
  if (isTick(field)) return null;
  if (isNumber(field)) return isRight(field, value) ? null : rule(field);
  if (field.kind === "mixture") {
    const { least, most } = field;
    const isWithin = (number) => number >= least && number <= most;
    return Object.values(value).every(isWithin) ? null : `Numbers from ${least} to ${most}.`;
  }
  return field.required && value.trim() === "" ? `Say ${field.help}.` : null;
}

// Some schedulers take fewer steps than the export.
const most = ({ name, most }) =>
  name === "num_steps" ? server.schedulers[byId("scheduler").value] : most;

function isRight(field, value) {
  const { kind, least, above } = field;
  return (
    (kind === "number" ? Number.isFinite(value) : Number.isInteger(value)) &&
    (least === null || value >= least) &&
    (above === null || value > above) &&
    (most(field) === null || value <= most(field))
  );
}

function rule(field) {
  const { kind, name, least, above } = field;
  const noun = kind === "number" ? "A number" : "A whole number";
  const from = above === null ? ` from ${least} to ` : ` above ${above}, up to `;
  const why = name === "num_steps" ? `, with ${byId("scheduler").value}` : "";
  const such = kind === "number" && above === null ? `, such as ${field.default}` : "";
  return `${noun}${from}${most(field)}${why}${such}.`;
}

// Shows problems at their fields, and focuses the first.
export function showProblems(found) {
  clearErrors();
  for (const [name, text] of Object.entries(found)) {
    byId(`${name}-error`).textContent = text;
    byId(name).setAttribute("aria-invalid", "true");
  }
  const first = fields.find(({ name }) => name in found);
  if (first !== undefined) byId(first.name).focus();
}

// Shows a refusal by the server at the field that it names first; if that is a list, at each field
// whose value was in it.
export function showRefusal(text) {
  const place = ({ name }) => text.search(new RegExp(`\\b${listOf(name)}\\b`));
  const first = Math.min(...fields.map(place).filter((index) => index >= 0));
  const named = fields.filter((field) => place(field) === first);
  const given = named.filter((field) => files.isChosen(isFile(field) ? field.name : field.goes_with));
  const shown = given.length > 0 ? given : named;
  showProblems(Object.fromEntries(shown.map(({ name }) => [name, text])));
  if (shown.length > 0) return;
  byId("form-notice").hidden = false;
  byId("form-notice").textContent = text;
}

export function clearErrors(only) {
  for (const { name } of fields.filter(({ name }) => !only || name === only)) {
    byId(`${name}-error`).textContent = "";
    byId(name).removeAttribute("aria-invalid");
  }
  byId("form-notice").hidden = true;
}

// Telling

// Returns a picture's parameters as [label, value] and as one line.
export function described(parameters) {
  const all = { ...spread(parameters, fields), size: `${parameters.width} × ${parameters.height}` };
  const told = values().filter(({ name }) => name !== "prompt" && (all[name] ?? null) !== null);
  const short = {
    "whole number": (label, value) => `${value} ${label}`,
    number: (label, value) => `${label} ${value}`,
    choice: (label, value) => value,
    size: (label, value) => value,
    seed: (label, value) => `${label}\u00a0${value}`,
    mixture: (label, value) => mixture.text(value),
  };
  const isUsual = ({ kind, name, default: usual }) =>
    kind === "choice" && name !== "scheduler" && parameters[name] === usual;
  const shown = told.filter((field) => field.kind in short && !isUsual(field));
  return {
    facts: told.map(({ kind, name, label }) => [
      label,
      kind === "mixture" ? mixture.text(all[name]) : String(all[name]),
    ]),
    line: shown
      .map(({ kind, label, name }) => short[kind](label.toLowerCase(), all[name]))
      .join(" · "),
  };
}

// Filling

// Fills in a picture's parameters; texts that it does not have are emptied, and so are files, which
// only a person can choose again.
export function useAgain(parameters) {
  const texts = values().filter(({ kind }) => kind === "text");
  const empty = Object.fromEntries(texts.map(({ name }) => [name, ""]));
  const size = `${parameters.height}x${parameters.width}`;
  const adapters = mixture.text(parameters.adapters ?? {});
  fill({ ...empty, ...spread(parameters, fields), size, adapters, count: 1 });
  const missing = Object.entries(files.keepOnly(parameters.files ?? {}));
  showProblems(Object.fromEntries(missing.map(([name, of]) => [name, again(of)])));
}

const again = (names) => `Choose ${names.join(", ")} again.`;

function fill(given) {
  for (const field of values().filter(({ name }) => name in given)) {
    if (isTick(field)) byId(field.name).checked = given[field.name] === true;
    else byId(field.name).value = given[field.name] ?? field.default ?? "";
  }
  for (const field of fields.filter(isSelect)) {
    if (byId(field.name).value === "") byId(field.name).value = field.default;
  }
  if (typeof given.live === "boolean") byId("live").checked = given.live;
  byId("random").checked = given.random ?? (given.seed ?? "") === "";
  showSeed();
  showMostSteps();
  if (byId("size") !== null) showShape();
  for (const slider of document.querySelectorAll("[data-for]")) {
    slider.value = byId(slider.dataset.for).value;
  }
  mixture.show();
  clearErrors();
  keep();
}

// Returns what is in the form, without files.
function written() {
  const ticked = TICKS.map((name) => [name, byId(name).checked]);
  const entered = values().map((field) => {
    const control = byId(field.name);
    return [field.name, isTick(field) ? control.checked : control.value];
  });
  return Object.fromEntries([...ticked, ...entered]);
}

function keep() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(written()));
  } catch {
    // Without storage the form is empty after a reload, which does no harm.
  }
}

function kept() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}
