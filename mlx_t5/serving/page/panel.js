// One text while it is written: the origin of each token, pass by pass, and the counts so far.

import { $, duration, element, seconds } from "./dom.js";

/** Shows one text pass by pass, and remembers the passes for a replay. */
export class Panel {
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

  /** Shows one event: the tokens of one pass, or of several passes that came together. */
  take(choice) {
    const { tokens, stats } = choice.speculation;
    const pass = { tokens, stats, cut: choice.finish_reason === "length" };
    this.passes.push(pass);
    this.draw(pass);
  }

  draw({ tokens, stats, cut }) {
    if (tokens.length) {
      const pass = element("span", "", "pass");
      for (const { text, origin } of tokens) append(pass, text, origin);
      this.text.append(pass);
    }
    this.show({
      perCall: stats.tokens_per_call.toFixed(2),
      calls: stats.target_calls,
      tokens: cut ? `${stats.generated_tokens}, then cut off` : stats.generated_tokens,
      seconds: seconds(duration(stats)),
      accepted: stats.drafted ? `${Math.round(100 * stats.acceptance_rate)} %` : "–",
    });
  }

  figure(name) {
    return this.root.querySelector(`[data-figure=${name}]`);
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

/** A token's text; its leading space stays outside, so that colors begin with the word. */
export function append(parent, text, origin) {
  const word = text.trimStart();
  if (text.length > word.length) parent.append(text.slice(0, text.length - word.length));
  if (!word) return;
  const span = element("span", word, `token ${origin}`);
  span.title = { draft: "proposed by the draft", copy: "copied from the prompt", target: "written by the large model" }[origin];
  parent.append(span);
}
