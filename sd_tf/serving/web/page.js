// Wires the parts together: the form asks, the stage shows the run, the gallery keeps the pictures.

import * as api from "./api.js";
import { announce, byId, facts } from "./dom.js";
import { names as fileNames } from "./files.js";
import * as form from "./form.js";
import * as gallery from "./gallery.js";
import * as key from "./key.js";
import * as notice from "./notice.js";
import * as stage from "./stage.js";

const BESIDE_THE_FORM = [400, 413, 422];
const NEEDS_KEY = 401;
const BUSY = 429;
const BUSY_WAIT = 5; // seconds, when the server does not say
const FAMILIES = {
  sd1: "Stable Diffusion 1",
  "sd2-base": "Stable Diffusion 2",
  "sd2-v": "Stable Diffusion 2 (v)",
  "sdxl-base": "Stable Diffusion XL",
  "sdxl-refiner": "Stable Diffusion XL refiner",
  "instruct-pix2pix": "InstructPix2Pix",
  "sdxl-instruct-pix2pix": "InstructPix2Pix XL",
  inpaint: "Stable Diffusion for inpainting",
  "sd3-medium": "Stable Diffusion 3 medium",
  "sd3.5-medium": "Stable Diffusion 3.5 medium",
  "sd3.5-large": "Stable Diffusion 3.5 large",
  "flux-schnell": "Flux.1 schnell",
  "flux-dev": "Flux.1 dev",
};

let isReady = false;
let isReading = false; // whether the form and its files are being read
let digest = null; // of the export that the page shows
let running = null; // the AbortController of the run that is going on

// Starting

async function connect() {
  notice.hide();
  let about;
  try {
    about = await api.about();
  } catch (error) {
    if (error.status === NEEDS_KEY) {
      byId("model").textContent = "This server asks for a key.";
      key.ask(connect);
      return;
    }
    byId("model").textContent = "The server does not answer.";
    notice.show(sentence(error), { again: connect });
    return;
  }
  setUp(about);
  const [[height, width]] = about.sizes;
  showShape(height, width);
  isReady = true;
  byId("generate").setAttribute("aria-disabled", "false");
}

function setUp(about) {
  digest = about.export;
  showModel(about);
  form.setUp(about);
}

// Sets up again if the server has taken up another export, and tells whether it has. Without an answer
// all stays as it is.
async function refresh() {
  const about = await api.about().catch(() => null);
  if (about === null || about.export === digest) return false;
  setUp(about);
  return true;
}

function showModel({ family, sizes, checkpoint }) {
  const name = FAMILIES[family] ?? family;
  const shown = sizes.map(([height, width]) => `${width}×${height}`).join(", ");
  byId("model").textContent = `${name} · ${shown} px`;
  const parts = Object.values(checkpoint);
  const named = [...new Set(parts.map(checkpointName))].join(", ");
  const sha256 = Object.fromEntries(
    Object.entries(checkpoint).map(([component, part]) => [component, part.sha256]),
  );
  const values = Object.entries({ family, checkpoint: named, sha256, export: digest });
  byId("facts").replaceChildren(
    ...facts(
      values.map(([key, value]) => [
        key.replaceAll("_", " "),
        typeof value === "string" ? value : JSON.stringify(value),
      ]),
    ),
  );
  byId("about").hidden = false;
}

function checkpointName({ name, format, adapters = [] }) {
  const merged = adapters.map((adapter) => ` + ${adapter.name} at ${adapter.scale}`);
  return `${name} (${format})${merged.join("")}`;
}

function showShape(height, width) {
  document.documentElement.style.setProperty("--shape", `${width} / ${height}`);
}

// A run

async function submit() {
  if (!isReady || isReading || running !== null) return;
  isReading = true;
  const files = fileNames();
  const request = await form.read();
  isReading = false;
  const problems = form.problems(request);
  form.showProblems(problems);
  if (Object.keys(problems).length === 0) run(form.composed(request), files);
}

// Sends a request; `files` has the names of its pictures.
async function run(request, files) {
  running = new AbortController();
  notice.hide();
  byId("generate").setAttribute("aria-disabled", "true");
  if ("height" in request) showShape(request.height, request.width);
  stage.start(request.count);
  byId("stage").scrollIntoView({ block: "nearest" });
  try {
    const events = api.generate(request, running.signal);
    for await (const [name, data] of events) show(name, data, files);
  } catch (error) {
    ended(error, () => run(request, files));
  } finally {
    running = null;
    byId("generate").setAttribute("aria-disabled", "false");
  }
}

function show(name, data, files) {
  if (name === "accepted") {
    stage.accepted(data.images, data.calls);
    form.rememberSeed(data.images[0].seed);
    if (data.export !== digest) refresh();
  }
  if (name === "progress") stage.progress(data.index, data.done, data.calls);
  if (name === "preview") stage.preview(data.index, data.png);
  if (name === "image") {
    const parameters = { ...data.parameters, files };
    const words = form.described(data.parameters);
    stage.finished(data.index, gallery.add({ png: decoded(data.png), parameters, words }));
  }
  if (name === "done") stage.end(`Done in ${data.seconds.toFixed(1)} s`);
}

function decoded(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: "image/png" });
}

// Tells how a run ended that was not done; `again` runs it once more.
function ended(error, again) {
  if (running.signal.aborted) {
    stage.end("Stopped");
    return;
  }
  if (error.status === NEEDS_KEY) {
    stage.reset();
    key.ask(again);
    return;
  }
  if (BESIDE_THE_FORM.includes(error.status)) {
    stage.reset();
    const tell = () => form.showRefusal(error.message);
    tell();
    refresh().then((isNew) => isNew && tell()); // another export may take other values
    return;
  }
  const wait = error.retryAfter ?? (error.status === BUSY ? BUSY_WAIT : 0);
  if (error.status === BUSY) stage.reset();
  else stage.end("Not finished");
  notice.show(sentence(error), { wait, again });
}

function sentence(error) {
  if (error instanceof api.ConnectionLost) {
    return "The connection to the server was lost. Finished pictures are kept.";
  }
  if (!(error instanceof api.ServerError)) {
    console.error(error);
    return "The server sent something that this page does not understand.";
  }
  if (error.status === BUSY) return `The server is busy. ${error.message}`;
  return `The server could not do it: ${error.message}`;
}

function stop() {
  running?.abort();
}

function useAgain(parameters) {
  form.useAgain(parameters);
  byId("prompt").focus({ preventScroll: true });
  byId("form").scrollIntoView({ block: "nearest" });
  announce("The parameters are in the form.");
}

// Keys

function onKey(event) {
  if (byId("viewer").open || event.isComposing) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    submit();
  }
  if (event.key === "Escape" && running !== null) stop();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", onKey);
gallery.setUp(useAgain);
connect();
