// A field with a slider for each of some names: how much of each adapter is added.
//
// Its value is a text such as "style@0.8,detail@-0.5", as commands take it, in a hidden input;
// requests have it as an object.

import { byId, element } from "./dom.js";

export function control(field, attributes) {
  const rows = field.choices.map((name) => row(field, name));
  const hidden = element("input", { ...attributes, type: "hidden" });
  return element("div", { class: "mixture", "data-mixture": field.name }, hidden, ...rows);
}

function row(field, name) {
  const [least, most, step] = field.slider;
  const label = `${field.label}: ${name}`;
  const slider = { type: "range", min: least, max: most, step, tabindex: -1, "aria-hidden": true };
  const number = { type: "number", min: field.least, max: field.most, step: "any" };
  return element(
    "div",
    { class: "slider", "data-of": name },
    element("span", { title: name }, name),
    element("input", { ...slider, value: 0 }),
    element("input", { ...number, value: 0, "aria-label": label }),
  );
}

// Has the sliders and numbers of all such fields write the fields' values.
export function listen() {
  for (const part of document.querySelectorAll("[data-mixture] [data-of]")) {
    const [slider, number] = part.querySelectorAll("input");
    const { mixture } = part.parentElement.dataset;
    slider.addEventListener("input", () => {
      number.value = slider.value;
      write(mixture);
    });
    number.addEventListener("input", () => {
      slider.value = number.value;
      write(mixture);
    });
  }
}

function write(name) {
  const parts = [...document.querySelectorAll(`[data-mixture=${name}] [data-of]`)];
  const numbers = parts.map((part) => [part.dataset.of, part.querySelector("[type=number]")]);
  const given = numbers.filter(([, input]) => input.valueAsNumber !== 0);
  byId(name).value = text(Object.fromEntries(given.map(([of, input]) => [of, input.value])));
}

// Shows the fields' values in their sliders and numbers, and drops names that they have none for.
export function show() {
  for (const part of document.querySelectorAll("[data-mixture] [data-of]")) {
    const given = numbers(byId(part.parentElement.dataset.mixture).value) ?? {};
    for (const input of part.querySelectorAll("input")) input.value = given[part.dataset.of] ?? 0;
  }
  for (const part of document.querySelectorAll("[data-mixture]")) write(part.dataset.mixture);
}

export const text = (numbers) =>
  Object.entries(numbers)
    .map(([name, number]) => `${name}@${number}`)
    .join(",");

// Returns a text's numbers by name, NaN for what is none; null for an empty text.
export function numbers(text) {
  if (text === "") return null;
  const parts = text.split(",").map((part) => part.split("@"));
  return Object.fromEntries(parts.map(([name, number]) => [name, parseFloat(number)]));
}
