// The form's fields, built from the server's description of a request.

import { element } from "./dom.js";
import { listOf } from "./lists.js";
import * as mixture from "./mixture.js";

const CONTROLS = {
  text: textArea,
  "whole number": (field) => (field.named ? namedSelect(field) : numberInput(field)),
  number: numberInput,
  seed: seedInput,
  choice: select,
  size: sizeSelect,
  mixture: (field) => mixture.control(field, common(field)),
  switch: tick,
  picture: (field) => (field.per_model ? shownFileInput(field) : fileInput(field)),
  mask: fileInput,
};
const MAY_BE_LEFT_OUT = ["text", "picture"]; // labelled optional; the others always have a value

export const isFile = (field) => field.kind === "picture" || field.kind === "mask";
export const isSelect = ({ kind, named }) => kind === "choice" || kind === "size" || Boolean(named);
export const isTick = (field) => field.kind === "switch";
export const isNumber = (field) => ["number", "whole number", "seed"].includes(field.kind);
const steers = (field) => isFile(field) && field.per_model; // beside the picture to start from
const goesWithFile = (field) => isFile(field) || field.goes_with !== null;

// Order: pictures and the fields that go with them, those of ControlNets, those of IP-Adapters,
// texts, the size and the other small fields, adapters, the seed last.
export function build(fields) {
  const steering = new Set(fields.filter(steers).map(({ name }) => listOf(name)));
  const group = ({ name, goes_with: other }) => listOf(other ?? name);
  const groups = [...steering].map((list) => fields.filter((field) => group(field) === list));
  const pictures = fields.filter((field) => goesWithFile(field) && !steering.has(group(field)));
  const others = fields.filter((field) => !goesWithFile(field));
  const texts = others.filter((field) => field.kind === "text");
  const seeds = others.filter((field) => field.kind === "seed");
  const mixtures = others.filter((field) => field.kind === "mixture");
  const wide = [...texts, ...mixtures, ...seeds];
  const rest = others.filter((field) => !wide.includes(field));
  const sizes = rest.filter((field) => field.kind === "size");
  const small = [...sizes, ...rest.filter((field) => !sizes.includes(field))];
  return [
    ...(pictures.length > 0 ? [pair([...pictures.map(fieldOf), chosenPicture()])] : []),
    ...groups.filter((group) => group.length > 0).map((group) => pair(group.map(fieldOf))),
    ...texts.map(fieldOf),
    pair(small.map(fieldOf)),
    ...mixtures.map(fieldOf),
    ...seeds.map(fieldOf),
  ];
}

const pair = (children) => element("div", { class: "pair" }, ...children);

function fieldOf(field) {
  const label = element("label", { for: field.name }, field.label);
  if (!field.required && MAY_BE_LEFT_OUT.includes(field.kind)) {
    label.append(" ", element("small", {}, "optional"));
  }
  return element(
    "div",
    { class: "field" },
    label,
    CONTROLS[field.kind](field),
    element("p", { class: "hint", id: `${field.name}-hint` }, hint(field)),
    element("p", { class: "error", id: `${field.name}-error` }),
  );
}

function hint({ kind, help, named, least, most, most_files: files }) {
  if (named) return help;
  if (files > 1) return `up to ${files}, chosen together`;
  if (kind === "whole number") return most === null ? `from ${least}` : `${least} to ${most}`;
  return ["number", "mask", "mixture", "switch"].includes(kind) ? help : "";
}

export const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// The attributes of every control: its name, and the texts that describe it.
const common = ({ name }) => ({
  id: name,
  name,
  "aria-describedby": `${name}-error ${name}-hint`,
});

function textArea(field) {
  return element("textarea", { ...common(field), rows: 1, placeholder: sentence(field.help) });
}

function numberInput(field) {
  const isWhole = field.kind === "whole number";
  const input = element("input", {
    ...common(field),
    type: "number",
    step: isWhole ? 1 : "any",
    inputmode: isWhole ? "numeric" : "decimal",
    ...(field.least === null ? {} : { min: field.least }),
    ...(field.most === null ? {} : { max: field.most }),
  });
  if (field.slider === null) return input;
  const [least, most, step] = field.slider;
  const slider = element("input", {
    type: "range",
    "data-for": field.name,
    min: least ?? field.least,
    max: most ?? field.most,
    step,
    tabindex: -1,
    "aria-hidden": true,
  });
  return element("div", { class: "slider" }, slider, input);
}

function seedInput(field) {
  const random = element("input", { type: "checkbox", id: "random", checked: "" });
  return element(
    "div",
    { class: "seed" },
    element("input", { ...common(field), type: "number", step: 1 }),
    element("label", { class: "check" }, random, " Random"),
  );
}

function select(field) {
  const options = field.choices.map((name) => element("option", { value: name }, name));
  return element("select", { ...common(field), title: sentence(field.help) }, ...options);
}

function namedSelect(field) {
  const options = field.named.map(([value, name]) => element("option", { value }, name));
  return element("select", common(field), ...options);
}

function sizeSelect(field) {
  const options = field.choices.map(([height, width]) =>
    element("option", { value: `${height}x${width}` }, `${width} × ${height}`),
  );
  return element("select", { ...common(field), title: sentence(field.help) }, ...options);
}

function fileInput(field) {
  const title = sentence(field.help);
  const several = field.most_files > 1 ? { multiple: "" } : {};
  return element("input", { ...common(field), type: "file", accept: "image/*", title, ...several });
}

// A file input with the pictures as they are seen: by a ControlNet in the size that is drawn and
// without transparency, by an IP-Adapter the middle squares.
function shownFileInput(field) {
  const seen = element("img", {
    alt: field.is_prompt ? "What is looked at" : "What is followed",
    class: field.is_prompt ? "square" : "opaque",
  });
  const place = element("div", { class: "seen", id: `${field.name}-seen`, hidden: "" }, seen);
  return element("div", { class: "shown" }, fileInput(field), place);
}

function tick(field) {
  return element("input", { ...common(field), type: "checkbox", title: sentence(field.help) });
}

const chosenPicture = () =>
  element(
    "div",
    { class: "given", id: "given", hidden: "" },
    element("img", { id: "given-picture", alt: "The picture that was chosen" }),
    element("button", { type: "button", class: "quiet", id: "forget" }, "Remove"),
  );
