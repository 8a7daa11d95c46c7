// Where prompts come from: examples, and the model's own tasks.

import { $, element } from "./dom.js";

const DEMO = "demo";
const EXAMPLES = {
  [DEMO]: [
    ["Translate to French", "translate English to French: Let's go to the store and buy some groceries including eggs, avocadoes, and bread."],
    ["Fix grammar", "fix grammar: My sisters wants to buy some tools including saws, hmamers, and brushes."],
    ["A longer translation", "translate English to French: Alice and Omar filled a black bag on Monday morning because this gardener was right, so Eric must find the messages that Alice hid."],
    ["A longer correction", "fix grammar: I have to bring six candles because you is going to be in the hallawy at noon, but the tourist won't be in Morocco."],
  ],
  other: [
    ["Translate to German", "translate English to German: The house is wonderful, and the garden behind it is larger than it looks."],
    ["Translate to French", "translate English to French: The house is wonderful, and the garden behind it is larger than it looks."],
    ["Summarize", "summarize: The tower is 324 metres tall, about the same height as an 81-storey building, and the tallest structure in Paris. Its base is square, measuring 125 metres on each side. It was the first structure to reach a height of 300 metres."],
    ["Fix grammar", "Fix grammatical errors in this sentence: When I grow up, I start to understand what he said is quite right."],
  ],
};

let tasks = {}; // of the model, by name
let known = []; // prefixes that are offered

/** Offers what suits the model that is served. */
export function offer(name, served = {}) {
  $("presets").replaceChildren(...(EXAMPLES[name] ?? EXAMPLES.other).map(chip));
  tasks = served.tasks ?? {};
  const names = Object.keys(tasks);
  $("task").replaceChildren(new Option("as the prompt says", ""), ...names.map((each) => new Option(each, each)));
  $("task-field").hidden = !names.length;
  $("task").onchange = explain;
  explain();
  if (!$("prompt").value) $("presets").firstChild.click();
}

/** The prefixes of the model's own tasks, or else of the examples. */
export function prefixes({ id, tasks = {} }) {
  const own = Object.values(tasks).map((each) => each.prefix?.trim()).filter(Boolean);
  const shown = (EXAMPLES[id] ?? EXAMPLES.other).map(([, prompt]) => prompt.slice(0, prompt.indexOf(": ") + 1));
  known = [...new Set(own.length ? own : shown)];
  return known;
}

/** The prefix of the task in the view "Write": the chosen one, or the prompt's own. */
export function prefix() {
  const prompt = $("prompt").value;
  return tasks[$("task").value]?.prefix?.trim() || known.find((each) => prompt.startsWith(each));
}

/** The task that a request names. */
export const task = () => ($("task").value ? { task: $("task").value } : {});

/** Shows the prefix of a task, and removes a task's prefix from the prompt itself. */
function explain() {
  const prefix = tasks[$("task").value]?.prefix ?? "";
  $("task-note").textContent = prefix ? `puts “${prefix}” before the prompt` : "";
  const prompt = $("prompt").value;
  const said = Object.values(tasks).find((each) => each.prefix && prompt.startsWith(each.prefix));
  if (prefix && said) {
    $("prompt").value = prompt.slice(said.prefix.length);
    press(null);
  }
}

/** A button for an example, whose prompt includes its task's prefix. */
function chip([label, prompt]) {
  const button = element("button", label, "chip");
  button.type = "button";
  button.addEventListener("click", () => {
    $("prompt").value = prompt;
    if ($("task").value) {
      $("task").value = "";
      explain();
    }
    press(button);
  });
  return button;
}

/** Marks the example whose prompt is shown; none if it was edited. */
export function press(button) {
  for (const other of $("presets").children) other.setAttribute("aria-pressed", other === button);
}
