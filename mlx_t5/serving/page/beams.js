// Beam search: its settings, and the texts that it finds.

import { post } from "./api.js";
import { $, duration, element, seconds, signed, tell } from "./dom.js";

const SETTINGS = ["num-beams", "length-penalty", "texts"];
const value = (id) => Number($(id).value);

/** Whether a search is requested. */
export const searching = () => value("num-beams") > 1;

/** The fields of a request for a search. */
export const wishes = () => ({
  num_beams: value("num-beams"),
  length_penalty: value("length-penalty"),
  n: value("texts"),
});

/** Updates the texts that describe the settings, after a change. */
export function settle() {
  const beams = value("num-beams");
  $("texts").max = beams;
  for (const id of SETTINGS) $(`${id}-value`).textContent = signed(value(id), id === "length-penalty" ? 1 : 0);
  for (const id of ["length-penalty", "texts"]) $(id).disabled = beams === 1;
  $("search-summary").textContent = beams === 1 ? "off" : `${beams} beams`;
  $("num-beams-note").textContent =
    beams === 1 ? "1: no search" : "partial texts kept side by side; a search uses no draft";
}

/** Calls `changed` after every change of a setting. */
export function listen(changed) {
  for (const id of SETTINGS) $(id).addEventListener("input", () => changed(settle()));
}

/** Searches, and shows the texts. */
export async function search(body, signal) {
  const panel = $("search");
  panel.classList.add("running");
  try {
    const { choices } = await post("v1/completions", { ...body, ...wishes(), speculation: true }, signal);
    show(choices);
  } finally {
    panel.classList.remove("running");
  }
}

export function clear() {
  $("search-texts").replaceChildren();
  figures({ calls: "–", seconds: "–" });
}

function show(choices) {
  $("search-texts").replaceChildren(...choices.map(item));
  const { stats } = choices[0].speculation;
  figures({ calls: stats.target_calls, seconds: seconds(duration(stats)) });
  tell(`Done: ${choices.length} of ${value("num-beams")} beams, the best scores ${signed(choices[0].score)}.`);
}

function item({ text, score }) {
  const made = element("li");
  made.append(element("p", text, "text"), element("span", `score ${signed(score, 3)}`, "score"));
  return made;
}

function figures(found) {
  for (const cell of $("search").querySelectorAll("[data-figure]")) {
    cell.textContent = found[cell.dataset.figure];
  }
}
