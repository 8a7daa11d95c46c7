"""Tests embeddings, scores and ranks over HTTP."""

import ast
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from openai import OpenAI

import ranking_models
from fake_serving import LocalServer
from mlx_t5.checkpoints.generation_config import read_tasks
from mlx_t5.convert import convert
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.disk import BUNDLED
from mlx_t5.model import load
from mlx_t5.scoring.pairs import Score, ranks_by
from mlx_t5.serving.requests import MAX_DOCUMENTS, MAX_INPUTS
from mlx_t5.serving.rerank import named_words
from mlx_t5.serving.service import Presets
from mlx_t5.serving.worker import ScoringJobs
from mlx_t5.text.tokenizer import load_tokenizer

TEXTS = ["a cat", "two dogs", "the long tale of a mouse", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a random T5 whose tokenizer has the words of monoT5."""
    tasks = {"telling": {"prefix": "the tale: ", "num_beams": 4, "length_penalty": 2.0}}
    return ranking_models.save(
        tmp_path_factory.mktemp("ranking") / "ranker", task_specific_params=tasks
    )


@pytest.fixture(scope="module")
def decoder(folder):
    model, tokenizer = load(folder, "float32")
    return SpeculativeDecoder(model, None, tokenizer)


@pytest.fixture(scope="module")
def ranker(folder, decoder):
    with LocalServer(decoder, "ranker", Presets(tasks=read_tasks(folder))) as running:
        yield running


def test_the_official_client_gets_vectors(ranker, decoder):
    client = OpenAI(base_url="http://localhost/v1", api_key="any", http_client=ranker.http)
    response = client.embeddings.create(model="ranker", input=TEXTS)  # decodes base64
    plain = client.embeddings.create(model="ranker", input="a cat", encoding_format="float")
    normal = client.embeddings.create(model="ranker", input=TEXTS, extra_body={"normalize": True})
    expected = decoder.embed(TEXTS)
    vectors = np.array([entry.embedding for entry in response.data], np.float32)
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    assert [entry.index for entry in response.data] == [0, 1, 2, 3]
    np.testing.assert_allclose(plain.data[0].embedding, expected[0], atol=1e-4)
    lengths = [np.linalg.norm(entry.embedding) for entry in normal.data]
    assert lengths == pytest.approx([1, 1, 1, 1], abs=1e-5)
    tokens = sum(len(decoder.tokenizer(text).input_ids) for text in TEXTS)
    assert response.usage.prompt_tokens == response.usage.total_tokens == tokens


def test_token_ids_are_inputs_too(ranker, decoder):
    ids = [decoder.tokenizer(text).input_ids for text in TEXTS[:2]]
    for given, expected in ((ids, decoder.embed(ids)), (ids[0], decoder.embed(ids[:1]))):
        data = ranker.http.post("/v1/embeddings", json={"input": given}).json()["data"]
        np.testing.assert_allclose([e["embedding"] for e in data], expected, atol=1e-4)


def test_scores_are_those_of_the_decoder(ranker, decoder):
    targets = ["mouse", "a cat", "a", [3, 4, 1]]
    body = {"prompt": "the tale", "targets": targets}
    answer = ranker.http.post("/v1/score", json=body).json()
    for i, (entry, score) in enumerate(
        zip(answer["data"], decoder.score("the tale", targets), strict=True)
    ):
        assert entry["index"] == i
        assert entry["logprob"] == pytest.approx(score.logprob, abs=1e-4)
        assert entry["token_logprobs"] == pytest.approx(score.token_logprobs, abs=1e-4)
    assert answer["data"][3]["tokens"] == [" true", " false", "</s>"]
    prompt = len(decoder.tokenizer("the tale").input_ids)
    written = sum(len(entry["tokens"]) for entry in answer["data"])
    assert answer["usage"] == {"prompt_tokens": prompt, "total_tokens": prompt + written}


def test_very_unlikely_scores_are_not_clipped(folder):
    """OpenAI's API has no log-probability below -9999, but scores are not part of that API."""
    model, tokenizer = load(folder, "float32")
    model.shared.weight = 1e4 * model.shared.weight  # also the head
    decoder = SpeculativeDecoder(model, None, tokenizer)
    (score,) = decoder.score("a cat", "mouse")
    assert score.logprob < min(score.token_logprobs) < -9999
    with LocalServer(decoder, "far") as far:
        answer = far.http.post("/v1/score", json={"prompt": "a cat", "targets": ["mouse"]})
    (entry,) = answer.json()["data"]
    assert entry["logprob"] == pytest.approx(score.logprob, rel=1e-5)
    assert entry["token_logprobs"] == pytest.approx(score.token_logprobs, rel=1e-5)


def test_the_prefix_of_a_task_is_put_before_what_is_scored_or_embedded(ranker, decoder):
    body = {"prompt": "a cat", "targets": ["a dog"], "task": "telling"}
    (entry,) = ranker.http.post("/v1/score", json=body).json()["data"]
    (score,) = decoder.score("the tale: a cat", ["a dog"])
    assert entry["logprob"] == pytest.approx(score.logprob, abs=1e-4)
    body = {"input": ["a cat"], "task": "telling"}
    (entry,) = ranker.http.post("/v1/embeddings", json=body).json()["data"]
    expected = decoder.embed("the tale: a cat")[0]
    np.testing.assert_allclose(entry["embedding"], expected, atol=1e-4)


def test_clients_are_told_what_the_model_can_do(ranker):
    (ranks,) = ranker.http.get("/v1/models").json()["data"]
    assert ranks["capabilities"] == ["completions", "score", "rerank", "embeddings"]
    assert ranks["tasks"] == {"telling": {"prefix": "the tale: "}} and ranks["num_beams"] == 1
    note = "the model's files ask for 4 beams; --num-beams 4 searches, without a draft"
    assert ranks["notes"] == [note]
    body = {"prompt": "a", "task": "telling", "stream": True, "logprobs": 1}
    assert ranker.http.post("/v1/completions", json=body).status_code == 200, "no beams"
    described = ranker.http.get("/openapi.json").json()["components"]["schemas"]
    assert set(ranks) == set(described["ServedModel"]["properties"])


def test_ranks_are_those_of_the_decoder(ranker, decoder):
    body = {"query": "cat", "documents": TEXTS, "top_n": 3, "return_documents": True}
    results = ranker.http.post("/v1/rerank", json=body).json()["results"]
    expected = decoder.rerank("cat", TEXTS)
    assert [entry["index"] for entry in results] == [rank.index for rank in expected][:3]
    for entry, rank in zip(results, expected, strict=False):
        assert entry["relevance_score"] == pytest.approx(np.exp(rank.score), abs=1e-4)
        assert entry["document"] == {"text": TEXTS[rank.index]}
    body["documents"] = [{"text": text} for text in TEXTS]
    best = TEXTS[expected[0].index]
    for path, document in (("/v2/rerank", {"text": best}), ("/rerank", best)):
        answer = ranker.http.post(path, json=body).json()
        assert answer["results"][0] == results[0] | {"document": document} and answer["id"]
    bare = ranker.http.post("/v1/rerank", json={"query": "cat", "documents": TEXTS[:1]}).json()
    assert set(bare["results"][0]) == {"index", "relevance_score"}
    assert bare["words"] == ["true", "false"]


def test_documents_are_ranked_by_the_words_of_the_request_the_server_or_the_models_name(decoder):
    def ranks(server, **fields):
        answer = server.http.post("/v1/rerank", json={"query": "cat", "documents": TEXTS} | fields)
        assert answer.status_code == 200, answer.text
        return [r["index"] for r in answer.json()["results"]], answer.json()["words"]

    def expected(*words):
        return [rank.index for rank in decoder.rerank("cat", TEXTS, words=words)], [*words]

    with LocalServer(decoder, "other", Presets(rerank_words=("false", "true"))) as other:
        assert ranks(other) == expected("false", "true") != ranks(other, words=["true", "false"])
        assert ranks(other, words=["true", "▁"]) == expected("true", "▁")
    with LocalServer(decoder, "none", Presets(rerank_words=("yes", "no"))) as none:
        (served,) = none.http.get("/v1/models").json()["data"]
        assert served["capabilities"] == ["completions", "score", "embeddings"]
        assert ranks(none, words=["true", "false"]) == expected("true", "false")
        for words in ({}, {"words": ["true", "nobody"]}, {"words": ["true"]}):
            body = {"query": "cat", "documents": TEXTS, **words}
            answer = none.http.post("/v1/rerank", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "words")


def test_a_models_name_or_card_tells_the_words_that_rerankers_has_for_it(tmp_path):
    (package,) = importlib.util.find_spec("rerankers").submodule_search_locations
    source = ast.parse(Path(package, "models", "t5ranker.py").read_text("utf-8"))
    (table,) = (n.value for n in source.body if getattr(n, "targets", None))
    token_names = {1176: "▁true", 6136: "▁false"}  # of T5's tokenizer, which TWOLAR has
    for name, (no, yes) in ast.literal_eval(table).items():
        id = name.replace("/", "--")
        named, cached = tmp_path / name, tmp_path / f"models--{id}" / "snapshots" / "0a1b"
        described = tmp_path / id / "my-ranker"
        tokens = [token_names.get(token, token) for token in (yes, no)]
        for folder in (named, cached, described):
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            if folder is described:
                (folder / "README.md").write_text(f"---\nbase_model: {name}\n---\n")
            words = named_words(folder) or ("true", "false")
            assert [f"▁{word}".replace("▁▁", "▁") for word in words] == tokens, folder
    assert named_words(tmp_path) is None
    assert ranks_by(load_tokenizer(BUNDLED / "target"), ("▁The", "▁")), "sentencepiece reads spaces"


def test_only_documents_that_are_longer_than_max_tokens_per_doc_are_cut(ranker, decoder):
    documents = ["a ☃ cat", "a ☃ cat sat"]  # "☃" is unknown to the tokenizer
    whole, cut = (len(decoder.tokenizer(text).input_ids) - 1 for text in documents)
    assert whole < cut

    def scores(documents, **fields):
        body = {"query": "cat", "documents": documents, **fields}
        answer = ranker.http.post("/v1/rerank", json=body).json()
        by_index = sorted(answer["results"], key=lambda entry: entry["index"])
        return [entry["relevance_score"] for entry in by_index], answer["usage"]["prompt_tokens"]

    assert scores(documents) == scores(documents, max_tokens_per_doc=cut)
    (first, second), _ = scores(documents, max_tokens_per_doc=whole)
    (expected,), _ = scores(documents[:1])
    assert first == pytest.approx(expected, abs=1e-6)
    assert second == pytest.approx(expected, abs=1e-6), "its beginning, unknown characters too"
    assert scores(documents[1:])[0] != pytest.approx([second], abs=1e-6)


def test_documents_are_cut_to_the_longest_prompt_that_the_server_takes(ranker, decoder):
    documents = ["b " * 99 + "a cat", "two dogs", "the tale " * 5000, "the tale " * 5001]
    body = {"query": "cat", "documents": documents}
    answer = ranker.http.post("/v1/rerank", json=body).json()
    expected = decoder.rerank("cat", documents, max_prompt_tokens=60)
    scores = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert scores == pytest.approx({e.index: np.exp(e.score) for e in expected}, abs=1e-4)
    assert scores[2] == pytest.approx(scores[3], abs=1e-6), "what differs is cut off"
    body = {"query": "cat", "documents": ["two dogs", "two dogs sat"], "max_tokens_per_doc": 2}
    first, second = ranker.http.post("/v1/rerank", json=body).json()["results"]
    assert first["relevance_score"] == pytest.approx(second["relevance_score"], abs=1e-6)
    short = len(decoder.tokenizer("Query: cat Document: two dogs Relevant:").input_ids)
    assert answer["usage"]["prompt_tokens"] == 3 * 60 + short


def test_a_queue_in_which_nothing_waits_has_room_for_the_largest_request(ranker, monkeypatch):
    def at_once(jobs, job):
        value = [0.0] if job.kind == "embed" else Score(-1.0)
        return iter([[(i, value) for i in range(job.count)]])

    monkeypatch.setattr(ScoringJobs, "_parts", at_once)
    for path, body in (
        ("embeddings", {"input": [[5]] * MAX_INPUTS}),
        ("rerank", {"query": "a", "documents": ["b"] * MAX_DOCUMENTS}),
    ):
        assert ranker.http.post(f"/v1/{path}", json=body).status_code == 200


@pytest.mark.parametrize(
    "path, body, param, message",
    [
        ("embeddings", {}, "input", "needed"),
        ("embeddings", {"input": ""}, "input", "at least 1"),
        ("embeddings", {"input": " "}, "input", "a text is empty"),
        ("embeddings", {"input": ["a", 5]}, "input[1]", "string"),
        ("embeddings", {"input": [99]}, "input", "outside the model's vocabulary"),
        ("embeddings", {"input": "a " * 100}, "input", "tokens; at most 60"),
        ("embeddings", {"input": ["a"] * 2049}, "input", "at most 2048"),
        ("embeddings", {"input": [" "] + ["a " * 200]}, "input[1]", "has more tokens; at most 60"),
        ("embeddings", {"input": "a", "dimensions": 5}, "dimensions", "not supported"),
        ("score", {"prompt": "a", "targets": []}, "targets", "at least 1"),
        ("score", {"prompt": "a", "targets": [" "]}, "targets", "a target is empty"),
        ("score", {"prompt": "a", "targets": ["a " * 15]}, "targets", "at most 20 .*--max-tokens"),
        ("score", {"prompt": "a", "targets": ["a"], "task": "x"}, "task", "it has telling"),
        ("embeddings", {"input": [5], "task": "telling"}, "task", "send that as text"),
        ("rerank", {"query": "a", "documents": ["b", " "]}, "documents", "document 1 is empty"),
        ("rerank", {"query": "a", "documents": ["b"] * 1025}, "documents", "at most 1024"),
        ("rerank", {"query": "a " * 999, "documents": ["b"]}, "query", "at most 60"),
        ("rerank", {"query": "a " * 30, "documents": ["b"]}, "documents", "room .* in 60 tokens"),
        ("embeddings", {"input": "a", "model": "gpt-2"}, "model", "no such model"),
    ],
)
def test_bad_scoring_requests_are_refused(ranker, path, body, param, message):
    answer = ranker.http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param), error
    assert re.search(message, error["message"])


