"""Tests documents over HTTP: the same text as from `generate`, beside other requests."""

import json

import pytest

from benchmarks import workload

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
    assert [{"error": None, **piece} for piece in choice["pieces"]] == list(
        map(vars, expected.pieces)
    )
    assert len(choice["pieces"]) == choice["stats"]["pieces"] == 3
    assert choice["stats"]["failed"] == choice["stats"]["cut"] == 0
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
    writers = [token["writer"] for piece in pieces for token in piece["speculation"]["tokens"]]
    assert writers == expected.writers
    whole = server.http.post("/v1/chat/completions", json={**fields, "split": "sentences"}).json()
    assert whole["choices"][0]["message"]["content"] == expected.text
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


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


def test_only_completions_and_chats_are_split(server):
    for path, split in (("v1/completions", "words"), ("predict", "lines")):
        answer = server.http.post(f"/{path}", json={"prompt": TEXT, "split": split})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "split")
    plain = complete(server, prompt=FIX, split="none")["choices"][0]
    assert plain["text"] == "She has two cats." and "pieces" not in plain
