"""Tests which requests the server refuses, and its error messages."""

import json
import re
import socket

import openai
import pytest
from openai import OpenAI

from fake_serving import kill, raw_request
from mlx_t5.serving.app import MAX_BODY
from serving_process import Server

KEY = "a secret key"
SECRET = "the confidential words"
LIMITS = ["--max-prompt-tokens", "60", "--max-tokens", "50"]
LIMITS += ["--max-batch", "2", "--max-queue", "4"]


@pytest.fixture(scope="module")
def guarded(models):
    """Starts a server with a key and low limits."""
    running = Server(*models, *LIMITS, T5_API_KEY=KEY, key=KEY)
    yield running
    running.close()


def refused(answer, status, param=None):
    """Checks the format of an error and returns its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "Traceback" not in error["message"] and SECRET not in error["message"]
    return error["message"]


PROMPT, CONTENT = {"prompt": SECRET}, {"type": "content"}
LOOPS = {"max_pattern_size": 8, "min_count": 3}
BAD_PREDICTIONS = [
    (CONTENT, ".content", "needed"),
    ({**CONTENT, "content": [{"type": "image_url"}]}, ".content[0].text", "needed"),
    ({**CONTENT, "content": " "}, "", "empty"),
    ({**CONTENT, "content": SECRET * 5}, "", r"the prediction has 11\d tokens; at most"),
]


@pytest.mark.parametrize(
    "body, param, message",
    [
        ({}, "prompt", "needed"),
        ({"prompt": "  "}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [999_999]}, "prompt", "outside the model's vocabulary"),
        ({"prompt": SECRET * 5}, "prompt", r"has 11\d tokens; at most 60"),
        ({"prompt": "x " * 5000}, "prompt", "has more tokens; at most 60"),
        ({"prompt": ["x", "y", 5]}, "prompt[2]", "a valid string"),
        ({"prompt": ["x", " "]}, "prompt[1]", "empty"),
        ({"prompt": ["x"] * 7}, "n", "at most|more than"),
        ({**PROMPT, "max_tokens": 51}, "max_tokens", "at most 50"),
        ({**PROMPT, "max_tokens": "5"}, "max_tokens", "integer"),
        ({**PROMPT, "temperature": 2.1}, "temperature", "less than or equal to 2"),
        ({**PROMPT, "n": 17}, "n", "less than or equal to 16"),
        ({**PROMPT, "n": 2}, "n", "set temperature above 0"),
        ({**PROMPT, "stop": ["x"] * 9}, "stop", "at most 8"),
        ({**PROMPT, "num_draft": "many"}, "num_draft", "auto"),
        ({**PROMPT, "draft": 1}, "draft", "boolean"),
        ({**PROMPT, "stream_options": {}}, "stream_options", "stream"),
        ({**PROMPT, "stream_options": {"foo": 1}}, "stream_options.foo", "no such field"),
        ({**PROMPT, "temperature": 1e-45}, "temperature", r"it must be 0 \(greedy\), or a number"),
        ({**PROMPT, "num_beams": 4, "temperature": 1}, "num_beams", "combined with temperature"),
        ({**PROMPT, "num_beams": 4, "delta": 0.5}, "num_beams", "combined with delta"),
        (
            {**PROMPT, "num_beams": 4, "repetition_detection": LOOPS},
            "num_beams",
            "combined with repetition_detection",
        ),
        (
            {**PROMPT, "repetition_detection": {**LOOPS, "min_count": 1}},
            "repetition_detection",
            "min_count is 1; it must be 2 or more",
        ),
        (
            {**PROMPT, "repetition_detection": {**LOOPS, "size": 1}},
            "repetition_detection",
            "it must be None or an object of max_pattern_size, min_pattern_size, min_count",
        ),
        ({**PROMPT, "num_beams": 17}, "num_beams", "less than or equal to 16"),
        ({**PROMPT, "num_beams": 4, "stream": True}, "num_beams", "combined with stream"),
        ({**PROMPT, "num_beams": 4, "logprobs": 0}, "num_beams", "combined with logprobs"),
        ({**PROMPT, "num_beams": 4, "n": 5}, "n", "n is above num_beams"),
        ({**PROMPT, "length_penalty": 2}, "length_penalty", "requires num_beams above 1"),
        ({**PROMPT, "file_type": ".srt"}, "file_type", "file_type requires split"),
        ({**PROMPT, "source_language": "de"}, "source_language", "requires split"),
        ({**PROMPT, "echo": True}, "echo", "not supported"),
        ({**PROMPT, "suffix": "x"}, "suffix", "not supported"),
        ({**PROMPT, "presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({**PROMPT, "best_of": True}, "best_of", "not supported"),
        ({**PROMPT, "temperature": 10**400}, "temperature", "number"),
        ({**PROMPT, SECRET[:3]: 1}, SECRET[:3], "no such field"),
        *(({**PROMPT, "prediction": p}, f"prediction{at}", s) for p, at, s in BAD_PREDICTIONS),
        ({"prompt": ["a", "b"], "prediction": {**CONTENT, "content": "x"}}, "prediction", "one"),
        (
            {**PROMPT, "num_beams": 2, "prediction": {**CONTENT, "content": "x"}},
            "num_beams",
            "num_beams cannot be combined with prediction",
        ),
        ([SECRET], None, "it must be an object"),
    ],
)
def test_bad_completions_are_refused(guarded, body, param, message):
    assert re.search(message, refused(guarded.http.post("/v1/completions", json=body), 400, param))


USER = {"role": "user", "content": "x"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "5"}]}


@pytest.mark.parametrize(
    "messages, where, message",
    [
        ([], "", "at least 1"),
        ([USER] * 2, "", "single turns"),
        ([USER, CALL, USER], "", "single turns"),
        ([{"role": "system", "content": "x"}], "", "single turns"),
        ([{**USER, "content": " "}], "", "empty"),
        ([{**USER, "role": "critic"}], "[0].role", "it must be 'system', 'developer' or 'user'"),
        ([{**USER, "tool_calls": []}], "[0].tool_calls", "no such field"),
        ([{**USER, "content": [{"type": "image_url"}]}], "[0].content[0].text", "needed"),
        ([{**USER, "content": 5}], "[0].content", "it must be a valid string or a valid list"),
    ],
)
def test_bad_chats_are_refused(guarded, messages, where, message):
    answer = guarded.http.post("/v1/chat/completions", json={"messages": messages})
    assert message in refused(answer, 400, f"messages{where}")


ASKING = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{"name": "f"}],
    "store": True,
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "logit_bias": {"5": 1},
}
NEUTRAL = {
    "tools": ([], None),
    "tool_choice": ("none", None),
    "functions": ([], None),
    "parallel_tool_calls": (True, False),
    "store": (False, None),
    "metadata": ({"a": "b"}, None),
    "service_tier": ("flex", None),
    "prompt_cache_key": ("a", None),
    "prompt_cache_retention": ("24h", None),
    "prompt_cache_options": ({"mode": "implicit", "ttl": "30m"}, None),
    "safety_identifier": ("x", None),
    "reasoning_effort": (None,),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "logit_bias": ({}, None),
    "user": ("x", None),
    "top_k": (None,),
}


def test_fields_that_ask_for_nothing_are_accepted_and_others_are_refused_by_name(guarded):
    def ask(**fields):
        body = {"messages": [USER], "max_tokens": 2, **fields}
        return guarded.http.post("/v1/chat/completions", json=body)

    for turn in range(2):
        fields = {name: values[turn % len(values)] for name, values in NEUTRAL.items()}
        assert ask(**fields).status_code == 200, fields
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert ask(messages=[{**USER, "content": [part]}]).status_code == 200
    for name, value in ASKING.items():
        assert refused(ask(**{name: value}), 400, name).startswith(f"{name}: this is not supp")


PATHS = ("predict", "v1/completions", "v1/chat/completions")
PATHS += ("v1/embeddings", "v1/score", "v1/rerank")
NOT_JSON = [b"{", b'{"prompt": NaN}', b'{"prompt": "\xff"}', b"[" * 15_000, b"9" * 10_000]
NOT_JSON += [b"[-Infinity]", '"x"'.encode("utf-16")]
HALF = "\ud800".encode(errors="surrogatepass")  # half of a surrogate pair, which is no text
NOT_JSON += [b'["x", "\\ud800"]', b'{"a\\udc00\\ud800": 1}', b'{"prompt": "' + HALF + b'"}']


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_not_json_are_refused(guarded, path):
    def send(content):
        headers = {"Content-Type": "application/json"}
        return refused(guarded.http.post(f"/{path}", content=content, headers=headers), 400)

    for content in NOT_JSON:
        assert "the body is not JSON" in send(content), content
    assert "needed" in send(b"")
    # Foreign pages can send other bodies without a preflight request.
    for headers, message in (
        ({"Content-Type": "text/plain"}, "send JSON"),
        ({}, "send JSON"),
        ({"Content-Encoding": "gzip"}, "the body is compressed"),
    ):
        answer = guarded.http.post(f"/{path}", content='{"prompt": "x"}', headers=headers)
        assert message in refused(answer, 415)


def test_a_number_that_no_float_holds_is_refused(guarded):
    headers = {"Content-Type": "application/json"}
    content = b'{"prompt": "x", "temperature": 1e999}'
    refused(guarded.http.post("/predict", content=content, headers=headers), 400, "temperature")


def test_names_of_fields_are_shown_as_far_as_they_can_be_read(guarded):
    for name, shown in [("x" * 15_000, "x" * 63 + "…"), ("\x1b[2Jö\n", r"\x1b[2Jö\n")]:
        answer = guarded.http.post("/v1/completions", json={**PROMPT, name: 1})
        assert refused(answer, 400, shown).startswith(shown + ": there is no such field")


def test_a_body_has_to_be_small(guarded):
    large = json.dumps({"prompt": "x" * MAX_BODY}).encode()
    message = f"larger than {MAX_BODY} bytes"
    assert message in refused(guarded.http.post("/predict", content=large), 413)
    pieces = (large[i : i + 10_000] for i in range(0, len(large), 10_000))  # no Content-Length
    assert message in refused(guarded.http.post("/predict", content=pieces), 413)


def test_unknown_addresses_methods_and_models_are_refused(guarded):
    refused(guarded.http.get("/v1/nothing"), 404)
    refused(guarded.http.get("/page/..%2fserver.py"), 404)
    answer = guarded.http.put("/predict", json=PROMPT)
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    body = {"model": "gpt-4o", "prompt": "x"}
    assert "target" in refused(guarded.http.post("/v1/completions", json=body), 404, "model")
    refused(guarded.http.get("/v1/models/gpt-4o"), 404, "model")


def ask(running, path, method="GET", header=None, **options):
    """Sends a request with this `Authorization` header (None: without it); returns the answer."""
    headers = {"Authorization": (header or "").encode("latin-1")}
    request = running.http.build_request(method, path, headers=headers, **options)
    if header is None:
        del request.headers["Authorization"]
    return running.http.send(request)


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer x", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xe9"]
)
def test_a_wrong_key_is_refused(guarded, header):
    for method, path in [("POST", "/v1/completions"), ("POST", "/predict"), ("GET", "/metrics")]:
        answer = ask(guarded, path, method, header, json=PROMPT)
        refused(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_head_request_answers_as_get_without_the_body(guarded):
    for path in ("/", "/health", "/v1/models", "/favicon.ico"):
        head, get = guarded.http.head(path), guarded.http.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]
    assert guarded.http.head("/predict").status_code == 405


def test_a_key_may_stand_after_several_spaces_and_a_target_may_be_absolute(guarded):
    assert ask(guarded, "/v1/models", header=f"bearer   {KEY}").status_code == 200
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"GET {guarded.url}/health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_without_the_key_nobody_learns_what_is_served_and_how_busy_it_is(guarded, server):
    for path in ("/", "/page/page.js", "/health", "/docs", "/openapi.json"):
        assert ask(guarded, path).status_code == 200
    for path in ("/metrics", "/v1/models"):
        assert ask(guarded, path).status_code == 401
    assert ask(guarded, "/health").json() == {"status": "ok"}
    known = guarded.http.get("/health").json()
    assert set(known) == {"status", "model", "running", "waiting"} and known["model"] == "target"
    assert "/v1/completions" in ask(guarded, "/openapi.json").json()["paths"]
    assert server.http.get("/health").json()["model"] == "demo", "where no key is needed"


def test_the_official_client_sees_its_own_exceptions(guarded):
    client = OpenAI(base_url=guarded.url + "/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="at most 50"):
        client.completions.create(model="target", prompt="x", max_tokens=51)
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError, match="API key"):
        OpenAI(base_url=guarded.url + "/v1", api_key="x").models.list()


def test_nothing_was_logged_that_holds_a_prompt(guarded):
    guarded.http.post("/predict", json=PROMPT)
    guarded.http.get("/predict", params=PROMPT)
    guarded.http.post("/predict", json={"prompt": [SECRET]})
    assert guarded.http.get("/health").status_code == 200, "it keeps serving"
    assert "confidential" not in guarded.log and KEY not in guarded.log
    assert "Traceback" not in guarded.log and "ERROR" not in guarded.log


def test_half_a_request_disturbs_nobody(guarded):
    for body in (PROMPT, {"prompt": "x" * 1000}):
        kill(raw_request(guarded.url, "/predict", body, KEY))
    host, port = guarded.url.removeprefix("http://").split(":")
    for start in (b"\x16\x03\x01", b"POST /predict HTTP/1.1\r\nContent-Length: 99\r\n\r\n{"):
        connection = socket.create_connection((host, int(port)))
        connection.sendall(start)
        kill(connection)
    guarded.until(guarded.idle)
    assert guarded.http.post("/predict", json={"prompt": "x"}).status_code == 200
