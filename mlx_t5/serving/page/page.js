// The page: one view for each capability of the model.

import { hasKey, model, rememberKey } from "./api.js";
import * as documents from "./document.js";
import { $ } from "./dom.js";
import { complain } from "./errors.js";
import "./one_pass.js";
import { offer, prefix, prefixes } from "./prompts.js";
import { run, start as startWriting, stop } from "./write.js";

const OUTPUT = { completions: "output" }; // the output of any other view is named after the view
let capabilities = ["completions"];

const links = () => [...$("views").querySelectorAll("a")];
const nameOf = (link) => link.hash.slice(1);
const shown = () => links().find((link) => link.getAttribute("aria-current"));

/** Shows the view that the address names, if the model can do that. */
function show() {
  const names = links().map(nameOf);
  const wanted = location.hash.slice(1);
  if (!names.includes(wanted) && shown()) return; // a place inside the view
  const name = capabilities.includes(wanted) ? wanted : capabilities[0];
  for (const link of links()) {
    if (nameOf(link) === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    $(`view-${nameOf(link)}`).hidden = nameOf(link) !== name;
  }
  $("skip").hash = OUTPUT[name] ?? `${name}-output`;
  if (name === "document") documents.begin(prefix());
}

/** Offers the views for the model's capabilities. */
function allow(names) {
  capabilities = names.flatMap((name) => (name === "completions" ? [name, "document"] : [name]));
  $("views").hidden = capabilities.length < 2;
  for (const link of links()) link.hidden = !capabilities.includes(nameOf(link));
  shown()?.removeAttribute("aria-current");
  show();
}

async function start() {
  try {
    const served = await model();
    $("model").textContent = served.id;
    $("notes").textContent = served.notes.map((note) => `· ${note}`).join(" ");
    $("metrics").hidden = hasKey(); // a link sends no key
    allow(served.capabilities);
    startWriting(served);
    documents.start(prefixes(served), prefix());
  } catch (error) {
    offer("other");
    await complain(error, $("error"));
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
document.addEventListener("keydown", (event) => {
  const form = $(`view-${nameOf(shown())}`).querySelector("form");
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  if (event.key === "Escape") [stop, documents.stop].forEach((each) => each());
});
window.addEventListener("hashchange", show);
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  rememberKey($("key").value);
  $("key-dialog").close();
  start();
});
show();
start();
