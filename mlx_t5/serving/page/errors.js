// Shows errors; if the server needs a key, asks for it first.

import { ApiError, hasKey } from "./api.js";
import { $, tell } from "./dom.js";

/** Shows an error in `place`, or asks for the key. */
export async function complain(error, place) {
  if (error instanceof ApiError && error.status === 401) {
    if (hasKey()) $("key-note").textContent = "That key was not accepted. Try another one.";
    $("key-dialog").showModal();
    return;
  }
  const unreachable = "The server cannot be reached. Is it still running?";
  place.textContent = error instanceof ApiError ? error.message : unreachable;
  place.hidden = false;
  tell("");
}
