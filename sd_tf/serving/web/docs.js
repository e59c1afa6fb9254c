// The server's API, as its OpenAPI document describes it.

import * as api from "./api.js";
import { KEY_HEADER } from "./curl.js";
import { byId, element } from "./dom.js";
import * as key from "./key.js";

async function show() {
  const [described, about] = await Promise.all([api.openapi(), api.about()]);
  const { title, version, description } = described.info;
  byId("about").textContent = `${title} ${version}. ${description}`;
  const defaults = Object.fromEntries(about.fields.map((field) => [field.name, field.default]));
  const operations = Object.entries(described.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => section(path, method, operation, defaults)),
  );
  // Operations that take a body come first, as most readers look for them.
  byId("operations").replaceChildren(
    ...operations.filter((one) => one.querySelector("table")),
    ...operations.filter((one) => !one.querySelector("table")),
  );
}

function section(path, method, operation, defaults) {
  const schema = operation.requestBody?.content["application/json"].schema;
  return element(
    "section",
    { class: "card operation" },
    element("h2", {}, element("code", {}, `${method.toUpperCase()} ${path}`)),
    element("p", {}, ...marked([operation.summary, operation.description])),
    ...(schema === undefined ? [] : [table(schema, defaults), example(path)]),
  );
}

// Returns the texts as sentences, with code elements for text between backticks.
function marked(texts) {
  const parts = `${texts.filter(Boolean).join(". ")}.`.replace(/\.\.$/, ".").split("`");
  return parts.map((part, i) => (i % 2 === 1 ? element("code", {}, part) : part));
}

const COLUMNS = ["Name", "Type", "Default", "Meaning"];

function table(schema, defaults) {
  const rows = Object.entries(schema.properties).map(([name, property]) => {
    const isRequired = schema.required.includes(name);
    const given = isRequired ? "required" : JSON.stringify(defaults[name] ?? property.default ?? null);
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, element("code", {}, name)),
      ...[types(property), given === "null" ? "–" : given, meaning(property)].map((text) =>
        element("td", {}, text),
      ),
    );
  });
  const heads = COLUMNS.map((text) => element("th", { scope: "col" }, text));
  const head = element("thead", {}, element("tr", {}, ...heads));
  const body = element("tbody", {}, ...rows);
  return element("div", { class: "wide", tabindex: 0 }, element("table", {}, head, body));
}

function types({ type, anyOf = [{ type }] }) {
  return anyOf
    .filter((one) => one.type !== "null")
    .map((one) => (one.type === "array" ? `list of ${one.items.type}s` : one.type))
    .join(" or ");
}

function meaning({ description, minimum, exclusiveMinimum, maximum, maxLength }) {
  const bounds = [
    minimum !== undefined && `at least ${minimum}`,
    exclusiveMinimum !== undefined && `above ${exclusiveMinimum}`,
    maximum !== undefined && `at most ${maximum}`,
    maxLength !== undefined && `at most ${maxLength} characters`,
  ].filter(Boolean);
  return [description, ...bounds].join("; ");
}

function example(path) {
  const address = new URL(`.${path}`, document.baseURI).href;
  const body = JSON.stringify({ prompt: "a large red star", seed: 1 });
  const sent = key.isKnown() ? ` ${KEY_HEADER}` : "";
  const text = `curl -sS '${address}' -H 'content-type: application/json'${sent} -d '${body}'`;
  return element("pre", { tabindex: 0 }, text);
}

function start() {
  show().catch((error) => {
    if (error.status === 401) {
      key.ask(start);
      return;
    }
    console.error(error);
    byId("about").textContent = "The server does not answer. Load the page again.";
  });
}

start();
