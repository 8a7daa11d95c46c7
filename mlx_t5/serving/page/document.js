// Documents: decodes a text or a file sentence by sentence, and shows source and answer side by side.

import { ApiError, MOST_BYTES, stream } from "./api.js";
import { $, element, reveal, tell } from "./dom.js";
import { complain } from "./errors.js";
import { append } from "./panel.js";

const UNREADABLE = /\.(md|mdx|markdown|mdown|rst|tex|x?html|htm|xml|json|po|ass|ssa|sbv|ttml|dfxp|smi|sub|lrc|docx|odt|pdf|epub|rtf)$/i;
const NOTE = $("document-note").textContent;
const EXAMPLE = "I open a lot of white suitcases at noon. It is going to rain next Thursday.\n\nThe windows that you have broken were not new. My sisters want to buy some tools including saws, hammers, and brushes.";

const LOOPS = { max_pattern_size: 16, min_count: 4 }; // as in translations by language

let controller = null; // of the run in progress
let opened = null; // { name, text } of the file in the field; no text once it has been edited
let answer = null; // { name, texts }: the answers so far, and the name to save them under
let units = ""; // the name of the units that the text is cut into
let waiting = []; // rows that are not shown yet
let chosen = false; // whether the user has chosen a prefix in this view
const written = {}; // how many tokens each origin has written

export function stop() {
  controller?.abort();
}

// ---- a run ----------------------------------------------------------------------------------------

async function run() {
  stop();
  const mine = (controller = new AbortController());
  const text = opened?.text ?? $("document-text").value;
  answer = { name: opened?.name ?? `document${$("file-type").value}`, texts: [], shown: 0 };
  const characters = [...text]; // offsets count these, and not the units of UTF-16
  units = $("split").value;
  clear();
  busy(true);
  try {
    const take = (choice) => mine === controller && show(choice, characters);
    await stream("v1/chat/completions", body(text), take, mine.signal);
    if (mine === controller) finish();
  } catch (error) {
    if (!mine.signal.aborted) await complain(error, $("document-error"));
    else if (mine === controller) tell("Stopped.");
  } finally {
    if (mine === controller) busy(false);
  }
}

function body(text) {
  const messages = [{ role: "user", content: text }];
  if ($("prefix").value.trim()) messages.unshift({ role: "system", content: $("prefix").value });
  return { messages, split: $("split").value, file_type: $("file-type").value, repetition_detection: LOOPS };
}

/** Shows the content of one event: a piece, and the text up to its end. */
function show({ delta, pieces, stats }, characters) {
  answer.texts.push(delta.content);
  for (const piece of pieces) {
    waiting.push(row(piece, characters.slice(piece.start, piece.end).join("")));
    for (const { origin } of piece.speculation?.tokens ?? []) written[origin] = (written[origin] ?? 0) + 1;
  }
  // One change of the page for all pieces that have come since the last change.
  if (waiting.length === pieces.length) requestAnimationFrame(flush);
  answer.stats = stats;
}

function row({ text, error, finish_reason, looped, speculation }, source) {
  const made = element("li", "", error ? "failed" : "");
  const target = element("p");
  if (speculation && !error) for (const { text, origin } of speculation.tokens) append(target, text, origin);
  else target.textContent = text;
  made.append(element("p", source, "source"), target);
  if (error) made.append(element("small", `Left as it was: ${error}`));
  else if (looped) made.append(element("small", "It ran into a loop, so it was decoded in smaller parts."));
  else if (!speculation) made.append(element("small", "Left as it was: its answer lacked a URL or an e-mail address."));
  else if (finish_reason === "length") made.append(element("small", "Cut off: it has as many tokens as are allowed."));
  return made;
}

function flush() {
  const count = $("pieces").childElementCount;
  waiting.forEach((each, i) => (each.dataset.number = count + i + 1));
  $("pieces").append(...waiting.splice(0));
  $("joined").append(answer.texts.slice(answer.shown).join(""));
  answer.shown = answer.texts.length;
  const done = $("pieces").childElementCount;
  if (!done) return;
  if (!count) reveal($("document-output"));
  const { pieces, looped, failed, kept, length } = answer.stats; // kept: an answer lacked a URL of its source
  $("document-progress").max = pieces;
  $("document-progress").value = done;
  $("document-count").textContent = `${done} of ${pieces} ${units}${failed + kept ? `, ${failed + kept} left as they were` : ""}${length ? `, ${length} cut off` : ""}${looped ? `, ${looped} looped` : ""}`;
  for (const cell of document.querySelectorAll("[data-origin]")) cell.textContent = written[cell.dataset.origin] ?? "";
}

