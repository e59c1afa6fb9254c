// The server's API, as its OpenAPI document describes it.

import * as api from "./api.js";
import { KEY_HEADER } from "./curl.js";
import { byId, element } from "./dom.js";
import * as key from "./key.js";

const FORM = "multipart/form-data";

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
  const [kind, body] = Object.entries(operation.requestBody?.content ?? {})[0] ?? [];
  return element(
    "section",
    { class: "card operation" },
    element("h2", {}, element("code", {}, `${method.toUpperCase()} ${path}`)),
    element("p", {}, ...marked([operation.summary, operation.description])),
    ...(body === undefined ? [] : [table(body.schema, defaults), example(path, kind)]),
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

function types({ type, format, items, anyOf }, plural = "") {
  if (format === "binary") {
    return `file${plural}`;
  }
  if (anyOf !== undefined) {
    const known = anyOf.filter((one) => one.type !== "null");
    return known.map((one) => types(one, plural)).join(" or ");
  }
  return type === "array" ? `list${plural} of ${types(items, "s")}` : `${type}${plural}`;
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

function example(path, kind) {
  const address = new URL(`.${path}`, document.baseURI).href;
  const start = `curl -sS '${address}'`;
  const sent = key.isKnown() ? ` ${KEY_HEADER}` : "";
  if (kind === FORM) {
    const header = sent || " -H 'authorization: Bearer none'"; // a form needs one
    const text = `${start}${header} -F image=@picture.png -F prompt='a large red star' -F seed=1`;
    return element("pre", { tabindex: 0 }, text);
  }
  const body = JSON.stringify({ prompt: "a large red star", seed: 1 });
  const text = `${start} -H 'content-type: application/json'${sent} -d '${body}'`;
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
