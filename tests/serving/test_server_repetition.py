"""Tests that the server ends texts that loop, and decodes looped pieces of documents again."""

import json

import pytest
from openai import OpenAI

import looping
from fake_model import contrary, drafter, good
from fake_serving import LocalServer
from mlx_t5.decoder import SpeculativeDecoder

pytestmark = pytest.mark.usefixtures("unpadded")  # fake models count positions

CATS, RAIN = "We have two cats.", "The old window was white, and the rain was late, and we ate."
TEXT = f"{CATS}  {RAIN}\n\n{CATS}"
LOOPS = {"max_pattern_size": 4, "min_count": 3}
FRENCH = {"target_language": "fr", "source_language": "en"}


def decoder_of(model=None, draft=contrary):
    model = model or looping.model()
    return SpeculativeDecoder(model, drafter(draft(model.table), model), looping.TOKENIZER, 3)


@pytest.fixture(scope="module")
def looped():
    with LocalServer(decoder_of(), "looping") as server:
        yield server


@pytest.fixture
def client(looped):
    return OpenAI(base_url="http://localhost/v1", api_key="any", http_client=looped.http)


def complete(server, **fields):
    answer = server.http.post("/v1/completions", json=fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def test_openais_client_reads_that_a_text_looped(client):
    prompt, options = looping.PREFIX + RAIN, {"extra_body": {"repetition_detection": LOOPS}}
    expected = decoder_of().generate(prompt, max_tokens=20, repetition_detection=LOOPS)
    assert expected.finish_reason == "repetition" and expected.text.endswith("and the rain")
    fields = {"model": "looping", "prompt": prompt, "logprobs": 1, "max_tokens": 20}
    answer = client.completions.create(**fields, **options)
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.text) == ("repetition", expected.text)
    assert answer.usage.completion_tokens == len(choice.logprobs.tokens) == len(expected.tokens)
    chunks = [c.choices[0] for c in client.completions.create(**fields, **options, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert chunks[-1].finish_reason == "repetition"
    streamed = [value for chunk in chunks for value in chunk.logprobs.token_logprobs]
    assert streamed == choice.logprobs.token_logprobs
    chat = {"model": "looping", "messages": [{"role": "user", "content": prompt}]}
    assert (
        client.chat.completions.create(**chat, **options).choices[0].finish_reason == "repetition"
    )
    with client.chat.completions.stream(**chat, **options) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    assert (choice.finish_reason, choice.message.content) == ("repetition", expected.text)


def test_litellm_reads_the_end_of_a_loop_as_stop(client, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # avoids a download
    import litellm

    messages = [{"role": "user", "content": looping.PREFIX + RAIN}]
    fields = {"model": "openai/looping", "messages": messages, "client": client}
    fields["repetition_detection"] = LOOPS
    (choice,) = litellm.completion(**fields).choices
    assert choice.message.content.endswith("and the rain") and choice.finish_reason == "stop"
    chunks = list(litellm.completion(**fields, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert {c.choices[0].finish_reason for c in chunks} == {None, "stop"}


def test_looped_pieces_of_a_translation_are_decoded_again(looped):
    choice = complete(looped, prompt=TEXT, speculation=True, **FRENCH)
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
    assert (choice["stats"]["looped"], choice["stats"]["pieces"]) == (1, 3)
    first, second, _ = choice["pieces"]
    assert second["looped"] and "speculation" not in second
    assert "looped" not in first and first["speculation"]["tokens"]
    streamed = looped.http.post("/v1/completions", json={"prompt": TEXT, "stream": True, **FRENCH})
    events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if "{" in line]
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert events[-1]["choices"][0]["stats"] == choice["stats"]
    off = complete(looped, prompt=TEXT, repetition_detection=None, **FRENCH)
    assert off["finish_reason"] == "length" and off["stats"]["looped"] == 0
    whole = complete(looped, prompt=RAIN, split="none", **FRENCH)
    assert whole["finish_reason"] == "repetition" and whole["text"].endswith("and the rain")
    laughs = "Ha ha ha ha ha!"
    for split in ("none", "sentences"):
        assert complete(looped, prompt=laughs, split=split, **FRENCH)["text"] == laughs
    plain = complete(looped, prompt=TEXT, split="sentences")
    assert plain["finish_reason"] == "length", "translations by language alone have it on"
    kept = complete(looped, prompt=f"The snow. {CATS}", **FRENCH)
    assert (kept["text"], kept["finish_reason"]) == (f"The snow. {CATS}", "repetition")


def test_libretranslates_texts_do_not_loop(looped):
    body = {"q": [TEXT, RAIN], "source": "en", "target": "fr"}
    answer = looped.http.post("/translate", json=body)
    assert answer.json() == {"translatedText": [TEXT, RAIN]}
    searched = looped.http.post("/translate", json={**body, "q": CATS, "alternatives": 1})
    assert searched.json()["translatedText"] == CATS


def test_a_part_that_breaks_the_engine_fails_its_piece_alone():
    class Breaking(type(looping.model())):
        def decode(self, tokens, cache, offsets):
            if any(len(s) < 16 and looping.LONG in s for s in cache.sources):
                raise RuntimeError("broken")
            return super().decode(tokens, cache, offsets)

    model = looping.model()
    model.__class__ = Breaking
    with LocalServer(decoder_of(model, good), "breaking") as server:
        choice = complete(server, prompt=f"{RAIN} {CATS}", **FRENCH)
        failed, last = choice["pieces"]
        assert (failed["text"], failed["finish_reason"]) == (RAIN, "error")
        assert last["text"] == CATS and choice["stats"]["failed"] == 1
        assert complete(server, prompt=CATS, **FRENCH)["text"] == CATS
