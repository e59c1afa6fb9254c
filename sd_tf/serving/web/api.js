// Calls of the server. Addresses are relative, so they also work below a path prefix.

import * as key from "./key.js";

export class ServerError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // seconds
  }
}

export class ConnectionLost extends Error {}

export async function about() {
  const response = await reach("about", {});
  return response.json();
}

export async function openapi() {
  const response = await reach("openapi.json", {});
  return response.json();
}

// Yields [name, data] for each event until the pictures are done.
export async function* generate(request, signal) {
  const response = await reach("generate", {
    method: "POST",
    headers: { "content-type": "application/json", accept: "text/event-stream" },
    body: JSON.stringify(request),
    signal,
  });
  for await (const [name, data] of events(response.body, signal)) {
    if (name === "error") throw new ServerError(data.status, data.error);
    yield [name, data];
    if (name === "done") return;
  }
  throw new ConnectionLost();
}

async function reach(address, options) {
  let response;
  try {
    const headers = { ...options.headers, ...key.headers() };
    response = await fetch(address, { ...options, headers });
  } catch (error) {
    throw options.signal?.aborted ? error : new ConnectionLost();
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = null;
  try {
    message = (await response.json()).error;
  } catch {
    // Not JSON: most likely a proxy's page.
  }
  if (typeof message !== "string") message = `HTTP ${response.status} ${response.statusText}`;
  return new ServerError(response.status, message, seconds(response.headers.get("retry-after")));
}

// Retry-After is a number of seconds or a date.
function seconds(value) {
  if (value === null) return null;
  const wait = /^\d+$/.test(value.trim()) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(wait) ? Math.max(0, Math.ceil(wait)) : null;
}

async function* events(body, signal) {
  let name = "message";
  let data = [];
  for await (const line of lines(body, signal)) {
    if (line === "") {
      if (data.length > 0) yield [name, parsed(data.join("\n"))];
      name = "message";
      data = [];
      continue;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") name = value;
    if (field === "data") data.push(value);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ServerError(500, "The server sent something that cannot be read.");
  }
}

async function* lines(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const complete = (rest + value).split(/\r?\n/);
      rest = complete.pop();
      yield* complete;
    }
  } catch (error) {
    throw signal.aborted ? error : new ConnectionLost();
  } finally {
    reader.cancel().catch(() => {}); // a stream that broke cannot be cancelled
  }
}
