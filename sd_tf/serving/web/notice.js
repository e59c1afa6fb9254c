// Tells what went wrong with a run, and offers to try again.

import { byId } from "./dom.js";

let ticking = null;

export function show(text, { wait = 0, again }) {
  hide();
  byId("notice").hidden = false;
  byId("notice-text").textContent = text;
  byId("again").onclick = () => {
    if (byId("again").getAttribute("aria-disabled") === "true") return;
    hide();
    again();
  };
  countDown(wait);
  byId("notice").scrollIntoView({ block: "nearest" });
}

export function hide() {
  clearInterval(ticking);
  byId("notice").hidden = true;
  byId("notice-text").textContent = "";
}

function countDown(wait) {
  const end = Date.now() + wait * 1000;
  const tick = () => {
    const left = Math.ceil((end - Date.now()) / 1000);
    byId("again").textContent = left > 0 ? `Try again in ${left} s` : "Try again";
    byId("again").setAttribute("aria-disabled", String(left > 0));
    if (left <= 0) clearInterval(ticking);
  };
  ticking = setInterval(tick, 1000);
  tick();
}