def test_metrics_count_items_and_requests(ranker):
    paths = ("/v1/embeddings", "/v1/score", "/v1/rerank")

    def counts():
        kinds = ("embed", "score", "rerank")
        items = [f't5_one_pass_items_total{{kind="{kind}"}}' for kind in kinds]
        requests = [f't5_requests_total{{path="{path}",status="200"}}' for path in paths]
        return list(map(ranker.metric, items + requests))

    before = counts()
    ranker.http.post("/v1/embeddings", json={"input": TEXTS})
    ranker.http.post("/v1/score", json={"prompt": "a", "targets": ["b", "c"]})
    ranker.http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert [b - a for a, b in zip(before, counts(), strict=True)] == [4, 2, 2, 1, 1, 1]
    assert ranker.idle()


def test_an_encoder_alone_serves_embeddings_and_nothing_else(folder, tmp_path):
    alone = load(convert(folder, tmp_path / "mlx", "float32", encoder_only=True), "float32")
    decoder = SpeculativeDecoder(alone[0], None, alone[1])
    ids = [[5, 1], [6, 7, 1]]
    with LocalServer(decoder, "encoder") as encoder:
        data = encoder.http.post("/v1/embeddings", json={"input": ids}).json()["data"]
        expected = SpeculativeDecoder(load(folder, "float32")[0]).embed(ids)
        np.testing.assert_allclose([e["embedding"] for e in data], expected, atol=1e-4)
        for path, body in (
            ("completions", {"prompt": "a"}),
            ("score", {"prompt": "a", "targets": ["b"]}),
        ):
            answer = encoder.http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400
            assert "encoder is an encoder alone" in answer.json()["error"]["message"]
        words = {"q": "a", "target": "fr"}
        for answer in (
            encoder.http.post("/translate", json=words),
            encoder.http.get("/languages"),
        ):
            assert answer.status_code == 400
            assert "encoder is an encoder alone" in answer.json()["error"]
        (served,) = encoder.http.get("/v1/models").json()["data"]
        assert served["capabilities"] == ["embeddings"]
