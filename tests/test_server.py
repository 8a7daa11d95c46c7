"""Tests the API of a server process with the official `openai` client."""

import math

import pytest
from openai import OpenAI

FIX = "fix grammar: My sisters wants to buy some tools including saws, hmamers, and brushes."
# Unlike the training texts, so that samples differ.
VAGUE = "translate English to French: The president discussed economic policy."
FIXED = "My sisters want to buy some tools including saws, hammers, and brushes."


@pytest.fixture(scope="module")
def client(server):
    return OpenAI(base_url=server.url + "/v1", api_key="not needed", max_retries=0)


def complete(client, prompt, **options):
    return client.completions.create(model="demo", prompt=prompt, **options)


# ---- completions ---------------------------------------------------------------------------------


def test_a_completion_has_its_text_and_usage(client, decoder):
    answer = complete(client, FIX)
    expected = decoder.generate(FIX)
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, FIXED, "stop")
    assert choice.logprobs is None
    assert (answer.object, answer.model) == ("text_completion", "demo")
    assert answer.usage.prompt_tokens == expected.stats.prompt_tokens
    assert answer.usage.completion_tokens == expected.stats.generated_tokens
    details = answer.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert (accepted, accepted + rejected) == (expected.stats.accepted, expected.stats.drafted)
    assert answer.usage.total_tokens - answer.usage.completion_tokens == answer.usage.prompt_tokens


PARTS = [{"type": "text", "text": FIXED[:20]}, {"type": "text", "text": FIXED[20:]}]


@pytest.mark.parametrize("content", [FIXED, PARTS])
def test_a_prediction_is_accepted_and_counted(client, content):
    prediction = {"type": "content", "content": content}
    usage = {"include_usage": True}
    options = {"extra_body": {"num_draft": 8, "prediction": prediction}}
    answer = complete(client, FIX, **options)
    *texts, last = complete(client, FIX, stream=True, stream_options=usage, **options)
    assert answer.choices[0].text == "".join(c.choices[0].text for c in texts) == FIXED
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == answer.usage.completion_tokens > 15
    assert details.rejected_prediction_tokens == 0
    assert last.usage == answer.usage
    chat = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": FIX}],
        prediction=prediction,
        extra_body={"num_draft": 8},
    )
    assert chat.choices[0].message.content == FIXED
    assert chat.usage.completion_tokens_details == details


def test_a_stream_adds_up_to_the_text(client):
    chunks = list(complete(client, FIX, stream=True, stream_options={"include_usage": True}))
    *texts, last = chunks
    assert len(texts) > 1, "it comes in pieces"
    assert "".join(chunk.choices[0].text for chunk in texts) == FIXED
    assert [c.choices[0].finish_reason for c in texts] == [None] * (len(texts) - 1) + ["stop"]
    assert (last.choices, last.usage) == ([], complete(client, FIX).usage)
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in complete(client, FIX, stream=True))


def test_sampling_follows_the_seed_as_generate_does(client, decoder):
    options = {"temperature": 1.5, "top_p": 0.95, "seed": 7, "max_tokens": 40}
    answer = complete(client, VAGUE, n=3, **options)
    expected = decoder.generate(VAGUE, temp=1.5, top_p=0.95, seed=7, max_tokens=40, num_samples=3)
    assert len({r.text for r in expected}) == 3
    assert [c.text for c in answer.choices] == [r.text for r in expected]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    streams = ["", "", ""]
    for chunk in complete(client, VAGUE, n=3, stream=True, **options):
        streams[chunk.choices[0].index] += chunk.choices[0].text
    assert streams == [r.text for r in expected]


