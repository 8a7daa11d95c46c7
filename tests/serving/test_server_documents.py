"""Tests documents in the server: the same text as from `generate`, beside other requests."""

import json

import pytest

import ranking_models
from fake_serving import ENDLESS, Gated, LocalServer, V, until
from mlx_t5.benchmarks import workload
from mlx_t5.decoder import SpeculativeDecoder
from mlx_t5.model import load

TEXT = """translate English to French: I open a lot of white suitcases at noon.  It is going to
rain next Thursday.

  * The windows that you have broken were not new.
\t"""
CANCELLED = "t5_cancelled_rows_total"
FIX = "fix grammar: She have two cat."


def complete(server, **fields):
    answer = server.http.post("/v1/completions", json={"split": "sentences", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server, path="/v1/completions", **fields):
    """Returns the JSON of all events of a stream."""
    body = {"split": "sentences", "stream": True, **fields}
    with server.http.stream("POST", path, json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def held_out(count):
    """Returns a document of `count` held-out sentences."""
    prompts = workload.held_out(workload.MIXED, count).prompts
    return " ".join(prompt.split(": ", 1)[1] for prompt in prompts)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"split": "lines", "max_tokens": 5},
        {"temperature": 1.5, "seed": 3, "num_draft": 2},
        {"num_beams": 2},
    ],
)
def test_the_server_returns_the_text_that_generate_returns(server, decoder, fields):
    answer = complete(server, prompt=TEXT, **fields)
    options = {{"temperature": "temp"}.get(name, name): value for name, value in fields.items()}
    expected = decoder.generate(TEXT, **{"split": "sentences", **options})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    assert [{"error": None, "looped": None, **piece} for piece in choice["pieces"]] == list(
        map(vars, expected.pieces)
    )
    assert len(choice["pieces"]) == choice["stats"]["pieces"] == 3
    assert choice["stats"]["failed"] == choice["stats"]["cut"] == 0
    reasons = [piece["finish_reason"] for piece in choice["pieces"]]
    assert choice["stats"]["length"] == reasons.count("length")
    assert ("length" in reasons) == ("max_tokens" in fields)
    assert answer["usage"]["completion_tokens"] == expected.stats.generated_tokens
    assert answer["usage"]["prompt_tokens"] == expected.stats.prompt_tokens
    accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert accepted == expected.stats.accepted


def test_a_stream_has_the_pieces_in_order(server, decoder):
    text = held_out(40)
    messages = [{"role": "system", "content": "fix grammar:"}, {"role": "user", "content": text}]
    fields = {"messages": messages, "speculation": True}
    options = {"stream_options": {"include_usage": True}}
    *events, last = streamed(server, "/v1/chat/completions", **fields, **options)
    expected = decoder.generate(text, split="sentences", prefix="fix grammar: ")
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["delta"]["content"] for choice in choices) == expected.text
    assert [choice["finish_reason"] for choice in choices] == [None] * (
        len(expected.pieces) - 1
    ) + ["stop"]
    pieces = [choice["pieces"][0] for choice in choices]
    for piece, result in zip(pieces, expected.pieces, strict=True):
        assert (piece["start"], piece["end"]) == (result.start, result.end)
        tokens = piece["speculation"]["tokens"]
        assert "".join(token["text"] for token in tokens) == piece["text"] == result.text
    origins = [token["origin"] for piece in pieces for token in piece["speculation"]["tokens"]]
    assert origins == expected.origins
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == expected.stats.generated_tokens


