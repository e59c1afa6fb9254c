// The run that is going on: a tile for each picture, which fills from noise to the end.

import { announce, byId, counted, element, picture } from "./dom.js";

const QUARTERS = 4; // how often screen readers are told of the progress

let tiles = [];
let calls = 0;
let started = 0;
let quarter = 0;

export function start(count) {
  tiles = Array.from({ length: count }, makeTile);
  calls = 0;
  quarter = 0;
  byId("tiles").replaceChildren(...tiles.map((tile) => tile.item));
  byId("tiles").classList.toggle("single", count === 1);
  byId("tiles").hidden = false;
  byId("empty").hidden = true;
  byId("meter").hidden = false;
  byId("stop").hidden = false;
  byId("progress").removeAttribute("value");
  byId("progress").hidden = false;
  byId("stage").setAttribute("aria-busy", "true");
  state("Waiting for the server…");
  announce(`Generating ${counted(count, "picture")}.`);
}

function makeTile() {
  const frame = element("div", { class: "picture waiting" });
  const caption = element("p", { class: "caption" });
  const item = element("li", {}, frame, caption);
  return { item, frame, caption, done: 0, image: null, isFinished: false };
}

export function accepted(images, callsOfEach) {
  calls = callsOfEach;
  started = performance.now();
  for (const { index, seed } of images) tiles[index].caption.textContent = `seed ${seed}`;
  showProgress();
}

export function progress(index, done, callsOfEach) {
  calls = callsOfEach;
  tiles[index].done = done;
  showProgress();
}

export function preview(index, png) {
  const tile = tiles[index];
  const url = `data:image/png;base64,${png}`;
  if (tile.image !== null) {
    tile.image.src = url;
    return;
  }
  tile.image = picture(url, "");
  tile.frame.replaceChildren(tile.image);
  tile.frame.classList.remove("waiting");
}

export function finished(index, button) {
  const tile = tiles[index];
  tile.done = calls;
  tile.isFinished = true;
  tile.frame.classList.remove("waiting");
  tile.frame.replaceChildren(button);
  showProgress();
}

// Shows the end of a run, however it ended; called after its last event.
export function end(text) {
  if (document.activeElement === byId("stop")) byId("generate").focus({ preventScroll: true });
  byId("stop").hidden = true;
  byId("stage").removeAttribute("aria-busy");
  byId("progress").hidden = true;
  for (const tile of tiles.filter((tile) => !tile.isFinished)) {
    tile.frame.classList.remove("waiting");
    tile.frame.classList.add("unfinished");
    if (tile.image === null) tile.frame.textContent = "–";
  }
  document.title = "sd_tf";
  state(text);
  announce(text);
}

export function reset() {
  end("");
  tiles = [];
  byId("tiles").hidden = true;
  byId("meter").hidden = true;
  byId("empty").hidden = false;
}

function share() {
  const done = tiles.reduce((sum, tile) => sum + tile.done, 0);
  return calls === 0 ? 0 : done / (calls * tiles.length);
}

function showProgress() {
  const part = share();
  const percent = Math.floor(part * 100);
  byId("progress").value = part;
  document.title = `${percent} % · sd_tf`;
  state(`${stepText()}${remaining(part)}`);
  const reached = Math.floor(part * QUARTERS);
  if (reached > quarter && reached < QUARTERS) announce(`${percent} percent`);
  quarter = reached;
}

function stepText() {
  const finishedCount = tiles.filter((tile) => tile.isFinished).length;
  const ahead = tiles.filter((tile) => tile.done < calls).map((tile) => tile.done);
  if (ahead.length === 0) return "Finishing";
  const step = `Step ${Math.max(...ahead)} of ${calls}`;
  return finishedCount === 0 ? step : `${step}, ${finishedCount} of ${tiles.length} done`;
}

function remaining(part) {
  const seconds = (performance.now() - started) / 1000;
  if (part === 0 || part === 1 || seconds < 1) return "";
  const left = Math.ceil(seconds * (1 / part - 1));
  return ` · about ${left < 90 ? `${left} s` : `${Math.round(left / 60)} min`} left`;
}

function state(text) {
  byId("state").textContent = text;
}
