// Writing: sends a prompt, shows the origin of each token, and compares with regular decoding.

import { stream } from "./api.js";
import * as beams from "./beams.js";
import { $, duration, element, reveal, seconds, tell } from "./dom.js";
import { complain } from "./errors.js";
import { Panel } from "./panel.js";
import { offer, press, task } from "./prompts.js";

const REPLAY_MS = 420; // one pass of the large model, in slow motion
const SHORT_SECONDS = 0.1; // a run that takes less is timed several times
const RUNS = 5;

let controller = null; // of the run in progress
let drafts = false; // whether the server has a draft
let medians = null; // seconds of each kind of run, if there were several

const panels = { speculative: new Panel("speculative"), regular: new Panel("regular") };
for (const panel of Object.values(panels)) {
  panel.text.append(element("span", panel === panels.regular ? "One token per pass, for comparison." : "The text appears here.", "placeholder"));
}

export async function run() {
  stop();
  const mine = (controller = new AbortController());
  const body = { prompt: $("prompt").value, ...task() };
  reset();
  busy(true);
  try {
    if (beams.searching()) await beams.search(body, mine.signal);
    else await write({ ...body, num_beams: 1 }, mine);
  } catch (error) {
    if (mine.signal.aborted) tell("Stopped.");
    else await complain(error, $("error"));
  } finally {
    if (controller === mine) busy(false);
  }
}

/** Decodes with proposals, and without to compare. */
async function write(body, mine) {
  const compare = $("compare").checked;
  const requests = { speculative: { ...body, ...drafting() }, regular: { ...body, draft: false } };
  await into(panels.speculative, requests.speculative, mine);
  count();
  if (compare) {
    await into(panels.regular, requests.regular, mine);
    await measure(requests, mine);
    judge(Number($("delta").value));
  } else {
    tell(`Done: ${panels.speculative.last.tokens_per_call.toFixed(2)} tokens per target call.`);
  }
}

/** Repeats runs that are too short to be timed once, by turns, and takes the medians. */
async function measure(requests, { signal }) {
  const names = Object.keys(requests);
  const times = Object.fromEntries(names.map((name) => [name, [duration(panels[name].last)]]));
  if (names.every((name) => times[name][0] >= SHORT_SECONDS)) return;
  for (let run = 1; run < RUNS; run += 1) {
    for (const name of names) {
      let last = null;
      await stream("v1/completions", requests[name], (choice) => (last = choice.speculation.stats), signal);
      times[name].push(duration(last));
    }
  }
  const median = (all) => all.sort((a, b) => a - b)[(RUNS - 1) / 2];
  medians = Object.fromEntries(names.map((name) => [name, median(times[name])]));
  for (const name of names) panels[name].figure("seconds").textContent = seconds(medians[name]);
  bars();
}

/** The seconds of a kind of run: the median of several runs, or what the only one took. */
const timed = (name) => medians?.[name] ?? duration(panels[name].last);

/** The settings of the sliders; none if the server has no draft. */
function drafting() {
  if (!drafts) return {};
  const fixed = Number($("num-draft").value);
  return { num_draft: $("auto").checked ? "auto" : fixed, delta: Number($("delta").value) };
}

async function into(panel, body, { signal }) {
  panel.root.classList.add("running");
  const show = (choice) => {
    panel.take(choice);
    bars();
    if (panel === panels.speculative) count();
  };
  try {
    await stream("v1/completions", body, show, signal);
  } finally {
    panel.root.classList.remove("running");
  }
}

function reset() {
  const search = beams.searching();
  medians = null;
  Object.values(panels).forEach((panel) => panel.clear());
  beams.clear();
  for (const id of ["error", "comparison"]) $(id).hidden = true;
  for (const id of ["legend", "panels"]) $(id).hidden = search;
  $("search").hidden = !search;
  $("regular").hidden = !$("compare").checked;
  count();
  reveal($("output"));
  tell("Running.");
}

export function stop() {
  controller?.abort();
  clearTimeout(replaying);
}

function busy(is) {
  $("stop").disabled = !is;
  $("replay").disabled = is;
  $("output").setAttribute("aria-busy", is);
}

