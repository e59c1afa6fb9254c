// Shows one picture, enlarged, with all that is known about it.

import { curl } from "./curl.js";
import { byId, facts, sharpenIfSmall } from "./dom.js";

let source = null; // {list(): the gallery's entries, actions(entry): its buttons}
let shown = null;

export function setUp(gallery) {
  source = gallery;
  byId("close").addEventListener("click", close);
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
  byId("viewer-picture").addEventListener("load", fit);
  window.addEventListener("resize", fit);
  byId("viewer").addEventListener("keydown", (event) => {
    if (event.target.matches("pre, summary")) return;
    if (event.key === "ArrowLeft") step(-1);
    if (event.key === "ArrowRight") step(1);
  });
  byId("viewer").addEventListener("click", (event) => {
    if (event.target === byId("viewer")) close();
  });
}

export function open(entry) {
  show(entry);
  byId("viewer").showModal();
  fit();
}

export function close() {
  byId("viewer").close();
}

function step(by) {
  const list = source.list();
  const next = list[list.indexOf(shown) + by];
  if (next !== undefined) show(next);
}

function show(entry) {
  shown = entry;
  const { parameters } = entry;
  const list = source.list();
  const place = list.indexOf(entry);
  byId("viewer-picture").src = entry.url;
  byId("viewer-picture").alt = parameters.prompt;
  byId("viewer-title").textContent = parameters.prompt;
  byId("viewer-facts").replaceChildren(...facts(entry.words.facts));
  byId("viewer-actions").replaceChildren(...source.actions(entry));
  byId("viewer-curl").textContent = curl(parameters);
  byId("previous").hidden = byId("next").hidden = list.length < 2;
  byId("previous").disabled = place <= 0;
  byId("next").disabled = place < 0 || place === list.length - 1;
}

// Small pictures grow by whole factors, so that their pixels stay squares of one size.
function fit() {
  const image = byId("viewer-picture");
  if (!byId("viewer").open || image.naturalWidth === 0) return;
  sharpenIfSmall(image);
  const frame = image.parentElement;
  const style = getComputedStyle(frame);
  const width = frame.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  const height = parseFloat(getComputedStyle(image).maxHeight);
  const factor = Math.min(width / image.naturalWidth, height / image.naturalHeight);
  const isSmall = image.classList.contains("small");
  const scale = isSmall ? Math.max(1, Math.floor(factor)) : Math.min(1, factor);
  image.width = Math.round(image.naturalWidth * scale);
}
