// The server's API, as far as the page needs it: the same addresses that every client uses. They are
// relative, as the page may stand under a proxy's path.

import { sayWaiting } from "./dom.js";

const KEY = "t5-api-key";
const LOOK_MS = 1000; // between two looks at how busy the server is
export const MOST_BYTES = 2 ** 20; // of a request

/** An answer that is an error; `status` is HTTP's, `message` for the user. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function rememberKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

/** The model that is served, with its limits and defaults. */
export async function model() {
  const response = await ask("v1/models");
  return (await response.json()).data[0];
}

/** The answer to a request that is not streamed. */
export async function post(path, body, signal) {
  const response = await send(path, body, signal);
  return response.json();
}

/**
 * Streams an answer; `take` gets each event's choice. Ends early when `signal` aborts.
 */
export async function stream(path, body, take, signal) {
  const response = await send(path, { ...body, stream: true, speculation: true }, signal);
  for await (const event of events(response.body)) {
    if (event.error) throw new ApiError(500, event.error.message);
    if (event.choices.length) take(event.choices[0]);
  }
}

/** Sends a request; until its answer begins, says if the server has others to serve first. */
async function send(path, value, signal) {
  const body = JSON.stringify(value);
  if (new Blob([body]).size > MOST_BYTES) throw new ApiError(413, "This is more than 1 MiB; send it in parts.");
  const headers = { "Content-Type": "application/json" };
  const looking = setInterval(look, LOOK_MS);
  try {
    return await ask(path, { method: "POST", headers, body, signal });
  } finally {
    clearInterval(looking);
    sayWaiting();
  }

  async function look() {
    const { running, waiting } = await (await ask("health", { signal })).json();
    if (waiting) sayWaiting(`Waiting: the server is busy (texts being decoded: ${running}, in the queue: ${waiting}).`);
  }
}

async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  let message = body?.error?.message ?? `the server answered ${response.status}`;
  if (response.status === 429) message = `The server is busy: ${message}.`;
  throw new ApiError(response.status, message);
}

/** The JSON objects of a stream of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
