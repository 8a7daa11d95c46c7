"""Tests scores against transformers' log softmax by family, and the sharing of passes."""

import math
from operator import attrgetter

import numpy as np
import pytest
import torch
import transformers

import ranking_models
from command_line import byte_model
from mlx_t5.backend import mx
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.errors import UserError
from mlx_t5.model import load
from mlx_t5.scoring import scores as scoring
from mlx_t5.scoring.pairs import Score, ranking

SOURCES = [[5, 9, 11, 30, 7, 1], [8, 1], [5, 9, 11, 30, 7, 1], [40, 41, 42, 1], [8, 1]]
TARGETS = [[6, 7, 8, 1], [9, 1], [3], [20, 21, 22, 23, 24, 25, 26, 1], [10, 11, 12, 1]]


def expected(reference, source, target):
    """Returns the log softmax of transformers' logits at each token of the target."""
    start = reference.family.raw["decoder_start_token_id"]
    logits = reference.logits([source], [[start, *target[:-1]]], None)[0]
    logprobs = torch.log_softmax(torch.tensor(logits).double(), -1).numpy()
    return logprobs[np.arange(len(target)), target]


@pytest.fixture(scope="module")
def byte_decoder(tmp_path_factory):
    model, tokenizer = load(byte_model(tmp_path_factory.mktemp("bytes") / "model"), "float32")
    return SpeculativeDecoder(model, None, tokenizer)


@pytest.mark.parametrize("family", ["t5", "madlad"])
def test_scores_are_those_of_transformers(reference_of, family):
    reference = reference_of(family)
    decoder = SpeculativeDecoder(load(reference.folder)[0])
    pairs = zip(SOURCES, TARGETS, strict=True)
    hf_logprobs = [expected(reference, source, target) for source, target in pairs]
    for batch_size in (1, 3, 8):
        scores = decoder.score(SOURCES, TARGETS, batch_size)
        for score, logprobs, target in zip(scores, hf_logprobs, TARGETS, strict=True):
            np.testing.assert_allclose(score.token_logprobs, logprobs, atol=1e-4)
            assert score.logprob == pytest.approx(logprobs.sum(), abs=1e-4 * len(target))
            assert score.tokens == target and score.error is None


def test_targets_of_a_prompt_are_scored_as_alone(reference_of):
    decoder = SpeculativeDecoder(load(reference_of("flan").folder)[0])
    alone = [decoder.score(SOURCES[0], [target])[0].logprob for target in TARGETS]
    together = decoder.score(SOURCES[0], TARGETS, batch_size=2)
    assert [s.logprob for s in together] == pytest.approx(alone, abs=1e-5)


def test_a_scored_text_gets_an_end_token_and_ids_stay_as_given(byte_decoder):
    text, ids = byte_decoder.score(["abc", "abc"], ["de", [103, 104]])
    assert text.tokens == [103, 104, 1] and ids.tokens == [103, 104]
    assert text.token_logprobs[:2] == pytest.approx(ids.token_logprobs, abs=1e-5)


def test_one_bad_pair_of_several_has_an_error(byte_decoder):
    some = [("a", "b"), ("a", " "), ([999], "b"), UserError("line 4 is bad")]
    some += [("a", 5), (None, "b"), *(misshapen := [("a",), tuple("abc"), "ab", None, 5, {0: 1}])]
    good, empty, unknown, bad, number, nothing, *rest = byte_decoder.scoring.scores(iter(some))
    assert number.error == "a target is 5; it must be a text or a list of token ids"
    assert nothing.error == "a prompt is None; it must be a text or a list of token ids"
    for score, pair in zip(rest, misshapen, strict=True):
        assert score.error == f"a pair is {pair!r}; it must be a prompt and its target"
    assert good.error is None and len(good.token_logprobs) == 2
    assert empty.error == "a target is empty; write the text to work on"
    assert "outside the model's vocabulary" in unknown.error
    assert bad.error == "line 4 is bad" and math.isnan(bad.logprob)
    with pytest.raises(UserError, match="a target is empty"):
        byte_decoder.score("a", "")
    with pytest.raises(UserError, match="2 prompts for 3 targets"):
        byte_decoder.score(["a", "b"], ["a", "b", "c"])


