// The server as the page sees it: requests, and errors that say what to do.

import { events } from "./sse.js";

let key = ""; // in memory only

/** Send this key with every request from now on; "" sends none. */
export function useKey(value) {
  key = value;
}

/** Whether a key is in use. */
export function hasKey() {
  return key !== "";
}

/** A request that failed; `title` says what happened, `message` the server's words or a remedy. */
export class ServerError extends Error {
  constructor(title, message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    this.title = title;
    this.status = status;
    this.param = param;
    this.retryAfter = retryAfter;
  }
}

/** The models that the server lists. */
export async function listModels() {
  const response = await ask("v1/models", {});
  const { data } = await response.json();
  return data;
}

/** Post `body` and yield the chunks of the answer as they come. */
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  let done = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") {
        done = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw failure(chunk.error.code ?? 500, chunk.error, null);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw brokenOff();
  }
  if (!done) throw brokenOff();
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(
      "No answer from the server",
      "It may have stopped, or the network is down. The prompt is kept: run it again when the server is back.",
    );
  }
  if (response.ok) return response;
  throw failure(response.status, await errorOf(response), response.headers.get("Retry-After"));
}

async function errorOf(response) {
  try {
    return (await response.json()).error ?? {};
  } catch {
    return {};
  }
}

const TITLES = {
  400: "The server refused this request",
  401: "This server asks for an API key",
  404: "The server does not know this model or address",
  413: "The prompt is too large for this server",
  429: "The server is busy",
  503: "The server takes no requests now",
};

const REMEDIES = {
  401: "Enter a key that it accepts.",
  429: "Its queue is full.",
  503: "It is starting or shutting down; try again shortly.",
};

function failure(status, error, retryAfter) {
  const code = Number(status) || 500;
  const title = TITLES[code] ?? (code < 500 ? TITLES[400] : "The server failed");
  const message = error.message ?? REMEDIES[code] ?? `It answered with status ${code}.`;
  const seconds = Number(retryAfter);
  return new ServerError(title, message, {
    status: code,
    param: error.param ?? null,
    retryAfter: retryAfter !== null && Number.isFinite(seconds) ? seconds : null,
  });
}

function brokenOff() {
  return new ServerError(
    "The answer broke off",
    "The server closed the connection in the middle. What came before is kept.",
  );
}
