// The page: sends a prompt, shows who wrote each token, and compares with regular decoding.
// Whatever comes from the server is put in as text, never as HTML.

import { ApiError, complete, hasKey, model, rememberKey } from "./api.js";

const REPLAY_MS = 420; // one pass of the large model, in slow motion
const DEMO = "demo";
const TASKS = {
  [DEMO]: [
    ["Translate to French", "translate English to French: Let's go to the store and buy some groceries including eggs, avocadoes, and bread."],
    ["Fix grammar", "fix grammar: My sisters wants to buy some tools including saws, hmamers, and brushes."],
    ["A longer translation", "translate English to French: Alice and Omar filled a black bag on Monday morning because this gardener was right, so Eric must find the messages that Alice hid."],
    ["A longer correction", "fix grammar: I have to bring six candles because you is going to be in the hallawy at noon, but the tourist won't be in Morocco."],
  ],
  other: [
    ["Translate to German", "translate English to German: The house is wonderful, and the garden behind it is larger than it looks."],
    ["Translate to French", "translate English to French: The house is wonderful, and the garden behind it is larger than it looks."],
    ["Summarise", "summarize: The tower is 324 metres tall, about the same height as an 81-storey building, and the tallest structure in Paris. Its base is square, measuring 125 metres on each side. It was the first structure to reach a height of 300 metres."],
    ["Fix grammar", "Fix grammatical errors in this sentence: When I grow up, I start to understand what he said is quite right."],
  ],
};

const $ = (id) => document.getElementById(id);
let controller = null; // of the run in progress
let runs = { speculative: null, regular: null };

// ---- one panel ------------------------------------------------------------------------------------

/** Shows one text pass by pass, and remembers the passes for a replay. */
class Panel {
  constructor(id) {
    this.root = $(id);
    this.text = this.root.querySelector(".text");
    this.clear();
  }

  clear() {
    this.passes = [];
    this.text.replaceChildren();
    this.show({ perCall: "–", calls: "–", tokens: "–", seconds: "–", accepted: "–" });
  }

  /** Takes what one event brought: the tokens of one pass, or of several that came together. */
  take(choice) {
    const { tokens, stats } = choice.speculation;
    const pass = { tokens, stats };
    this.passes.push(pass);
    this.draw(pass);
  }

  draw({ tokens, stats }) {
    if (tokens.length) {
      const pass = document.createElement("span");
      pass.className = "pass";
      for (const { text, writer } of tokens) append(pass, text, writer);
      this.text.append(pass);
    }
    this.show({
      perCall: stats.tokens_per_call.toFixed(2),
      calls: stats.target_calls,
      tokens: stats.generated_tokens,
      seconds: seconds(stats),
      accepted: stats.drafted ? `${Math.round(100 * stats.acceptance_rate)} %` : "–",
    });
  }

  show(figures) {
    for (const cell of this.root.querySelectorAll("[data-figure]")) {
      cell.textContent = figures[cell.dataset.figure];
    }
  }

  get last() {
    return this.passes.at(-1)?.stats;
  }

  get written() {
    return this.passes.flatMap((pass) => pass.tokens);
  }

  get string() {
    return this.written.map((token) => token.text).join("");
  }
}

/** A token's text; its leading space stays outside, so that colours begin with the word. */
function append(parent, text, writer) {
  const word = text.trimStart();
  if (text.length > word.length) parent.append(text.slice(0, text.length - word.length));
  if (!word) return;
  const span = document.createElement("span");
  span.className = `token ${writer}`;
  span.title = { draft: "proposed by the draft", copy: "copied from the prompt", target: "written by the large model" }[writer];
  span.textContent = word;
  parent.append(span);
}

const seconds = (stats) => (stats.encode_seconds + stats.decode_seconds).toFixed(2);

// ---- running --------------------------------------------------------------------------------------

const panels = { speculative: new Panel("speculative"), regular: new Panel("regular") };
for (const panel of Object.values(panels)) {
  panel.text.append(placeholder(panel === panels.regular ? "One token per pass, for comparison." : "The text appears here."));
}

function placeholder(text) {
  const span = document.createElement("span");
  span.className = "placeholder";
  span.textContent = text;
  return span;
}