// ---- figures --------------------------------------------------------------------------------------

function count() {
  const written = panels.speculative.written;
  for (const origin of ["draft", "copy", "target"]) {
    const share = written.filter((token) => token.origin === origin).length;
    $(`count-${origin}`).textContent = written.length ? share : "";
  }
}

function bars() {
  const [ours, theirs] = [panels.speculative.last, panels.regular.last];
  if (!ours || !theirs) return;
  const pairs = [
    ["calls", ours.target_calls, theirs.target_calls, (x) => x],
    ["seconds", timed("speculative"), timed("regular"), (x) => `${seconds(x)} s`],
  ];
  for (const [name, a, b, format] of pairs) {
    for (const [side, value] of [["s", a], ["r", b]]) {
      const meter = $(`bar-${name}-${side}`);
      meter.max = Math.max(a, b);
      meter.value = value;
      meter.setAttribute("aria-label", `${name}, ${side === "s" ? "speculative" : "regular"}`);
      $(`${name}-${side}`).textContent = `${format(value)} ${side === "s" ? "speculative" : "regular"}`;
    }
  }
  $("comparison").hidden = false;
}

function judge(delta) {
  const [ours, theirs] = [panels.speculative.last, panels.regular.last];
  const same = panels.speculative.string === panels.regular.string;
  const fewer = (theirs.target_calls / ours.target_calls).toFixed(1);
  const runs = medians ? ` (medians of ${RUNS} runs)` : "";
  const speed = `${(timed("regular") / timed("speculative")).toFixed(1)}× the speed${runs}`;
  let text = same ? "The same text." : "The text differs: leniency above 0 lets the draft’s taste through.";
  if (!same && delta === 0) text = "The text differs, by rounding: see the README.";
  const passes = ours.drafted ? `${fewer}× fewer passes of the large model` : "Nothing was proposed, so the large model made as many passes";
  const verdict = `${passes}, ${speed}. ${text}`;
  $("verdict").textContent = verdict;
  tell(`Done. ${panels.speculative.last.tokens_per_call.toFixed(2)} tokens per target call. ${verdict}`);
}

// ---- slow motion ----------------------------------------------------------------------------------

let replaying = 0;

/** Draws both texts again, each pass of the large model taking the same time. */
function replay() {
  clearTimeout(replaying);
  const all = Object.values(panels);
  const passes = all.map((panel) => panel.passes);
  all.forEach((panel) => panel.clear());
  all.forEach((panel, i) => (panel.passes = passes[i]));
  let n = 0;
  const draw = () => {
    passes.forEach((list, i) => list[n] && all[i].draw(list[n]));
    n += 1;
    if (passes.some((list) => n < list.length)) replaying = setTimeout(draw, REPLAY_MS);
  };
  draw();
}

// ---- controls -------------------------------------------------------------------------------------

function settle() {
  const search = beams.searching();
  const delta = Number($("delta").value);
  $("num-draft-value").textContent = $("auto").checked ? "auto" : $("num-draft").value;
  $("num-draft").disabled = !drafts || search || $("auto").checked;
  for (const id of ["auto", "delta"]) $(id).disabled = !drafts || search;
  $("compare").disabled = search;
  $("delta-value").textContent = String(delta);
  $("delta-note").textContent =
    delta === 0 ? "0: the large model’s own text, exactly"
    : delta === 1 ? "1: whatever the draft proposes is kept"
    : "keeps more proposals than the large model would make";
}

/** Takes the server's defaults. */
export function start(served) {
  drafts = served.draft;
  $("num-draft").max = served.max_num_draft;
  if (served.num_draft === "auto") $("auto").checked = true;
  else $("num-draft").value = served.num_draft;
  $("delta").value = served.delta;
  $("num-beams").max = served.max_num_beams;
  offer(served.id, served);
  beams.settle();
  settle();
}

$("stop").addEventListener("click", stop);
$("replay").addEventListener("click", replay);
for (const id of ["num-draft", "delta", "auto"]) $(id).addEventListener("input", settle);
beams.listen(settle);
$("prompt").addEventListener("input", () => press(null));