function finish() {
  flush();
  if (!$("pieces").childElementCount) throw new ApiError(400, "There is no word in the text, so it stays as it is.");
  answer.complete = true;
  tell(`Done: ${$("document-count").textContent}.`);
}

function clear() {
  waiting = [];
  for (const origin of Object.keys(written)) delete written[origin];
  for (const id of ["pieces", "joined"]) $(id).replaceChildren();
  $("document-error").hidden = true;
  $("document-count").textContent = "Cutting the text";
  $("document-progress").removeAttribute("value");
  $("document-output").hidden = false;
  tell("Running.");
}

function busy(is) {
  if (!is) flush();
  $("document-stop").disabled = !is;
  for (const id of ["copy", "download"]) $(id).disabled = is || !$("pieces").childElementCount;
  $("document-output").setAttribute("aria-busy", is);
  if (!is && !$("pieces").childElementCount) $("document-output").hidden = true;
}

// ---- files ----------------------------------------------------------------------------------------

async function open(file) {
  if (!file) return;
  $("document-error").hidden = true;
  try {
    if (UNREADABLE.test(file.name)) throw new ApiError(400, `${file.name} cannot be read, only plain text (.txt), SubRip (.srt) and WebVTT (.vtt).`);
    const tooLarge = new ApiError(413, `${file.name} has more than 1 MiB; give it in parts.`);
    if (file.size > 2 * MOST_BYTES) throw tooLarge; // even if its characters take two bytes, and one as JSON
    const bytes = new Uint8Array(await file.arrayBuffer());
    const encoding = { "255,254": "utf-16le", "254,255": "utf-16be" }[bytes.slice(0, 2)] ?? "utf-8";
    const text = new TextDecoder(encoding, { fatal: true, ignoreBOM: true }).decode(bytes);
    if (new Blob([JSON.stringify(text)]).size > MOST_BYTES) throw tooLarge;
    opened = { name: file.name, text }; // with its line ends, which the field would change
    $("document-text").value = text;
    $("document-note").textContent = `${file.name}, ${text.length} characters`;
    const types = [...$("file-type").options].map((each) => each.value);
    $("file-type").value = types.find((each) => file.name.toLowerCase().endsWith(each)) ?? ".txt";
  } catch (error) {
    const message = error instanceof ApiError ? error.message : `${file.name} is no text in UTF-8; save it as such.`;
    await complain(new ApiError(400, message), $("document-error"));
  }
}

async function copy() {
  try {
    await navigator.clipboard.writeText(answer.texts.join(""));
  } catch { // only pages of this machine or with TLS have a clipboard
    getSelection().selectAllChildren($("joined"));
    document.execCommand("copy");
  }
  tell("Copied.");
}

/** Saves the answers so far, under a name like the source's. */
function download() {
  const [, base, end] = /^(.*?)(\.[^.]*)?$/s.exec(answer.name);
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([new TextEncoder().encode(answer.texts.join(""))], { type: "text/plain" }));
  link.download = `${base}-answer${answer.complete ? "" : "-part"}${end ?? ".txt"}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// ---- controls -------------------------------------------------------------------------------------

/** Offers prefixes that suit the model. */
export function start(prefixes, prefix) {
  $("prefixes").replaceChildren(...prefixes.map(chip));
  begin(prefix ?? prefixes[0]);
}

/** Takes the prefix of the task in the view "Write", unless another one was chosen in this view. */
export function begin(prefix) {
  if (chosen || !prefix) return;
  $("prefix").value = prefix;
  mark();
}

function chip(prefix) {
  const button = element("button", prefix, "chip");
  button.type = "button";
  button.addEventListener("click", () => {
    $("prefix").value = prefix;
    choose();
  });
  return button;
}

function choose() {
  chosen = true;
  mark();
}

const mark = () => [...$("prefixes").children].forEach((each) => each.setAttribute("aria-pressed", each.textContent === $("prefix").value));

$("document-text").value = EXAMPLE;
$("document-text").addEventListener("beforeinput", ({ target }) => {
  const replaced = target.selectionStart === 0 && target.selectionEnd === target.value.length;
  if (replaced) opened = null; // another text is no version of the file
});
$("document-text").addEventListener("input", () => {
  opened = opened && $("document-text").value ? { name: opened.name } : null;
  if (!opened) $("document-note").textContent = NOTE;
});
$("prefix").addEventListener("input", choose);
$("document-form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("document-stop").addEventListener("click", stop);
$("copy").addEventListener("click", copy);
$("download").addEventListener("click", download);
$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  open($("file").files[0]);
  $("file").value = ""; // so that the same file can be opened again
});
for (const name of ["dragover", "drop"]) {
  document.addEventListener(name, (event) => {
    if ($("view-document").hidden || !event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // a browser would leave the page for the file
    if (name === "drop") open(event.dataTransfer.files[0]);
  });
}
