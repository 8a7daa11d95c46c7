// Scores, ranks and embeddings: each has a form and one answer.

import { ApiError, post } from "./api.js";
import { $, element, reveal, signed, tell } from "./dom.js";
import { complain } from "./errors.js";

const MOST_TEXTS = 12; // side by side in a table
const EXAMPLES = {
  "score-prompt": "fix grammar: She have two cat.",
  "score-targets": "She has two cats.\nShe have two cats.\nShe has two cat.",
  query: "Where do penguins live?",
  documents: "Penguins live mostly in the south, on ice and on rocky coasts.\nThe penguin is a biscuit with a chocolate coating.\nBears sleep through the winter.",
  inputs: "The cat sleeps on the sofa.\nA kitten is napping on the couch.\nShares fell sharply on Monday.",
};

const lines = (id) => $(id).value.split("\n").map((line) => line.trim()).filter(Boolean);

/** Sends a form, and shows the answer under it. */
function answer(name, ask) {
  const form = $(`${name}-form`);
  const error = form.querySelector(".error");
  const output = $(`${name}-output`);
  let controller = null;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    controller?.abort();
    const mine = (controller = new AbortController());
    error.hidden = true;
    output.setAttribute("aria-busy", true);
    try {
      const message = await ask((path, body) => post(path, body, mine.signal));
      output.hidden = false;
      reveal(output);
      tell(message);
    } catch (problem) {
      if (!mine.signal.aborted) await complain(problem, error);
    } finally {
      if (controller === mine) output.setAttribute("aria-busy", false);
    }
  });
}

// ---- scores ---------------------------------------------------------------------------------------

answer("score", async (post) => {
  const targets = lines("score-targets");
  const { data } = await post("v1/score", { prompt: $("score-prompt").value, targets });
  const best = data.reduce((a, b) => (b.logprob > a.logprob ? b : a));
  $("scores").replaceChildren(...data.map((each) => scored(each, each === best && data.length > 1)));
  return `Done. The likeliest: ${targets[best.index]}`;
});

function scored({ tokens, token_logprobs, logprob }, best) {
  const made = element("li");
  const cells = element("p", "", "cells");
  tokens.forEach((token, i) => cells.append(cell(token, token_logprobs[i])));
  const sum = element("p", `${signed(logprob)} in all`, "score");
  if (best) sum.append(" · ", element("strong", "the likeliest"));
  made.append(cells, sum);
  return made;
}

/** A token over its log-probability; marked where it is improbable. */
function cell(token, logprob) {
  const likelihood = logprob > Math.log(0.5) ? "likely" : logprob > Math.log(0.05) ? "possible" : "unlikely";
  const made = element("span", "", `cell ${likelihood}`);
  made.append(element("span", token.trim() || token, "piece"), " ", element("small", signed(logprob)));
  return made;
}

// ---- ranks ----------------------------------------------------------------------------------------

answer("rerank", async (post) => {
  const documents = lines("documents");
  const { results } = await post("v1/rerank", { query: $("query").value, documents });
  $("ranks").replaceChildren(...results.map((each) => ranked(each, documents[each.index])));
  return `Done. The most relevant: ${documents[results[0].index]}`;
});

function ranked({ relevance_score }, text) {
  const made = element("li");
  const meter = element("meter", "", "ours");
  meter.value = relevance_score;
  meter.setAttribute("aria-label", "relevance");
  const line = element("div", "", "relevance");
  line.append(meter, element("span", `${(100 * relevance_score).toFixed(1)} %`));
  made.append(element("p", text, "text"), line);
  return made;
}

// ---- embeddings -----------------------------------------------------------------------------------

answer("embeddings", async (post) => {
  const texts = lines("inputs");
  if (texts.length < 2) throw new ApiError(400, "Write at least two texts, one a line.");
  if (texts.length > MOST_TEXTS) {
    throw new ApiError(400, `There is room for ${MOST_TEXTS} texts here; the API takes more.`);
  }
  const body = { input: texts, normalize: true, encoding_format: "float" };
  const vectors = (await post("v1/embeddings", body)).data.map((entry) => entry.embedding);
  $("similarities").replaceChildren(...table(texts, vectors));
  return `Done: ${texts.length} vectors of ${vectors[0].length} numbers.`;
});

/** The rows of a table of similarities. */
function table(texts, vectors) {
  const head = element("tr");
  head.append(element("td"), ...texts.map((_, i) => heading(`${i + 1}`, "col")));
  const rows = texts.map((text, i) => {
    const row = element("tr");
    const cells = vectors.map((other, j) => element("td", signed(dot(vectors[i], other)), i === j ? "same" : ""));
    row.append(heading(`${i + 1}  ${text}`, "row"), ...cells);
    return row;
  });
  return [head, ...rows];
}

function heading(text, scope) {
  const made = element("th", text);
  made.scope = scope;
  return made;
}

const dot = (a, b) => a.reduce((sum, number, i) => sum + number * b[i], 0);

for (const [id, text] of Object.entries(EXAMPLES)) $(id).value = text;