def test_others_are_answered_while_a_long_document_runs(server):
    cancelled = server.metric(CANCELLED)
    body = {"prompt": "fix grammar: " + held_out(200) * 5, "split": "sentences", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as document:
        pieces = (json.loads(line[6:])["choices"][0] for line in document.iter_lines() if line)
        assert next(pieces)["stats"]["pieces"] > 900
        answer = server.http.post("/v1/completions", json={"prompt": [FIX] * 64})
        assert {choice["text"] for choice in answer.json()["choices"]} == {"She has two cats."}
        assert next(pieces)["finish_reason"] is None
        state = server.http.get("/health").json()
        assert state["running"] + state["waiting"] == 8, "it goes on"
    server.until(lambda: server.metric(CANCELLED) > cancelled)  # as its client leaves


def test_subtitles_keep_their_times(server, decoder):
    cue = "\ufeff1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>{}\r\n{}</i>\r\n"
    text, how = cue.format("She have", "two cat."), {"task": "grammar"}
    answer = complete(server, prompt=text, file_type=".srt", **how)["choices"][0]
    expected = decoder.generate(text, split="sentences", prefix=FIX[:13], file_type=".srt")
    assert answer["text"] == expected.text == cue.format("She has", "two cats.")


def test_the_tokens_of_a_piece_that_was_kept_are_not_reported(server):
    source = "See https://example.org/x now."
    text = f"translate English to French: I have two cats. {source}"
    for choices in (
        [complete(server, prompt=text, speculation=True)["choices"][0]],
        [event["choices"][0] for event in streamed(server, prompt=text, speculation=True)],
    ):
        answered, kept = (piece for choice in choices for piece in choice["pieces"])
        assert choices[-1]["stats"]["kept"] == 1 and kept["text"] == source
        assert "speculation" in answered and "speculation" not in kept


def test_the_language_decides_where_a_sentence_ends(server):
    fields = {"prompt": "fix grammar: Er kommt am 3. Oktober. Es regnet.", "max_tokens": 3}
    counts = [
        len(complete(server, **fields, **more)["choices"][0]["pieces"])
        for more in ({"source_language": "de"}, {})
    ]
    assert counts == [2, 3]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"n": 2, "temperature": 1.0}, "n"),
        ({"logprobs": 0}, "logprobs"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [5]}, "prompt"),
        ({"source_language": "german"}, "source_language"),
        ({"file_type": ".md"}, "file_type"),
        ({"prompt": "a\n" * 5001, "split": "lines"}, "prompt"),
    ],
)
def test_a_text_that_cannot_be_split_is_refused(server, fields, param):
    body = {"prompt": TEXT, "split": "sentences", **fields}
    answer = server.http.post("/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_long_sentence_is_cut_and_a_failed_piece_keeps_its_source(tmp_path, unpadded):
    model, tokenizer = load(ranking_models.save(tmp_path / "small"), "float32")
    encode = model.encode

    def without_memory(ids, mask=None):
        if ids.shape[1] > 24:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes.")
        return encode(ids, mask)

    model.encode = without_memory
    long = "the long tale of a cat, " * 2 + "a tale."
    with LocalServer(SpeculativeDecoder(model, None, tokenizer), "small") as small:
        (choice,) = complete(small, prompt=f" a cat.\n\n- {long}  a dog. \n")["choices"]
        first, failed, last = choice["pieces"]
        assert choice["text"] == f" {first['text']}\n\n- {long}  {last['text']} \n"
        assert (failed["text"], failed["finish_reason"]) == (long, "error")
        assert "no memory" in failed["error"] and "error" not in first | last
        counts = {"pieces": 3, "cut": 0, "looped": 0, "failed": 1, "kept": 0, "length": 2}
        assert choice["stats"] == counts
        for stream in (False, True):
            body = {"prompt": long, "split": "sentences", "stream": stream}
            answer = small.http.post("/v1/completions", json=body)
            assert answer.status_code == 500 and "no memory" in answer.json()["error"]["message"]
        del model.encode
        (choice,) = complete(small, prompt=long * 4)["choices"]
        assert choice["stats"]["cut"] == choice["stats"]["pieces"] > 1, "60 tokens are taken"


@pytest.mark.parametrize("text", [" \n", "42: …\n\n***"])
def test_a_document_without_a_word_is_returned_as_it_is(server, text):
    (choice,) = complete(server, prompt=text)["choices"]
    assert (choice["text"], choice["pieces"], choice["finish_reason"]) == (text, [], "stop")
    (event,) = streamed(server, prompt=text)
    assert event["choices"][0]["text"] == text


def test_only_completions_and_chats_are_split(server):
    for path, split in (("v1/completions", "words"), ("predict", "lines")):
        answer = server.http.post(f"/{path}", json={"prompt": TEXT, "split": split})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "split")
    plain = complete(server, prompt=FIX, split="none")["choices"][0]
    assert plain["text"] == "She has two cats." and "pieces" not in plain


# ---- rows in the thread that owns MLX ----------------------------------------------------------


@pytest.mark.parametrize("document", [None, True])
def test_a_small_request_gets_the_next_free_row(serve, document):
    """Whether the rows are taken by another client's prompts or by its document."""
    served = serve(max_batch=4, max_queue=90)
    order, name = [], lambda name: lambda event: order.append(name)
    short = {"max_tokens": 5, "num_draft": 0}  # rows that join together end together
    many = {"document": document, **short}
    served.submit_held([[2, 3]] * 40, put=name("large"), **many)
    served.submit([[2, 3]] * 40, put=name("other"), **many)
    for _ in range(3):
        served.submit([[4]], put=name("small"), **short)
    served.release()
    until(lambda: len(order) == 83)
    assert order[:4] == ["large"] * 4, "they were in the batch already"
    assert sorted(order[4:8]) == ["large", "other", "small", "small"], "each job in its turn"
    assert sorted(order[8:12]) == ["large", "large", "other", "small"]
    assert sorted(order[12:16]) == ["large", "large", "other", "other"]


@pytest.mark.parametrize("stage, message", [("step", "internal error"), ("logits", "NaN")])
def test_a_piece_that_fails_is_marked_and_the_others_go_on(serve, stage, message):
    class Breaking(Gated):
        def decode(self, tokens, cache, offsets):
            if stage == "step" and max(map(len, cache.sources)) > 9:
                raise TypeError("of a secret text")
            return super().decode(tokens, cache, offsets)

    def table(source, seen):
        bad = stage == "logits" and len(source) > 9 and len(seen) > 2
        return ENDLESS(source, seen) * (float("nan") if bad else 1)

    served = serve(Breaking(table, V), max_batch=1, max_queue=0)
    job = served.submit([[2], [3] * 10, [4], [5]], max_tokens=6, document=True)
    results = job.results()
    assert [r.finish_reason for r in results] == ["length", "error", "length", "length"]
    assert message in results[1].error and "secret" not in results[1].error
    assert [len(r.tokens) for r in results] == [6, 0, 6, 6]
    until(lambda: served.worker.rows == (0, 0))