async function run() {
  stop();
  const mine = (controller = new AbortController());
  const prompt = $("prompt").value;
  const compare = $("compare").checked;
  reset(compare);
  busy(true);
  try {
    await into(panels.speculative, { prompt, ...drafting() }, mine);
    count();
    if (compare) {
      await into(panels.regular, { prompt, draft: false }, mine);
      judge(Number($("delta").value));
    } else {
      tell(`Done: ${panels.speculative.last.tokens_per_call.toFixed(2)} tokens per target call.`);
    }
  } catch (error) {
    if (mine.signal.aborted) tell("Stopped.");
    else await complain(error);
  } finally {
    if (controller === mine) busy(false);
  }
}

/** The settings of the sliders; none where the server has no draft. */
function drafting() {
  if ($("delta").disabled) return {};
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
    await complete(body, show, signal);
  } finally {
    panel.root.classList.remove("running");
  }
}

function reset(compare) {
  Object.values(panels).forEach((panel) => panel.clear());
  $("error").hidden = true;
  $("comparison").hidden = true;
  $("regular").hidden = !compare;
  count();
  tell("Running.");
}

function stop() {
  controller?.abort();
  clearTimeout(replaying);
}

function busy(is) {
  $("stop").disabled = !is;
  $("replay").disabled = is;
  $("output").setAttribute("aria-busy", is);
}

const tell = (message) => ($("status").textContent = message);

async function complain(error) {
  if (error instanceof ApiError && error.status === 401) {
    if (hasKey()) $("key-note").textContent = "That key was not accepted. Try another one.";
    $("key-dialog").showModal();
    return;
  }
  const unreachable = "The server cannot be reached. Is it still running?";
  $("error").textContent = error instanceof ApiError ? error.message : unreachable;
  $("error").hidden = false;
  tell("");
}

// ---- figures --------------------------------------------------------------------------------------

function count() {
  const written = panels.speculative.written;
  for (const writer of ["draft", "copy", "target"]) {
    const share = written.filter((token) => token.writer === writer).length;
    $(`count-${writer}`).textContent = written.length ? share : "";
  }
}

function bars() {
  const [ours, theirs] = [panels.speculative.last, panels.regular.last];
  if (!ours || !theirs) return;
  const time = (stats) => stats.encode_seconds + stats.decode_seconds;
  const pairs = [
    ["calls", ours.target_calls, theirs.target_calls, (x) => x],
    ["seconds", time(ours), time(theirs), (x) => `${x.toFixed(2)} s`],
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
  const speed = seconds(theirs) / seconds(ours);
  const time = Number.isFinite(speed) ? `${speed.toFixed(1)}× the speed` : "too short to time";
  let text = same ? "The same text." : "The text differs: leniency above 0 lets the draft’s taste through.";
  if (!same && delta === 0) text = "The text differs, by rounding: see the README.";
  const verdict = `${fewer}× fewer passes of the large model, ${time}. ${text}`;
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
  $("num-draft-value").textContent = $("auto").checked ? "auto" : $("num-draft").value;
  $("num-draft").disabled = $("auto").checked;
  const delta = Number($("delta").value);
  $("delta-value").textContent = String(delta);
  $("delta-note").textContent =
    delta === 0 ? "0: the large model’s own text, exactly"
    : delta === 1 ? "1: whatever the draft proposes is kept"
    : "keeps more proposals than the large model would make";
}

function offer(name) {
  const tasks = TASKS[name] ?? TASKS.other;
  $("presets").replaceChildren(
    ...tasks.map(([label, prompt]) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "chip";
      button.textContent = label;
      button.addEventListener("click", () => {
        $("prompt").value = prompt;
        press(button);
      });
      return button;
    }),
  );
  if (!$("prompt").value) $("presets").firstChild.click();
}

/** Marks the task whose prompt is shown; none if it was edited. */
function press(button) {
  for (const other of $("presets").children) other.setAttribute("aria-pressed", other === button);
}

async function start() {
  try {
    const served = await model();
    $("model").textContent = served.id;
    offer(served.id);
    $("num-draft").max = served.max_num_draft;
    if (served.num_draft === "auto") $("auto").checked = true;
    else $("num-draft").value = served.num_draft;
    $("delta").value = served.delta;
    settle();
    for (const id of ["num-draft", "auto", "delta"]) $(id).disabled ||= !served.draft;
  } catch (error) {
    offer("other");
    await complain(error);
  }
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
  if (event.key === "Escape") stop();
});
$("stop").addEventListener("click", stop);
$("replay").addEventListener("click", replay);
for (const id of ["num-draft", "delta", "auto"]) $(id).addEventListener("input", settle);
$("prompt").addEventListener("input", () => press(null));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  rememberKey($("key").value);
  $("key-dialog").close();
  start();
});
start();