def test_without_a_seed_samples_differ(client):
    texts = {complete(client, VAGUE, temperature=2.0).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_several_prompts_and_token_ids_are_accepted(client, decoder):
    options = {"temperature": 1.5, "seed": 3, "n": 2}
    answer = complete(client, [VAGUE, FIX], **options)
    expected = decoder.generate([VAGUE, FIX], temp=1.5, seed=3, num_samples=2)
    assert [c.text for c in answer.choices] == [r.text for r in expected]
    ids = [decoder.tokenizer.encode(prompt) for prompt in (VAGUE, FIX)]
    again = complete(client, ids, **options)
    assert [c.text for c in again.choices] == [r.text for r in expected]
    assert again.usage.prompt_tokens == sum(map(len, ids))
    assert complete(client, ids[1]).choices[0].text == FIXED


def test_stop_strings_and_max_tokens_end_a_text(client):
    cut = complete(client, FIX, stop=[" saws", "never"])
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (
        FIXED[: FIXED.index(" saws")],
        "stop",
    )
    stream = complete(client, FIX, stop=" saws", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == cut.choices[0].text
    short = complete(client, FIX, max_tokens=4)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 4)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_logprobs(client, stream):
    if stream:
        parts = [c.choices[0].logprobs for c in complete(client, FIX, logprobs=2, stream=True)]
    else:
        parts = [complete(client, FIX, logprobs=2).choices[0].logprobs]
    tokens, own, top, offsets = (
        [entry for part in parts for entry in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert "".join(tokens) == FIXED
    assert all(value <= 0 for value in own) and math.exp(sum(own)) > 0.5
    for token, value, likely in zip(tokens, own, top, strict=True):
        assert len(likely) == 2
        assert likely[token] == value == max(likely.values()), "greedy takes the likeliest"
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] == len(FIXED) - 1


# ---- speculation ---------------------------------------------------------------------------------


def test_drafting_can_be_chosen_for_each_request(client, decoder):
    def ask(**extra):
        return complete(client, FIX, extra_body={"speculation": True, **extra})

    usual, none, zero = ask(), ask(draft=False), ask(num_draft=0)
    for answer in (usual, none, zero, ask(num_draft="auto"), ask(num_draft=3)):
        assert answer.choices[0].text == FIXED
    assert none.usage.completion_tokens_details.accepted_prediction_tokens == 0
    regular = none.choices[0].speculation["stats"]
    assert (regular["drafted"], regular["tokens_per_call"]) == (0, 1)
    assert zero.choices[0].speculation["stats"]["target_calls"] == regular["target_calls"]
    assert usual.choices[0].speculation["stats"]["target_calls"] < regular["target_calls"]
    lenient = ask(delta=1.0).choices[0].speculation["stats"]
    assert lenient["acceptance_rate"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_origin_of_each_token_is_reported(client, decoder, stream):
    extra = {"speculation": True}
    if stream:
        answers = list(complete(client, FIX, stream=True, extra_body=extra))
    else:
        answers = [complete(client, FIX, extra_body=extra)]
    expected = decoder.generate(FIX)
    for answer in answers:
        choice = answer.choices[0]
        assert "".join(t["text"] for t in choice.speculation["tokens"]) == choice.text
    written = [t for answer in answers for t in answer.choices[0].speculation["tokens"]]
    assert [t["origin"] for t in written] == expected.origins
    assert set(expected.origins) == {"draft", "copy", "target"}
    stats = answers[-1].choices[0].speculation["stats"]
    assert stats["target_calls"] == expected.stats.target_calls


# ---- chat, predict, models and metrics -----------------------------------------------------------


def test_a_chat_of_one_turn_is_answered(client):
    def ask(messages, **options):
        return client.chat.completions.create(model="demo", messages=messages, **options)

    task, text = FIX.split(": ", 1)
    system, user = {"role": "system", "content": task + ":"}, {"role": "user", "content": text}
    whole = {"role": "user", "content": [{"type": "text", "text": FIX}]}
    for messages in ([system, user], [whole]):
        answer = ask(messages)
        message = answer.choices[0].message
        assert (message.role, message.content) == ("assistant", FIXED)
        assert answer.choices[0].finish_reason == "stop"
    chunks = list(ask([whole], stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == FIXED
    assert chunks[-1].usage == answer.usage
    assert ask([whole], max_completion_tokens=3).choices[0].finish_reason == "length"


def test_chats_have_logprobs(client):
    answer = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": FIX}], logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content).strip() == FIXED
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert [t.logprob for t in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert (entry.top_logprobs[0].token, len(entry.top_logprobs)) == (entry.token, 3)


def test_the_model_is_listed_with_what_it_can_do(client, server):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert model.capabilities == ["completions", "score", "embeddings"]
    assert client.models.retrieve("demo").max_tokens == 1024
    answer = server.http.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert (answer.status_code, answer.headers["x-content-type-options"]) == (400, "nosniff")
    assert answer.json()["error"]["message"].startswith("demo cannot rank")


def test_predict_needs_only_a_prompt(server, decoder):
    answer = server.http.post("/predict", json={"prompt": FIX}).json()
    expected = decoder.generate(FIX)
    assert (answer["text"], answer["finish_reason"]) == (FIXED, "stop")
    assert answer["stats"]["target_calls"] == expected.stats.target_calls
    regular = server.http.post("/predict", json={"prompt": FIX, "draft": False}).json()
    assert (regular["text"], regular["stats"]["drafted"]) == (FIXED, 0)


def test_metrics_count_what_happened(server):
    labels = 'path="/predict",status="200"'
    names = [f"t5_{name}_tokens_total" for name in ("generated", "drafted", "accepted")]
    names += ["t5_target_calls_total", 't5_finished_rows_total{reason="stop"}']
    names += [f"t5_requests_total{{{labels}}}"]

    def read():
        return [server.metric(name) for name in names]

    server.http.post("/predict", json={"prompt": FIX})
    before = read()
    stats = server.http.post("/predict", json={"prompt": FIX}).json()["stats"]
    grown = [b - a for a, b in zip(before, read(), strict=True)]
    decided = round(stats["tokens_per_call"] * stats["target_calls"])
    assert grown == [decided, stats["drafted"], stats["accepted"], stats["target_calls"], 1, 1]
    lines = server.http.get("/metrics").text.splitlines()
    assert {"t5_batch_rows 0.0", "t5_queue_rows 0.0", "t5_batch_capacity 8.0"} <= set(lines)