@pytest.mark.parametrize(
    "method, message, values",
    [
        ("score", "targets is None; it must be a text or a list", {"targets": None}),
        ("scoring.scores", "pairs is 'ab'; it must be a list, each a prompt", {"pairs": "ab"}),
        ("embeddings.vectors", "prompts is 'ab'; it must be a list, each", {"prompts": "ab"}),
        ("embed", "normalize is 'no'; it must be True or False", {"normalize": "no"}),
        ("rerank", "the query is empty or no text", {"query": 5, "words": ("t", "f")}),
        ("rerank", "document 1 is empty", {"documents": ["b", ""], "words": ("t", "f")}),
        ("rerank", "'true' is no single token", {}),
        ("rerank", "max_prompt_tokens is 0; it must be a whole", {"max_prompt_tokens": 0}),
    ],
)
def test_values_of_the_wrong_kind_are_refused(byte_decoder, method, message, values):
    usual = {
        "score": {"prompts": "a", "targets": "b"},
        "embed": {"prompts": "a"},
        "rerank": {"query": "a", "documents": ["b"]},
    }.get(method, {})
    with pytest.raises(UserError, match=message):
        attrgetter(method)(byte_decoder)(**{**usual, **values})


def test_logits_that_are_nan_are_an_error(byte_decoder, monkeypatch):
    decode = byte_decoder.model.decode
    monkeypatch.setattr(
        type(byte_decoder.model), "decode", lambda self, *a: decode(*a) * mx.array(mx.nan)
    )
    with pytest.raises(UserError, match="NaN or infinite"):
        byte_decoder.score("a", "b")


def test_a_batch_too_large_for_memory_is_halved(byte_decoder, monkeypatch):
    targets = ["d", "e", "f", "gh" * 50]
    whole = byte_decoder.score("abc", targets)

    def require(self, new, rows, target, width):
        if rows * target > 4:
            raise RuntimeError("needs more")

    monkeypatch.setattr(scoring.Scoring, "_require", require)
    scores = byte_decoder.score("abc", targets)
    assert [s.logprob for s in scores[:3]] == pytest.approx([s.logprob for s in whole[:3]])
    assert scores[3].error.startswith("no memory for a prompt and its target (needs more)")


def test_ranking_is_the_recipe_of_monot5(tmp_path):
    """The recipe with transformers: log softmax over two words' logits at the first position."""
    folder = ranking_models.save(tmp_path / "ranker")
    hf_model = transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()
    model, tokenizer = load(folder, "float32")
    decoder = SpeculativeDecoder(model, None, tokenizer)
    true, false = tokenizer.convert_tokens_to_ids(["▁true", "▁false"])
    most = 40  # tokens, where monoT5 has 512
    long = "a much longer text about other things " * 3
    documents = ["a cat", "dogs and cats", "the", long, "x."]

    def recipe(document):
        ids = tokenizer(f"Query: cats Document: {document} Relevant:").input_ids
        if len(ids) > most:
            cue = tokenizer("Relevant:").input_ids
            ids = tokenizer(f"Query: cats Document: {document}").input_ids[:-1]
            ids = ids[: most - len(cue)] + cue
        with torch.no_grad():
            start = torch.tensor([[model.config.decoder_start_token_id]])
            logits = hf_model(torch.tensor([ids]), decoder_input_ids=start).logits[0, 0]
        return len(ids), torch.log_softmax(logits[[true, false]].double(), 0)[0].item()

    lengths, scores = zip(*map(recipe, documents), strict=True)
    assert max(lengths) == most > min(lengths), "one is cut"
    ranked = decoder.rerank("cats", documents, batch_size=2, max_prompt_tokens=most)
    assert [r.index for r in ranked] == sorted(range(5), key=lambda i: -scores[i])
    assert [r.score for r in ranked] == pytest.approx(sorted(scores, reverse=True), abs=1e-4)
    (best,) = decoder.rerank("cats", documents, top_n=1, max_prompt_tokens=most)
    assert (best.index, best.score) == (ranked[0].index, pytest.approx(ranked[0].score, abs=1e-5))
    uncut = {r.index: r.score for r in decoder.rerank("cats", documents)}
    assert abs(uncut[3] - scores[3]) > 1e-3, "512 tokens are room enough for it"
    with pytest.raises(UserError, match="the query leaves no room for a document in 40 tokens"):
        decoder.rerank("cats " * 9, ["dogs"], max_prompt_tokens=most)


def test_ranking_does_not_overflow():
    scores = [Score(-900.0), Score(0.0), Score(0.0), Score(-900.0)]
    best, worst = ranking(scores)
    assert (best.index, best.score) == (1, 0.0)
    assert (worst.index, worst.score) == (0, -900.0), "and no infinity"
